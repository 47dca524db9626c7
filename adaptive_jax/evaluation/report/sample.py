"""A passage of the text with the surprisal of each token, and what the model expected instead."""

import functools
import math
import unicodedata
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.vocabulary.subwords import MARK, Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.distributions import expected
from adaptive_jax.evaluation.report.scores import Subject, kept, shown, with_rows
from adaptive_jax.evaluation.scoring import Extras, composed, scores

ALTERNATIVES = 8


class Passage(NamedTuple):
    """A part of the text, in words from its beginning, `<eos>` included."""

    begin: int = 0
    words: int = 150


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
    bits: float
    rank: int
    entropy: float
    count: int
    expected: list[tuple[str, float]]


def check_passage(passage: Passage, words: int) -> None:
    """Raises InputError for a passage that begins after the text, or before it."""
    if passage.words < 0 or not 0 <= passage.begin < words:
        raise InputError(
            f"sample_from={passage.begin} and sample_words={passage.words} are no part of a text of"
            f" {words:,} words: give less"
        )


def passage_of(run: Subject, nll: np.ndarray, passage: Passage) -> list[Token]:
    """The tokens of a passage of a run's text.

    nll: `[tokens]` of the split.
    """
    ends = np.flatnonzero(run.vocabulary.ends[run.ids])
    begin = 0 if passage.begin == 0 else int(ends[passage.begin - 1]) + 1
    end = int(ends[min(passage.begin + passage.words, len(ends)) - 1]) + 1
    found = kept(run, f"sample-{begin}-{end}-{ALTERNATIVES}", lambda: _expected(run, begin, end))
    vocabulary, tokens = run.vocabulary, []
    places = {int(at): number for number, at in enumerate(found["at"])}
    for at, word in enumerate(run.ids[begin:end].tolist(), begin):
        if (number := places.get(at)) is None:  # an empty line that no example holds
            tokens.append(
                Token(
                    *spelled(vocabulary, word), word == vocabulary.eos, math.nan, 0, math.nan, 0, []
                )
            )
            continue
        others = zip(
            found["words"][number].tolist(),
            np.exp(found["log_probs"][number]).tolist(),
            strict=True,
        )
        expected_ = [(spelled(vocabulary, other)[0], probability) for other, probability in others]
        bits, entropy = float(nll[at]) / math.log(2), float(found["entropy"][number]) / math.log(2)
        about = bits, int(found["rank"][number]), entropy, int(vocabulary.counts[word])
        tokens.append(Token(*spelled(vocabulary, word), word == vocabulary.eos, *about, expected_))
    return tokens


def spelled(vocabulary: Vocabulary, word: int) -> tuple[str, bool]:
    """The letters of a token as they can be shown, and whether its word goes on after it."""
    text = vocabulary.spellings[word].decode(errors="replace")
    ends = bool(vocabulary.ends[word])
    if isinstance(vocabulary, Subwords) and ends:
        text = text.removesuffix(MARK) or MARK
    return (
        "".join("�" if unicodedata.category(letter) in ("Cc", "Cs") else letter for letter in text),
        not ends,
    )


def _expected(run, begin, end):
    """Distributions of the tokens from begin to end: arrays with `at`, where they are."""
    opened, windows = run.open(), with_rows(run)
    # Examples that reach into the passage must be those of the whole split.
    ids = np.asarray(run.ids[: end + 2 * windows.window])
    at, hidden = [], []
    for scored in scores(
        opened,
        ids,
        windows,
        Extras(hidden=True),
        functools.partial(shown, what=f"expectations of {run.name}"),
    ):
        inside = (scored.at >= begin) & (scored.at < end)
        at.append(scored.at[inside])
        hidden.append(scored.hidden[inside])
    at, hidden = np.concatenate(at), np.concatenate(hidden)
    found = expected(opened, composed(opened, ids)[0], hidden, ids[at], ALTERNATIVES)
    return {"at": at} | found._asdict()
