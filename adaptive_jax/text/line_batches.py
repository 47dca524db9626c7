"""Batches of lines of text: windows that are scored on their own, and texts that are read on from
batch to batch.

Each batch is what `adaptive_jax.evaluation.scoring.Scorer` takes: rows, the positions in `ids` that
they score, and how many columns of a row do not count.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from adaptive_jax.data.batches.examples import ranges
from adaptive_jax.data.batches.spans import Spans, fill_rows
from adaptive_jax.data.batches.windows import WindowBatch

SHORTEST = 8  # tokens of a row: shorter ones would need programs of their own, and save nothing


def round_up(tokens: int, longest: int) -> int:
    """The next power of two, or `longest` if that is less: few lengths are few programs."""
    return min(longest, max(SHORTEST, 1 << (int(tokens) - 1).bit_length()))


def window_batches(
    ids: np.ndarray,
    eos: int,
    windows: Sequence[tuple[int, int, int]],
    longest: int,
    rows_of: Callable[[int, int], int],
) -> Iterator[tuple[WindowBatch, np.ndarray, int]]:
    """Batches of windows; those of similar length are read together.

    Args:
        ids: int32 `[tokens]`. The token before a window is its first input, or `<eos>`.
        windows: of each, the position of the first token that it shows, that of the first one that
            it scores, and its end.
        longest: tokens of a window at most.
        rows_of: from a number of windows and the length of their rows to the rows of a batch.
    """
    groups: dict[tuple[int, int], list] = {}
    for shown, start, end in windows:
        key = round_up(end - shown, longest), round_up(end - start, longest)
        groups.setdefault(key, []).append((shown, start, end))
    for (time, scored), group in sorted(groups.items()):
        rows = rows_of(len(group), time)
        for begin in range(0, len(group), rows):
            shown, start, end = np.array(group[begin : begin + rows]).T
            numbers = np.arange(len(shown))
            batch = fill_rows(ids, eos, Spans(shown, end - shown, numbers), (rows, time))
            context, first = np.zeros((2, rows), np.int32)
            context[numbers] = start - shown
            first[numbers] = np.minimum(start - shown, time - scored)
            counts = np.arange(time) >= context[:, None]
            batch = batch._replace(weights=batch.weights * counts)
            yield WindowBatch(batch, first), ranges(start, end - start), time - scored


def stream_batches(
    ids: np.ndarray, eos: int, starts: np.ndarray, lengths: np.ndarray, shape: tuple[int, int]
) -> Iterator[tuple[WindowBatch, np.ndarray, int]]:
    """Batches of `shape`, (rows, time), that read texts on, a row each: every token counts.

    starts, lengths: of each text in `ids`, `[texts]`; at most as many as rows.
    """
    rows, time = shape
    for begin in range(0, int(lengths.max()), time):
        left = np.clip(lengths - begin, 0, time)
        row = np.flatnonzero(left)
        spans = Spans(starts[row] + begin, left[row], row)
        batch = fill_rows(ids, eos, spans, shape)
        yield WindowBatch(batch, np.zeros(rows, np.int32)), ranges(spans.starts, spans.lengths), 0
