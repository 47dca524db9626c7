"""Order, folding, encoding, and files that are wrong."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.on_disk import read_vocabulary
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.files import replacing
from tests import refuses

COUNTS = {"the": 5, "b": 2, "a": 2, "hat": 1, "mat": 1, "<eos>": 3}


@pytest.mark.parametrize("limit", [1, 2])
def test_impossible_limits_are_named(limit):
    """`<eos>` and `<unk>` alone would be no vocabulary."""
    with refuses(f"data.limit={limit}"):
        load({"corpus": "text_files", "limit": limit})


def test_words_from_outside(tmp_path, own_cache):
    """A lexicon fixes the words: those of the text that it lacks are <unk>, those that the text
    lacks are there with count 0. A byte order mark, as Windows writes it, is no part of a word.
    """
    (tmp_path / "words.txt").write_text("\ufeffcat\nhat\ndog\n")
    for split, text in ("train", "the cat\nthe hat cat\n"), ("valid", "dog\n"), ("test", "the\n"):
        (tmp_path / f"{split}.txt").write_text(text)
    data = {"corpus": "text_files", "path": str(tmp_path), "words": str(tmp_path / "words.txt")}
    vocabulary = load(data).vocabulary
    assert vocabulary.counts_by_word == {"<eos>": 2, "<unk>": 2, "cat": 2, "hat": 1, "dog": 0}
    assert vocabulary.words[-1] == "dog"
    with refuses("data.words", "data.limit"):
        load(data | {"limit": 4})
    (tmp_path / "words.txt").write_text("cat\nhot dog\n")
    with refuses("line", "2", "one", "word"):
        load(data)


def test_lines_become_ids():
    """Any white space parts words, and every line ends in <eos>."""
    vocabulary = Vocabulary.build(COUNTS, threshold=2)
    line = "the cat  in the\that\r"
    words = [vocabulary.words[i] for i in vocabulary.encode(line)]
    assert " ".join(words) == "the <unk> <unk> the <unk> <eos>"
    ids = vocabulary.encode_lines([line, "", "a b"])
    assert ids.dtype == np.int32
    assert ids.tolist() == [0, 2, 2, 0, 2, 1, 1, 3, 4, 1]
    assert vocabulary.count_words(ids) == vocabulary.ends_word[ids].sum() == 10


def test_an_unknown_word_without_unk_is_named_with_the_cure():
    """The error names the word and the setting that makes an `<unk>`; a KeyError would not."""
    with refuses("'cat'", "data.threshold"):
        Vocabulary.build(COUNTS).encode("the cat")


def test_unigram_nll_is_the_mean_cost_of_the_counts():
    """Models are compared with this number: a wrong mean would make them look better or worse."""
    vocabulary = Vocabulary.build({"a": 6, "<eos>": 2})
    assert vocabulary.unigram_nll(np.array([0, 0, 1])) == pytest.approx(
        -(2 * math.log(0.75) + math.log(0.25)) / 3
    )
    assert Vocabulary(("a", "<eos>"), np.array([4, 0])).unigram_nll(np.array([1])) == math.inf
    assert Vocabulary(("a", "<eos>"), np.array([4, 0])).unigram_nll(np.array([0])) == 0.0


def test_a_written_file_is_read_back_the_same(tmp_path):
    """Ids of a run are lines of this file: a word read as two, or as none, would shift all after
    it.
    """
    # U+2028 and U+0085 end a line for str.splitlines, but not in this file
    vocabulary = Vocabulary.build({"naïve": 4, "x\u2060y": 2, "–": 2, "<eos>": 3})
    path = tmp_path / "deeper" / "vocabulary.txt"
    vocabulary.write(path)
    assert path.read_text(encoding="utf-8").startswith("naïve 4\n<eos> 3\n")
    again = read_vocabulary(path)
    assert again.counts_by_word == vocabulary.counts_by_word
    assert again.words == vocabulary.words
    assert again.digest == vocabulary.digest
    assert (
        len(
            {vocabulary.digest, Vocabulary.build(COUNTS).digest, Vocabulary.build(COUNTS, 2).digest}
        )
        == 3
    )


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"the 5\ncat\n<eos> 1\n", ["line 2", "'cat'"]),
        (b"the 5\n\n<eos> 1\n", ["line 2", "''"]),
        (b"the 5\ncat -1\n", ["line 2", "'cat -1'"]),
        (b"the 1000000000000000000000\n<eos> 1\n", ["line 1", "'the 1000000000000000000000'"]),
        (b"the 5\nthe 4\n<eos> 1\n", ["line 2", "'the'", "twice"]),
        (b"the 5\n<eos> 3\n\xff 2\n", ["line 3", "UTF-8"]),
        (b"the 5\n", ["<eos>"]),
        (b"", ["line 1", "''"]),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path, content, names):
    """The error names file, line and content: read in part, later ids would be other words."""
    path = tmp_path / "v.txt"
    path.write_bytes(content)
    with refuses(str(path), *names):
        read_vocabulary(path)
    path.unlink()
    with refuses("v.txt", "No such file"):
        read_vocabulary(path)
    with refuses("NUL"):
        read_vocabulary("a\0b")


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path):
    """A run would lose its vocabulary, or keep half of one."""
    path = tmp_path / "v.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), replacing(path) as file:
        file.write(b"new")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def plainly_cut(counts, threshold, limit):
    """The words that `cut` keeps, one word after another."""
    order = sorted(counts, key=lambda word: (-counts[word], word))
    kept = [word for word in order if word not in ("<eos>", "<unk>") and counts[word] >= threshold]
    folds = "<unk>" in counts or len(kept) < len(counts) - 1
    while limit and len(kept) + 1 + folds > limit:
        kept, folds = kept[:-1], True
    left = {word: counts[word] for word in (*kept, "<eos>")}
    if folds:
        left["<unk>"] = sum(count for word, count in counts.items() if word not in left)
    return sorted(left.items(), key=lambda item: (-item[1], item[0]))


@given(
    counts=st.dictionaries(st.sampled_from("abcdefgé日"), st.integers(0, 6)),
    eos=st.integers(1, 6),
    unknown=st.none() | st.integers(0, 6),
    threshold=st.integers(1, 5),
    limit=st.just(0) | st.integers(3, 9),
)
def test_cut_against_a_plain_loop(counts, eos, unknown, threshold, limit):
    """In one step and in two, with a threshold, a limit or both, with `<unk>` in the text or
    without.
    """
    counts |= {"<eos>": eos} | ({} if unknown is None else {"<unk>": unknown})
    expected = plainly_cut(counts, threshold, limit)
    for vocabulary in (
        Vocabulary.build(counts, threshold, limit),
        Vocabulary.build(counts).cut(threshold, limit),
    ):
        assert list(zip(vocabulary.words, vocabulary.counts.tolist(), strict=True)) == expected
