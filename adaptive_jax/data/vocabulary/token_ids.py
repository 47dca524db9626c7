"""The vocabulary of any tokenizer: its entries are ids, in order of frequency.

vocabulary.txt has a line `ID COUNT` for each entry, in place of `WORD COUNT`; the id that ends a
document, if there is one, is written `<eos=ID>`.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence

import numpy as np

from adaptive_jax.data.vocabulary.frequency import frequency_order
from adaptive_jax.data.vocabulary.words import EOS, Vocabulary
from adaptive_jax.errors import InputError

ENTRY = re.compile(r"0|[1-9][0-9]*|<eos=([0-9]+)>")


class _Entries(dict[str, int]):
    """Entries by id as text."""

    def __missing__(self, word: str) -> int:
        largest = len(self) - 1 - (EOS in self)
        raise InputError(f"{word[:60]!r} must be an id of the run, from 0 to {largest}")


@dataclasses.dataclass(frozen=True, eq=False)
class TokenIds(Vocabulary):
    """All ids of a tokenizer, 0 to V - 1, the most frequent first.

    >>> TokenIds.of_counts(np.array([2, 0, 5]), eos=0).words
    ('2', '<eos>', '1')

    words: the ids as decimal numbers, and `<eos>` for the one that ends a document.
    """

    unit = "token"

    @classmethod
    def of_counts(cls, counts: np.ndarray, eos: int = -1) -> "TokenIds":
        """Makes the vocabulary of a training text.

        counts: int64 `[V]`, occurrences of each id.
        eos: the id that ends a document; -1: none does.

        Raises:
            InputError: `eos` is not an id.
        """
        if not -1 <= eos < len(counts):
            raise InputError(
                f"data.eos={eos} must be an id from 0 to {len(counts) - 1:,}, or -1: no id ends a"
                " document"
            )
        order = frequency_order(counts).ids
        words = tuple(EOS if i == eos else str(i) for i in order.tolist())
        return cls(words, np.asarray(counts, np.int64)[order])

    @classmethod
    def from_lines(cls, path: str | os.PathLike, counts: Mapping[str, int]) -> "TokenIds":
        """See `Vocabulary.from_lines`."""
        words = tuple(EOS if name[0] == "<" else name for name in counts)
        return cls(words, np.fromiter(counts.values(), np.int64))

    @property
    def names(self) -> Sequence[str | int]:
        """The tokenizer's ids."""
        return self.ids.tolist()

    @functools.cached_property
    def ids(self) -> np.ndarray:
        """int32 `[V]`: the tokenizer's id of each entry."""
        ids = np.array([-1 if word == EOS else int(word) for word in self.words], np.int64)
        ids[ids < 0] = len(ids) * (len(ids) - 1) // 2 - ids[ids >= 0].sum()  # the remaining id
        return ids.astype(np.int32)

    @functools.cached_property
    def entry_of_id(self) -> np.ndarray:
        """int32 `[V]`: the entry of each of the tokenizer's ids."""
        entry_of_id = np.empty(len(self), np.int32)
        entry_of_id[self.ids] = np.arange(len(self), dtype=np.int32)
        return entry_of_id

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """The entry of each id as text; `<eos>` and the id that it stands for have the same entry.
        Any other text gives InputError.
        """
        entries = _Entries((str(i), entry) for entry, i in enumerate(self.ids.tolist()))
        if EOS in self.words:
            entries[EOS] = self.words.index(EOS)
        return entries

    @property
    def eos(self) -> int:
        """The entry that ends a document. If there is none, the most frequent entry is the input
        before the first token, and padding.
        """
        return self.index.get(EOS, 0)

    @property
    def _text(self) -> str:
        if EOS not in self.index:
            return super()._text
        name = f"<eos={self.ids[self.eos]}>"
        words = tuple(name if word == EOS else word for word in self.words)
        return Vocabulary(words, self.counts)._text


def holds_ids(names: Mapping[str, int]) -> bool:
    """True if the entries of a file are the ids 0 to V - 1, each once."""
    if not all(ENTRY.fullmatch(name) for name in names):  # stops at the first word
        return False
    matches = [ENTRY.fullmatch(name) for name in names]
    if sum(match[1] is not None for match in matches) > 1:
        return False
    ids = sorted(int(match[1] or match[0]) for match in matches)
    return ids == list(range(len(ids)))


def check_ends(vocabulary: Vocabulary, break_mode: str, key: str = "break_mode") -> None:
    """Checks that a vocabulary has the `<eos>` that a break mode needs. Raises InputError."""
    if break_mode != "none" and EOS not in vocabulary.index:
        raise InputError(
            f"{key}={break_mode} breaks text where documents end: pass --config.data.eos=ID, the id"
            f" that ends one, to training, or {key}=none"
        )
