"""Layouts: how examples become rows. One example a row, many packed into one, or examples of
similar length together.

A layout numbers the rows of an epoch. It chooses the rows of each update, and the spans of the
split that they hold:

    layout = Packed(*examples(ids, eos, "eos", 512), 512, rows=128)
    epochs, numbers, time = layout.update(seed, step)
    starts, lengths, rows = layout.spans(numbers, seed, epoch)     # for rows of one epoch
"""

import functools
from collections.abc import Mapping

import numpy as np

from adaptive_jax.data.batches.examples import BREAK_MODES, ranges
from adaptive_jax.data.batches.spans import Spans, permutation, runs, shuffled
from adaptive_jax.data.batches.streams import Streams
from adaptive_jax.errors import InputError, check_known

# Of the sequence length, for layout "similar"
DIVISORS = (*range(1, 9), 10, 12, 16, 21, 32, 64)


class Single:
    """One example a row.

    Attributes:
        count: rows of an epoch.
        row_lengths: the lengths of rows, ascending; one or several.
        num_slots: number of tokens for which the rows of an epoch have room.
        segmented: whether a row may hold several examples, which must not see each other.
        continued: whether each row of an update continues that of the update before.
    """

    segmented, continued = False, False

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, sequence_length: int, rows: int):
        """Arranges examples in rows.

        starts, lengths: of examples, `[examples]`; lengths are at most `sequence_length`.
        rows: rows of an update.
        """
        self.starts, self.lengths = starts, lengths
        self.rows, self.row_lengths = rows, [sequence_length]
        self.count, self.num_slots = len(starts), len(starts) * sequence_length

    def describe(self, examples: int, tokens: int) -> str:
        """Describes an epoch with these numbers of examples and tokens."""
        shortest, longest = self.row_lengths[0], self.row_lengths[-1]
        length = f"{longest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
        return (
            f"{examples:,} examples in {self.count:,} rows of {length} tokens, padding"
            f" {1 - tokens / self.num_slots:.2%}"
        )

    def update(self, seed: int, step: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Returns the epochs and the numbers, int64 `[rows]`, of the rows of update `step`, and
        their length.

        Updates go through the rows again and again, in a new order each epoch. With 3 rows in total
        and 2 an update, updates 0, 1, 2 may have rows (2 0), (1 | 0), (2 1): the second update ends
        one epoch and begins the next.
        """
        epochs, index = np.divmod(np.arange(step * self.rows, (step + 1) * self.rows), self.count)
        numbers = [permutation(self.count, seed, epoch)[index[run]] for epoch, run in runs(epochs)]
        return epochs, np.concatenate(numbers), self.row_lengths[0]

    def spans(self, numbers: np.ndarray, seed: int | None, epoch: int) -> Spans:
        """Returns the spans in the rows `numbers` of an epoch; seed None: in order."""
        return Spans(self.starts[numbers], self.lengths[numbers], np.arange(len(numbers)))

    def in_order(self) -> list[tuple[range, int, int]]:
        """Returns batches of all rows in order: the numbers of rows that hold examples, the number
        of rows of the batch, and their length.
        """
        rows, time = self.rows, self.row_lengths[0]
        return [(range(self.count)[i : i + rows], rows, time) for i in range(0, self.count, rows)]


class Packed(Single):
    """As many examples in a row as fit. Each epoch shuffles the examples of each length.

    Lengths 3 3 2 1 1 in rows of 5 make two rows: 3 2 and 3 1 1.
    """

    segmented = True

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, sequence_length: int, rows: int):
        """As `Single`."""
        self.rows, self.row_lengths = rows, [sequence_length]
        counts = np.bincount(lengths, minlength=sequence_length + 1)
        # Rows take examples from this list, sorted by length. A stable sort of 16 bits is several
        # times faster.
        small = lengths.astype(np.min_scalar_type(sequence_length))
        self.starts = starts[np.argsort(small, kind="stable")]
        self.order = functools.lru_cache(maxsize=2)(functools.partial(shuffled, counts))
        patterns = pack(counts, sequence_length)
        repeats = np.array([count for _, count in patterns])
        self.last = np.cumsum(repeats)  # the end of the rows of each pattern
        self.count, self.num_slots = int(self.last[-1]), int(self.last[-1]) * sequence_length
        # The first row of a pattern takes the example at `index` for each of its lengths, the next
        # row the one after that.
        self.sizes = np.array([len(lengths) for lengths, _ in patterns])
        self.lengths = np.concatenate([lengths for lengths, _ in patterns]).astype(np.int32)
        uses, by_length = np.repeat(repeats, self.sizes), np.argsort(self.lengths, kind="stable")
        self.index = np.empty(len(uses), np.int64)
        self.index[by_length] = np.cumsum(uses[by_length]) - uses[by_length]

    def spans(self, numbers: np.ndarray, seed: int | None, epoch: int) -> Spans:
        """As `Single.spans`."""
        pattern = np.searchsorted(self.last, numbers, side="right")
        sizes = self.sizes[pattern]
        slot = ranges(np.cumsum(self.sizes)[pattern] - sizes, sizes)
        row = np.repeat(np.arange(len(numbers)), sizes)
        index = self.index[slot] + (numbers - np.append(0, self.last)[pattern])[row]
        index = index if seed is None else self.order(seed, epoch)[index]
        return Spans(self.starts[index], self.lengths[slot], row)


class Similar(Single):
    """One example a row, and updates of equally long rows: for bodies that cannot keep segments
    apart.

    Rows are 1, 1/2, 1/3 … of the sequence length long, in multiples of 8, and an update has 1, 2, 3
    … times as many of them. So all updates have about as many tokens, the number of devices that
    divides the longest rows divides all, and few programs are compiled. Empty rows fill up the last
    update of each length.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, sequence_length: int, rows: int):
        """As `Single`; an update has `rows` of the longest rows."""
        shorter = {sequence_length // n // 8 * 8 for n in DIVISORS if sequence_length // n >= 8}
        self.row_lengths = sorted(shorter | {sequence_length})
        self.rows = rows * (sequence_length // np.array(self.row_lengths))
        group = np.searchsorted(self.row_lengths, lengths).astype(np.uint8)
        by_group = np.argsort(group, kind="stable")
        self.starts, self.lengths = starts[by_group], lengths[by_group]
        examples = np.bincount(group, minlength=len(self.row_lengths))
        self.order = functools.lru_cache(maxsize=2)(functools.partial(shuffled, examples))
        updates = -(-examples // self.rows)
        # Up to the end of each length: examples, rows.
        self.examples, self.last = np.cumsum(examples), np.cumsum(updates * self.rows)
        self.count = int(self.last[-1])
        self.num_slots = int((updates * self.rows) @ self.row_lengths)
        self.updates, end = [], 0
        for rows, time, many in zip(self.rows.tolist(), self.row_lengths, updates, strict=True):
            for _ in range(many):
                self.updates.append((range(end, end + rows), rows, time))
                end += rows

    def in_order(self) -> list[tuple[range, int, int]]:
        """As `Single.in_order`, but the numbers include empty rows."""
        return self.updates

    def update(self, seed: int, step: int) -> tuple[np.ndarray, np.ndarray, int]:
        """As `Single.update`, but all rows belong to one epoch."""
        epoch, index = divmod(step, len(self.updates))
        numbers, rows, time = self.updates[permutation(len(self.updates), seed, epoch)[index]]
        return np.full(rows, epoch), np.asarray(numbers), time

    def spans(self, numbers: np.ndarray, seed: int | None, epoch: int) -> Spans:
        """As `Single.spans`; the last rows of a length may be empty."""
        group = np.searchsorted(self.last, numbers, side="right")
        index = numbers - np.append(0, self.last)[group] + np.append(0, self.examples)[group]
        filled = np.flatnonzero(index < self.examples[group])
        index = index[filled] if seed is None else self.order(seed, epoch)[index[filled]]
        return Spans(self.starts[index], self.lengths[index], filled)


# Layout classes by name: for continuous text, and for separate examples (None if unsupported).
LAYOUTS = {"packed": (Single, Packed), "similar": (Single, Similar), "streams": (Streams, None)}


def layout_class(layout: str, break_mode: str) -> type:
    """The class of a layout for a break mode."""
    of_text, of_examples = LAYOUTS[layout]
    return of_text if break_mode == "none" else of_examples


def scored_break_mode(config: Mapping) -> str:
    """The default break mode for evaluating a run."""
    return config["evaluate_break_mode"] or config["batches"]["break_mode"]


def check_layout(break_mode: str, layout: str, key: str = "batches.break_mode") -> None:
    """Raises InputError for an unknown name, or a layout that cannot hold such examples."""
    check_known(f"{key}={break_mode!r}", break_mode, BREAK_MODES)
    if layout == "streams" and break_mode != "none":
        raise InputError(
            f"batches.layout={layout!r} continues the text from row to row, and"
            f" {key}={break_mode!r} breaks it: use break_mode none, or layout packed"
        )


def pack(counts: np.ndarray, sequence_length: int) -> list[tuple[tuple[int, ...], int]]:
    """Packs examples into rows by best fit decreasing: the longest first, each into the fullest row
    that has room for it.

    Rows that hold the same lengths are handled together, so that the work does not grow with the
    number of examples.

    counts: int `[sequence_length + 1]`, the number of examples of each length.

    Returns:
        The patterns of rows: the lengths in such a row, longest first, and the number of such rows.
    """
    patterns = [[] for _ in range(sequence_length + 1)]  # by the room that is left
    for length in range(sequence_length, 0, -1):
        examples, room = int(counts[length]), length
        while examples:
            while room < sequence_length and not patterns[room]:
                room += 1
            lengths, rows = patterns[room].pop() if patterns[room] else ((), examples)
            # The next example of this length fits best where this one went, as long as there is
            # room.
            per_row = min(room // length, examples)
            used = min(rows, examples // per_row)
            examples -= per_row * used
            if lengths and rows > used:
                patterns[room].append((lengths, rows - used))
            patterns[room - per_row * length].append((lengths + (length,) * per_row, used))
    return [pattern for of_room in patterns for pattern in of_room]
