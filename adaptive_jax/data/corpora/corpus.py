"""Prepared corpus: a vocabulary, and ids for each split."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.vocabulary.words import Vocabulary

SPLITS = ("train", "validation", "test")


class LazyIds:
    """Ids that are read when they are indexed, int32 `[tokens]`. `numpy.asarray` reads all.

    read: returns the ids at a slice without a step, or at an array of non-negative indices.
    """

    dtype, ndim = np.dtype(np.int32), 1

    def __init__(self, read: Callable[[slice | np.ndarray], np.ndarray], tokens: int):
        self._read, self.shape = read, (tokens,)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        return self._read(index)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self[:], dtype)


def renumbered(ids: np.ndarray, new: np.ndarray) -> LazyIds:
    """Ids that are mapped to new ones when they are read: nothing is copied.

    ids: integers `[tokens]`, a memory-mapped file or anything that is indexed like one.
    new: int32 `[V]`, the new id of each.
    """
    return LazyIds(lambda index: new[ids[index]], len(ids))


class Corpus(NamedTuple):
    """A vocabulary, and the ids of each split, int32 `[tokens]`, read-only: a memory-mapped file or
    `LazyIds`.

    unseen: for each split where it is known, the share of its words, `<eos>` included, that the
        vocabulary was not learnt from: words that it lacks, or for sub-word units, words that the
        train split lacks. `<unk>` itself does not count.
    """

    vocabulary: Vocabulary
    ids: dict[str, np.ndarray | LazyIds]
    unseen: Mapping[str, float] = {}
