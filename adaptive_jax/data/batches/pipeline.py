"""Training batches as pure functions of (ids, seed, step), so that a run resumes without the state
of an iterator.
"""

from typing import Annotated, NamedTuple

import numpy as np

from adaptive_jax.config.options import Option, PositiveInt
from adaptive_jax.data.batches.examples import BREAK_MODES, examples
from adaptive_jax.data.batches.layouts import LAYOUTS, layout_class
from adaptive_jax.data.batches.spans import Spans, fill_rows, runs
from adaptive_jax.numerics.batch import Batch


class Layout(NamedTuple):
    """Layout of a split in rows: the group `batches` of a config.

    sequence_length: tokens of a row, and the most that an example has; for layout "streams" the
        usual length of a window.
    break_mode: unit of text that is an example: a window of the text (none), or whole sentences
        (complete, complete_doc, eos); see docs/corpora.md.
    layout: arrangement of examples in rows: "packed", several in a row, or "similar", rows of
        similar length (with break_mode "none" both put one in each row); or "streams", for bodies
        that carry a state from update to update.
    """

    sequence_length: PositiveInt = 256
    break_mode: Annotated[str, Option(among=BREAK_MODES)] = "none"
    layout: Annotated[str, Option(among=LAYOUTS)] = "packed"


class TrainingBatches:
    """The training batches of a split.

    Args:
        ids: int32 `[n]`, the split. Targets are its tokens. The input for token k is token k − 1,
            or `<eos>` for the first.
        eos: the id of `<eos>`.
        rows: rows of an update. Layout "similar" has more if rows are shorter.
        microbatches: number of microbatches of an update.
        devices: number of devices that share a microbatch. Empty rows, of weight 0, fill up an
            update whose rows do not divide among microbatches and devices.

    Attributes:
        per_microbatch: rows of a microbatch; if lengths differ, of one with the longest rows.
        examples, tokens: their numbers in an epoch.
        layout: the object that numbers the rows, of a class in `layouts`.

    Raises:
        InputError: an empty split.
    """

    def __init__(
        self,
        ids: np.ndarray,
        eos: int,
        layout: Layout,
        rows: int,
        microbatches: int = 1,
        devices: int = 1,
    ):
        length, break_mode, name = layout
        starts, lengths = examples(ids, eos, break_mode, length)
        self.ids, self.eos = ids, eos
        self.microbatches, self.multiple = microbatches, microbatches * devices
        self.per_microbatch = -(-rows // self.multiple) * devices
        self.layout = layout_class(name, break_mode)(starts, lengths, length, rows)
        self.examples, self.tokens = len(starts), int(lengths.sum(dtype=np.int64))

    def batch(self, seed: int, step: int, share: tuple[int, int] = (0, 1)) -> Batch:
        """Returns the batch of update `step`, `[microbatches, rows, ...]`. Every epoch has each
        token of an example once; layout "streams" drops fewer tokens at the end than it has rows.

        share: (i, n) returns only the rows of host i of n: the i-th of n equal parts of each
            microbatch. `row_ids` number the rows of the whole update. With layout "streams" row r
            continues row r of the update before, or is `reset`.
        """
        epochs, numbers, time = self.layout.update(seed, step)
        index, hosts = share
        row_ids = np.arange(-(-len(numbers) // self.multiple) * self.multiple, dtype=np.int32)
        row_ids = row_ids.reshape(self.microbatches, hosts, -1)[:, index]
        filled = np.flatnonzero(row_ids.ravel() < len(numbers))
        epochs, numbers = (a[row_ids.ravel()[filled]] for a in (epochs, numbers))
        spans = [(np.zeros(0, np.int64),) * 3]  # a host may have nothing but empty rows
        for epoch, run in runs(epochs):
            starts, lengths, rows = self.layout.spans(numbers[run], seed, epoch)
            spans.append((starts, lengths, filled[rows + run.start]))
        spans = Spans(*map(np.concatenate, zip(*spans, strict=True)))
        batch = fill_rows(self.ids, self.eos, spans, (row_ids.size, time), self.layout.segmented)
        reset = None
        if self.layout.continued:  # the first window of an epoch resets all rows, also empty ones
            reset = np.ones(row_ids.size, bool)
            reset[filled] = numbers < self.layout.rows
        arrays = batch._replace(row_ids=row_ids.ravel(), reset=reset)
        return Batch(
            *(None if a is None else a.reshape(*row_ids.shape, *a.shape[1:]) for a in arrays)
        )

    def shape(self, seed: int, step: int) -> tuple[int, int]:
        """The number of rows of update `step`, and their length."""
        _, numbers, time = self.layout.update(seed, step)
        return len(numbers), time

    def __str__(self):
        return self.layout.describe(self.examples, self.tokens)
