"""Text that goes on and on: what each token is read after, and how much at once."""

from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches.examples import examples, ranges
from adaptive_jax.data.batches.windows import ALONE, Windows, check_windows
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.text.rows import Reader, Row, Shape, TokenScores, batched

CONTEXTS = ("none", "previous")
NOTHING = np.zeros(0, np.int32)


class Reading(NamedTuple):
    """What a line is read after, and how much a model reads at once.

    Attributes:
        context_from: "none": each line stands alone. "previous": each follows the lines before it.
        given: text that the first line follows; with "none", that every line follows. It is not
            scored. A text that ends with a line feed is whole lines; any other one is the beginning
            of the line.
        window: tokens of a row; 0: the sequence length that the run was trained with. A run on
            streams carries its state, so a token sees all before it, whatever the window.
        context: tokens of each further row that are only read, where a text is longer than a row.
            None: half a window; 0 where examples of the run's training saw nothing before them, or
            the run carries its state.
        eager: score each line when it comes, instead of many together.
    """

    context_from: str = "none"
    given: str = ""
    window: int = 0
    context: int | None = None
    eager: bool = False


class Limits(NamedTuple):
    """How much a run reads at once: see `Reading`. carries: whether the body carries its state
    from window to window.
    """

    window: int
    context: int
    break_mode: str
    carries: bool


def limits_of(config: dict, reading: Reading) -> Limits:
    """The limits of a run of this config.

    Raises:
        InputError: settings that do not fit each other or the run.
    """
    batches = config["batches"]
    break_mode, carries = batches["break_mode"], batches["layout"] == "streams"
    check_known(f"context_from={reading.context_from!r}", reading.context_from, CONTEXTS)
    if (
        reading.context_from == "previous"
        and break_mode in ALONE
        and (break_mode == "eos" or reading.given)
    ):
        what = (
            "sentences alone"
            if break_mode == "eos"
            else "documents alone, with nothing before them"
        )
        raise InputError(
            f"context_from='previous' is not for a run that read {what}"
            f" (batches.break_mode={break_mode}): use 'none'"
        )
    window = reading.window or batches["sequence_length"]
    context = reading.context
    if context is None:
        context = 0 if carries or break_mode in ALONE else window // 2
    check_windows(Windows(window, context, break_mode, batches["layout"], rows=1))
    return Limits(window, context, break_mode, carries)


def cut(given: np.ndarray, ids: np.ndarray, limits: Limits, eos: int) -> list[Row]:
    """Rows that score each of `ids` once, after the tokens `given`: the first scores what it can,
    each later one sees `context`.

    given a b, ids c d e f g, window 4, context 1:  [b | c d e], [d e | f g]
    What stands before | is only read.
    """
    given, before = (
        given[-limits.window :],
        int(given[-limits.window - 1]) if len(given) > limits.window else eos,
    )
    whole, first = np.concatenate([given, ids]), limits.window - min(len(given), limits.context)
    begins = [0, *range(first, len(ids), limits.window - limits.context)]
    rows = []
    for begin, end in zip(begins, [*begins[1:], len(ids)], strict=True):
        start = max(0, len(given) + end - limits.window)
        rows.append(
            Row(
                int(whole[start - 1]) if start else before,
                whole[start : len(given) + end],
                end - begin,
            )
        )
    return rows


class Windowed:
    """Text that is read in windows. It is cut as `windows` cuts a split, so its perplexity is
    that of evaluate.py.
    """

    def __init__(self, reader: Reader, limits: Limits, given: np.ndarray):
        """given: tokens before the text."""
        self.reader, self.limits = reader, limits
        self.eos = reader.run.vocabulary.eos
        self.history, self.pending = np.append(np.int32(self.eos), given), NOTHING

    def read(self, ids: np.ndarray, whole: bool) -> TokenScores:
        """The scores of the next tokens of the text. NaN for tokens of no example: empty lines of
        "complete_doc".

        ids: tokens that follow those of the call before; whole lines.
        whole: score all of them now; else those of the last window wait for its end.
        """
        pending = np.concatenate([self.pending, ids])
        starts, lengths, done = self._examples(pending, whole)
        text, offset, rows = np.concatenate([self.history, pending[:done]]), len(self.history), []
        for begin, end in zip(offset + starts, offset + starts + lengths, strict=True):
            shown = begin - min(self.limits.context, begin - 1)
            rows.append(Row(int(text[shown - 1]), text[shown:end], int(end - begin)))
        self.history, self.pending = text[-self.limits.window - 1 :], pending[done:]
        scores, at = batched(self.reader, rows, self.limits.window), ranges(starts, lengths)
        return (
            TokenScores(*(_placed(column, at, done) for column in zip(*scores, strict=True)))
            if rows
            else _no_scores(self, done)
        )

    def _examples(self, pending, whole):
        """Starts and lengths of examples, and how many tokens of the text they make up."""
        limits, alone = self.limits, self.limits.break_mode in ALONE
        if not len(pending) or (alone and (pending == self.eos).all()):
            return NOTHING, NOTHING, len(pending)
        starts, lengths = examples(
            pending, self.eos, limits.break_mode, limits.window - limits.context
        )
        if whole:
            return starts, lengths, len(pending)
        # More text may make the last example longer. What comes after a part of a long sentence
        # must not look like a line.
        begins = (
            starts
            if limits.break_mode == "none"
            else starts[(starts == 0) | (pending[starts - 1] == self.eos)]
        )
        done = int(begins[-1])
        return starts[starts < done], lengths[starts < done], done


def _placed(parts, at, tokens):
    """The scores of rows as a column `[tokens]`, NaN where there are none; None of None."""
    if parts[0] is None:
        return None
    column = np.full(tokens, np.nan, np.float32)
    column[at] = np.concatenate(parts)
    return column


def _no_scores(running, tokens):
    blank = np.full(tokens, np.nan, np.float32)
    return TokenScores(blank, blank, blank) if running.reader.describe else TokenScores(blank)


class Carried:
    """Text that is read by a body that carries its state: every token sees all before it.

    Attributes:
        carry: after all that has been read.
    """

    def __init__(self, reader: Reader, limits: Limits, given: np.ndarray):
        """given: tokens before the text."""
        self.reader, self.limits = reader, limits
        self.before, self.pending = reader.run.vocabulary.eos, given
        self.carry = reader.start(reader.run.mesh.size)
        self.read(NOTHING, True)

    def read(self, ids: np.ndarray, whole: bool) -> TokenScores:
        """As `Windowed.read`."""
        self.pending, parts = np.concatenate([self.pending, ids]), [_no_scores(self, 0)]
        while len(self.pending) >= self.limits.window or (whole and len(self.pending)):
            # Whole rows only, since a carry after padding would be wrong; the rest in powers of
            # two, for few programs.
            window, left = self.limits.window, len(self.pending)
            time = window if left >= window else 1 << (left.bit_length() - 1)
            tokens, self.pending = self.pending[:time], self.pending[time:]
            rows = [Row(self.before, tokens, time)]
            [scores], self.carry = self.reader.carry_on(
                rows, Shape(self.reader.run.mesh.size, time, time), self.carry
            )
            self.before = int(tokens[-1])
            parts.append(scores)
        return TokenScores.joined(parts)
