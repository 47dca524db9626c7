"""Loss by how often words occur in the training text: bins, means, medians and their intervals.

Baevski & Auli 2019 (section 5.3, Figures 2 to 5) bin the mean loss by the frequency of the word, or
of the word before it. Pappas et al. 2020 (section 4.3, Figure 3) take the median of the difference
between two models.
"""

import functools
import itertools
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.corpora.load import count_prepared
from adaptive_jax.data.vocabulary.words import UNKNOWN, Vocabulary
from adaptive_jax.errors import InputError

logger = logging.getLogger(__name__)
# Largest frequency of each bin but the last, in Figures 2 to 5
PAPER = 10, 100, 1_000, 10_000, 100_000, 1_000_000
DRAWS = 1_000  # bootstrap samples
BLOCKS = 256  # parts of the text that the bootstrap draws
LEAST_BLOCK = 10  # words of a part
LEAST_BLOCKS = 5  # parts that a bin must occur in to have an interval
RANKS = 1_000  # most distinct ranks in the bootstrap of a median
INTERVAL = 0.025, 0.975  # quantiles


class Words(NamedTuple):
    """The words of a text, `<eos>` included, and their frequencies.

    Attributes:
        ids: int32 `[tokens]`.
        ends: int64 `[words]`, the position of the last token of each word.
        hashes: uint32 `[words]`, a hash of each word's letters; 0 for `<unk>`.
        eos_count: occurrences of `<eos>` in the training text.
        counts: int64 `[words]`, occurrences of each word in the training text; None if unknown.
    """

    ids: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray
    eos_count: int
    counts: np.ndarray | None = None

    def nll(self, nll: np.ndarray) -> np.ndarray:
        """The loss of each word, float64 `[words]` in nats, summed over its tokens; NaN for words
        that are not scored. nll: `[tokens]`.
        """
        starts = np.concatenate([[0], self.ends[:-1] + 1])
        return np.add.reduceat(nll[: self.ends[-1] + 1].astype(np.float64), starts)

    def counts_before(self) -> np.ndarray:
        """Count of the word before each word, int64 `[words]`; `<eos>` precedes the first word."""
        return np.concatenate([[self.eos_count], self.counts[:-1]])

    def span(self, first: int, words: int) -> tuple[int, int]:
        """Positions of the first token of a passage, and of the first token after it.

        first, words: number of its first word, and of its words.

        Raises:
            InputError: the text has no word `first`.
        """
        if first >= len(self.ends):
            raise InputError(
                f"sample_from={first} must be less than the text's {len(self.ends):,} words"
            )
        begin = 0 if first == 0 else int(self.ends[first - 1]) + 1
        return begin, int(self.ends[min(first + words, len(self.ends)) - 1]) + 1


class Bin(NamedTuple):
    """Words of similar frequency.

    Attributes:
        least, most: smallest and largest frequency in the bin; `most` is None for the last bin.
        words: number of the text's words in the bin.
        mean, median: of these words' values.
        mean_interval, median_interval: 95 % bootstrap intervals, low and high; None if the words
            stand in too few places or a value is infinite.
    """

    least: int
    most: int | None
    words: int
    mean: float
    median: float
    mean_interval: tuple[float, float] | None
    median_interval: tuple[float, float] | None


def bin_label(least: int, most: int | None) -> str:
    """Label of a bin: "1-10", "101-1K"; from 1,000 on it begins with the edge of the bin before:
    "1K-10K", "1M+". "new" stands for words that training lacks. A number with more than three
    significant digits is written out.
    """
    if most == 0:
        return "new"
    if least == most:
        return _edge(most)
    first = _edge(least if least < 1_000 else least - 1)
    return f"{first}+" if most is None else f"{first}-{_edge(most)}"


def short(number: int) -> str:
    """Abbreviates a number to three digits: 10, 1K, 2.5M."""
    for unit, letter in (10**9, "B"), (10**6, "M"), (10**3, "K"):
        if number >= 0.9995 * unit and number >= 1_000:  # 3 digits of less would round up to it
            return f"{number / unit:.3g}{letter}"
    return str(number)


def _edge(number):
    return short(number) if number == float(f"{number:.3g}") else f"{number:,}"


def check_edges(edges: Sequence[int]) -> None:
    """Raises InputError unless the edges of bins are positive and strictly growing."""
    if not edges or edges[0] < 1 or any(a >= b for a, b in itertools.pairwise(edges)):
        raise InputError(
            f"bins={','.join(map(str, edges))} must be growing frequencies above 0, such as"
            " 10,100,1000"
        )


def words_of(ids: np.ndarray, vocabulary: Vocabulary, data: Mapping) -> Words:
    """The words of a text of words, sub-words or tokens. Those of a converted list have no counts.

    Args:
        ids: int32 `[tokens]`.
        data: the group `data` of the run's config. If the vocabulary has sub-words, the words are
            counted in its training text, if that is prepared on this machine.
    """
    ids = np.asarray(ids)
    ends, spellings = np.flatnonzero(vocabulary.ends_word[ids]), vocabulary.utf8
    eos_count = int(vocabulary.counts[vocabulary.eos])
    if not vocabulary.mark:
        hashes = np.fromiter(map(zlib.crc32, spellings), np.uint32)
        if UNKNOWN in vocabulary.index:
            hashes[vocabulary.index[UNKNOWN]] = 0
        counts = vocabulary.counts[ids] if vocabulary.has_counts else None
        return Words(ids, ends, hashes[ids], eos_count, counts)
    frequencies, mark = count_prepared(data, ("train",)).get("train", {}), vocabulary.mark
    if not frequencies:
        logger.warning(
            "frequencies of words are unknown: the run's training text is not prepared on this"
            " machine"
        )

    def counts_and_hashes():
        start = 0
        for end in map(int, ends):
            word = b"".join(spellings[i] for i in ids[start : end + 1]).removesuffix(mark)
            hashed = 0 if word == UNKNOWN.encode() else zlib.crc32(word)
            yield frequencies.get(word.decode(errors="replace"), 0), hashed
            start = end + 1

    table = np.fromiter(counts_and_hashes(), [("count", np.int64), ("hash", np.uint32)])
    return Words(ids, ends, table["hash"], eos_count, table["count"] if frequencies else None)


def in_bins(
    counts: np.ndarray, edges: Sequence[int]
) -> Iterator[tuple[int, int | None, np.ndarray]]:
    """Yields for each bin its smallest and largest frequency (None for the last bin) and a mask of
    its words, bool `[words]`.

    A bin holds the frequencies above the previous edge, up to its own; bins are not cumulative. The
    first bin holds words that do not occur in training.

    counts: int `[words]`. edges: growing, the largest frequency of each bin but the last.
    """
    numbers = np.where(counts == 0, 0, 1 + np.searchsorted(edges, counts, side="left"))
    for number, (before, most) in enumerate(itertools.pairwise([-1, 0, *edges, None])):
        yield before + 1, most, numbers == number


def by_frequency(values: np.ndarray, counts: np.ndarray, edges: Sequence[int] = PAPER) -> list[Bin]:
    """Means and medians of the values of a text's words in each bin of `in_bins` that has words.
    The bootstrap of the intervals draws parts of the text, because words near each other are alike.

    Args:
        values: `[words]` in the order of the text, such as losses in nats; NaN for words that do
            not count.
        counts: int `[words]`, the frequencies of the words in training.
    """
    size = max(LEAST_BLOCK, -(-len(values) // BLOCKS))
    blocks = np.arange(len(values)) // size
    weights = _draws(int(blocks[-1]) + 1) if len(blocks) else None
    bins = []
    for least, most, inside in in_bins(counts, edges):
        inside &= ~np.isnan(values)
        if not inside.any():
            continue
        inner, parts, intervals = values[inside], blocks[inside], (None, None)
        if len(np.unique(parts)) >= LEAST_BLOCKS and np.isfinite(inner).all():
            intervals = _of_means(inner, parts, weights), _of_medians(inner, parts, weights)
        mean, median = float(np.mean(inner)), float(np.median(inner))
        bins.append(Bin(least, most, len(inner), mean, median, *intervals))
    return bins


@functools.lru_cache(maxsize=8)
def _draws(blocks):
    """Number of times that each bootstrap sample draws each part of the text: float32
    `[draws, parts]`, the same for all bins and runs.
    """
    bits = np.random.Generator(np.random.Philox(0))
    return bits.multinomial(blocks, np.full(blocks, 1 / blocks), DRAWS).astype(np.float32)


def _of_means(values, blocks, weights):
    """The interval of the mean of some values.

    values: `[words]`. blocks: the part of the text that each word is in, int `[words]`. weights:
        see `_draws`.
    """
    count = weights.shape[1]
    words = weights @ np.bincount(blocks, minlength=count).astype(np.float64)
    return _interval(weights @ np.bincount(blocks, values, count), words)


def _of_medians(values, blocks, weights):
    """The interval of the median; arguments as of `_of_means`."""
    order = np.argsort(values, kind="stable")
    # With more than RANKS values, neighbours share a rank: 100 values do among 100,000, which
    # changes the median by less than it varies between samples.
    ranks = np.arange(len(values)) * min(RANKS, len(values)) // len(values)
    firsts = np.flatnonzero(np.diff(ranks, prepend=-1))
    times = np.zeros((weights.shape[1], len(firsts)), np.float32)
    np.add.at(times, (blocks[order], ranks), 1)
    reached = np.cumsum(weights @ times, axis=1)
    words = reached[:, -1]
    median = np.argmax(2 * reached >= words[:, None], axis=1)
    return _interval(values[order][firsts][median], np.where(words > 0, 1.0, 0.0))


def _interval(totals, words):
    """The interval of totals / words, `[draws]` each; draws without words do not count."""
    drawn = words > 0
    low, high = np.quantile(totals[drawn] / words[drawn], INTERVAL)
    return float(low), float(high)
