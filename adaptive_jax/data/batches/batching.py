"""Batches as pure functions of (ids, seed, step): a run resumes anywhere, without the state of an iterator.

Throughout, ids is int32 [n], one split; targets are its tokens, and the input for token k is token k − 1, with
`<eos>` before the first. Weights are 1 where a target counts and 0 where it does not; never mask by token id.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches.examples import examples, ranges
from adaptive_jax.data.batches.packing import Blocks, Packed, Pieces, Similar, of_epochs
from adaptive_jax.errors import InputError, check_at_least, check_known

ROWS = {"packed": Packed, "similar": Similar}


class Batch(NamedTuple):
    """inputs int32 [..., time], targets int32 [..., time], weights float32 [..., time].

    segments int32 [..., time]: which example of its row a token is of, 1, 2 …, 0 where there is none; None where a row
    holds one example, and causality alone keeps it from what comes after.
    """

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    segments: np.ndarray | None = None


class WindowBatch(NamedTuple):
    """A Batch for evaluation, and first int32 [rows]: the column of the first target that is scored."""

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    first: np.ndarray
    segments: np.ndarray | None = None


class Rows:
    """The rows of a split that is trained on, and the updates that read them.

    Args:
        ids, eos: the split, and the id of `<eos>`.
        block: the length of a row, and the most that an example has.
        break_mode: what is an example; see `examples`.
        kind: "packed" or "similar", see `packing`; break_mode "none" has one block a row either way.
        rows: rows of an update; `Similar` has more where they are shorter.
        parts: batches that make up an update.

    Attributes:
        per_batch: rows of each of these, the longest if they differ.

    Raises:
        InputError: an empty split, a size below 1, a name that does not exist.
    """

    def __init__(self, ids: np.ndarray, eos: int, *, block: int, break_mode: str, kind: str, rows: int, parts: int = 1):
        check_known(f"data.rows={kind!r}", kind, ROWS)
        check_at_least(1, block=block, rows=rows, parts=parts)
        starts, lengths = examples(ids, eos, break_mode, block)
        self.ids, self.eos, self.parts, self.per_batch = ids, eos, parts, rows // parts
        self.layout = (Blocks if break_mode == "none" else ROWS[kind])(starts, lengths, block, rows)
        self.examples, self.tokens = len(starts), int(lengths.sum(dtype=np.int64))

    def batch(self, seed: int, step: int, share: tuple[int, int] = (0, 1)) -> Batch:
        """Update `step` of an endless walk through the rows: arrays [parts, rows, time]. No example is lost or repeated.

        share: (1, 4) reads only what the second of four hosts needs, the second quarter of the rows of each part.
        """
        epochs, numbers, time = self.layout.update(seed, step)
        index, hosts = share
        epochs, numbers = (a.reshape(self.parts, hosts, -1)[:, index].ravel() for a in (epochs, numbers))
        pieces = []
        for epoch, run in of_epochs(epochs):
            starts, lengths, rows = self.layout.pieces(numbers[run], seed, epoch)
            pieces.append((starts, lengths, rows + run.start))
        pieces = Pieces(*map(np.concatenate, zip(*pieces, strict=True)))
        batch = lay(self.ids, self.eos, pieces, len(numbers), time, self.layout.segmented)
        shape = self.parts, -1, time
        return Batch(*(None if a is None else a.reshape(shape) for a in batch))

    def __str__(self):
        times, padding = self.layout.times, 1 - self.tokens / self.layout.size
        times = f"{times[0]:,}" if len(times) == 1 else f"{times[0]:,} to {times[-1]:,}"
        return f"{self.examples:,} examples in {self.layout.count:,} rows of {times} tokens, padding {padding:.2%}"


def lay(ids: np.ndarray, eos: int, pieces: Pieces, rows: int, time: int, segmented: bool = False) -> Batch:
    """Reads `pieces` of a split into a batch [rows, time].

    ids a b c d e, pieces of starts 3 0, lengths 2 1, both in row 0, time 4:
        inputs [c d <eos> .], targets [d e a .], weights [1 1 1 0], and if they are segmented, segments [1 1 2 0].
    """
    starts, lengths, row = pieces
    # Each with the token before it.
    at = ranges(starts.astype(np.int64) - 1, lengths + 1)
    stream = np.where(at < 0, np.int32(eos), ids[np.maximum(at, 0)])
    ends = np.cumsum(lengths + 1, dtype=np.int64)
    begins = np.cumsum(lengths, dtype=np.int64) - lengths
    leftmost = np.searchsorted(row, row)  # the first piece of the same row
    places = ranges(row * time + begins - begins[leftmost], lengths)

    def laid(values, rest, dtype):
        flat = np.full(rows * time, rest, dtype)
        flat[places] = values
        return flat.reshape(rows, time)

    inputs, targets = np.delete(stream, ends - 1), np.delete(stream, ends - lengths - 1)
    segments = laid(np.repeat(np.arange(len(row)) - leftmost + 1, lengths), 0, np.int32) if segmented else None
    return Batch(laid(inputs, eos, np.int32), laid(targets, eos, np.int32), laid(1, 0, np.float32), segments)


def windows(
    ids: np.ndarray, eos: int, *, break_mode: str, kind: str, window: int, context: int, rows: int
) -> tuple[int, Iterator[tuple[WindowBatch, np.ndarray]]]:
    """Rows of `window` tokens, the first `context` of which are only read: every token of an example is scored exactly once.

    ids a b c d e, window 3, context 1 (so 2 scored a row), break_mode "none":
        inputs [<eos> a .], [a b c], [c d .];  targets [a b .], [b c d], [d e .];  weights [1 1 0], [0 1 1], [0 1 0]; first 0 1 1

    Examples of at most window − context tokens stand one a row, after as many tokens of the stream as `context` says; those
    that are to see nothing else (break_mode "complete_doc" and "eos", context 0) as `kind` says, "packed" or "similar".
    `first` leaves room for window − context columns after it, so the output layer need not run on the others. Rows that
    fill up a batch have weight 0 throughout.

    Returns:
        The number of batches; and the batches, with the index in ids of what each scores: int64 [tokens], row by row.

    Raises:
        InputError: window <= context, a context where examples are to see nothing else, and as `Rows`.
    """
    check_known(f"data.rows={kind!r}", kind, ROWS)
    check_at_least(1, rows=rows)
    if not 0 <= context < window:
        raise InputError(f"window={window} must be greater than context={context}, and context 0 or more")
    alone = break_mode in ("complete_doc", "eos")
    if context and alone:
        raise InputError(
            f"context={context} shows an example what stands before it, and break_mode={break_mode!r} nothing else: "
            "give context 0, or break_mode none or complete"
        )
    starts, lengths = examples(ids, eos, break_mode, window - context)
    layout = (ROWS[kind] if alone else Blocks)(starts, lengths, window - context, rows)

    def read(numbers, rows, time):
        pieces = layout.pieces(np.asarray(numbers), None, 0)
        before = np.minimum(pieces.starts, context)
        shown = Pieces(pieces.starts - before, pieces.lengths + before, pieces.rows)
        batch = lay(ids, eos, shown, rows, time + context, layout.segmented)
        first = np.zeros(rows, np.int32)
        first[pieces.rows] = before
        scored = np.arange(time + context) >= first[:, None]
        return WindowBatch(batch.inputs, batch.targets, batch.weights * scored, first, batch.segments), ranges(*pieces[:2])

    batches = layout.in_order()
    return len(batches), (read(*batch) for batch in batches)
