"""A text that grows line by line, in the windows in which an evaluation reads a split."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches.examples import examples
from adaptive_jax.data.batches.windows import ALONE, Windows, WindowSpans
from adaptive_jax.data.corpora.line_files import TextLine
from adaptive_jax.scores.scores import Scores


class Line(NamedTuple):
    """A line, its words, and their tokens, int32 `[tokens]`.

    context_tokens: number of leading tokens that are read but not scored: they belong to `before`.
    before: the beginning of the line's first word, which stands in the text before the line.
    begins: whether the line begins a document, and so sees nothing before it.
    """

    source: TextLine
    words: list[str]
    ids: np.ndarray
    context_tokens: int = 0
    before: str = ""
    begins: bool = False


class GrowingText:
    """Lines that follow each other. Tokens are scored once no later line can change what they see,
    and a line leaves the text once all of its tokens are scored.

    Attributes:
        scores: rows of the tokens that windows may still show, oldest first; NaN until scored.
        settled: number of tokens of `scores` whose examples no later line can change.
        scored: number of tokens of `scores` that `next_windows` has returned.
        begun: whether `next_windows` has returned any tokens.
    """

    def __init__(self, before: Scores, eos: int, settings: Windows):
        """before: the tokens before the text, at least `<eos>`."""
        self.scores, self.eos, self.settings = before, eos, settings
        self.settled = self.scored = self._popped = len(before.ids)
        self.begun, self._lines = False, deque()

    def extend(self, lines: Sequence[Line]) -> None:
        """Adds lines at the end."""
        self._lines.extend(lines)
        ids = np.concatenate([line.ids for line in lines])
        unscored = Scores.unscored(ids, self.scores.rank is not None)
        self.scores = Scores.concatenated([self.scores, unscored])

    def next_windows(self, complete: bool) -> WindowSpans:
        """Windows of tokens that are not scored yet: of settled tokens, or of all if `complete`.

        With layout "streams" this is one window; unless `complete`, its length is a multiple of
        `window`.

        complete: no line follows, or the last example may be scored before it is complete.
        """
        window, context, break_mode, layout, *_ = self.settings
        scored, pending = self.scored, self.scores.ids[self.settled :]
        if layout == "streams":
            self.settled += len(pending) if complete else len(pending) // window * window
            self.scored = self.settled
            self.begun |= scored < self.scored
            return WindowSpans(*np.array([[scored], [scored], [self.scored]]))
        starts, end = np.zeros((2, 0), np.int64)
        closed = len(pending)
        if closed and not (break_mode in ALONE and (pending == self.eos).all()):
            starts, lengths = examples(pending, self.eos, break_mode, window - context)
            starts, end = starts + self.settled, starts + self.settled + lengths
            firsts = starts
            if break_mode != "none":  # a part of a long sentence must not look like a line
                before = self.scores.ids[starts - 1]
                firsts = starts[(starts == self.settled) | (before == self.eos)]
            closed = int(firsts[-1]) - self.settled  # the last example may still grow
        self.settled += closed
        self.scored = len(self.scores.ids) if complete else self.settled
        shown = starts - np.minimum(context, starts - 1)
        new = (scored < end) & (end <= self.scored)
        return WindowSpans(shown[new], np.maximum(starts, scored)[new], end[new])

    def pop_complete_lines(self) -> Iterator[tuple[Line, Scores]]:
        """Yields lines whose tokens are all scored, then drops tokens that no window can show."""
        while self._lines and self._popped + len(self._lines[0].ids) <= self.scored:
            line = self._lines.popleft()
            begin, self._popped = self._popped, self._popped + len(line.ids)
            yield line, self.scores.take(slice(begin, self._popped))
        old = max(0, min(self._popped, self.settled - self.settings.window - 1))
        self.scores = self.scores.take(slice(old, None))
        self._popped, self.settled, self.scored = (
            count - old for count in (self._popped, self.settled, self.scored)
        )
