"""Scoring methods by name: the model alone, with a cache, with nearest neighbours, with parameters
that adapt to the text, or with another model.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from adaptive_jax.config.options import check, fields_of
from adaptive_jax.errors import InputError
from adaptive_jax.scores import cache, dynamic, knn, mix
from adaptive_jax.scores.scoring import Evaluation

# For each setting: the options that distinguish it, and the nll `[tokens]` in nats
Trials = Iterator[tuple[dict, np.ndarray]]


class Plain(NamedTuple):
    """The options of --method=plain: none."""


class Method(NamedTuple):
    """A scoring method.

    Attributes:
        score: `score(job, options)`.
        options: a NamedTuple whose fields are flags of the command.
        one_row: whether the split is read in one row by default.
        new_words: whether it scores words that the model has no vectors of and takes --down_weight.
    """

    score: Callable[[Evaluation, tuple], Trials]
    options: type = Plain
    one_row: bool = False
    new_words: bool = True


def score_plain(job: Evaluation, options: Plain) -> Trials:
    """Yields the model's own scores."""
    yield {}, job.score()[0]


METHODS = {
    "plain": Method(score_plain),
    "cache": Method(cache.score, cache.Cache),
    "dynamic": Method(dynamic.score, dynamic.Dynamic, one_row=True, new_words=False),
    "knn": Method(knn.score, knn.Neighbours),
    "mix": Method(mix.score, mix.Mix, new_words=False),
}


def with_options(method: str, options: Mapping[str, object]) -> Callable[[Evaluation], Trials]:
    """The method with its options bound, a function of an `Evaluation`.

    Raises:
        InputError: an option of another method, or a value out of range.
    """
    for key in options:
        readers = [name for name, entry in METHODS.items() if key in fields_of(entry.options)]
        if method not in readers:
            raise InputError(
                f"--{key} has no meaning with --method={method}: leave it out, or use"
                f" --method={' or '.join(readers)}"
            )
    settings = METHODS[method].options(**options)
    check(settings, options)
    return lambda job: METHODS[method].score(job, settings)
