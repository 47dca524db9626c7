"""Words and their counts, in the order that cutoffs divide: by frequency, or by clusters."""

import bisect
import dataclasses
import functools
import hashlib
import os
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.files import path_of, write_bytes

EOS = "<eos>"
UNKNOWN = "<unk>"
BYTE_ORDER_MARK = "\ufeff"
CHUNK_TOKENS = 1 << 20


class _Index(dict[str, int]):
    """Ids by word. A missing word becomes `<unk>`, or an error if there is no `<unk>`."""

    def __missing__(self, word: str) -> int:
        if UNKNOWN not in self:
            raise InputError(
                f"{word[:60]!r} is not one of the {len(self):,} words of the vocabulary, which has"
                f" no {UNKNOWN}: leave it out, evaluate with --vocabulary=union, or train with a"
                " data.threshold above the count of the rarest word"
            )
        return self[UNKNOWN]


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """Words in the order of their ids. `build` sorts them by falling count, and words with equal
    counts by code point; `adaptive_jax.data.vocabulary.clusters` has other orders.

    >>> counts = {"the": 5, "cat": 2, "hat": 1, "mat": 1, "<eos>": 3}
    >>> vocabulary = Vocabulary.build(counts, threshold=2)
    >>> vocabulary.words
    ('the', '<eos>', '<unk>', 'cat')
    >>> vocabulary.encode("the cat in the hat")
    [0, 3, 2, 0, 2, 1]

    words: all V words, including `<eos>`, and `<unk>` if there is one.
    counts: int64 `[V]`, the occurrences of each; `<unk>` includes the words folded into it.
    """

    words: tuple[str, ...]
    counts: np.ndarray
    unit = "word"  # the unit of losses and perplexities
    spells = False  # whether entries are parts of words, which spell any text
    mark = b""  # ends the spelling of a word that may consist of several entries
    file, model = "", b""  # name and content of the file of the program that finds the entries

    @classmethod
    def build(cls, counts: Mapping[str, int], threshold: int = 1, limit: int = 0) -> "Vocabulary":
        """Keeps words seen at least `threshold` times, `limit` words at most, and folds the rest
        into `<unk>`.

        counts: occurrences of each word; for `<eos>` the number of lines.
        limit: maximal size of the vocabulary, including `<eos>` and `<unk>`, which are never
            folded; 0: no limit.
        """
        words, numbers = zip(*most_frequent_first(counts), strict=True)
        return Vocabulary(words, np.array(numbers, np.int64)).cut(threshold, limit)

    def cut(self, threshold: int = 1, limit: int = 0) -> "Vocabulary":
        """Returns this vocabulary with more words folded into `<unk>`; see `build`."""
        foldable = np.array([word not in (EOS, UNKNOWN) for word in self.words])
        keep = foldable & (self.counts >= threshold)
        unknown = UNKNOWN in self.words or (foldable & ~keep).any()
        if limit and keep.sum() + (2 if unknown else 1) > limit:
            keep &= np.cumsum(keep) <= limit - 2
        folded = foldable & ~keep
        if not folded.any():
            return self
        counts = {self.words[i]: int(self.counts[i]) for i in np.flatnonzero(~folded)}
        counts[UNKNOWN] = counts.get(UNKNOWN, 0) + int(self.counts[folded].sum())
        return Vocabulary.build(counts)

    def only(self, words: Iterable[str]) -> "Vocabulary":
        """Returns the vocabulary of these words, `<eos>` and `<unk>`, as which all other words are
        counted. New words have count 0.
        """
        counts = dict.fromkeys([*words, EOS, UNKNOWN], 0)
        for word, count in zip(self.words, self.counts.tolist(), strict=True):
            counts[word if word in counts else UNKNOWN] += count
        return Vocabulary.build(counts, threshold=0)

    def with_words(self, words: Iterable[str], counts: Mapping[str, int] = {}) -> "Vocabulary":
        """Returns this vocabulary with the new ones of `words` appended.

        counts: occurrences of new words, which are subtracted from those of `<unk>`; 0 if missing.
        """
        new = {word: counts.get(word, 0) for word in words if word not in self.index}
        numbers = np.append(self.counts, np.fromiter(new.values(), np.int64))
        if folded := sum(new.values()):
            numbers[self.index[UNKNOWN]] -= folded
        return Vocabulary((*self.words, *new), numbers)

    @classmethod
    def from_lines(cls, path: str | os.PathLike, counts: Mapping[str, int]) -> "Vocabulary":
        """Makes the vocabulary of a file that `write` wrote.

        counts: its lines, as `read_counts` reads them.

        Raises:
            InputError: there is no `<eos>`.
        """
        if EOS not in counts:
            raise InputError(
                f"{path}: {EOS} is missing; add it with the number of lines as its count"
            )
        return cls(tuple(counts), np.fromiter(counts.values(), np.int64))

    def write(self, path: str | os.PathLike) -> None:
        """Writes a line `WORD COUNT` for each word, UTF-8, in the order of ids, in one step. The
        model is written first, as `file` beside it, so that it exists if the words do.
        """
        if self.file:
            write_bytes(path_of(path).with_name(self.file), self.model)
        write_bytes(path_of(path), self._text.encode("utf-8"))

    def encode(self, line: str) -> list[int]:
        """Returns the ids of the words of a line and `<eos>`.

        Raises:
            InputError: an unknown word, if there is no `<unk>`.
        """
        return self.encode_lines([line]).tolist()

    def split(self, line: str) -> list[str]:
        """The words of a line, which `encode_words` takes."""
        return line.split()

    def whole_words(self, ids: Iterable[int]) -> Iterator[str]:
        """The words that tokens spell; the last may be incomplete."""
        return map(self.words.__getitem__, ids)

    def border(self, text: str) -> int:
        """Index of the first character whose tokens may change when text is appended. Words are
        complete, so it is the length.
        """
        return len(text)

    @property
    def names(self) -> Sequence[str | int]:
        """Names of the entries `[V]`, by which vocabularies of the same kind are compared."""
        return self.words

    def encode_lines(self, lines: Iterable[str]) -> np.ndarray:
        """Returns the ids of lines, each followed by `<eos>`: int32 `[tokens]`. Raises InputError
        as `encode`.
        """
        return self.encode_words([word for line in lines for word in (*self.split(line), EOS)])[0]

    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of words, int32 `[tokens]`, and the number of each word's tokens,
        int32 `[words]`: here always 1.
        """
        tokens = np.fromiter(map(self.index.__getitem__, words), np.int32, len(words))
        return tokens, np.ones(len(words), np.int32)

    def unigram_nll(self, ids: np.ndarray) -> float:
        """Returns the mean nats per word of ids `[tokens]` under `unigram_probs`."""
        times = np.bincount(ids, minlength=len(self.words))
        seen = times > 0
        with np.errstate(divide="ignore"):  # a word with count 0 costs infinitely much
            nll = -np.log(self.unigram_probs[seen])
        return float(times[seen] @ nll / times[self.ends_word].sum())

    @property
    def unigram_probs(self) -> np.ndarray:
        """float64 `[V]`: the relative frequency of each token."""
        return self.counts / self.counts.sum()

    def count_words(self, ids: np.ndarray) -> int:
        """Counts the words of the text that end in ids `[tokens]`, including `<eos>`."""
        if self.ends_word.all():
            return len(ids)
        return sum(int(self.ends_word[piece].sum()) for piece in pieces(ids))

    def unk_rate(self, ids: np.ndarray) -> float:
        """Returns the share of `<unk>` among the words in ids `[tokens]`."""
        if UNKNOWN not in self.index or not len(ids):
            return 0.0
        unk = self.index[UNKNOWN]
        unknown = sum(int(np.sum(piece == unk)) for piece in pieces(ids))
        return unknown / max(1, self.count_words(ids))

    def __len__(self) -> int:
        return len(self.words)

    @property
    def eos(self) -> int:
        """Id of `<eos>`."""
        return self.index[EOS]

    @functools.cached_property
    def ranks(self) -> np.ndarray:
        """int64 `[V]`: the rank of each word by frequency, from 0: its id, if words are in such an
        order; otherwise words with equal counts are in code point order, as in `build`.
        """
        ranks = np.arange(len(self))
        if (np.diff(self.counts) > 0).any():
            counts, words = self.counts.tolist(), self.words
            order = sorted(range(len(self)), key=lambda i: (-counts[i], words[i]))
            ranks[order] = np.arange(len(self))
        return ranks

    @functools.cached_property
    def has_counts(self) -> bool:
        """False for a list of words that all have the same count, which no text has."""
        return len(np.unique(self.counts[self.counts > 0])) > 1

    @property
    def counts_by_word(self) -> dict[str, int]:
        """The occurrences of each word."""
        return dict(zip(self.words, self.counts.tolist(), strict=True))

    def same_words(self, other: "Vocabulary") -> bool:
        """True if both have the same words and counts, in any order, and the same model."""
        return self.counts_by_word == other.counts_by_word and self.model == other.model

    @functools.cached_property
    def ends_word(self) -> np.ndarray:
        """bool `[V]`: whether a token ends a word of the text. Some sub-word units do not."""
        return np.ones(len(self), bool)

    @functools.cached_property
    def utf8(self) -> tuple[bytes, ...]:
        """The letters of each word, UTF-8."""
        return tuple(word.encode() for word in self.words)

    @functools.cached_property
    def _by_spelling(self):
        """Spellings in order, with the ids of their units; without `<eos>` and `<unk>`."""
        units = enumerate(zip(self.words, self.utf8, strict=True))
        return sorted((text, i) for i, (word, text) in units if word not in (EOS, UNKNOWN))

    def beginning(self, text: bytes) -> tuple[list[int], list[int]]:
        """Ids of the units that begin with `text`, UTF-8, and of shorter ones that are prefixes of
        it.
        """
        order = self._by_spelling

        def between(first, last):
            begin, end = (bisect.bisect(order, (spelling,)) for spelling in (first, last))
            return [i for _, i in order[begin:end]]

        shorter = (text[:end] for end in range(1, len(text)))
        longer = between(text, text + b"\xff")  # a byte that no text has
        return longer, [i for part in shorter for i in between(part, part + b"\0")]

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Id of each word. Any other word gives that of `<unk>`, or InputError if there is no
        `<unk>`.
        """
        return _Index(zip(self.words, range(len(self.words)), strict=True))

    @functools.cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that differ when a word, a count, the order or the model does."""
        return hashlib.sha256(self._text.encode("utf-8") + self.model).hexdigest()[:16]

    @property
    def _text(self) -> str:
        entries = zip(self.words, self.counts.tolist(), strict=True)
        return "".join(f"{word} {count}\n" for word, count in entries)


def read_counts(path: str | os.PathLike) -> dict[str, int]:
    """Reads a file with a line `NAME COUNT` for each entry, in the order of the file.

    Raises:
        InputError: any other file, with the number of the line.
    """
    counts: dict[str, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        word, _, count = line.rpartition(" ")
        fault = ""
        if not word or not (count.isascii() and count.isdigit() and len(count) < 19):
            fault = f"{line!r} must be a word, one space and its count"
        elif word in counts:
            fault = f"{word!r} occurs twice; keep one line for each word"
        if fault:
            raise InputError(f"{path}, line {number}: {fault}")
        counts[word] = int(count)
    return counts


def read_words(path: str | os.PathLike) -> list[str]:
    """Reads a file of words, one a line. Raises InputError for any other file, with the number of
    the line.
    """
    words = []
    for number, line in enumerate(_lines(path), start=1):
        line = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
        if len(line.split()) != 1:
            raise InputError(f"{path}, line {number}: {line[:60]!r} must be one word")
        words += line.split()
    return words


def _lines(path):
    """The lines of a file of words."""
    try:
        return path_of(path).read_bytes().decode("utf-8").removesuffix("\n").split("\n")
    except OSError as error:
        raise InputError(
            f"cannot read the vocabulary {path}: {error.strerror}; use a file of words, one a line"
        ) from error
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}, line {number}: not UTF-8; save the vocabulary as UTF-8"
        ) from error


def pieces(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Yields pieces of ids `[tokens]`, because a split may be larger than memory."""
    for begin in range(0, len(ids), CHUNK_TOKENS):
        yield ids[begin : begin + CHUNK_TOKENS]


def most_frequent_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns the items sorted by count, and in code point order where counts are equal."""
    words = sorted(sorted(counts), key=counts.__getitem__, reverse=True)
    return [(word, counts[word]) for word in words]


@functools.cache
def combining_marks() -> str:
    """Characters, for a class of a regular expression, that belong to the letter before them and
    that `\\w` does not match: accents, vowel signs, vowel points and joiners, up to U+FFFF, since
    a class with characters beyond is several times as slow.
    """
    characters = map(chr, range(0x300, 0x10000))
    marks = (character for character in characters if unicodedata.category(character)[0] == "M")
    return "".join(marks) + "\u200c\u200d"
