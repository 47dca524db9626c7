"""Division of a vocabulary into bands: the expected work of an adaptive softmax, and the cutoffs
with the least work.

    workload = Workload(features=1024, factor=4, tokens=4096)
    cost(counts, (20_000, 60_000), workload)  # FLOPs per token, to train
    propose(counts, 3, workload)              # the cheapest two cutoffs, after Grave et al. 2017,
                                              # section 4
    equal_products(len(counts), 3, workload)  # bands of equally many words times width, as in
                                              # Apostoae 2019

Only work is counted. The least work may need bands of a few words, which only make the next bands
narrower, and nobody has shown such bands to be accurate; `smallest_band` is the size of the
smallest band that Baevski & Auli (2019) found no worse.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adaptive_jax.errors import check_at_least
from adaptive_jax.numerics.bands import band_flops, band_sizes, band_widths

# Equal to `losses.plans.TAIL_CHUNK`, whose import would import JAX
LEAST_ROWS = 96
ALL_POSITIONS = 512  # in vocabularies of at most this many words, every position is a candidate
GRID = 800  # candidates in larger vocabularies, before rounding merges some


class Workload(NamedTuple):
    """The adaptive softmax whose work is counted.

    features: width of the hidden states.
    factor: band i has vectors of `width / factor^i`.
    width: of band 0; 0 means `features`. If it differs from `features`, the head projects the
        hidden states first.
    tokens: number of tokens that one device scores at a time.
    least_rows: a matrix product of fewer rows costs as much as one of this many. It accounts for
        the partly empty last chunk of a tail, and for devices that few rows do not keep busy.
    """

    features: int = 1024
    factor: int = 4
    width: int = 0
    tokens: int = 4096
    least_rows: int = LEAST_ROWS

    def widths(self, bands: int) -> list[int]:
        """Width of each band. Raises InputError for a setting that is too small, or a band of width
        0.
        """
        check_at_least(1, features=self.features, tokens=self.tokens)
        check_at_least(0, width=self.width, least_rows=self.least_rows)
        return band_widths(self.width or self.features, self.factor, bands)


def cost(counts: Sequence[float] | np.ndarray, cutoffs: Sequence[int], workload: Workload) -> float:
    """Expected FLOPs per token of the softmax, forward and backward.

    Of `tokens` tokens, all visit the head, and a share `p_i` visits tail i: the share of tokens
    whose word is in band i. The matrix products are those of `bands.band_flops`, with
    at least `least_rows` rows, three times. Exponentials, sorting and sums into gradients of
    tables are left out.

    counts: `[V]`, how often each word occurs, or its share, most frequent first. No cutoffs: the
        full softmax.

    Raises:
        InputError: cutoffs that do not fit the vocabulary; a band of width 0.
    """
    cumulative = np.append(0.0, _cumulative(counts))
    sizes = band_sizes(len(cumulative) - 1, cutoffs)
    widths, ends = workload.widths(len(sizes)), np.cumsum([0, *sizes])
    flops = (
        _flops(i, ends[i], ends[i + 1], cumulative, widths, workload) for i in range(len(sizes))
    )
    return float(sum(flops)) / workload.tokens


def band_shares(counts: Sequence[float] | np.ndarray, cutoffs: Sequence[int]) -> list[float]:
    """Share of tokens whose word is in each band; arguments as those of `cost`."""
    cumulative = _cumulative(counts)
    ends = np.array([*cutoffs, len(cumulative)])
    return np.diff(cumulative[ends - 1], prepend=0.0).tolist()


def propose(
    counts: Sequence[float] | np.ndarray,
    bands: int,
    workload: Workload,
    smallest: int = 0,
) -> tuple[tuple[int, ...], float]:
    """The `bands - 1` cutoffs of least `cost`, and that cost. If several are equal, any of them.

    A dynamic programme over (band, end): the cost of a band depends only on its number and on where
    it begins and ends. It is exact over its candidates: every position of a vocabulary of at most
    512 words; in a larger one some 600 positions, 1% to 2% apart and rounded to three digits.

    smallest: least number of words of each band; 0: `smallest_band`. The vocabulary must have
        `bands` times as many.

    Raises:
        InputError: as `cost`.
    """
    cumulative = np.append(0.0, _cumulative(counts))
    words, widths = len(cumulative) - 1, workload.widths(bands)
    smallest = smallest or smallest_band(words)
    ends = np.append(_candidates(words, smallest * np.arange(1, bands)), words)
    best = np.where(ends >= smallest, _flops(0, 0, ends, cumulative, widths, workload), np.inf)
    is_large_enough, choices = ends[None] - ends[:, None] >= smallest, []
    for band in range(1, bands):
        tail = _flops(band, ends[:, None], ends[None], cumulative, widths, workload)
        total = np.where(is_large_enough, best[:, None] + tail, np.inf)
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    end_index, cutoffs = len(ends) - 1, ()
    for choice in reversed(choices):
        end_index = choice[end_index]
        cutoffs = int(ends[end_index]), *cutoffs
    return cutoffs, cost(counts, cutoffs, workload)


def equal_products(vocabulary_size: int, bands: int, workload: Workload) -> tuple[int, ...]:
    """The `bands - 1` cutoffs at which words times width is the same in every band, to a word
    (Apostoae 2019, section 4.1).

    Raises:
        InputError: a band of width 0, or without words.
    """
    shares = 1 / np.array(workload.widths(bands))
    edges = tuple(
        np.rint(vocabulary_size * np.cumsum(shares)[:-1] / shares.sum()).astype(int).tolist()
    )
    band_sizes(vocabulary_size, edges)
    return edges


def smallest_band(vocabulary_size: int) -> int:
    """Smallest sensible band size: 3.7% of all words, as the band of 10K words in 10K/60K/190K.

    On WikiText-103, of 267,735 words, these bands reached the perplexity of 20K/40K/200K, 19.79;
    5K/155K/100K reached 20.06 (Baevski & Auli 2019, Table 8).
    """
    return max(1, round(vocabulary_size * 10_000 / 267_735))


def _cumulative(counts):
    """Share of tokens whose word is among the first 1, 2, ... V: float64 [V]."""
    return np.cumsum(counts, dtype=np.float64) / np.sum(counts)


def _flops(band, begin, end, cumulative, widths, workload):
    """FLOPs of a batch, forward and backward, in the words `begin` to `end` as band number
    `band`; arrays of ends broadcast.
    """
    tokens, features, columns = workload.tokens, workload.features, end - begin
    if band == 0:
        columns, features = columns + len(widths) - 1, features if widths[0] != features else 0
    else:
        tokens = tokens * (cumulative[end] - cumulative[begin])
    return 3 * band_flops(np.maximum(tokens, workload.least_rows), widths[band], columns, features)


def _candidates(words, feasible):
    """Ascending candidates for cutoffs, from 1 to words - 1; `feasible` are cutoffs that satisfy
    all constraints together.
    """
    if words <= ALL_POSITIONS:
        return np.arange(1, words)
    grid = np.geomspace(1, words - 1, GRID)
    unit = 10.0 ** np.maximum(np.floor(np.log10(grid)) - 2, 0)
    cutoffs = np.unique(np.concatenate([np.rint(grid / unit) * unit, feasible])).astype(np.int64)
    return cutoffs[(cutoffs > 0) & (cutoffs < words)]
