"""Windows for evaluation: every token of a split is scored exactly once, after as much context
as asked for.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches import streams
from adaptive_jax.data.batches.examples import check_split, examples, ranges
from adaptive_jax.data.batches.layouts import LAYOUTS, Single, check_layout
from adaptive_jax.data.batches.spans import Spans, fill_rows
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.numerics.batch import Batch

ALONE = ("complete_doc", "eos")  # break modes whose examples see nothing before them


class Windows(NamedTuple):
    """Windows in which a split is scored.

    window: tokens of a row, the first `context` of which are only read.
    context: with layout "streams", tokens that every row of the split but the first reads before
        those that it scores.
    break_mode: what an example is; see `examples`.
    layout: "packed" or "similar"; how to place examples that must see nothing else (break_mode
        "complete_doc" or "eos"). Or "streams": the split is read on from batch to batch, by a body
        that carries its state.
    rows: rows of a batch. Layout "similar" has more where rows are shorter. "streams" cuts the
        split into this many, and all but the first begin with no more than `context` tokens of what
        came before them: only one row gives every token its whole past.
    multiple: the rows of a batch are a multiple of this; empty ones are added.
    in_text_order: rows hold one example each and follow the text, whatever `layout` says; for
        parameters that change from batch to batch.
    """

    window: int
    context: int
    break_mode: str
    layout: str
    rows: int
    multiple: int = 1
    in_text_order: bool = False

    @property
    def context_columns(self) -> int:
        """Columns of every row, wherever they are, whose targets do not count."""
        return 0 if self.layout == "streams" else self.context


class WindowBatch(NamedTuple):
    """A batch `[rows, time]` to score, and `first` int32 `[rows]`: the column of the first target
    that counts.

    The columns that count are within the window − `Windows.context_columns` columns from `first`
    on, so the output layer can skip others.
    """

    batch: Batch
    first: np.ndarray


def check_windows(settings: Windows) -> None:
    """Checks what needs no split.

    Raises:
        InputError: window <= context, a context for examples that must see nothing else, an unknown
            name.
    """
    window, context, break_mode, layout, rows, multiple, _ = settings
    check_layout(break_mode, layout)
    check_at_least(1, rows=rows, multiple=multiple)
    if context < 0 or window <= settings.context_columns or window < 1:
        raise InputError(
            f"window={window} must be greater than context={context}, and context 0 or more"
        )
    if context and break_mode in ALONE:
        raise InputError(
            f"context={context} shows an example the tokens before it, but"
            f" batches.break_mode={break_mode!r} forbids that: use context 0, or break_mode none"
            " or complete"
        )
    if context and rows == 1 and LAYOUTS[layout][1] is None:
        raise InputError(
            f"context={context} is not for one row of batches.layout={layout!r}, where a token sees"
            " all before it: use context 0, or --rows=2 or more"
        )


def ends_example(ids: np.ndarray, before: np.ndarray, eos: int, break_mode: str) -> np.ndarray:
    """Mask of the tokens that end an example of training; each is given with the one before it."""
    ends = (ids == eos) & (break_mode in ALONE)
    return ends & ((break_mode != "complete_doc") | (before == eos))


def last_example(ids: np.ndarray, eos: int, break_mode: str) -> np.ndarray:
    """The end of a text that what follows it may see."""
    ends = ends_example(ids, np.append(eos, ids[:-1]), eos, break_mode)
    return ids[np.append(0, 1 + np.flatnonzero(ends))[-1] :]


def windows(
    ids: np.ndarray, eos: int, settings: Windows
) -> tuple[int, Iterator[tuple[WindowBatch, np.ndarray]]]:
    """Cuts a split into windows, so that every token of an example is scored exactly once.

    ids a b c d e, window 3, context 1 (so each row scores 2), break_mode "none":
        inputs [<eos> a .], [a b c], [c d .];  targets [a b .], [b c d], [d e .];
        weights [1 1 0], [0 1 1], [0 1 0];  first 0 1 1

    A row holds one example of at most window − context tokens, after the `context` tokens that
    precede it in the split. Examples that must see nothing else need context 0, and rows hold them
    as `layout` says. Rows that only fill up the last batch have weight 0.

    Returns:
        The number of batches, and an iterator over pairs of a batch and the positions in `ids` that
        it scores: int64 [tokens], row by row.

    Raises:
        InputError: as `check_windows`, and an empty split.
    """
    check_windows(settings)
    window, context, break_mode, name, rows, multiple, in_text_order = settings
    check_split(ids)
    if name == "streams":
        return _continued(ids, eos, settings)
    longest = max(1, min(window - context, len(ids)))  # a row need not be longer than the split
    starts, lengths = examples(ids, eos, break_mode, longest)
    make = LAYOUTS[name][1] if break_mode in ALONE and not in_text_order else Single
    layout = make(starts, lengths, longest, rows)

    def read(numbers, rows, time):
        rows = -(-rows // multiple) * multiple
        scored = layout.spans(np.asarray(numbers), None, 0)
        before = np.minimum(scored.starts, context)
        shown = Spans(scored.starts - before, scored.lengths + before, scored.rows)
        batch = fill_rows(ids, eos, shown, (rows, time + context), layout.segmented)
        return _from_first(batch, shown, before)

    batches = layout.in_order()
    return len(batches), (read(*batch) for batch in batches)


def _from_first(batch, spans, first_of_span):
    """A batch that counts each span of a row from its first target to score on."""
    first = np.zeros(len(batch.weights), np.int32)
    first[spans.rows] = first_of_span
    counts = np.arange(batch.weights.shape[1]) >= first[:, None]
    scored = ranges(spans.starts + first_of_span, spans.lengths - first_of_span)
    return WindowBatch(batch._replace(weights=batch.weights * counts), first), scored


def _continued(ids, eos, settings):
    """As `windows`, for layout "streams"."""
    rows = max(1, min(settings.rows, len(ids) - settings.context))
    context = settings.context if rows > 1 else 0
    longest = -(-(len(ids) - context) // rows) + context
    shape = -(-rows // settings.multiple) * settings.multiple, min(settings.window, longest)
    count, parts = streams.in_order(len(ids), rows, shape[1], context)

    def read(number, spans, context_of_span):
        batch = fill_rows(ids, eos, spans, shape)
        shown, scored = _from_first(batch, spans, context_of_span)
        reset = np.full(shape[0], number == 0)
        return WindowBatch(shown.batch._replace(reset=reset), np.zeros_like(shown.first)), scored

    return count, (read(number, *part) for number, part in enumerate(parts))
