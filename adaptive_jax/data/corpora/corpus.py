"""What a prepared corpus is: a vocabulary, and ids for each split."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.vocabulary.words import Vocabulary

SPLITS = ("train", "validation", "test")


class LazyIds:
    """Ids that are computed when they are indexed, int32 `[tokens]`, by whole numbers, slices and
    integer arrays. `numpy.asarray` computes all.
    """

    dtype, ndim = np.dtype(np.int32), 1

    def __init__(self, tokens: int):
        self.shape = (tokens,)

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if copy is False:
            raise ValueError("ids that are computed cannot be an array without a copy")
        return np.asarray(self[:], dtype)


class Renumbered(LazyIds):
    """Tokens under other numbers, `new[i]` for each i that is stored, looked up when they are read:
    nothing is copied.

    ids: integers `[tokens]`, a memory-mapped file or anything that is indexed like one.
    new: int32 `[V]`.
    """

    def __init__(self, ids: np.ndarray, new: np.ndarray):
        super().__init__(len(ids))
        self._ids, self._new = ids, new

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        return self._new[self._ids[index]]


class Corpus(NamedTuple):
    """A vocabulary, and int32 `[tokens]` for each split, read-only: a memory-mapped file,
    `stored.Ids` of a URL, or one of these `Renumbered`.

    unseen: for each split where it is known, the share of its words, `<eos>` included, that the
        vocabulary was not learnt from: words that it lacks; for sub-word units, words that the
        train split lacks. `<unk>` itself is not one of them.
    note: what every result on this text must say, such as that it is not the published one.
    """

    vocabulary: Vocabulary
    ids: dict[str, np.ndarray]
    unseen: Mapping[str, float] = {}
    note: str = ""
