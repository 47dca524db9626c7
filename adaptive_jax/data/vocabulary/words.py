"""Words and their counts, most frequent first: the order on which cutoffs, bands and clusters rest."""

import bisect
import dataclasses
import functools
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.files import replacing

EOS = "<eos>"
UNKNOWN = "<unk>"


class _Index(dict[str, int]):
    """Word to id; a word that is missing becomes <unk>, or an error where there is no <unk>."""

    def __missing__(self, word: str) -> int:
        if UNKNOWN not in self:
            raise InputError(
                f"the word {word!r} is not in the vocabulary of {len(self):,} words, which has no {UNKNOWN}; "
                f"build it with data.threshold=2 or a data.limit, so that rare words become {UNKNOWN}"
            )
        return self[UNKNOWN]


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """Words, most frequent first; words of the same count stand in code point order.

    >>> vocabulary = Vocabulary.build({"the": 5, "cat": 2, "hat": 1, "mat": 1, "<eos>": 3}, threshold=2)
    >>> vocabulary.words
    ('the', '<eos>', '<unk>', 'cat')
    >>> vocabulary.encode("the cat in the hat")
    [0, 3, 2, 0, 2, 1]

    words: all V words, `<eos>` among them, and `<unk>` if there is one.
    counts: int64 [V], how often each was seen; that of `<unk>` includes the words folded into it.
    """

    words: tuple[str, ...]
    counts: np.ndarray

    @classmethod
    def build(cls, counts: Mapping[str, int], threshold: int = 1, limit: int = 0) -> "Vocabulary":
        """Keeps words seen `threshold` times or more, `limit` at most, and folds the rest into `<unk>`.

        counts: occurrences of each word; that of `<eos>` is the number of lines.
        limit: the size of the whole vocabulary, `<eos>` and `<unk>` included, which are never folded; 0: no limit.
        """
        words, numbers = zip(*most_frequent_first(counts), strict=True)
        return cls(words, np.array(numbers, np.int64)).cut(threshold, limit)

    def cut(self, threshold: int = 1, limit: int = 0) -> "Vocabulary":
        """This vocabulary with more words folded into `<unk>`; see `build`."""
        if threshold < 1:
            raise InputError(f"data.threshold={threshold} must be 1 (keep every word) or more")
        if limit < 0 or limit in (1, 2):
            raise InputError(f"data.limit={limit} must be 0 (no limit), or 3 or more: {EOS}, {UNKNOWN} and a word")
        places = {word: i for i, word in enumerate(self.words) if word in (EOS, UNKNOWN)}
        foldable = np.ones(len(self), bool)
        foldable[list(places.values())] = False
        kept = foldable & (self.counts >= threshold)
        if limit and kept.sum() + (2 if UNKNOWN in places or (foldable & ~kept).any() else 1) > limit:
            kept &= np.cumsum(kept) <= limit - 2
        folded = foldable & ~kept
        if not folded.any():
            return self
        rest = self.counts[folded].sum() + (self.counts[places[UNKNOWN]] if UNKNOWN in places else 0)
        final = [(self.words[i], int(self.counts[i])) for i in np.flatnonzero(~folded) if self.words[i] != UNKNOWN]
        bisect.insort(final, (UNKNOWN, int(rest)), key=lambda item: (-item[1], item[0]))
        words, numbers = zip(*final, strict=True)
        return Vocabulary(words, np.array(numbers, np.int64))

    @classmethod
    def read(cls, path: str | os.PathLike) -> "Vocabulary":
        """Reads what `write` wrote. Raises InputError, with the number of the line, for anything else."""
        try:
            lines = Path(path).read_bytes().decode("utf-8").removesuffix("\n").split("\n")
        except OSError as error:
            raise InputError(f"cannot read the vocabulary {path}: {error.strerror}; give the path of one") from error
        except UnicodeDecodeError as error:
            number = error.object.count(b"\n", 0, error.start) + 1
            raise InputError(f"{path}, line {number}: not UTF-8; save the vocabulary as UTF-8") from error
        counts: dict[str, int] = {}
        last = None
        for number, line in enumerate(lines, start=1):
            word, _, count = line.rpartition(" ")
            if not word or not (count.isascii() and count.isdigit()):
                raise InputError(f"{path}, line {number}: {line!r} must be a word, one space and its count")
            if last is not None and int(count) > last:
                raise InputError(
                    f"{path}, line {number}: {line!r} follows a count of {last}; sort by count, descending"
                )
            if word in counts:
                raise InputError(f"{path}, line {number}: {word!r} stands twice; keep one line a word")
            counts[word] = last = int(count)
        if EOS not in counts:
            raise InputError(f"{path}: {EOS} is missing; add it with the number of lines as its count")
        return cls(tuple(counts), np.fromiter(counts.values(), np.int64))

    def write(self, path: str | os.PathLike) -> None:
        """Writes one `word count` a line, UTF-8, most frequent first, in one step."""
        with replacing(Path(path)) as file:
            file.write(self._text.encode("utf-8"))

    def encode(self, line: str) -> list[int]:
        """Ids of the words of a line, `<eos>` last. InputError for an unknown word if there is no `<unk>`."""
        return [self.index[word] for word in (*line.split(), EOS)]

    def encode_lines(self, lines: Iterable[str]) -> np.ndarray:
        """Ids of many lines, one `<eos>` after each: int32 [tokens]. Like `encode`, but fast."""
        return self.encode_words([word for line in lines for word in (*line.split(), EOS)])[0]

    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of words, one word after another, int32 [tokens], and how many each has, int32 [words]: here, one."""
        return np.fromiter(map(self.index.__getitem__, words), np.int32, len(words)), np.ones(len(words), np.int32)

    def unigram_nll(self, ids: np.ndarray) -> float:
        """Mean nats per word of ids [tokens], if each token comes with probability `chances`."""
        times = np.bincount(ids, minlength=len(self.words))
        seen = times > 0
        with np.errstate(divide="ignore"):  # a word of count 0 costs infinitely much, rightly
            nll = -np.log(self.chances[seen])
        return float(times[seen] @ nll / times[self.ends].sum())

    @property
    def chances(self) -> np.ndarray:
        """float64 [V]: how likely each token is by its count alone."""
        return self.counts / self.counts.sum()

    def count_words(self, ids: np.ndarray) -> int:
        """How many words of the text, `<eos>` included, end in ids [tokens]: here, all of them are words."""
        return len(ids)

    def __len__(self) -> int:
        return len(self.words)

    @property
    def eos(self) -> int:
        """Id of `<eos>`."""
        return self.index[EOS]

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """bool [V]: whether a token ends a word of the text. All do here; of sub-word units, some do not."""
        return np.ones(len(self), bool)

    @functools.cached_property
    def spellings(self) -> tuple[bytes, ...]:
        """What each word spells, UTF-8."""
        return tuple(word.encode() for word in self.words)

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Id of each word; any other word gives that of `<unk>`, or InputError if there is none."""
        return _Index(zip(self.words, range(len(self.words)), strict=True))

    @functools.cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that differ when a word, a count or the order differs."""
        return hashlib.sha256(self._text.encode("utf-8")).hexdigest()[:16]

    @property
    def _text(self) -> str:
        return "".join(f"{word} {count}\n" for word, count in zip(self.words, self.counts.tolist(), strict=True))


def most_frequent_first(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Items by count, those of the same count in code point order."""
    words = sorted(counts)
    numbers = np.fromiter(map(counts.__getitem__, words), np.int64, len(words))
    order = np.argsort(-numbers, kind="stable")
    return list(zip(map(words.__getitem__, order.tolist()), numbers[order].tolist(), strict=True))
