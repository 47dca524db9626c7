"""A passage of the text with the surprisal of each token and the model's alternatives."""

import math
import unicodedata
from typing import NamedTuple

from adaptive_jax.data.vocabulary.words import EOS, Vocabulary
from adaptive_jax.runs.settings import read_words
from adaptive_jax.scores.report.runs import RunReport


class Token(NamedTuple):
    """A token of the passage.

    Attributes:
        text: its letters; control characters are replaced.
        joined: whether no space follows, because the word continues.
        line_end: whether it is `<eos>`.
        bits: surprisal; NaN if the token is not scored.
        count: occurrences in training; None if unknown.
        rank: 1 for the most probable token; None if the evaluation stored no distribution.
        entropy: of the distribution that predicts the token, in bits.
        expected: the most probable tokens and their probabilities.
    """

    text: str
    joined: bool
    line_end: bool
    bits: float = math.nan
    count: int | None = None
    rank: int | None = None
    entropy: float | None = None
    expected: tuple[tuple[str, float], ...] = ()


def read_passage(run: RunReport, first: int, words: int) -> list[Token]:
    """The tokens of a passage of a run's text.

    first, words: of the passage, in words of the text, `<eos>` included.

    Raises:
        InputError: the passage begins after the end of the text.
    """
    vocabulary, new = read_words(run.workdir), run.arrays["new_words"].tolist()
    vocabulary = vocabulary.with_words(new) if new else vocabulary
    begin, end = run.words.span(first, words)
    places = {int(at): number for number, at in enumerate(run.arrays.get("sample_at", ()))}
    tokens = []
    for at, word in enumerate(run.words.ids[begin:end].tolist(), begin):
        bits = float(run.nll[at]) / math.log(2)
        count = int(vocabulary.counts[word]) if vocabulary.has_counts else None
        line_end = vocabulary.words[word] == EOS
        token = Token(*spelled(vocabulary, word), line_end, bits, count)
        if at in places:
            token = token._replace(**_distribution(run.arrays, places[at], vocabulary))
        tokens.append(token)
    return tokens


def _distribution(arrays, number, vocabulary):
    """Fields of a token whose distribution the evaluation stored."""
    likely = zip(arrays["sample_words"][number], arrays["sample_log_probs"][number], strict=True)
    return {
        "rank": int(arrays["sample_rank"][number]),
        "entropy": float(arrays["sample_entropy"][number]) / math.log(2),
        "expected": tuple((spelled(vocabulary, word)[0], math.exp(p)) for word, p in likely),
    }


def spelled(vocabulary: Vocabulary, word: int) -> tuple[str, bool]:
    """The printable letters of a token, and whether its word continues after it."""
    special = getattr(vocabulary, "special", {})  # of a tokenizer
    text = special.get(word) or vocabulary.utf8[word].decode(errors="replace")
    ends = bool(vocabulary.ends_word[word])
    if ends:
        text = text.removesuffix(vocabulary.mark.decode()) or text
    shown = ("�" if unicodedata.category(sign) in ("Cc", "Cs") else sign for sign in text)
    return "".join(shown), not ends
