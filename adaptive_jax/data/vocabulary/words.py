"""Words and their counts, in the order that cutoffs rest on: by frequency, or by clusters."""

import bisect
import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.files import path_of, write_bytes

EOS = "<eos>"
UNKNOWN = "<unk>"
BYTE_ORDER_MARK = "\ufeff"
CHUNK_TOKENS = 1 << 20


class _Index(dict[str, int]):
    """Word to id. A missing word becomes <unk>, or an error if there is no <unk>."""

    def __missing__(self, word: str) -> int:
        if UNKNOWN not in self:
            raise InputError(
                f"the word {word!r} is not in the vocabulary of {len(self):,} words, which has no"
                f" {UNKNOWN}: train with a data.threshold above the count of the rarest word, or a"
                " data.limit below the number of words; or evaluate with --vocabulary=union"
            )
        return self[UNKNOWN]


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """Words in the order of their ids. `build` puts the most frequent first, and words with equal
    counts in code point order; `adaptive_jax.data.vocabulary.clusters` has other orders.

    >>> counts = {"the": 5, "cat": 2, "hat": 1, "mat": 1, "<eos>": 3}
    >>> vocabulary = Vocabulary.build(counts, threshold=2)
    >>> vocabulary.words
    ('the', '<eos>', '<unk>', 'cat')
    >>> vocabulary.encode("the cat in the hat")
    [0, 3, 2, 0, 2, 1]

    words: all V words, including `<eos>`, and `<unk>` if there is one.
    counts: int64 `[V]`, how often each occurs; `<unk>` includes the words folded into it.
    """

    words: tuple[str, ...]
    counts: np.ndarray
    unit = "word"  # what losses and perplexities are per
    spells = False  # whether entries are parts of words, which spell any text
    mark = b""  # ends the spelling of a word that may be several entries
    file, model = "", b""  # of a program that finds the entries: its name and content

    @classmethod
    def build(cls, counts: Mapping[str, int], threshold: int = 1, limit: int = 0) -> "Vocabulary":
        """Keeps words seen at least `threshold` times, `limit` words at most, and folds the others
        into `<unk>`.

        counts: occurrences of each word; for `<eos>` the number of lines.
        limit: the size of the whole vocabulary, including `<eos>` and `<unk>`, which are never
            folded; 0 for no limit.
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
        """Restricts the vocabulary to these words, `<eos>` and `<unk>`; all others are counted as
        `<unk>`. Words that it lacks have count 0.
        """
        counts = dict.fromkeys([*words, EOS, UNKNOWN], 0)
        for word, count in zip(self.words, self.counts.tolist(), strict=True):
            counts[word if word in counts else UNKNOWN] += count
        return Vocabulary.build(counts, threshold=0)

    def with_words(self, words: Iterable[str], counts: Mapping[str, int] = {}) -> "Vocabulary":
        """Returns this vocabulary with those of `words` that it lacks behind its own, in their
        order.

        counts: occurrences of words, which `<unk>` includes for those that are new; 0 of others.
        """
        new = {word: counts.get(word, 0) for word in words if word not in self.index}
        numbers = np.append(self.counts, np.fromiter(new.values(), np.int64))
        if folded := sum(new.values()):
            numbers[self.index[UNKNOWN]] -= folded
        return Vocabulary((*self.words, *new), numbers)

    @classmethod
    def from_lines(cls, path: str | os.PathLike, counts: Mapping[str, int]) -> "Vocabulary":
        """Reads what `write` wrote, of whose lines `read_counts` has made `counts`. Raises
        InputError for anything else.
        """
        if EOS not in counts:
            raise InputError(
                f"{path}: {EOS} is missing; add it with the number of lines as its count"
            )
        return cls(tuple(counts), np.fromiter(counts.values(), np.int64))

    def write(self, path: str | os.PathLike) -> None:
        """Writes a `word count` line for each word, UTF-8, in the order of ids, in one step; the
        model before it, as `file` beside it, so that it exists wherever the words do.
        """
        if self.file:
            write_bytes(path_of(path).with_name(self.file), self.model)
        write_bytes(path_of(path), self._text.encode("utf-8"))

    def encode(self, line: str) -> list[int]:
        """Returns the ids of the words of a line and `<eos>`. InputError: an unknown word, if
        there is no `<unk>`.
        """
        return self.encode_lines([line]).tolist()

    def split(self, line: str) -> list[str]:
        """The words of a line, which `encode_words` takes."""
        return line.split()

    def whole_words(self, ids: Iterable[int]) -> Iterator[str]:
        """The words of tokens, as text; the last may lack its end."""
        return map(self.words.__getitem__, ids)

    def border(self, text: str) -> int:
        """Index of the first character whose tokens may change when text is appended. Words are
        complete, so it is the length.
        """
        return len(text)

    @property
    def names(self) -> Sequence[str | int]:
        """Names of the entries, by which two vocabularies of one kind compare: `[V]`."""
        return self.words

    def encode_lines(self, lines: Iterable[str]) -> np.ndarray:
        """Returns the ids of many lines, each followed by `<eos>`: int32 `[tokens]`. Raises
        InputError as `encode`.
        """
        return self.encode_words([word for line in lines for word in (*self.split(line), EOS)])[0]

    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of words, int32 `[tokens]`, and how many each word has, int32
        `[words]`: here always one.
        """
        tokens = np.fromiter(map(self.index.__getitem__, words), np.int32, len(words))
        return tokens, np.ones(len(words), np.int32)

    def unigram_nll(self, ids: np.ndarray) -> float:
        """Returns the mean nats per word of ids `[tokens]` if every token has the probability
        in `unigram_probs`.
        """
        times = np.bincount(ids, minlength=len(self.words))
        seen = times > 0
        with np.errstate(divide="ignore"):  # a word with count 0 rightly costs infinitely much
            nll = -np.log(self.unigram_probs[seen])
        return float(times[seen] @ nll / times[self.ends_word].sum())

    @property
    def unigram_probs(self) -> np.ndarray:
        """float64 `[V]`: the probability of each token by its count alone."""
        return self.counts / self.counts.sum()

    def count_words(self, ids: np.ndarray) -> int:
        """Returns how many words of the text, including `<eos>`, end in ids `[tokens]`. Reads all
        of them where some tokens end no word.
        """
        if self.ends_word.all():
            return len(ids)
        return sum(int(self.ends_word[piece].sum()) for piece in pieces(ids))

    def unk_rate(self, ids: np.ndarray) -> float:
        """Returns the share of the words in ids `[tokens]` that are `<unk>`, which ends a word in
        every vocabulary. Reads all of them.
        """
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
        """int64 `[V]`: how many words come before each in order of frequency: its id, if words are
        in such an order; otherwise words with equal counts are in code point order, as in `build`.
        """
        ranks = np.arange(len(self))
        if (np.diff(self.counts) > 0).any():
            counts, words = self.counts.tolist(), self.words
            order = sorted(range(len(self)), key=lambda i: (-counts[i], words[i]))
            ranks[order] = np.arange(len(self))
        return ranks

    @functools.cached_property
    def has_counts(self) -> bool:
        """True if counts are of a text: False of a list of words, each of which has the count 1."""
        return len(np.unique(self.counts[self.counts > 0])) > 1

    @property
    def counts_by_word(self) -> dict[str, int]:
        """The occurrences of each word."""
        return dict(zip(self.words, self.counts.tolist(), strict=True))

    def same_words(self, other: "Vocabulary") -> bool:
        """True if both have the same words with the same counts, in any order, and one model."""
        return self.counts_by_word == other.counts_by_word and self.model == other.model

    @functools.cached_property
    def ends_word(self) -> np.ndarray:
        """bool `[V]`: whether a token ends a word of the text. Here all do; some sub-word units
        do not.
        """
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
        """Ids of the units that begin with `text`, UTF-8, and of the shorter ones that it begins
        with.
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
        """Id of each word. Any other word gives that of `<unk>`, or InputError if there is none."""
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
    """The names and counts of a file with a line `NAME COUNT` for each entry, in its order.

    Raises:
        InputError: anything else, with the number of the line.
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
    """The words of a file, one a line. Raises InputError: anything else, with the line's number."""
    if not path_of(path).is_file():
        raise InputError(f"data.words={path} must be a file with a word a line: there is none")
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
            f"cannot read the vocabulary {path}: {error.strerror}; use the path of one"
        ) from error
    except UnicodeDecodeError as error:
        number = error.object.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"{path}, line {number}: not UTF-8; save the vocabulary as UTF-8"
        ) from error


def pieces(ids: np.ndarray) -> Iterator[np.ndarray]:
    """Yields ids `[tokens]` a piece at a time, because a split may be larger than memory."""
    for begin in range(0, len(ids), CHUNK_TOKENS):
        yield ids[begin : begin + CHUNK_TOKENS]


def most_frequent_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Returns the items sorted by count, and in code point order where counts are equal."""
    words = sorted(sorted(counts), key=counts.__getitem__, reverse=True)
    return [(word, counts[word]) for word in words]
