"""How cutoffs split a vocabulary."""

import re

import pytest

from adaptive_jax.errors import InputError
from adaptive_jax.numerics.bands import band_sizes, band_widths


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
    "vocabulary, cutoffs, says",
    [
        (
            5_000,
            (20, 60_000),
            "cutoff 60,000 is not below the vocabulary size 5,000: use cutoffs that leave at least"
            " one word for the last band",
        ),
        (
            100,
            (60, 20),
            "cutoffs (60, 20) do not increase from 1: 20 follows 60; use them in rising order",
        ),
        (100, (20, 100), "cutoff 100 is not below the vocabulary size 100"),
        (100, (20, 20), "20 follows 20"),
        (100, (0, 20), "0 follows 0"),
        (100, (-5,), "-5 follows 0"),
    ],
)
def test_wrong_cutoffs(vocabulary, cutoffs, says):
    """One line with the values and the cure."""
    with pytest.raises(InputError, match=re.escape(says)):
        band_sizes(vocabulary, cutoffs)


def test_bands_without_width():
    """A factor that leaves nothing for the last band is refused, and so is none at all."""
    says = "4 bands of factor 4 leave the last band no width of 16: use fewer cutoffs, a smaller"
    with pytest.raises(InputError, match=says):
        band_widths(16, 4, 4)
    with pytest.raises(InputError, match="factor must be in"):
        band_widths(16, 0, 2)
