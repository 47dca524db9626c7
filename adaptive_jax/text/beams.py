"""Beam search: the most probable texts that a model may write, as far as a few hypotheses at a
time can find them.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from adaptive_jax.text.draft import Draft


class Written(NamedTuple):
    """How much of a text is written: words, ends of lines, the last token, and whether that is
    all.
    """

    words: int
    lines: int
    last: int
    ended: bool = False


class Hypothesis(NamedTuple):
    """Tokens after the prompt, the sum of their log-probabilities in nats, and how much of the
    text they are.
    """

    tokens: tuple[int, ...]
    log_prob: float
    written: Written


def search(
    draft: Draft, avoided: tuple[int, ...], start: Written, extended: Callable
) -> list[Hypothesis]:
    """The most probable texts that have ended, best first, as many as the draft has rows, if there
    are so many.

    Each step extends all hypotheses by every word and goes through these texts from the most
    probable on. Those that have ended are kept, until as many others are found as there are beams,
    which are extended next. The search stops when none of them can become better than those kept.
    With as many beams as there are texts it is exhaustive.

    Args:
        draft: has read the prompt, in as many rows as there are beams.
        avoided: places of words that are never written.
        extended: `extended(hypothesis, token, log_prob)`, the hypothesis with one more token and
            this sum.
    """
    beams = len(draft.tokens)
    live, kept = [Hypothesis((), 0.0, start)], []
    while live and (len(kept) < beams or live[0].log_prob > kept[-1].log_prob):
        scores = np.full(beams, -np.inf, np.float32)
        scores[: len(live)] = [one.log_prob for one in live]
        best = draft.best(2 * beams, scores, avoided)
        totals = scores[:, None] + best.values
        live_before, live, parents = live, [], []
        for place in np.argsort(-totals, axis=None, kind="stable")[: 2 * beams]:
            row, column = divmod(int(place), totals.shape[1])
            if len(live) == beams or not totals[row, column] > -np.inf:
                break
            before = live_before[row]
            text = extended(
                before,
                int(best.ids[row, column]),
                before.log_prob + float(best.values[row, column]),
            )
            if text.written.ended:
                kept = sorted([*kept, text], key=lambda one: -one.log_prob)[:beams]
            else:
                live.append(text)
                parents.append(row)
        if live:
            more = beams - len(live)  # rows without a hypothesis
            draft.take(np.array([*parents, *[0] * more], np.int32))
            draft.read(np.array([*(text.written.last for text in live), *[0] * more], np.int32))
    return kept
