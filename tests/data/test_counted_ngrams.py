"""Counts of n-grams against a dict, and their file."""

import collections

import numpy as np
import pytest

from adaptive_jax.data.vocabulary import ngrams
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from tests import refuses

WORDS = Vocabulary.build({"<eos>": 30, "<unk>": 20} | {f"w{n}": 19 - n for n in range(15)})
IDS = np.minimum(np.random.default_rng(0).zipf(1.4, 400) - 1, len(WORDS) - 1).astype(np.int32)


@pytest.mark.parametrize("words", [17, 1 << 21])  # 32 bits and 64
@pytest.mark.parametrize("piece", [7, 1 << 20])
@pytest.mark.parametrize("order", [2, 3])
def test_counts_are_those_of_a_dict(monkeypatch, words, piece, order):
    """Also of a text that is read in pieces: an n-gram over two of them is counted once."""
    monkeypatch.setattr(ngrams, "CHUNK_TOKENS", piece)
    ids = IDS * (words // 17)
    pairs = zip(*(ids[i:].tolist() for i in range(order)), strict=False)
    counts = collections.Counter(pairs)
    expected = sorted(counts, key=lambda each: (-counts[each], each))
    expected = [each for each in expected if counts[each] >= 3][:25]
    result = ngrams.count(ids, words, order, limit=25, min_count=3)
    assert result.tolist() == [[*each, counts[each]] for each in expected] and len(expected) > 5


def test_orders_that_are_too_long_and_texts_that_are_too_short():
    """One line says which orders would do; a text may have no n-gram."""
    with refuses("orders", "3"):
        ngrams.count(IDS, 1 << 30, 3, limit=5, min_count=1)
    assert ngrams.count(IDS[:1], 17, 2, limit=5, min_count=2).shape == (0, 3)


def test_the_file_of_a_vocabulary(tmp_path):
    """It keeps n-grams and counts, and says so in one line where it does not fit."""
    path = tmp_path / "ngrams.npz"
    counts = {order: ngrams.count(IDS, len(WORDS), order, 30, 2) for order in (2, 3)}
    ngrams.write(path, WORDS, counts)
    again = ngrams.read(path, WORDS, (3, 2))
    for order in counts:
        np.testing.assert_array_equal(counts[order], again[order])
    array = ngrams.sorted_ngrams(WORDS, str(path), (2,), 40, 4)["2"]
    number = int((counts[2][:, -1] >= 4).sum())
    keys, ranks = array[:, :-1], array[:, -1]
    assert 5 < number < 30 and keys.shape == (40, 2) and array.dtype == np.int32
    assert list(map(tuple, keys)) == sorted(map(tuple, keys))
    np.testing.assert_array_equal(counts[2][ranks[:number], :-1], keys[:number])
    assert (keys[number:] >= len(WORDS)).all()

    other = Vocabulary.build({"<eos>": 3, "<unk>": 2, "w0": 1})
    with pytest.raises(InputError, match="of another vocabulary"):
        ngrams.read(path, other, (2,))
    with pytest.raises(InputError, match="has no n-grams of 4 words"):
        ngrams.read(path, WORDS, (2, 4))
    with refuses("least", "99"):
        ngrams.sorted_ngrams(WORDS, str(path), (2,), 40, 99)
    with pytest.raises(InputError, match="counts is empty"):
        ngrams.read("", WORDS, (2,))
    for content, says in (b"nothing", "is damaged"), (None, "No such file"):
        (path.write_bytes(content) if content else path.with_suffix(".sha256").unlink())
        path.unlink() if content is None else None
        with pytest.raises(InputError, match=says) as error:
            ngrams.read(path, WORDS, (2,))
        assert "\n" not in str(error.value)
    path.write_bytes(b"nothing")
    with pytest.raises(InputError, match="it holds no arrays"):
        ngrams.read(path, WORDS, (2,))
