"""Bins of frequency: what is in them, their intervals, and the words of sub-word units."""

import numpy as np
import pytest

from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.scores.frequency import (
    BLOCKS,
    RANKS,
    bin_label,
    by_frequency,
    check_edges,
    short,
    words_of,
)
from tests import refuses


def label(group):
    return bin_label(group.least, group.most)


def test_bins_are_those_of_the_paper():
    """Each frequency is in the bin with the next edge, and labels say where a bin begins; words
    that training lacks stand apart.
    """
    counts = np.array([0, 1, 10, 11, 100, 1_000, 10_001, 1_000_000, 1_000_001, 5_000_000])
    bins = by_frequency(np.arange(10.0), counts)
    assert [(label(each), each.words, each.least, each.most) for each in bins] == [
        ("new", 1, 0, 0),
        ("1-10", 2, 1, 10),
        ("11-100", 2, 11, 100),
        ("101-1K", 1, 101, 1_000),
        ("10K-100K", 1, 10_001, 100_000),
        ("100K-1M", 1, 100_001, 1_000_000),
        ("1M+", 2, 1_000_001, None),
    ]
    assert (
        [each.mean for each in bins]
        == [0, 1.5, 3.5, 5, 6, 7, 8.5]
        == [each.median for each in bins]
    )
    assert all(
        each.mean_interval is each.median_interval is None for each in bins
    )  # each in fewer than 5 places


def test_edges_of_ones_own_and_words_that_do_not_count():
    """The last bin is open; NaN is left out, and a bin without words."""
    bins = by_frequency(
        np.array([1.0, np.nan, 3.0, 8.0]), np.array([50, 51, 60, 50]), (50, 500, 5_000)
    )
    assert [(label(each), each.words, each.mean) for each in bins] == [
        ("1-50", 2, 4.5),
        ("51-500", 1, 3.0),
    ]
    assert label(by_frequency(np.array([2.0]), np.array([9]), (5,))[0]) == "6+"
    # Of words without probability, the intervals were NaN, and NumPy warned.
    values = np.where(np.arange(200) % 2, np.inf, 1.0)
    new, old = by_frequency(values, 1 - np.arange(200) % 2)
    assert (new.mean, new.mean_interval, new.median_interval) == (np.inf, None, None)
    assert old.mean_interval == old.median_interval == (1.0, 1.0)
    edges = 1_001, 1_003  # which three digits do not tell apart
    labels = [*map(label, by_frequency(np.zeros(3), np.array([9, 1_002, 1_004]), edges))]
    assert labels == ["1-1,001", "1,001-1,003", "1,003+"] and short(999_700) == "1M"
    assert bin_label(1_001, 1_001) == "1,001" and bin_label(7, 7) == "7"


@pytest.mark.parametrize("edges", [(), (0, 10), (10, 10), (100, 10)])
def test_edges_that_do_not_grow(edges):
    """They are refused in one line: an empty bin would have no mean."""
    with refuses("frequencies"):
        check_edges(edges)


def test_intervals_are_those_of_a_plain_bootstrap():
    """The slow twin draws the parts of the text, puts their words together and takes mean and
    median.
    """
    bits = np.random.default_rng(0)
    values, counts = bits.gamma(2.0, 1.0, 600), bits.choice([5, 50], 600, p=[0.2, 0.8])
    parts, means, medians = np.arange(600) // 10, [], []
    inside = counts == 5
    weights = np.random.Generator(np.random.Philox(0)).multinomial(60, np.full(60, 1 / 60), 1_000)
    for draw in weights:
        drawn = np.sort(np.repeat(values[inside], draw[parts[inside]]))
        means.append(drawn.mean())
        medians.append(drawn[(len(drawn) + 1) // 2 - 1])
    rare, _ = by_frequency(values, counts)
    np.testing.assert_allclose(rare.mean_interval, np.quantile(means, (0.025, 0.975)), rtol=1e-6)
    np.testing.assert_allclose(
        rare.median_interval, np.quantile(medians, (0.025, 0.975)), rtol=1e-12
    )


def test_intervals_hold_the_truth():
    """Of texts whose parts differ, most intervals hold the true mean; intervals that took words
    as independent would not.
    """
    bits, inside, lone = np.random.default_rng(1), 0, 0
    for _ in range(25):
        each = np.repeat(bits.normal(0, 1, BLOCKS), 20) + bits.normal(0, 1, 20 * BLOCKS)
        (found,) = by_frequency(each, np.ones(len(each), int))
        low, high = found.mean_interval
        inside += low <= 0 <= high
        lone += abs(each.mean()) <= 1.96 * each.std() / len(each) ** 0.5
    assert inside >= 22 and lone <= 15


def test_medians_of_many_words():
    """More words than ranks are told apart: medians and intervals are right to a small share of
    their spread.
    """
    bits = np.random.default_rng(2)
    values = bits.exponential(1.0, 20 * RANKS)
    (found,) = by_frequency(values, np.ones(len(values), int))
    low, high = found.median_interval
    exact = 1 / np.sqrt(
        len(values)
    )  # the standard error of the median of an exponential: sqrt(p (1 - p) / n) / density
    assert found.median == np.median(values)
    assert low < found.median < high and 3 * exact < high - low < 5 * exact


def test_words_of_a_vocabulary():
    """Every token is a word of its own frequency; the word before the first is <eos>."""
    vocabulary = Vocabulary.build({"the": 9, "<eos>": 5, "cat": 2})
    words = words_of(np.array([0, 2, 1, 0, 1]), vocabulary, {})
    np.testing.assert_array_equal(words.nll(np.arange(5, dtype=np.float32)), np.arange(5.0))
    np.testing.assert_array_equal(words.counts, [9, 2, 5, 9, 5])
    np.testing.assert_array_equal(words.counts_before(), [5, 9, 2, 5, 9])


def test_words_of_units(tmp_path, caplog):
    """A word's loss is the sum over its units, and its frequency that of the word in the training
    text, not of a unit; unknown where that text is not prepared.
    """
    (tmp_path / "train.txt").write_text("low lower low\nlow newest newest\n")
    units = Subwords.build({"low": 3, "lower": 1, "newest": 2, "<eos>": 2}, codes=8)
    line = ["low", "lowest", "newest", "<eos>", "lower", "<eos>"]
    ids, lengths = units.encode_words(line)
    assert lengths.max() > 1
    ends = np.cumsum(lengths)
    nll = np.arange(1, len(ids) + 1, dtype=np.float32)
    nll[ends[1] - 1] = np.nan
    data = {"corpus": "text_files", "path": str(tmp_path)}
    for absent in data, data | {"path": str(tmp_path / "none")}:
        caplog.clear()
        assert words_of(ids, units, absent).counts is None and "unknown" in caplog.text
    caplog.clear()
    load(data | {"codes": 8}, splits=("train",))
    words = words_of(ids, units, data)
    assert not caplog.text
    slow = [nll[end - length : end].sum() for end, length in zip(ends, lengths, strict=True)]
    np.testing.assert_array_equal(words.nll(nll), slow)
    assert np.isnan(words.nll(nll)[1])
    np.testing.assert_array_equal(words.counts, [3, 0, 2, 2, 1, 2])
    np.testing.assert_array_equal(words.counts_before(), [2, 3, 0, 2, 2, 1])
    vocabulary = Vocabulary.build(dict.fromkeys(line, 1))
    whole = words_of(vocabulary.encode_words(line)[0], vocabulary, {})
    np.testing.assert_array_equal(words.hashes, whole.hashes)
    assert whole.counts is None  # of a list without counts
