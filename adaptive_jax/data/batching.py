"""Batches as pure functions of (ids, seed, step): a run resumes anywhere, without the state of an iterator.

Throughout, ids is int32 [n], one split; targets are its tokens, and the input for token k is token k − 1, with
`<eos>` before the first. Weights are 1 where a target counts and 0 where it does not; never mask by token id.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from adaptive_jax.errors import InputError


class Batch(NamedTuple):
    """inputs int32 [rows, time], targets int32 [rows, time], weights float32 [rows, time]."""

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray


class WindowBatch(NamedTuple):
    """A Batch for evaluation, and first int32 [rows]: the column of the first target that is scored."""

    inputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    first: np.ndarray


def blocks(ids: np.ndarray, eos: int, block: int, numbers: np.ndarray) -> Batch:
    """Blocks of `block` tokens, by number; each token is a target in exactly one block.

    ids a b c d e, block 2, numbers [2, 0]:  inputs [d .], [<eos> a];  targets [e .], [a b];  weights [1 0], [1 1].

    numbers: int [rows], each from 0 to ceil(n / block) − 1.
    """
    _check(ids, block=block)
    starts = np.asarray(numbers, np.int64) * block
    return _cut(ids, eos, starts, block)


@functools.lru_cache(maxsize=4)
def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of `count` blocks in an epoch: int64 [count], the same on every machine and in every NumPy.

    Sorted random bits rather than Generator.permutation, whose order may change with the version of NumPy.
    """
    if seed < 0:
        raise InputError(f"seed={seed} must be 0 or more")
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(count)
    order = np.argsort(bits, kind="stable")
    order.flags.writeable = False  # callers share it through the cache
    return order


def training_batch(ids: np.ndarray, eos: int, block: int, rows: int, seed: int, step: int) -> Batch:
    """Batch number `step` of an endless walk through the blocks, in a new order each epoch.

    With 3 blocks and 2 rows, steps 0, 1, 2 hold blocks (2 0), (1 | 0), (2 1): step 1 ends one epoch and begins the
    next. No block is lost or repeated within an epoch.
    """
    _check(ids, block=block, rows=rows)
    count = -(-len(ids) // block)
    epochs, places = np.divmod(np.arange(step * rows, (step + 1) * rows), count)
    numbers = [permutation(count, seed, epoch)[k] for epoch, k in zip(epochs.tolist(), places.tolist(), strict=True)]
    return blocks(ids, eos, block, np.array(numbers))


def windows(ids: np.ndarray, eos: int, window: int, context: int, rows: int) -> Iterator[WindowBatch]:
    """Rows of `window` tokens, the first `context` of which are only read: every token is scored exactly once.

    ids a b c d e, window 3, context 1 (so 2 scored a row):
        inputs [<eos> a b], [a b c] …;  targets [a b c], [b c d] …;  weights [1 1 0], [0 1 1] …;  first 0, 1 …

    `first` leaves room for window − context columns after it, so the output layer need not run on the others.
    Rows that fill up the last batch have weight 0 throughout.
    """
    _check(ids, rows=rows)
    if context < 0 or window <= context:
        raise InputError(f"window={window} must be greater than context={context}, and context 0 or more")
    stride = window - context
    columns = np.arange(window)
    count = -(-len(ids) // stride)
    for begin in range(0, count, rows):
        numbers = np.arange(begin, begin + rows)
        real = numbers < count
        scored = np.where(real, numbers * stride, 0)
        starts = np.maximum(scored - context, 0)
        first = (scored - starts)[:, None]
        batch = _cut(ids, eos, starts, window)
        scoring = (columns >= first) & (columns < first + stride) & real[:, None]
        yield WindowBatch(batch.inputs, batch.targets, batch.weights * scoring, first[:, 0].astype(np.int32))


def _cut(ids: np.ndarray, eos: int, starts: np.ndarray, length: int) -> Batch:
    """Targets ids[start : start + length] for each start, padded on the right with weight 0."""
    at = starts[:, None] + np.arange(-1, length)
    stream = np.where(at < 0, np.int32(eos), ids[np.clip(at, 0, len(ids) - 1)])
    return Batch(stream[:, :-1], stream[:, 1:], (at[:, 1:] < len(ids)).astype(np.float32))


def _check(ids: np.ndarray, **sizes: int) -> None:
    if not len(ids):
        raise InputError("the split has 0 tokens; give one with at least 1")
    for name, size in sizes.items():
        if size < 1:
            raise InputError(f"{name}={size} must be 1 or more")
