"""Bands of a vocabulary, from cutoffs."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_jax.numerics.bands import band_sizes, band_widths
from tests import refuses

CUTS = st.lists(st.integers(-2, 62), max_size=4)


def test_the_papers_bands():
    """20K, 40K and the rest, of 1024, 256 and 64; with a fourth band of 16 (Table 8)."""
    assert band_sizes(267_735, (20_000, 60_000)) == [20_000, 40_000, 207_735]
    assert band_widths(1024, 4, 4) == [1024, 256, 64, 16]


@given(words=st.integers(1, 60), cuts=CUTS | CUTS.map(lambda cuts: sorted({*cuts})))
def test_bands_are_the_vocabulary_cut(words, cuts):
    """Every word is in one band, band i + 1 begins at cutoff i; cutoffs that leave a band empty
    are named.
    """
    ends = [0, *cuts, words]
    sizes = [after - before for before, after in itertools.pairwise(ends)]
    if min(sizes) > 0:
        assert band_sizes(words, tuple(cuts)) == sizes
        return
    with refuses() as error:
        band_sizes(words, tuple(cuts))
    assert "cutoff" in str(error.value) and any(f"{cut:,}" in str(error.value) for cut in cuts)


@given(width=st.integers(1, 300), factor=st.integers(0, 5), bands=st.integers(1, 5))
def test_bands_narrow_by_the_factor(width, factor, bands):
    """Each by the whole factor; one that leaves the last band nothing is refused, as is none."""
    if factor and width >= factor ** (bands - 1):
        widths = band_widths(width, factor, bands)
        assert widths == [width // factor**i for i in range(bands)] and widths[-1] >= 1
        return
    with refuses(*(["factor", str(width)] if factor else ["factor"])):
        band_widths(width, factor, bands)


@pytest.mark.parametrize("cutoffs", [5, (1.5,), "20"])
def test_cutoffs_that_are_no_numbers(cutoffs):
    """They are named before a table is made."""
    with refuses("cutoffs", repr(cutoffs)):
        band_sizes(100, cutoffs)
