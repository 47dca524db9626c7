"""evaluate.py's work: open a run, score a split, print and write the result."""

import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from adaptive_jax.data.batches.windows import Windows, check_windows
from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.token_ids import check_ends
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.evaluation import card
from adaptive_jax.evaluation.methods import Job, prepared
from adaptive_jax.evaluation.open_words import (
    TRAIN,
    UNIFORM,
    extended,
    seen_and_unseen,
)
from adaptive_jax.evaluation.results import say, write
from adaptive_jax.evaluation.runs import SavedRun
from adaptive_jax.evaluation.scoring import summary
from adaptive_jax.evaluation.unseen import describe_words
from adaptive_jax.parallel import hosts
from adaptive_jax.parallel.progress import Bar
from adaptive_jax.planning.plan import rows_to_score


class Request(NamedTuple):
    """What to score.

    Attributes:
        split: "train", "validation" or "test".
        window, context: see `scores`; window 0 is the sequence length that the model was trained
            with.
        checkpoint: "best" by validation, "latest", or a step.
        data_path: a directory with the split as .txt, .txt.xz or .txt.gz, instead of the corpus in
            the run's config.
        break_mode: how the split is broken into examples, instead of as the run's config says.
        method: a name of `METHODS`.
        rows: rows of a batch, 0: as many as a device holds. Layout "streams" cuts the split into so
            many, and 0 means one, so that every token sees all that came before it; so it does for
            the method "dynamic".
        options: fields of `Cache`, `Neighbours` or `Dynamic`, for the methods of that name.
        vocabulary: "train", the words of the run; "union", these and the words of the split; or
            these and the words of a file.
        uniform: share of the uniform distribution over the vocabulary in that of the model. None:
            0.01 where the model gives new words no probability, else 0.
        down_weight: factor of the probabilities that the model gives to new words (GroC 2020,
            section 5.1), which are then normalised again.
        share: of the words, those that keep their entries in a lexicon, instead of the config's
            `input.share` (GroC 2020, Table 4).
    """

    split: str = "test"
    window: int = 0
    context: int = 0
    checkpoint: str = "best"
    data_path: str | None = None
    break_mode: str | None = None
    method: str = "plain"
    rows: int = 0
    options: Mapping[str, object] = MappingProxyType({})
    vocabulary: str = TRAIN
    uniform: float | None = None
    down_weight: float = 1.0
    share: float | None = None


def evaluate(workdir: Path, request: Request) -> dict:
    """Scores a split with a trained model, prints the result and writes it to workdir/eval/, as
    JSON and as a card in Markdown, with the losses of its tokens as .npy.

    Returns:
        `summary(...)`, with `unseen`, see `Corpus` (None if not known), `split`, `step`, `seconds`
        that scoring took (compilation included), `settings`: the config, break_mode, window,
        context and checkpoint, of a run on streams, rows, too; what `card.metadata` returns; and as
        `published` and `scored`, what `card.published` and `card.fingerprint` return. Of a
        vocabulary with more words, `unseen` is the share of new words, `open` has share and
        perplexity of words that training knew and of others, and the settings are those of the
        request. Where several settings were tried, `grid` has a line for each, and the rest is of
        the best one.

    Raises:
        InputError: no run or checkpoint, a corpus that is missing, a `window` longer than the
            split, see `windows`, and settings that do not fit together; scores that are not finite;
            or the result, which has been printed by then, cannot be written.
    """
    return evaluate_contexts(workdir, request, (request.context,))[0]


def evaluate_contexts(workdir: Path, request: Request, contexts: Sequence[int]) -> list[dict]:
    """As `evaluate`, once for each context in place of the request's."""
    saved = SavedRun.read(workdir)
    config = saved.config
    requests = [request._replace(context=context) for context in dict.fromkeys(contexts)]
    checked = [_checked(config, each) for each in requests]
    data = data_of(workdir, config, request)
    check_ends(saved.vocabulary, checked[0][0].break_mode)
    paper = card.published(workdir, request.split)
    vocabulary = extended(saved.vocabulary, request.vocabulary, data, request.split)
    corpus = load(data, vocabulary=vocabulary, splits=(request.split,))
    ids = corpus.ids[request.split]
    if request.window > len(ids):
        raise InputError(
            f"window={request.window} is longer than the {request.split} split, {len(ids)} tokens:"
            " give that or less"
        )
    words = describe_words(corpus, request.split) if request.vocabulary == TRAIN else ""
    run = saved.load(request.checkpoint, vocabulary, request.share)

    def train(directory=None):
        text = data_of(workdir, config, request._replace(data_path=directory))
        return load(text, vocabulary=vocabulary, splits=("train",)).ids["train"]

    results = []
    for each, (settings, score) in zip(requests, checked, strict=True):
        settings = settings._replace(rows=_rows(config, each, settings.window, run.mesh.size))
        job = _job(run, ids, settings, each)._replace(train=train, folder=workdir / "eval")
        start = time.perf_counter()
        found, nll = _best(score, job)
        result = found | {"seconds": time.perf_counter() - start} | _about(each, settings, config)
        result |= {"unseen": corpus.unseen.get(each.split), "step": run.step}
        result |= card.metadata(run, ids, nll) | {"published": paper}
        result |= {"scored": card.fingerprint(workdir, run.step, vocabulary, ids)}
        if each.vocabulary != TRAIN:
            result |= {"open": seen_and_unseen(nll, ids, run.known)}
            result |= {"unseen": result["open"]["unseen"]["share"]}
        say(result, words, settings)
        write(workdir / "eval", result, nll)
        results.append(result)
    return results


def _checked(config, request):
    """How to cut the split, and the method with its options."""
    batches = config["batches"]
    window, break_mode = (
        request.window or batches["sequence_length"],
        request.break_mode or batches["break_mode"],
    )
    if batches["layout"] == "streams" and break_mode != "none":
        raise InputError(
            f"--break_mode={break_mode} is not for a run on streams, which reads the split as one"
            " text: leave it out"
        )
    check_at_least(0, rows=request.rows)
    settings = Windows(window, request.context, break_mode, batches["layout"], request.rows or 1)
    check_windows(settings)
    check_known(f"split={request.split!r}", request.split, SPLITS)
    score = prepared(request.method, request.options)
    lists = [
        key for key, value in request.options.items() if isinstance(value, tuple) and len(value) > 1
    ]
    if lists and request.split == "test":
        raise InputError(
            f"--{lists[0]} has several values: choose among them with --split=validation, and give"
            " the test split one"
        )
    if request.uniform is not None and not 0 <= request.uniform < 1:
        raise InputError(
            f"uniform={request.uniform} is no share: give a number from 0 to less than 1"
        )
    if not 0 < request.down_weight <= 1:
        raise InputError(
            f"down_weight={request.down_weight} must be above 0 and at most 1, such as 0.1"
        )
    if request.down_weight != 1 and request.vocabulary == TRAIN:
        raise InputError(
            f"down_weight={request.down_weight} is for new words: give --vocabulary=union, or leave"
            " it out"
        )
    if request.down_weight != 1 and request.method == "dynamic":
        raise InputError(
            f"down_weight={request.down_weight} means nothing to --method=dynamic: leave it out"
        )
    return settings, score


def _check_new_words(run, request):
    """Checks that a model that knows no new words is not asked for them."""
    if run.predicts_new_words:
        return
    if request.down_weight != 1:
        raise InputError(
            f"down_weight={request.down_weight} is for models that predict new words, and this one"
            " has vectors of the words of its training only: leave it out"
        )
    if request.method == "dynamic":
        raise InputError(
            "--method=dynamic cannot learn from the new words of"
            f" --vocabulary={request.vocabulary}, of which this model has no vectors: leave the"
            " vocabulary out"
        )


def _rows(config, request, window, devices):
    one = config["batches"]["layout"] == "streams" or request.method == "dynamic"
    return request.rows or (1 if one else rows_to_score(config, window) * devices)


def _job(run, ids, settings, request):
    """The job of a method, which lacks `train`."""
    _check_new_words(run, request)
    uniform = request.uniform
    if uniform is None:
        uniform = 0.0 if run.predicts_new_words else UNIFORM

    def progress(what):
        return functools.partial(
            _progress, what=f"{what}, context {request.context:,}" if request.context else what
        )

    return Job(run, ids, settings, uniform, request.down_weight, None, progress)


def _best(score, job):
    """The summary of the best setting, with all of them as `grid` if there are several, and its
    nll.
    """
    best, tried = None, []
    for label, nll in score(job):
        found = label | summary(nll, job.ids, job.run.vocabulary)
        tried.append({key: found[key] for key in (*label, "nll", "perplexity")})
        if best is None or found["nll"] < best[0]["nll"]:
            best = found, nll
    found, nll = best
    return found | ({"grid": tried} if len(tried) > 1 else {}), nll


def _about(request, settings, config):
    """What the result is of."""
    asked = {
        key: getattr(request, key)
        for key in ("split", "window", "context", "checkpoint", "data_path", "method")
    }
    if settings.layout == "streams" or request.method == "dynamic":
        asked["rows"] = settings.rows
    if request.options:
        asked["options"] = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in request.options.items()
        }
    if request.vocabulary != TRAIN or request.uniform is not None:
        asked |= {key: getattr(request, key) for key in ("vocabulary", "uniform", "down_weight")}
    if request.share is not None:
        asked["share"] = request.share
    more = {"break_mode": settings.break_mode, "window": settings.window, "config": config}
    return {"split": request.split, "settings": asked | more}


def data_of(workdir: Path, config: dict, request: Request) -> dict:
    """The group `data` of a run's config, with another path if one is given."""
    data = config["data"] | ({} if request.data_path is None else {"path": request.data_path})
    if data["corpus"] == "text_files" and not data["path"]:
        raise InputError(
            f"{workdir} names no text: give --data_path=DIR, a directory with {request.split}.txt"
        )
    return data


def _progress(batches: Iterable, count: int, what: str) -> Iterator:
    bar = Bar(count, 0, [what], shown=hosts.first())
    try:
        with hosts.stopping() as stop:
            for number, batch in enumerate(batches):
                if stop(number):
                    raise KeyboardInterrupt  # on all hosts
                yield batch
                bar.show(number + 1)
    finally:
        bar.close()
