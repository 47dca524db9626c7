"""Streams: the split as parallel rows that continue from update to update, for bodies that carry a
state.
"""

import functools

import numpy as np

from adaptive_jax.data.batches.spans import Spans, philox
from adaptive_jax.errors import InputError

DEVIATION = 5  # standard deviation of a window's length, in tokens
SHORTEST = 5  # minimal length of a window


class Streams:
    """The split cut into equal rows; update after update reads the next window of each (Merity et
    al. 2018, section 5).

    Tokens 0 to 13 in 2 rows, windows of 3, 4:
        update 0: [0 1 2] and [7 8 9];   update 1: [3 4 5 6] and [10 11 12 13].

    A window is about as long as the sequence length; see `draw` and `round_lengths`. All rows of an
    update have windows of the same length. The last window of an epoch is cut short, and padded
    with tokens of weight 0. The remaining tokens, fewer than there are rows, are dropped. The input
    of the first token of a row is the token before it in the split.

    Attributes:
        rows: rows of an update.
        columns: tokens of each row in an epoch.
        segmented, continued: as in `adaptive_jax.data.batches.layouts.Single`.
    """

    segmented, continued = False, True

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, sequence_length: int, rows: int):
        """As `Single`. Only the end of the last example matters."""
        tokens = int(starts[-1]) + int(lengths[-1])
        self.rows, self.base, self.columns = rows, sequence_length, tokens // rows
        if not self.columns:
            raise InputError(
                f"the split has {tokens:,} tokens, fewer than its {rows:,} rows: lower"
                " tokens_per_update"
            )
        self.ends = functools.lru_cache(maxsize=4)(self._ends)
        self._windows = {}  # by seed: the number of windows before each epoch

    def describe(self, examples: int, tokens: int) -> str:
        """Describes an epoch."""
        usual = round_lengths(self.base, self.base + 2.0 * DEVIATION * np.array([-1, 1]))
        return (
            f"{self.rows:,} rows, each continued through {self.columns:,} tokens in windows of"
            f" about {usual[0]} to {usual[1]}"
        )

    def update(self, seed: int, step: int) -> tuple[np.ndarray, np.ndarray, int]:
        """As `Single.update`; the numbers of window w are w · rows to (w + 1) · rows − 1."""
        starts = self._windows.get(seed, (0,))
        while starts[-1] <= step:
            starts = (*starts, starts[-1] + len(self.ends(seed, len(starts) - 1)))
        self._windows[seed] = starts  # not changed in place, since another thread may read it
        epoch = int(np.searchsorted(starts, step, side="right")) - 1
        window = step - starts[epoch]
        ends = self.ends(seed, epoch)
        time = int(ends[window] - (ends[window - 1] if window else 0))
        return np.full(self.rows, epoch), window * self.rows + np.arange(self.rows), time

    def spans(self, numbers: np.ndarray, seed: int, epoch: int) -> Spans:
        """As `Single.spans`."""
        window, row = np.divmod(numbers, self.rows)
        ends = np.append(0, self.ends(seed, epoch))
        lengths = np.minimum(ends[window + 1], self.columns) - ends[window]
        return Spans(row * self.columns + ends[window], lengths, np.arange(len(numbers)))

    def _ends(self, seed, epoch):
        """The ends of an epoch's windows in a row, int64 `[windows]`; the last is not cut short."""
        source, drawn, total = philox(seed, epoch, 2), [], 0
        while total < self.columns:
            drawn.append(draw(self.base, source, 1 + (self.columns - total) // self.base))
            total += int(drawn[-1].sum())
        ends = np.cumsum(np.concatenate(drawn))
        return ends[: np.searchsorted(ends, self.columns) + 1]


def draw(base: int, source: np.random.Philox, count: int) -> np.ndarray:
    """Draws lengths of `count` windows, int64: `bptt_lengths`, rounded by `round_lengths`."""
    uniform, *pair = (source.random_raw(3 * count).reshape(count, 3) >> np.uint64(11)).T * 2.0**-53
    normal = np.sqrt(-2 * np.log1p(-pair[0])) * np.cos(2 * np.pi * pair[1])
    return round_lengths(base, bptt_lengths(base, uniform, normal))


def bptt_lengths(base: int, uniform: np.ndarray, normal: np.ndarray) -> np.ndarray:
    """Lengths of windows according to Merity et al. 2018, section 5: about `base` with probability
    0.95, else half of that.

    uniform, normal: samples of U(0, 1) and N(0, 1).
    """
    mean = np.where(uniform < 0.95, base, base / 2)
    return np.maximum(min(SHORTEST, base), (mean + DEVIATION * normal).astype(np.int64))


def round_lengths(base: int, lengths: np.ndarray) -> np.ndarray:
    """Rounds lengths to the nearest of base ± 0, 1, 2, … tenths of base (or 5 tokens, if that is
    more), so that few programs compile.

    With base 70 those are 56, 63, 70, 77, 84 and, around half of it, 21 to 49; in one of 10,000
    draws 14 or 91. Rounding keeps the mean, 67.75, and raises the standard deviation around each of
    the two means from 5 to 5.4.
    """
    step = max(min(base, SHORTEST), round(base / 10))
    rounded = base + step * np.rint((np.asarray(lengths) - base) / step).astype(np.int64)
    shortest = base - (base - min(SHORTEST, base)) // step * step
    return np.maximum(rounded, shortest)
