"""Where to cut a vocabulary into bands: the expected work of an adaptive softmax, and the cutoffs that make it least.

    layer = Layer(features=1024, factor=4, tokens=4096)
    cost(counts, (20_000, 60_000), layer)     # FLOP a token, to train
    propose(counts, 3, layer)                 # the cheapest two cutoffs, after Grave et al. 2017, section 4

Work is all that counts here, and least work alone cuts off bands of a few words, which only make the next ones narrower.
Nobody has shown such bands to be accurate; `smallest_band` is the smallest that Baevski & Auli (2019) found no worse.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adaptive_jax.bands import band_sizes, band_widths
from adaptive_jax.errors import InputError, check_at_least

# Tokens in a chunk of a tail as the softmax of this project runs them. Stated anew: data knows nothing of outputs.
FLOOR = 96
PAPERS = {"wikitext103": (20_000, 60_000), "billion_word": (60_000, 160_000)}  # Baevski & Auli 2019, section 4.2
PAPERS_WORDS = 267_735  # of WikiText-103, whose proportions other corpora are given
ALL_POSITIONS = 512  # a vocabulary of so many words or fewer may be cut anywhere
GRID = 800


class Layer(NamedTuple):
    """The adaptive softmax whose work is counted.

    features: width of the hidden states.
    factor: band i has vectors of `width / factor^i`.
    width: that of band 0; 0: `features`. If it is another, the head projects the hidden states first.
    tokens: tokens that one device scores at a time.
    floor: a matrix product of fewer rows than this costs as much as one of so many. It stands for the partly empty chunk
        in which a tail ends, and for the rows that a device needs to be busy at all; 0: rows cost what they are.
    """

    features: int = 1024
    factor: int = 4
    width: int = 0
    tokens: int = 4096
    floor: int = FLOOR

    def widths(self, bands: int) -> list[int]:
        """Width of each band. InputError: a setting that is too small, or a band without width."""
        check_at_least(1, features=self.features, tokens=self.tokens, bands=bands)
        check_at_least(0, width=self.width, floor=self.floor)
        return band_widths(self.width or self.features, self.factor, bands)


def cost(counts: Sequence[float] | np.ndarray, cutoffs: Sequence[int], layer: Layer) -> float:
    """Expected work of the softmax, FLOP a token, forward and backward (three times the forward products).

    A batch of B tokens has expected `n_0 = B` rows in the head and `n_i = B · p_i` in tail i, where p_i is the share of
    tokens whose word is in band i. With d features and k_i words of width w_i in band i, the batch costs

        6 · Σ_i  max(n_i, floor) · w_i · (columns_i + d)        columns_0 = k_0 + tails,  columns_i = k_i

    and a token 1/B of that; the `d` is that of the projection, and band 0 has it only if `w_0` is not d. Left out are
    exponentials, sorting, and the sums into the gradients of the tables, which grow with the vocabulary alone.

    counts: `[V]`, how often each word occurs (or its share), most frequent first. No cutoffs: the full softmax.

    Raises:
        InputError: counts that rise, are negative or all zero, cutoffs that do not fit them, or a band without width.
    """
    reached = np.append(0.0, _cumulative(counts))
    sizes = band_sizes(len(reached) - 1, cutoffs)
    widths = layer.widths(len(sizes))
    ends = np.cumsum([0, *sizes])
    work = [_work(i, ends[i], ends[i + 1], reached, widths, layer) for i in range(len(sizes))]
    return float(sum(work)) / layer.tokens


def parameters(vocabulary_size: int, cutoffs: Sequence[int], layer: Layer) -> int:
    """Parameters of tables, projections and cluster rows, of a softmax that shares none of them."""
    sizes = band_sizes(vocabulary_size, cutoffs)
    widths = layer.widths(len(sizes))
    tables = sum(words * width for words, width in zip(sizes, widths, strict=True))
    head = widths[0] * layer.features if widths[0] != layer.features else 0
    return tables + head + widths[0] * (len(sizes) - 1) + sum(width * widths[0] for width in widths[1:])


def band_shares(counts: Sequence[float] | np.ndarray, cutoffs: Sequence[int]) -> list[float]:
    """Share of tokens whose word is in each band. Raises InputError as `cost`."""
    reached = _cumulative(counts)
    band_sizes(len(reached), cutoffs)
    return np.diff(reached[[cut - 1 for cut in (*cutoffs, len(reached))]], prepend=0.0).tolist()


def propose(
    counts: Sequence[float] | np.ndarray, bands: int, layer: Layer, smallest: int = 1, also: Sequence[int] = ()
) -> tuple[tuple[int, ...], float]:
    """The `bands - 1` cutoffs of least `cost`, and that cost, in FLOP a token; of several equal ones, any.

    A dynamic programme over (band, end), since what a band costs depends on where it begins and ends, on its number,
    and on nothing else. It is exact over its candidates: every position of a vocabulary of 512 words or fewer, of a
    larger one some 600 positions, 1 to 2 in a hundred apart and rounded to three digits, and those in `also`.

    smallest: words that each band has at least, see `smallest_band`.

    Raises:
        InputError: as `cost`; more bands than words, or too few words for bands of `smallest`.
    """
    check_at_least(1, smallest=smallest)
    reached = np.append(0.0, _cumulative(counts))
    words = len(reached) - 1
    widths = layer.widths(bands)
    if bands > words:
        raise InputError(f"bands={bands} are more than the {words:,} words: ask for {words:,} or fewer")
    if bands * smallest > words:
        raise InputError(
            f"{bands} bands of smallest={smallest:,} words need more than the {words:,} there are: "
            f"give smallest={words // bands:,} or less, or fewer bands"
        )
    ends = np.append(_candidates(words, smallest * np.arange(1, bands), also), words)
    best = np.where(ends >= smallest, _work(0, 0, ends, reached, widths, layer), np.inf)
    choices = []
    wide = ends[None] - ends[:, None] >= smallest
    for band in range(1, bands):
        tail = _work(band, ends[:, None], ends[None], reached, widths, layer)
        total = np.where(wide, best[:, None] + tail, np.inf)
        choices.append(total.argmin(axis=0))
        best = total.min(axis=0)
    at, cutoffs = len(ends) - 1, []
    for choice in reversed(choices):
        at = choice[at]
        cutoffs.append(int(ends[at]))
    found = tuple(reversed(cutoffs))
    return found, cost(counts, found, layer)


def paper_cutoffs(corpus: str, vocabulary_size: int) -> tuple[int, int] | None:
    """Cutoffs of Baevski & Auli (2019) for WikiText-103 and the Billion Word benchmark.

    Another corpus, or one of these cut below the paper's bands, gets the proportions of WikiText-103: 7.5% and 22.4% of
    its words. None where that leaves a band empty.
    """
    if corpus in PAPERS and PAPERS[corpus][-1] < vocabulary_size:
        return PAPERS[corpus]
    first, second = (round(vocabulary_size * cut / PAPERS_WORDS) for cut in PAPERS["wikitext103"])
    return (first, second) if 0 < first < second < vocabulary_size else None


def smallest_band(vocabulary_size: int) -> int:
    """Words that a band should have at least: 3.7% of them, as in bands of 10K, 60K and 190K.

    On WikiText-103 these reached the perplexity of 20K, 40K and 200K, 19.79; with 5K, 155K and 100K it was 20.06 (Baevski &
    Auli 2019, Table 8).
    """
    return max(1, round(vocabulary_size * 10_000 / PAPERS_WORDS))


def _cumulative(counts):
    """Share of tokens whose word is among the first 1, 2, ... V: float64 [V], from counts in the right order."""
    counts = np.asarray(counts, np.float64)
    if counts.ndim != 1 or not counts.size or not np.isfinite(counts).all() or counts.min() < 0 or not counts.sum():
        raise InputError("counts must be one row of numbers of 0 or more, not all 0: give how often each word occurs")
    if (rises := np.flatnonzero(np.diff(counts) > 0)).size:
        at = rises[0]
        raise InputError(
            f"counts rise from {counts[at]:g} to {counts[at + 1]:g} at id {at + 1:,}: sort them, most first"
        )
    return np.cumsum(counts) / counts.sum()


def _work(band, begin, end, reached, widths, layer):
    """FLOP of a batch in words `begin` to `end` as a band of this number; arrays of ends broadcast."""
    words = end - begin
    if band == 0:
        rows, columns = float(layer.tokens), words + len(widths) - 1
        projected = layer.features if widths[0] != layer.features else 0
    else:
        rows, columns, projected = layer.tokens * (reached[end] - reached[begin]), words, layer.features
    return 6.0 * np.maximum(rows, layer.floor) * widths[band] * (columns + projected)


def _candidates(words, sure, also):
    """Positions where a vocabulary may be cut, rising from 1 at least to words - 1 at most.

    sure: cutoffs that are allowed together, so that there is a way to cut at all.
    """
    if words <= ALL_POSITIONS:
        return np.arange(1, words)
    grid = np.geomspace(1, words - 1, GRID)
    unit = 10.0 ** np.maximum(np.floor(np.log10(grid)) - 2, 0)
    wanted = np.unique(np.concatenate([np.rint(grid / unit) * unit, sure, also])).astype(np.int64)
    return wanted[(wanted > 0) & (wanted < words)]
