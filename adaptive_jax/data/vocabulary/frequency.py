"""Token ids of any tokenizer in order of frequency, which cutoffs need, and back.

counts = count_ids(ids, vocabulary_size=128_000)
order = frequency_order(counts)
order.ranks[ids]            # what a model with cutoffs reads: 0 is the most frequent id
order.ids[[0, 1, 2]]        # the three most frequent ids of the tokenizer
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adaptive_jax.errors import InputError

CHUNK_TOKENS = 1 << 22  # ids read at a time, since a file may be larger than memory


class FrequencyOrder(NamedTuple):
    """Two inverse maps, int32 `[V]` each.

    ranks: the rank of each id, 0 for the most frequent one.
    ids: the id of each rank.
    """

    ranks: np.ndarray
    ids: np.ndarray


def frequency_order(counts: np.ndarray) -> FrequencyOrder:
    """Orders ids by falling count; ids with equal counts stay in order.

    counts: integers `[V]`, occurrences of each id in the training text, see `count_ids`.

    Raises:
        InputError: counts that are not integers `[V]`.

    >>> frequency_order([2, 0, 5])
    FrequencyOrder(ranks=array([1, 2, 0], dtype=int32), ids=array([2, 0, 1], dtype=int32))
    """
    counts = np.asarray(counts)
    if counts.dtype.kind not in "iu" or counts.ndim != 1:
        raise InputError(
            f"counts must be integers [V], got {counts.dtype} {list(counts.shape)}: use those of"
            " count_ids"
        )
    ids = np.argsort(-counts.astype(np.int64), kind="stable").astype(np.int32)
    ranks = np.empty_like(ids)
    ranks[ids] = np.arange(len(ids), dtype=np.int32)
    return FrequencyOrder(ranks, ids)


def count_ids(
    ids: np.ndarray, vocabulary_size: int, show: Callable[[float], None] = lambda share: None
) -> np.ndarray:
    """Counts the occurrences of each id: int64 `[vocabulary_size]`. Reads a few million at a time.

    ids: integers `[tokens]`, an array, a memory-mapped file, or anything with a length and slices.
    show: called with the share of the ids read so far.

    Raises:
        InputError: ids that are not integers `[tokens]`, or an id outside of 0 to
            `vocabulary_size - 1`.
    """
    counts = np.zeros(vocabulary_size, np.int64)
    for begin in range(0, len(ids), CHUNK_TOKENS):
        part = np.asarray(ids[begin : begin + CHUNK_TOKENS])
        if part.dtype.kind not in "iu" or part.ndim != 1:
            raise InputError(
                f"ids must be integers [tokens], got {part.dtype} {list(np.shape(ids))}"
            )
        invalid = (part < 0) | (part >= vocabulary_size)
        if invalid.any():
            place = int(invalid.argmax())
            raise InputError(
                f"ids must be from 0 to {vocabulary_size - 1:,}, got {part[place]:,} at position"
                f" {begin + place:,}: use ids of one tokenizer, and the size of its whole"
                " vocabulary"
            )
        counts += np.bincount(part.astype(np.int64, copy=False), minlength=vocabulary_size)
        show((begin + len(part)) / len(ids))
    return counts
