"""Windows for evaluation: every token of a split is scored exactly once, after a chosen context."""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches.examples import check_split, examples, ranges
from adaptive_jax.data.batches.layouts import LAYOUTS, Single, check_layout, scored_break_mode
from adaptive_jax.data.batches.spans import Spans, fill_rows
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.numerics.batch import Batch

SHORTEST = 8  # tokens of a row: shorter rows would need more programs, and save nothing
ALONE = ("complete_doc", "eos")  # break modes whose examples see nothing before them


class Windows(NamedTuple):
    """Settings of the windows in which a split is scored.

    window: tokens of a row, of which the first `context` are not scored.
    context: with layout "streams", tokens that every row of the split but the first reads before
        those that it scores.
    break_mode: unit of text that is an example; see `examples`.
    layout: "packed" or "similar": arrangement of examples that must see nothing else (break_mode
        "complete_doc" or "eos"). "streams": the rows of a batch continue those of the batch before,
        for a body that carries its state.
    rows: rows of a batch. Layout "similar" has more if rows are shorter. "streams" cuts the split
        into this many rows, and all but the first see no more than `context` tokens of the text
        before them: only a single row gives every token its whole past.
    multiple: the number of rows of a batch is a multiple of this; empty rows are added.
    in_text_order: rows hold one example each and follow the text, whatever `layout` is; for
        parameters that change from batch to batch.
    """

    window: int
    context: int
    break_mode: str
    layout: str
    rows: int
    multiple: int = 1
    in_text_order: bool = False

    @classmethod
    def of(
        cls,
        config: Mapping,
        window: int = 0,
        context: int = 0,
        break_mode: str | None = None,
        rows: int = 1,
    ) -> "Windows":
        """Makes the settings for a run. window: 0: the sequence length. break_mode: None: that of
        evaluation. Raises InputError as `check_windows`.
        """
        batches = config["batches"]
        break_mode = break_mode or scored_break_mode(config)
        window = window or batches["sequence_length"]
        settings = cls(window, context, break_mode, batches["layout"], rows)
        check_windows(settings)
        return settings

    @property
    def context_columns(self) -> int:
        """Number of columns of every row, in any place, whose targets do not count."""
        return 0 if self.layout == "streams" else self.context


class WindowBatch(NamedTuple):
    """A batch `[rows, time]` to score, and `first` int32 `[rows]`: a column at or before the first
    target that counts.

    All columns that count are among the window − `Windows.context_columns` columns from `first` on,
    so that the output layer can skip the others.
    """

    batch: Batch
    first: np.ndarray


def check_windows(settings: Windows) -> None:
    """Checks the settings.

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
    if context and rows == 1 and layout == "streams":
        raise InputError(
            f"context={context} has no effect in one row of batches.layout={layout!r}, which sees"
            " the whole text: use context 0, or evaluate in several rows, --rows=2 or more"
        )


def ends_example(ids: np.ndarray, before: np.ndarray, eos: int, break_mode: str) -> np.ndarray:
    """Mask of the tokens that end an example of training. before: the token before each."""
    ends = (ids == eos) & (break_mode in ALONE)
    return ends & ((break_mode != "complete_doc") | (before == eos))


def last_example(ids: np.ndarray, eos: int, break_mode: str) -> np.ndarray:
    """The tokens of the last example of a text, which the next token may see."""
    ends = ends_example(ids, np.append(eos, ids[:-1]), eos, break_mode)
    return ids[np.append(0, 1 + np.flatnonzero(ends))[-1] :]


def windows(
    ids: np.ndarray, eos: int, settings: Windows
) -> tuple[int, Iterator[tuple[WindowBatch, np.ndarray]]]:
    """Cuts a split into windows, in which every token of an example is scored exactly once.

    ids a b c d e, window 3, context 1 (so each row scores 2), break_mode "none":
        inputs [<eos> a .], [a b c], [c d .];  targets [a b .], [b c d], [d e .];
        weights [1 1 0], [0 1 1], [0 1 0];  first 0 1 1

    A row holds one example of at most window − context tokens, after the `context` tokens before it
    in the split. Examples that must see nothing else need context 0, and are arranged by `layout`.
    Rows that fill up the last batch have weight 0. With layout "streams" each row of the split is
    one window, which continues from batch to batch.

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
        rows = max(1, min(rows, len(ids) - context))
        spans = _rows_of_split(len(ids), rows, context)
        longest = int((spans.end - spans.shown).max())
        shape = -(-rows // multiple) * multiple, min(window, longest)
        return -(-longest // shape[1]), read_on(ids, eos, spans, shape)
    longest = max(1, min(window - context, len(ids)))  # a row need not be longer than the split
    starts, lengths = examples(ids, eos, break_mode, longest)
    make = LAYOUTS[name][1] if break_mode in ALONE and not in_text_order else Single
    layout = make(starts, lengths, longest, rows)

    def read(numbers, rows, time):
        shape = -(-rows // multiple) * multiple, time + context
        scored = layout.spans(np.asarray(numbers), None, 0)
        before = np.minimum(scored.starts, context)
        shown = Spans(scored.starts - before, scored.lengths + before, scored.rows)
        return _window_batch(ids, eos, shown, before, shape, context, layout.segmented)

    batches = layout.in_order()
    return len(batches), (read(*batch) for batch in batches)


# Batches, the positions in the text that each scores, and the columns of a row that do not count
LineBatches = Iterator[tuple[WindowBatch, np.ndarray, int]]


class WindowSpans(NamedTuple):
    """Windows of a text: window i shows the tokens `shown[i]` to `end[i] - 1`, after the token
    before them, and scores those from `start[i]` on. All fields are int64 `[windows]`.
    """

    shown: np.ndarray
    start: np.ndarray
    end: np.ndarray


def windows_after(
    starts: np.ndarray, ends: np.ndarray, prefix: np.ndarray, window: int, context: int
) -> WindowSpans:
    """Cuts texts that do not see each other into windows. Before the tokens that it scores, a
    window shows as many tokens as fit, at least `context`.

    starts, ends: of each text, `[texts]`.
    prefix: number of tokens before each text that it may see, `[texts]`.
    """
    first, step = window - np.minimum(prefix, context), window - context
    counts = 1 + np.maximum(0, -(-(ends - starts - first) // step))
    number = ranges(np.zeros_like(counts), counts)
    columns = starts, ends, prefix, first
    begin, last, prefix, first = (np.repeat(column, counts) for column in columns)
    end = np.minimum(last, begin + first + number * step)
    start = np.where(number > 0, begin + first + (number - 1) * step, begin)
    return WindowSpans(np.maximum(begin - prefix, end - window), start, end)


def read_on(
    ids: np.ndarray, eos: int, spans: WindowSpans, shape: tuple[int, int], reset: bool = True
) -> Iterator[tuple[WindowBatch, np.ndarray]]:
    """Yields batches of `shape`, (rows, time), for a body that carries its state: each row goes on
    through one window of any length.

    spans: at most as many windows as rows.
    reset: whether the first batch resets the state of its rows.
    """
    rows, time = shape
    lengths = spans.end - spans.shown
    for begin in range(0, int(lengths.max()), time):
        remaining = np.clip(lengths - begin, 0, time)
        row = np.flatnonzero(remaining)
        context = np.clip(spans.start - spans.shown - begin, 0, remaining)[row]
        part = Spans(spans.shown[row] + begin, remaining[row], row)
        (batch, first), places = _window_batch(ids, eos, part, context, shape)
        yield WindowBatch(batch._replace(reset=np.full(rows, reset and begin == 0)), first), places


def _window_batch(ids, eos, spans, context, shape, unscored=0, segmented=False):
    """A batch, and the positions that it scores: of each span all but its first `context` tokens.

    unscored: number of columns of every row, in any place, whose targets do not count.
    """
    batch = fill_rows(ids, eos, spans, shape, segmented)
    before = np.zeros(shape[0], np.int32)
    before[spans.rows] = context
    weights = batch.weights * (np.arange(shape[1]) >= before[:, None])
    scored = ranges(spans.starts + context, spans.lengths - context)
    return WindowBatch(batch._replace(weights=weights), np.minimum(before, unscored)), scored


def _rows_of_split(tokens, rows, context):
    """A split cut into equal rows, all but the first after `context` tokens.

    Tokens 0 to 9, 2 rows, context 2: row 0 scores 0 to 5, row 1 reads 4 to 9 and scores 6 to 9.
    """
    context = context if rows > 1 else 0
    columns = max(1, -(-(tokens - context) // rows))
    shown = np.minimum(np.arange(rows) * columns, tokens)
    end = np.minimum(shown + columns + context, tokens)
    start = np.minimum(shown + context * (np.arange(rows) > 0), end)
    return WindowSpans(shown, start, end)


def round_up(tokens: np.ndarray, longest: int) -> np.ndarray:
    """Rounds up to a power of two, at most `longest`: few lengths need few programs."""
    powers = 2 ** np.ceil(np.log2(np.maximum(tokens, 1))).astype(np.int64)
    return np.minimum(longest, np.maximum(SHORTEST, powers))


class WindowReader(NamedTuple):
    """Makes batches of the windows of a text, in three ways; see `LineBatches`.

    Attributes:
        eos: the input of the first token of a text.
        window: maximal number of tokens of a row.
        rows_of: maps a number of windows and the length of their rows to the rows of a batch.
    """

    eos: int
    window: int
    rows_of: Callable[[int, int], int]

    def similar(self, ids: np.ndarray, spans: WindowSpans) -> LineBatches:
        """Yields batches of windows of similar length, at most `window` tokens."""
        sizes = np.stack([spans.end - spans.shown, spans.end - spans.start], axis=1)
        sizes = round_up(sizes, self.window)
        for time, scored in np.unique(sizes, axis=0).tolist():
            group = np.flatnonzero((sizes == (time, scored)).all(axis=1))
            rows = self.rows_of(len(group), time)
            for begin in range(0, len(group), rows):
                shown, start, end = (column[group[begin : begin + rows]] for column in spans)
                part = Spans(shown, end - shown, np.arange(len(shown)))
                shape, unscored = (rows, time), time - scored
                yield *_window_batch(ids, self.eos, part, start - shown, shape, unscored), unscored

    def carried(self, ids: np.ndarray, spans: WindowSpans) -> LineBatches:
        """Yields batches of windows of any length, the longest first, for a body that carries its
        state: each group of rows goes on to the end of its windows.
        """
        lengths = spans.end - spans.shown
        order = np.argsort(lengths, kind="stable")
        while len(order):
            time = int(round_up(lengths[order[-1]], self.window))
            rows = self.rows_of(len(order), time)
            order, batch = order[:-rows], order[-rows:]
            part = WindowSpans(*(column[batch] for column in spans))
            yield from ((*batch, 0) for batch in read_on(ids, self.eos, part, (rows, time)))

    def stream(self, ids: np.ndarray, begin: int, end: int, reset: bool = False) -> LineBatches:
        """Yields batches of one row, which goes on from the tokens that it has read. Rows are full,
        since a carry after padding would be wrong; lengths of the rest are powers of two, which
        need few programs.

        reset: whether the first batch resets the state.
        """
        while begin < end:
            time, remaining = self.window, end - begin
            time = time if remaining >= time else 1 << (remaining.bit_length() - 1)
            shape, spans = (self.rows_of(1, time), time), [[begin], [begin], [begin + time]]
            spans = WindowSpans(*np.array(spans))
            yield from ((*batch, 0) for batch in read_on(ids, self.eos, spans, shape, reset))
            begin, reset = begin + time, False
