"""Copies spans of a split into the rows of a batch."""

from typing import NamedTuple

import numpy as np

from adaptive_jax.batch import Batch
from adaptive_jax.data.batches.examples import ranges


class Spans(NamedTuple):
    """Spans of a split, and the row of each: span i is the tokens `starts[i]` to `starts[i] + lengths[i] - 1`, in row `rows[i]`.

    Rows ascend. The spans of one row follow each other from its left edge.
    """

    starts: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray


def fill_rows(ids: np.ndarray, eos: int, spans: Spans, shape: tuple[int, int], segmented: bool = False) -> Batch:
    """Copies spans into a batch of `shape`, which is (rows, time). Row ids are 0, 1, 2, …

    ids a b c d e, spans with starts 3 0 and lengths 2 1, both in row 0, shape (1, 4):
        inputs [c d <eos> .], targets [d e a .], weights [1 1 1 0] and, if segmented, segment_ids [1 1 2 0].

    Args:
        ids: int32 `[n]`, or anything with a length, slices and indexing by integer arrays.
        segmented: whether to number the spans of each row, so that they do not see each other.
    """
    starts, lengths, row = spans
    rows, time = shape
    # Each span with the token before it, which is the first input.
    at = ranges(starts.astype(np.int64) - 1, lengths + 1)
    stream = np.where(at < 0, np.int32(eos), ids[np.maximum(at, 0)])
    ends = np.cumsum(lengths + 1, dtype=np.int64)
    begins = np.cumsum(lengths, dtype=np.int64) - lengths
    leftmost = np.searchsorted(row, row)  # the first span of the same row
    positions = ranges(row * time + begins - begins[leftmost], lengths)

    def fill(values, padding, dtype):
        flat = np.full(rows * time, padding, dtype)
        flat[positions] = values
        return flat.reshape(shape)

    inputs, targets = np.delete(stream, ends - 1), np.delete(stream, ends - lengths - 1)
    segment_ids = fill(np.repeat(np.arange(len(row)) - leftmost + 1, lengths), 0, np.int32) if segmented else None
    return Batch(
        inputs=fill(inputs, eos, np.int32),
        targets=fill(targets, eos, np.int32),
        weights=fill(1, 0, np.float32),
        row_ids=np.arange(rows, dtype=np.int32),
        segment_ids=segment_ids,
    )
