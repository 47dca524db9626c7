"""evaluate.py's work: open a run, score a split, print and write the result."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.corpora.load import load
from adaptive_jax.devices import hosts
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.runs import open_run
from adaptive_jax.evaluation.scoring import METHODS, summary
from adaptive_jax.progress import Bar
from adaptive_jax.workdir.settings import read_config, read_words, write_json


class Request(NamedTuple):
    """What to score.

    Attributes:
        split: "train", "validation" or "test".
        window, context: see `scores`; window 0 is the sequence length that the model was trained with.
        checkpoint: "best" by validation, "latest", or a step.
        data_path: a directory with the split as .txt, .txt.xz or .txt.gz, instead of the corpus in the run's config.
        break_mode: how the split is broken into examples, instead of as the run's config says.
        method: a name of `METHODS`.
    """

    split: str = "test"
    window: int = 0
    context: int = 0
    checkpoint: str = "best"
    data_path: str | None = None
    break_mode: str | None = None
    method: str = "plain"


def evaluate(workdir: Path, request: Request) -> dict:
    """Scores a split with a trained model, prints the result and writes it to workdir/eval/.

    Returns:
        `summary(...)`, with `split`, `step` and `settings`: the config, break_mode, window, context and checkpoint.

    Raises:
        InputError: no run or checkpoint, a corpus that is missing, and see `windows`.
    """
    config = read_config(workdir)
    batches = config["batches"]
    window, break_mode = request.window or batches["sequence_length"], request.break_mode or batches["break_mode"]
    vocabulary = read_words(workdir)
    data = _data(workdir, config, request)
    ids = load(data, vocabulary=vocabulary, splits=(request.split,)).ids[request.split]

    run = open_run(workdir, request.checkpoint, vocabulary)
    rows = max(1, config["tokens_per_device"] // window) * run.mesh.size
    settings = Windows(window, request.context, break_mode, batches["layout"], rows)
    nll = METHODS[request.method](run, ids, settings, _progress)
    result = summary(nll, ids, vocabulary) | {
        "split": request.split,
        "step": run.step,
        "settings": request._asdict() | {"break_mode": break_mode, "window": window, "config": config},
    }
    path = workdir / "eval" / f"{_name(result)}.json"
    if hosts.first():
        write_json(path, result)
    hosts.say(
        f"{request.split}: perplexity {result['perplexity']:.2f} ({result['nll']:.4f} nats a word) over {result['words']:,} "
        f"words, unigram perplexity {result['unigram_perplexity']:.2f}; step {run.step:,}, break_mode {break_mode}, "
        f"window {window}, context {request.context}\n{path}"
    )
    return result


def _name(result):
    """The name of a result's file: results of other text, or of text broken otherwise, do not replace those of the run's own."""
    settings = result["settings"]
    name = f"{result['split']}-{settings['window']}-{settings['context']}-{result['step']}"
    if settings["break_mode"] != settings["config"]["batches"]["break_mode"]:
        name += f"-{settings['break_mode']}"
    if settings["data_path"] is not None:
        name += "-" + hashlib.sha256(str(Path(settings["data_path"]).resolve()).encode()).hexdigest()[:8]
    return name


def _data(workdir, config, request):
    """The group `data` of a run's config, with another path if one is given."""
    data = config["data"] | ({} if request.data_path is None else {"path": request.data_path})
    if data["corpus"] == "text_files" and not data["path"]:
        raise InputError(f"{workdir} names no text: give --data_path=DIR, a directory with {request.split}.txt")
    return data


def _progress(batches: Iterable, count: int) -> Iterator:
    bar = Bar(count, 0, ["scoring"], shown=hosts.first())
    try:
        with hosts.stopping() as stop:
            for number, batch in enumerate(batches):
                if stop(number):
                    raise KeyboardInterrupt  # on all hosts
                yield batch
                bar.show(number + 1)
    finally:
        bar.close()
