"""Rows of a batch from spans of a split, and orders that depend only on seed and epoch."""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches.examples import ranges
from adaptive_jax.numerics.batch import Batch


class Spans(NamedTuple):
    """Spans of a split, and their rows: span i has the tokens `starts[i]` to
    `starts[i] + lengths[i] - 1`, in row `rows[i]`.

    Rows ascend. The spans of a row follow each other from its left edge.
    """

    starts: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray


def fill_rows(
    ids: np.ndarray, eos: int, spans: Spans, shape: tuple[int, int], segmented: bool = False
) -> Batch:
    """Copies spans into a batch of `shape`, which is (rows, time). Row ids are 0, 1, 2, …

    ids a b c d e, spans with starts 3 0 and lengths 2 1, both in row 0, shape (1, 4):
        inputs [c d <eos> .], targets [d e a .], weights [1 1 1 0]
        and, if segmented, segment_ids [1 1 2 0].

    Args:
        ids: int32 `[n]`, or anything with a length, slices and indexing by integer arrays.
        segmented: whether to number the spans of each row, which then do not see each other.
    """
    starts, lengths, row = spans
    rows, time = shape
    # Each span with the token before it, which is the first input.
    places = ranges(starts.astype(np.int64) - 1, lengths + 1)
    stream = np.where(places < 0, np.int32(eos), ids[np.maximum(places, 0)])
    ends = np.cumsum(lengths + 1, dtype=np.int64)
    begins = np.cumsum(lengths, dtype=np.int64) - lengths
    leftmost = np.searchsorted(row, row)  # the first span of the same row
    positions = ranges(row * time + begins - begins[leftmost], lengths)

    def fill(values, padding, dtype):
        flat = np.full(rows * time, padding, dtype)
        flat[positions] = values
        return flat.reshape(shape)

    numbers = np.repeat(np.arange(len(row)) - leftmost + 1, lengths)
    return Batch(
        inputs=fill(np.delete(stream, ends - 1), eos, np.int32),
        targets=fill(np.delete(stream, ends - lengths - 1), eos, np.int32),
        weights=fill(1, 0, np.float32),
        row_ids=np.arange(rows, dtype=np.int32),
        segment_ids=fill(numbers, 0, np.int32) if segmented else None,
    )


def runs(values: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Yields each distinct value of an ascending array and its slice: 3 3 4 gives 3, slice(0,
    2) and 4, slice(2, 3).
    """
    bounds = np.flatnonzero(np.diff(values, prepend=-1, append=-1))
    for begin, end in itertools.pairwise(bounds.tolist()):
        yield int(values[begin]), slice(begin, end)


@functools.lru_cache(maxsize=4)
def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the order of `count` items in an epoch: int64 `[count]`, the same on every machine
    and for every version of NumPy, unlike that of Generator.permutation.
    """
    order = np.argsort(philox(seed, epoch, 0).random_raw(count), kind="stable")
    order.flags.writeable = False  # callers share it through the cache
    return order


def shuffled(counts: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Shuffles items within groups of `counts` members: int32 `[sum of counts]`, int64 from 2^31
    on.

    counts 3 2: the first three are 0 1 2 in some order, the last two 3 4.
    """
    total, source = int(np.sum(counts)), philox(seed, epoch, 1)
    order = np.empty(total, np.int32 if total < 2**31 else np.int64)
    begin = 0
    for count in map(int, counts):
        order[begin : begin + count] = begin + np.argsort(source.random_raw(count), kind="stable")
        begin += count
    order.flags.writeable = False
    return order


def philox(seed: int, epoch: int, stream: int) -> np.random.Philox:
    """Makes a source of random bits for an epoch; each purpose has a stream."""
    return np.random.Philox(
        key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, 0, stream], np.uint64)
    )
