"""Evaluates a run: opens it, scores a split, prints and writes the result."""

import dataclasses
import functools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, NamedTuple

import numpy as np

from adaptive_jax.config.options import NonNegativeInt, Option, check
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.corpora.corpus import SPLITS, Corpus
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.corpora.published import CORPORA
from adaptive_jax.data.corpora.text import is_one_split
from adaptive_jax.data.vocabulary.lexicon import lexicon_of
from adaptive_jax.data.vocabulary.token_ids import check_ends
from adaptive_jax.errors import InputError
from adaptive_jax.files import path_of
from adaptive_jax.parallel import hosts
from adaptive_jax.parallel.progress import Bar
from adaptive_jax.planning.plan import rows_to_score
from adaptive_jax.runs.identity import check_hosts, of_scores
from adaptive_jax.runs.run import Run
from adaptive_jax.scores import card
from adaptive_jax.scores.distributions import passage_stats
from adaptive_jax.scores.frequency import PAPER, Words, check_edges, words_of
from adaptive_jax.scores.methods import METHODS, with_options
from adaptive_jax.scores.open_words import TRAIN, UNIFORM, vocabulary_to_score
from adaptive_jax.scores.results import MEASURED, print_result, write
from adaptive_jax.scores.scores import Scores
from adaptive_jax.scores.scoring import Evaluation, composed
from adaptive_jax.scores.unseen import describe_words


class Request(NamedTuple):
    """Evaluation to run. Its fields but `options` are flags of the command.

    Attributes:
        split: Split to score.
        window: Tokens the model reads at once; 0: the sequence length it was trained with.
        context: Tokens of each window that are given and not scored.
        checkpoint: best (by validation), latest, or a step.
        data_path: File with the split, or directory that contains it; default: the run's corpus.
        break_mode: none, complete, complete_doc or eos; default: that of the run.
        method: Scoring method.
        rows: Rows of a batch; 0: as many as fit the run's tokens_per_device (4,096 if that is 0),
            or 1 for layout streams and dynamic evaluation, which are exact with one row and faster
            with more.
        options: Options of the method: fields of `Cache`, `Neighbours`, `Dynamic` or `Mix`.
        vocabulary: Words to score over: train, union (train and the split), or a file of words.
        uniform: Share of the uniform distribution over the vocabulary; default 0.01 if new words
            would have no probability, else 0.
        down_weight: Factor on a composed model's probabilities of new words (GroC 2020, section
            5.1).
        share: Share of the words that keep their entries in a lexicon; default: that of the run.
        bins: Largest frequency in training of each bin of words but the last.
        sample_from: Number of the passage's first word, from 0.
        sample_words: Words of a passage for which a report shows the model's alternatives.
    """

    split: Annotated[str, Option(among=SPLITS)] = "test"
    window: int = 0
    context: int = 0
    checkpoint: str = "best"
    data_path: str | None = None
    break_mode: str | None = None
    method: Annotated[str, Option(among=METHODS)] = "plain"
    rows: NonNegativeInt = 0
    options: Mapping[str, object] = MappingProxyType({})
    vocabulary: str = TRAIN
    uniform: Annotated[float | None, Option(within="[0, 1)")] = None
    down_weight: Annotated[float, Option(within="(0, 1]")] = 1.0
    share: Annotated[float | None, Option(within="[0, 1]")] = None
    bins: tuple[int, ...] = PAPER
    sample_from: NonNegativeInt = 0
    sample_words: Annotated[int, Option(within="[0, inf)", only=("method", "plain"))] = 0


def evaluate(workdir: Path, request: Request) -> dict:
    """Scores a split with a trained model, prints the result and writes it to workdir/eval/ as
    JSON, with the losses of its tokens as .npy and the arrays that a report reads as .npz.

    Returns:
        The entries of `Scores.summary` and `card.metadata`, and: `unseen`, see `Corpus` (None if
        unknown); `split`; `step`; `seconds` of scoring, compilation included; `settings`:
        those of the request with break_mode and window filled in, rows if they change scores, and
        the config; `published`, see `card.published`; and `scored`, see `of_scores`. With a larger
        vocabulary than in training, `unseen` is the share of new words, and `open` has share and
        perplexity of the training vocabulary's words and of new ones. If several settings were
        tried, `grid` has an entry for each, and all other keys are those of the best one.

    Raises:
        InputError: no run or checkpoint, a missing corpus, a `window` longer than the split,
            settings that do not fit together, see `windows`, or scores that are not finite.
        OSError: the result, which has been printed by then, cannot be written. If the folder is
            read-only, a warning says so instead.
    """
    return evaluate_contexts(workdir, request, (request.context,))[0]


def evaluate_contexts(workdir: Path, request: Request, contexts: Sequence[int]) -> list[dict]:
    """As `evaluate`, once for each context in place of the request's."""
    score = _check_request(request)
    check_hosts(request._asdict() | {"data_path": "", "contexts": list(contexts)})
    split = _read(workdir, request, list(dict.fromkeys(contexts)))
    return [_evaluate(split, job, score) for job in split.jobs]


class _Split(NamedTuple):
    """A split and the run that scores it, read once for all contexts.

    Attributes:
        jobs: one for each context.
        text: the words of the split.
        passage: positions of the first token of the request's sample, and of the first one after
            it; None without a sample.
        unseen: the shares of unknown and unseen words, to be printed.
        paper: the record of `card.published`, if the split is the one that a paper scored.
    """

    request: Request
    jobs: list[Evaluation]
    corpus: Corpus
    text: Words
    passage: tuple[int, int] | None
    unseen: str
    paper: dict | None


def _read(workdir, request, contexts):
    """Reads the run and the split of a request."""
    saved = Run.of(workdir)
    config, split = saved.saved_config, request.split
    windows = [
        Windows.of(config, request.window, context, request.break_mode, request.rows or 1)
        for context in contexts
    ]
    check_ends(saved.vocabulary, windows[0].break_mode)
    data = data_of(workdir, config, request.data_path, split)
    vocabulary = vocabulary_to_score(saved.vocabulary, request.vocabulary, data, split)
    corpus = load(data, vocabulary=vocabulary, splits=(split,))
    ids = corpus.ids[split]
    check_hosts({}, corpus)
    _check_length(request, windows, len(ids))
    unseen = describe_words(corpus, split) if request.vocabulary == TRAIN else ""
    comparable = _is_published(request, config, vocabulary.count_words(ids))
    paper = card.published(workdir, split) if comparable else None
    changes = {"checkpoint": request.checkpoint, "share": request.share}
    run = dataclasses.replace(saved, vocabulary=vocabulary, **changes).read()
    if not run.predicts_new_words:
        _check_no_new_words(request)
    text, passage = words_of(ids, vocabulary, config["data"]), None
    if request.sample_words:
        passage = text.span(request.sample_from, request.sample_words)
    one_row = METHODS[request.method].one_row or windows[0].layout == "streams"
    if not (request.rows or one_row):
        rows = rows_to_score(run.saved_config, windows[0].window) * run.mesh.size
        windows = [settings._replace(rows=rows) for settings in windows]
    default = 0.0 if run.predicts_new_words else UNIFORM
    shared = {
        "uniform": default if request.uniform is None else request.uniform,
        "down_weight": request.down_weight,
        "train": functools.partial(_train_ids, request, run),
        "tables": functools.cache(functools.partial(composed, run, ids)),
        "encode": functools.partial(_ids_by, split, data),
    }
    jobs = [
        Evaluation(run, ids, settings, progress=functools.partial(_bar, settings.context), **shared)
        for settings in windows
    ]
    return _Split(request, jobs, corpus, text, passage, unseen, paper)


def _evaluate(split, job, score):
    """Scores a split, prints the result, writes and returns it."""
    request, run, ids, settings = split.request, job.run, job.ids, job.windows
    start = time.perf_counter()
    chosen, result, nll = _best(score, job)
    seconds = time.perf_counter() - start
    result |= {
        "seconds": seconds,
        "split": request.split,
        "settings": _settings(request, settings, run.saved_config, lexicon_of(run.config)),
        "unseen": split.corpus.unseen.get(request.split),
        "step": run.step,
        "published": split.paper,
        "scored": of_scores(run.step, run.identity, run.vocabulary, ids),
        **card.metadata(run.vocabulary, split.text, nll, request.bins),
    }
    if request.vocabulary != TRAIN:
        result["open"] = Scores(ids, nll).seen_and_unseen(run.num_known_words)
        result["unseen"] = result["open"]["unseen"]["share"]
    print_result(result, chosen, split.unseen, settings)
    arrays = {key: value for key, value in split.text._asdict().items() if value is not None}
    arrays["new_words"] = np.array(run.vocabulary.words[run.num_known_words :], str)
    if split.passage:
        passage = passage_stats(run, ids, settings, job.tables(), *split.passage)
        arrays |= {f"sample_{key}": value for key, value in passage.items()}
    write(run.workdir / "eval", result, nll, arrays)
    return result


def _check_request(request):
    """Checks a request before its run is read; returns the method with its options."""
    check(request, set_fields=("sample_words",) if request.sample_words else ())
    check_edges(request.bins)
    score = with_options(request.method, request.options)
    several = [
        key for key, value in request.options.items() if isinstance(value, tuple) and len(value) > 1
    ]
    if several and request.split == "test":
        raise InputError(
            f"--{several[0]} has several values: choose among them with --split=validation, and"
            " give the test split one"
        )
    new_words = request.vocabulary != TRAIN and METHODS[request.method].new_words
    if request.down_weight != 1 and not new_words:
        raise InputError(
            f"--down_weight={request.down_weight} is for new words: pass --vocabulary=union and"
            " a method other than dynamic and mix, or leave it out"
        )
    return score


def _check_length(request, windows, tokens):
    """Checks that a split has tokens for the window and the rows of a request."""
    if request.window > tokens:
        raise InputError(
            f"window={request.window} is longer than the {request.split} split, {tokens} tokens:"
            " use that or less"
        )
    most = tokens - max(settings.context for settings in windows)
    if windows[0].layout == "streams" and request.rows > most:
        raise InputError(
            f"rows={request.rows} must be {max(1, most)} or less: each begins at another token of"
            f" the {request.split} split, {tokens} tokens"
        )


def _check_no_new_words(request):
    """Checks that a request needs no vectors of new words, for a model that has none."""
    method, vocabulary = request.method, request.vocabulary
    if request.down_weight != 1:
        flag = f"--down_weight={request.down_weight}"
    elif not METHODS[method].new_words:
        flag = f"--method={method} with --vocabulary={vocabulary}"
    else:
        return
    raise InputError(f"{flag} needs vectors of new words, which this model lacks: leave it out")


def _train_ids(request, run, directory):
    """The ids of the run's train split, or of the train.txt in a directory."""
    config, data = run.saved_config, run.saved_config["data"]
    if not directory and data["corpus"] == "text_files" and not data["path"]:
        directory = request.data_path  # a converted model names no text
        if directory and is_one_split(path_of(directory)):
            directory = None  # the split to be scored
    try:
        source = data_of(run.workdir, config, directory, "train")
        return load(source, vocabulary=run.vocabulary, splits=("train",)).ids["train"]
    except InputError as error:
        raise InputError(f"--method={request.method} reads a train text: {error}") from error


def _ids_by(split, data, run):
    """The ids of a split of `data`'s corpus in the vocabulary of another run."""
    source = run.saved_config["data"] | {key: data[key] for key in ("corpus", "path")}
    return load(source, vocabulary=run.vocabulary, splits=(split,)).ids[split]


def _best(score, job):
    """Returns the options of the best setting, its summary and its nll. If there are several
    settings, the summary lists all of them as `grid`.
    """
    best, grid = None, []
    for options, nll in score(job):
        result = Scores(job.ids, nll).summary(job.run.vocabulary)
        grid.append(options | {key: result[key] for key in MEASURED})
        if best is None or result["nll"] < best[1]["nll"]:
            best = options, options | result, nll
    options, result, nll = best
    return options, result | ({"grid": grid} if len(grid) > 1 else {}), nll


def _settings(request, windows, config, lexicon):
    """Returns the settings to record in a result. lexicon: source of the entries of new words."""
    keys = "split", "checkpoint", "data_path", "method"
    settings = {key: getattr(request, key) for key in keys}
    if windows.layout == "streams" or METHODS[request.method].one_row:
        settings["rows"] = windows.rows
    if request.options:
        settings["options"] = dict(request.options)
    if request.vocabulary != TRAIN or request.uniform is not None:
        settings |= {key: getattr(request, key) for key in ("vocabulary", "uniform", "down_weight")}
    if request.vocabulary != TRAIN and lexicon:
        settings["lexicon"] = lexicon
    if request.share is not None:
        settings["share"] = request.share
    keys = "break_mode", "window", "context"
    return settings | {key: getattr(windows, key) for key in keys} | {"config": config}


def data_of(workdir: Path, config: dict, path: str | None, split: str) -> dict:
    """The group `data` of a run's config, with `path` in place of its own unless that is None."""
    data = config["data"] | ({} if path is None else {"path": path})
    if data["corpus"] == "text_files" and not data["path"]:
        raise InputError(
            f"{workdir} names no text: pass --data_path=DIR, a directory with {split}.txt"
        )
    return data


def _is_published(request, config, words):
    """True if the scores compare with a paper's number: the model alone, with its own words and
    its complete lexicon, scores a text with the published number of words or, if that is unknown,
    the run's own text.
    """
    published = CORPORA[config["data"]["corpus"]].words.get(request.split)
    same_text = request.data_path is None if published is None else words == published
    alone = request.method == "plain" and request.vocabulary == TRAIN and not request.uniform
    return same_text and alone and request.share is None


def _bar(context: int, text: str):
    """Returns a `Progress` that draws a bar and, when one host is interrupted, raises
    KeyboardInterrupt on all hosts.
    """

    def with_bar(batches: Iterable, count: int) -> Iterator:
        label = f"{text}, context {context:,}" if context else text
        bar = Bar(count, 0, [label], visible=hosts.first(), every=60.0)
        try:
            with hosts.stopping() as stop:
                for number, batch in enumerate(batches):
                    if stop(number):
                        raise KeyboardInterrupt
                    yield batch
                    bar.show(number + 1)
        finally:
            bar.close()

    return with_bar
