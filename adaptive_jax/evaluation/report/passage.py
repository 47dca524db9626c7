"""A passage of the text with the surprisal of each token, and what the model expected instead."""

import math
import unicodedata
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.vocabulary.subwords import MARK, Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.distributions import expected
from adaptive_jax.evaluation.report.runs import RunReport
from adaptive_jax.evaluation.runs import Run
from adaptive_jax.evaluation.scoring import ScoreOptions, composed, scores
from adaptive_jax.planning.plan import rows_to_score

ALTERNATIVES = 8


class Token(NamedTuple):
    """A token of the passage.

    Attributes:
        text: its letters; control characters are replaced.
        joined: whether no space follows, because the word goes on.
        line_end: whether it is `<eos>`.
        bits: its surprisal; NaN for one that is not scored.
        rank: 1 for the most probable token.
        entropy: of the model's distribution there, in bits.
        count: how often it occurs in training.
        expected: the most probable tokens and their probabilities.
    """

    text: str
    joined: bool
    line_end: bool
    bits: float = math.nan
    rank: int = 0
    entropy: float = math.nan
    count: int = 0
    expected: tuple[tuple[str, float], ...] = ()


def read_passage(run: RunReport, opened: Run, first: int, words: int) -> list[Token]:
    """The tokens of a passage of a run's text.

    opened: the same run with its parameters.
    first, words: of the passage, in words of the text, `<eos>` included.

    Raises:
        InputError: the text has no such part.
    """
    ends, vocabulary = np.flatnonzero(run.vocabulary.ends_word[run.ids]), run.vocabulary
    if first >= len(ends):
        raise InputError(f"sample_from={first} must be less than the text's {len(ends):,} words")
    begin = 0 if first == 0 else int(ends[first - 1]) + 1
    end = int(ends[min(first + words, len(ends)) - 1]) + 1
    distributions = _distributions(run, opened, begin, end)
    places, tokens = {int(at): number for number, at in enumerate(distributions["at"])}, []
    for at, word in enumerate(run.ids[begin:end].tolist(), begin):
        token = Token(*spelled(vocabulary, word), word == vocabulary.eos)
        number = places.get(at)
        if number is not None:  # an empty line may be in no example
            words, log_probs = distributions["words"][number], distributions["log_probs"][number]
            token = token._replace(
                bits=float(run.nll[at]) / math.log(2),
                rank=int(distributions["rank"][number]),
                entropy=float(distributions["entropy"][number]) / math.log(2),
                count=int(vocabulary.counts[word]),
                expected=tuple(
                    (spelled(vocabulary, other)[0], math.exp(log_prob))
                    for other, log_prob in zip(words.tolist(), log_probs.tolist(), strict=True)
                ),
            )
        tokens.append(token)
    return tokens


def spelled(vocabulary: Vocabulary, word: int) -> tuple[str, bool]:
    """The letters of a token as they can be shown, and whether its word goes on after it."""
    text = vocabulary.utf8[word].decode(errors="replace")
    ends = bool(vocabulary.ends_word[word])
    if isinstance(vocabulary, Subwords) and ends:
        text = text.removesuffix(MARK) or MARK
    shown = ("�" if unicodedata.category(each) in ("Cc", "Cs") else each for each in text)
    return "".join(shown), not ends


def _distributions(run, opened, begin, end):
    """Distributions at the tokens from begin to end that count, which are "at"."""
    settings, batches = run.result["settings"], run.config["batches"]
    window, context = settings["window"], settings["context"]
    rows = settings.get("rows") or rows_to_score(run.config, window) * opened.mesh.size
    windows = Windows(window, context, settings["break_mode"], batches["layout"], rows)
    # Examples that reach into the passage must be those of the whole split.
    ids = np.asarray(run.ids if settings.get("rows", 1) > 1 else run.ids[: end + 2 * window])
    at, hidden = [], []
    for scored in scores(opened, ids, windows, ScoreOptions(hidden=True)):
        inside = (scored.at >= begin) & (scored.at < end)
        at.append(scored.at[inside])
        hidden.append(scored.hidden[inside])
    at, hidden = np.concatenate(at), np.concatenate(hidden)
    if not len(at):
        return {"at": at}
    result = expected(opened, composed(opened, ids)[0], hidden, ids[at], ALTERNATIVES)
    return {"at": at} | result._asdict()
