"""Reads the vocabularies of checkpoints."""

import collections
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from adaptive_jax.data.vocabulary.words import EOS, Vocabulary
from adaptive_jax.errors import InputError, one_line

DICTIONARY = "use the dict.txt of the checkpoint"
CORPUS = (
    "use the directory of train.txt, valid.txt and test.txt that the model was trained with, or a"
    " file with one word a line"
)


def read_dictionary(path: Path) -> Vocabulary:
    """The vocabulary of a dict.txt with the same ids: fairseq's own `<s> <pad> </s> <unk>`, then
    the words of the file.

    `</s>` is called `<eos>` here. fairseq's four words have no counts in the file and get that of
    its first word; a count above that of the line before is lowered to it. So the unigram
    perplexity of a converted model is only approximate. A word that a later line overwrites
    (`#fairseq:overwrite`) keeps its id under a name that cannot occur in a text.

    Raises:
        InputError: a wrong line, with its number.
    """
    words, counts = ["<s>", "<pad>", "</s>", "<unk>"], []
    ids = {word: i for i, word in enumerate(words)}
    for number, line in _lines(path, DICTIONARY):
        line = line.rstrip()
        entry = line.removesuffix(" #fairseq:overwrite")
        word, _, count = entry.rpartition(" ")
        problem = ""
        if not word or not (count.isascii() and count.isdigit() and len(count) < 19):
            problem = f"must be a word, one space and its count; {DICTIONARY}"
        elif word == EOS:
            problem = "has this project's name of fairseq's </s>; rename it, also in the text"
        elif word in ids and entry == line:
            problem = f"repeats a word; {DICTIONARY}"
        if problem:
            raise InputError(f"{path}, line {number}: {line!r} {problem}")
        if word in ids:
            words[ids[word]] = f"{word} (until line {number})"
        ids[word] = len(words)
        words.append(word)
        counts.append(min([int(count), *counts[-1:]]))
    if not counts:
        raise InputError(f"{path} has no words; {DICTIONARY}")
    words[2] = EOS
    return Vocabulary(tuple(words), np.array([counts[0]] * 4 + counts, np.int64))


def read_corpus(path: Path) -> dict[str, int]:
    """Counts of the words of an AWD-LSTM in the order of their ids.

    path: the directory of the corpus, whose words are numbered as they appear in train.txt,
        valid.txt and test.txt, with `<eos>` at the end of every line; or a text file with one word
        a line, which has no counts: each is 1.

    Raises:
        InputError: a file is missing or not UTF-8, a line of the list is not one new word, or there
            is no `<eos>`.
    """
    counts = collections.Counter()
    if path.is_dir():
        for split in ("train.txt", "valid.txt", "test.txt"):
            for _, line in _lines(path / split, CORPUS):
                counts.update((*line.split(), EOS))
    else:
        for number, line in _lines(path, CORPUS):
            words = line.split()
            if len(words) != 1 or words[0] in counts:
                problem = "is not one word" if len(words) != 1 else "repeats a word"
                raise InputError(f"{path}, line {number}: {line.rstrip()!r} {problem}; {CORPUS}")
            counts[words[0]] = 1
    if EOS not in counts:
        raise InputError(f"{path} has no {EOS}, which ends every line of a text; {CORPUS}")
    return counts


def fairseq_words(
    path: Path, state: dict[str, np.ndarray]
) -> tuple[Vocabulary, dict[str, np.ndarray]]:
    """The vocabulary of a dict.txt, see `read_dictionary`, and the tensors, unchanged."""
    return read_dictionary(path), state


def awd_lstm_words(
    path: Path, state: dict[str, np.ndarray]
) -> tuple[Vocabulary, dict[str, np.ndarray]]:
    """The vocabulary of an AWD-LSTM, most frequent words first, and its tensors with their rows in
    this order.

    A model with a split softmax keeps its ids, because classes are ranges of ids.

    Raises:
        InputError: see `read_corpus`; or the model has another number of words.
    """
    counts, size = read_corpus(path), len(state["encoder.weight"])
    if len(counts) != size:
        raise InputError(f"{path} has {len(counts):,} words and the checkpoint {size:,}: {CORPUS}")
    words, numbers = np.array(list(counts), object), np.fromiter(counts.values(), np.int64)
    split = "tail_vectors" in state
    order = np.arange(size) if split else np.argsort(-numbers, kind="stable")
    tables = {
        name: state[name][order]
        for name in ("encoder.weight", "decoder.weight", "decoder.bias")
        if name in state and len(state[name]) == size
    }
    return Vocabulary(tuple(words[order]), numbers[order]), state | tables


def _lines(path, cure) -> Iterator[tuple[int, str]]:
    """Numbers and lines of a text file."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {one_line(error)}; {cure}") from None
    return enumerate(io.StringIO(text, newline=None), start=1)
