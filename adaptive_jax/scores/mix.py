"""Interpolation of two models: λ p_model + (1 − λ) p_other.

The other model is a run, or a table of surprisals from any program, such as an n-gram model;
`score --words` writes such a table. Runs with the same vocabulary are interpolated token by token;
other runs of words or sub-words, which must read the same text, word by word.
"""

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np

from adaptive_jax.config.options import Option
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN
from adaptive_jax.errors import InputError, one_line
from adaptive_jax.files import path_of
from adaptive_jax.runs.run import Run
from adaptive_jax.scores.cache import Floats, interpolations
from adaptive_jax.scores.scores import Scores, word_names
from adaptive_jax.scores.scoring import Evaluation

UNITS = {"surprisal_nats": 1.0, "surprisal_bits": np.log(2)}


class Mix(NamedTuple):
    """The options of --method=mix.

    Attributes:
        other: workdir of the other run.
        scores: table in place of --other, separated by tabs, with a line for each word of the
            split, <eos> included, and a column surprisal_nats or surprisal_bits, as written by
            score --words.
        model_weight: λ, the weight of this run's distribution; several values are all tried.
    """

    other: str = ""
    scores: str = ""
    model_weight: Annotated[Floats, Option(within="(0, 1]")] = (0.5,)


def score(job: Evaluation, options: Mix) -> Iterator[tuple[dict, np.ndarray]]:
    """Yields the scores for all weights; each model scores the split once.

    Raises:
        InputError: neither or both of --other and --scores; another text or tokenizer.
    """
    if bool(options.other) == bool(options.scores):
        raise InputError("--method=mix needs one of --other=RUN and --scores=FILE")
    vocabulary, by_token = job.run.vocabulary, False
    if options.other:
        other = Run.open(path_of(options.other))
        other_vocabulary = other.vocabulary
        same_words = vocabulary.words == other_vocabulary.words
        by_token = same_words and vocabulary.model == other_vocabulary.model
        if not by_token and "token" in (other_vocabulary.unit, vocabulary.unit):
            raise InputError(
                f"--other={options.other} must be a run of the same tokenizer: tokens mix only with"
                " the same tokens"
            )
    else:
        table = read_surprisals(path_of(options.scores))
    nll, _ = job.score()
    counts = ~np.isnan(nll)
    tokens = Scores(job.ids[:], nll).take(counts)
    words = tokens.words(vocabulary)
    if options.other:
        ids = job.ids if by_token else job.encode(other)
        scores = Scores(ids[:], job.by(other, ids).score()[0]).counted()
        other_nll = scores.nll if by_token else scores.words(other_vocabulary).nll
    else:
        table.check_words(word_names(tokens.ids.tolist(), vocabulary))
        other_nll = table.nll
    expected = len(tokens.nll if by_token else words.nll)
    if len(other_nll) != expected:
        raise InputError(
            f"{options.scores or options.other} scores {len(other_nll):,}"
            f" {'tokens' if by_token else 'words'}, and this run {expected:,}: both must read the"
            " same text, <eos> included"
        )
    if by_token:
        yield from interpolations(nll, -other_nll[None], options.model_weight, {})
        return
    ends = np.flatnonzero(counts)[np.append(words.place[1:], len(tokens.nll)) - 1]
    for label, mixed in interpolations(words.nll, -other_nll[None], options.model_weight, {}):
        scored = np.where(counts, 0.0, np.nan)  # the last token of a word gets all of its nll
        scored[ends] = mixed
        yield label, scored


class Surprisals(NamedTuple):
    """Surprisals read from a table.

    Attributes:
        path: of the table.
        words: the column "word"; None for each row if there is no such column.
        nll: float64 `[words]` in nats.
    """

    path: Path
    words: list[str | None]
    nll: np.ndarray

    def check_words(self, names: Sequence[str]) -> None:
        """Raises InputError if a word differs from that of the text, `names`. In place of `<eos>`
        and `<unk>` the table may have any word.
        """
        for number, (word, expected) in enumerate(zip(self.words, names, strict=False), start=2):
            if word not in (None, expected) and expected not in (EOS, UNKNOWN):
                raise InputError(
                    f"{self.path}, line {number}: the word is {word!r}, and that of the split"
                    f" {expected!r}: both must be the same text"
                )


def read_surprisals(path: Path) -> Surprisals:
    """Reads a table of surprisals. Raises InputError: no such file or column, or a cell that is not
    a number.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            column = next((name for name in table.fieldnames or () if name in UNITS), None)
            rows = list(table)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"--scores={path} cannot be read: {one_line(error)}") from error
    if column is None:
        raise InputError(f"{path}: a column must be named {' or '.join(UNITS)}")
    try:
        nll = np.array([float(row[column]) for row in rows]) * UNITS[column]
        if (missing := np.isnan(nll)).any():  # `interpolate` would take it for an empty cache
            raise ValueError(f"nan in line {np.argmax(missing) + 2}")
    except (TypeError, ValueError) as error:
        raise InputError(f"{path}: {column} must be numbers: {error}") from None
    return Surprisals(path, [row.get("word") for row in rows], nll)
