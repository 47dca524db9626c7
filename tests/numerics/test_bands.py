"""How cutoffs split a vocabulary."""

import pytest

from adaptive_jax.numerics.bands import band_sizes, band_widths
from tests import refuses


def test_the_papers_bands():
    """20K, 40K and the rest, of 1024, 256 and 64; with a fourth band of 16 (Table 8). Factor 1
    keeps the width.
    """
    assert band_sizes(267_735, (20_000, 60_000)) == [20_000, 40_000, 207_735]
    assert band_widths(1024, 4, 4) == [1024, 256, 64, 16]
    assert band_widths(64, 4, 4)[-1] == 1 and band_widths(24, 1, 3) == [24, 24, 24]
    assert band_sizes(7, ()) == [7]
    assert band_sizes(3, (1, 2)) == [1, 1, 1]


@pytest.mark.parametrize(
    "vocabulary, cutoffs, got",
    [
        (5_000, (20, 60_000), "60,000"),
        (100, (60, 20), "(60, 20)"),
        (100, (20, 100), "100"),
        (100, (20, 20), "(20, 20)"),
        (100, (0, 20), "(0, 20)"),
        (100, (-5,), "-5"),
    ],
)
def test_wrong_cutoffs(vocabulary, cutoffs, got):
    """Each with its value."""
    with refuses("cutoffs", got):
        band_sizes(vocabulary, cutoffs)


def test_bands_without_width():
    """A factor that leaves nothing for the last band is refused, and so is none at all."""
    with refuses("factor", "4", "16"):
        band_widths(16, 4, 4)
    with refuses("factor=0"):
        band_widths(16, 0, 2)
