"""The ways to score a split, by name: the model alone, with a cache, with neighbours, or with
parameters that follow the text.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.evaluation import knn
from adaptive_jax.evaluation.cache import Cache, log_chances, mixed
from adaptive_jax.evaluation.dynamic import Dynamic, dynamic
from adaptive_jax.evaluation.knn import Neighbours
from adaptive_jax.evaluation.open_words import with_uniform
from adaptive_jax.evaluation.runs import Run
from adaptive_jax.evaluation.scoring import Extras, Progress, gathered


class Job(NamedTuple):
    """What a method is given besides its options.

    Attributes:
        ids: int32 `[tokens]` of the split.
        uniform, down_weight: see `Request`.
        train: gives the ids of the train split, or of the train.txt in another directory.
        progress: `progress(what)` shows how far something is.
        folder: where a datastore is kept.
    """

    run: Run
    ids: np.ndarray
    windows: Windows
    uniform: float
    down_weight: float
    train: Callable[..., np.ndarray]
    progress: Callable[[str], Progress]
    folder: Path = Path()

    def mixed(self, nll: np.ndarray) -> np.ndarray:
        """The model's nll `[tokens]` mixed with the uniform distribution.

        Raises:
            InputError: words that the model knows have a score that is not finite.
        """
        wrong = np.flatnonzero(np.isinf(nll))
        wrong = wrong[self.ids[:][wrong] < self.run.known]  # new words may have probability 0
        if len(wrong):
            total, step, dtype = np.sum(~np.isnan(nll)), self.run.step, self.run.config["dtype"]
            raise InputError(
                f"{len(wrong):,} of {total:,} scores are not finite, the first of token"
                f" {wrong[0]:,}: the model of step {step:,} diverged, is damaged or overflows in"
                f" {dtype}; give another --checkpoint"
            )
        return with_uniform(nll, self.uniform, len(self.run.vocabulary))


class Plain(NamedTuple):
    """The options of --method=plain: none."""

    def check(self) -> None:
        """Nothing to check."""


# For each setting tried: what it is, and the nll `[tokens]` in nats
Scores = Iterator[tuple[dict, np.ndarray]]


def _plain(job: Job, options: Plain) -> Scores:
    extras = Extras(down_weight=job.down_weight)
    yield {}, job.mixed(gathered(job.run, job.ids, job.windows, extras, job.progress("scoring"))[0])


def _cached(job: Job, options: Cache) -> Scores:
    """The split is scored once, whatever the number of settings."""
    compares = options.cache in ("local", "unbounded")
    extras = Extras(hidden=compares, down_weight=job.down_weight)
    nll, hidden = gathered(job.run, job.ids, job.windows, extras, job.progress("scoring"))
    nll, counts = job.mixed(nll), ~np.isnan(nll)
    entries = None if hidden is None else hidden[counts]
    chances = log_chances(
        options, entries, job.ids[:][counts], len(job.run.vocabulary), job.progress("cache")
    )
    for weight, theta in options.grid():
        label = {"model_weight": weight} | ({"theta": theta} if options.cache == "local" else {})
        scored = nll.copy()
        scored[counts] = mixed(nll[counts], chances[options.theta.index(theta)], weight)
        yield label, scored


def _knn(job: Job, options: Neighbours) -> Scores:
    """The split is scored and its neighbours are searched for once, whatever the number of
    settings.
    """
    text, batches = job.train(options.datastore or None), job.run.config["batches"]
    if np.array_equal(text[: len(job.ids)], job.ids):
        raise InputError(
            "the datastore is the text to be scored, which would find itself: give another --split"
            " or --datastore=DIR"
        )
    windows = job.windows
    # In as many rows as in training: in one, the text would be read a window at a time.
    if windows.layout == "streams":
        rows = job.run.config["tokens_per_update"] // batches["sequence_length"]
        windows = windows._replace(rows=max(1, min(rows, len(text) // (4 * windows.window))))
    name = "datastore" + (
        f"-{hashlib.sha256(options.datastore.encode()).hexdigest()[:8]}"
        if options.datastore
        else ""
    )
    store = knn.open_datastore(job.folder / name, job.run, text, windows, job.progress("datastore"))
    extras = Extras(hidden=True, down_weight=job.down_weight)
    nll, hidden = gathered(job.run, job.ids, job.windows, extras, job.progress("scoring"))
    nll, counts = job.mixed(nll), ~np.isnan(nll)
    chances = knn.log_chances(
        store, hidden[counts], job.ids[:][counts], options, job.progress("neighbours")
    )
    for weight, temperature in options.grid():
        scored = nll.copy()
        scored[counts] = mixed(nll[counts], chances[options.temperature.index(temperature)], weight)
        yield {"model_weight": weight, "temperature": temperature}, scored


def _dynamic(job: Job, options: Dynamic) -> Scores:
    yield (
        {},
        job.mixed(
            dynamic(job.run, job.ids, job.windows, options, job.train, job.progress("scoring"))
        ),
    )


METHODS = {
    "plain": (Plain, _plain),
    "cache": (Cache, _cached),
    "dynamic": (Dynamic, _dynamic),
    "knn": (Neighbours, _knn),
}


def prepared(method: str, options: Mapping[str, object]) -> Callable[[Job], Scores]:
    """The method with its options, to be called with a job.

    Raises:
        InputError: a name that does not exist, an option of another method, or a value out of
            range.
    """
    check_known(f"method={method!r}", method, METHODS)
    kind, score = METHODS[method]
    for key in options:
        readers = [name for name, (other, _) in METHODS.items() if key in other._fields]
        if method not in readers:
            raise InputError(
                f"--{key} means nothing to --method={method}: leave it out, or use"
                f" --method={' or '.join(readers)}"
            )
    settings = kind(**options)
    settings.check()
    return lambda job: score(job, settings)
