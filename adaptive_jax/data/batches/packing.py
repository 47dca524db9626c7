"""Where examples stand in rows: one a row, many packed into one, or those of similar length side by side.

A layout (`Blocks`, `Packed`, `Similar`) numbers its rows, and says which of them an update reads and what stands in them:

    layout = Packed(*examples(ids, eos, "eos", 512), 512, rows=128)
    epochs, numbers, time = layout.update(seed, step)
    starts, lengths, rows = layout.pieces(numbers, seed, epoch)     # where all of them are of one epoch
"""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches.examples import ranges
from adaptive_jax.errors import InputError

PARTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 21, 32, 64)  # of a block that rows of similar length are long


class Pieces(NamedTuple):
    """What stands in some rows: piece i is the tokens `starts[i]` to `starts[i] + lengths[i] - 1`, in row `rows[i]`.

    Rows ascend, and the pieces of a row stand in it side by side, from its left edge.
    """

    starts: np.ndarray
    lengths: np.ndarray
    rows: np.ndarray


class Blocks:
    """One example a row.

    Attributes:
        count: rows of an epoch.
        times: how long rows are, one length or several.
        size: places for tokens in all rows of an epoch.
        segmented: whether a row holds examples that are not to see each other.
    """

    segmented = False

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, block: int, rows: int):
        """Starts and lengths of examples, [examples], each of at most `block` tokens; `rows` make an update."""
        self.starts, self.lengths, self.rows, self.times = starts, lengths, rows, [block]
        self.count, self.size = len(starts), len(starts) * block

    def update(self, seed: int, step: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Epochs and numbers, int64 [rows], of the rows that update `step` reads, and how long they are.

        An endless walk through the rows, in a new order each epoch. With 3 rows, 2 an update, updates 0, 1, 2 read (2 0),
        (1 | 0), (2 1): the second ends one epoch and begins the next.
        """
        epochs, places = np.divmod(np.arange(step * self.rows, (step + 1) * self.rows), self.count)
        numbers = [permutation(self.count, seed, epoch)[places[run]] for epoch, run in of_epochs(epochs)]
        return epochs, np.concatenate(numbers), self.times[0]

    def pieces(self, numbers: np.ndarray, seed: int | None, epoch: int) -> Pieces:
        """What stands in the rows `numbers` in an epoch; seed None: as if nothing had been shuffled."""
        return Pieces(self.starts[numbers], self.lengths[numbers], np.arange(len(numbers)))

    def in_order(self) -> list[tuple[range, int, int]]:
        """All rows once, in batches: the numbers of those that hold something, how many there are to be, how long they are."""
        begins = range(0, self.count, self.rows)
        return [(range(begin, min(begin + self.rows, self.count)), self.rows, self.times[0]) for begin in begins]


class Packed(Blocks):
    """As many examples in a row as fit. Which of those of a length stand in which row is drawn anew each epoch.

    Lengths 3 3 2 1 1 in rows of 5 make two: 3 2 and 3 1 1.
    """

    segmented = True

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, block: int, rows: int):
        """As `Blocks`."""
        self.rows, self.times = rows, [block]
        counts = np.bincount(lengths, minlength=block + 1)
        # Examples in order of length are the places that rows take from. Of 16 bits, a stable sort is several times faster.
        self.starts = starts[np.argsort(lengths.astype(np.min_scalar_type(block)), kind="stable")]
        self.order = functools.lru_cache(maxsize=2)(functools.partial(shuffled, counts))
        kinds = pack(counts, block)
        times = np.array([count for _, count in kinds])
        self.last = np.cumsum(times)  # the row after the last of each kind
        self.count, self.size = int(self.last[-1]), int(self.last[-1]) * block
        # The pieces of a row of each kind: each takes one place, in the kind's next row the one after that.
        self.sizes = np.array([len(lengths) for lengths, _ in kinds])
        self.lengths = np.concatenate([lengths for lengths, _ in kinds]).astype(np.int32)
        taken, by_length = np.repeat(times, self.sizes), np.argsort(self.lengths, kind="stable")
        self.places = np.empty(len(taken), np.int64)
        self.places[by_length] = np.cumsum(taken[by_length]) - taken[by_length]

    def pieces(self, numbers: np.ndarray, seed: int | None, epoch: int) -> Pieces:
        """As `Blocks.pieces`."""
        kind = np.searchsorted(self.last, numbers, side="right")
        sizes = self.sizes[kind]
        piece, row = ranges(np.cumsum(self.sizes)[kind] - sizes, sizes), np.repeat(np.arange(len(numbers)), sizes)
        places = self.places[piece] + (numbers - np.append(0, self.last)[kind])[row]
        places = places if seed is None else self.order(seed, epoch)[places]
        return Pieces(self.starts[places], self.lengths[piece], row)


class Similar(Blocks):
    """One example a row, and updates of rows that are equally long: for bodies that cannot keep segments apart.

    Rows are 1, 1/2, 1/3 … of a block long, in multiples of 8, and an update has 1, 2, 3 … times as many of them: so about
    as many tokens, devices that can share blocks can share these, and few programs are compiled. The last update of each
    length is filled up with empty rows.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, block: int, rows: int):
        """As `Blocks`; an update has `rows` of the longest rows."""
        self.times = sorted({block // part // 8 * 8 for part in PARTS if block // part >= 8} | {block})
        self.rows = rows * (block // np.array(self.times))
        kind = np.searchsorted(self.times, lengths).astype(np.uint8)
        by_kind = np.argsort(kind, kind="stable")
        self.starts, self.lengths = starts[by_kind], lengths[by_kind]
        examples = np.bincount(kind, minlength=len(self.times))
        self.order = functools.lru_cache(maxsize=2)(functools.partial(shuffled, examples))
        updates = -(-examples // self.rows)
        # Of each length, and after those that are shorter: examples, rows.
        self.examples, self.last = np.cumsum(examples), np.cumsum(updates * self.rows)
        self.count, self.size = int(self.last[-1]), int((updates * self.rows) @ self.times)
        each = [(int(rows), time) for rows, time, many in zip(self.rows, self.times, updates, strict=True) for _ in range(many)]
        ends = itertools.accumulate(rows for rows, _ in each)
        self.updates = [(range(end - rows, end), rows, time) for end, (rows, time) in zip(ends, each, strict=True)]

    def in_order(self) -> list[tuple[range, int, int]]:
        """As `Blocks.in_order`; empty rows are among the numbers."""
        return self.updates

    def update(self, seed: int, step: int) -> tuple[np.ndarray, np.ndarray, int]:
        """As `Blocks.update`; all rows are of one epoch."""
        epoch, place = divmod(step, len(self.updates))
        numbers, rows, time = self.updates[permutation(len(self.updates), seed, epoch)[place]]
        return np.full(rows, epoch), np.asarray(numbers), time

    def pieces(self, numbers: np.ndarray, seed: int | None, epoch: int) -> Pieces:
        """As `Blocks.pieces`; only the last rows of a length are empty."""
        kind = np.searchsorted(self.last, numbers, side="right")
        places = numbers - np.append(0, self.last)[kind] + np.append(0, self.examples)[kind]
        filled = np.flatnonzero(places < self.examples[kind])
        places = places[filled] if seed is None else self.order(seed, epoch)[places[filled]]
        return Pieces(self.starts[places], self.lengths[places], filled)


def pack(counts: np.ndarray, block: int) -> list[tuple[tuple[int, ...], int]]:
    """Packs examples into rows of `block` tokens: longest first, each into the fullest row that it fits (best fit decreasing).

    counts: int [block + 1], examples of each length. The work depends on the block and not on the number of examples, as
    rows that hold the same lengths are handled together.

    Returns:
        For every kind of row, the lengths in it, longest first, and how many such rows there are.
    """
    kinds = [[] for _ in range(block + 1)]  # by the room left
    for length in range(block, 0, -1):
        examples, room = int(counts[length]), length
        while examples:
            while room < block and not kinds[room]:
                room += 1
            lengths, rows = kinds[room].pop() if kinds[room] else ((), examples)
            # Where one has gone the next fits best, for as long as it fits.
            each = min(room // length, examples)
            used = min(rows, examples // each)
            examples -= each * used
            if lengths and rows > used:
                kinds[room].append((lengths, rows - used))
            kinds[room - each * length].append((lengths + (length,) * each, used))
    return [kind for of_room in kinds for kind in of_room]


def of_epochs(epochs: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Each epoch of `epochs`, ascending, and where it stands: 3 3 4 give 3, slice(0, 2) and 4, slice(2, 3)."""
    bounds = np.flatnonzero(np.diff(epochs, prepend=-1, append=-1))
    for begin, end in itertools.pairwise(bounds.tolist()):
        yield int(epochs[begin]), slice(begin, end)


@functools.lru_cache(maxsize=4)
def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """An order of `count` things in an epoch: int64 [count], the same on every machine and in every NumPy.

    Sorted random bits rather than Generator.permutation, whose order may change with the version of NumPy.
    """
    order = np.argsort(_bits(seed, epoch, 0).random_raw(count), kind="stable")
    order.flags.writeable = False  # callers share it through the cache
    return order


def shuffled(counts: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """An order of things of several kinds, of each as many as `counts` says, in which kinds keep their places.

    counts 3 2: the first three are 0 1 2 in some order, the last two 3 4. int32 [sum of counts], int64 from 2^31 on.
    """
    total, bits = int(np.sum(counts)), _bits(seed, epoch, 1)
    order = np.empty(total, np.int32 if total < 2**31 else np.int64)
    begin = 0
    for count in map(int, counts):
        order[begin : begin + count] = begin + np.argsort(bits.random_raw(count), kind="stable")
        begin += count
    order.flags.writeable = False
    return order


def _bits(seed, epoch, stream):
    if seed < 0:
        raise InputError(f"seed={seed} must be 0 or more")
    return np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, 0, stream], np.uint64))
