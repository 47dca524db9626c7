"""evaluate.py's work: open a run, score a split, print and write the result."""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.data.batches.windows import Windows, check_windows
from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.load import load
from adaptive_jax.devices import hosts
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.evaluation.runs import open_run
from adaptive_jax.evaluation.scoring import METHODS, summary
from adaptive_jax.evaluation.unseen import describe_words
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
        rows: rows of a batch, 0: as many as a device holds. Layout "streams" cuts the split into so many, and 0 means one, so
            that every token sees all that came before it.
    """

    split: str = "test"
    window: int = 0
    context: int = 0
    checkpoint: str = "best"
    data_path: str | None = None
    break_mode: str | None = None
    method: str = "plain"
    rows: int = 0


def evaluate(workdir: Path, request: Request) -> dict:
    """Scores a split with a trained model, prints the result and writes it to workdir/eval/.

    Returns:
        `summary(...)`, with `unseen`, see `Corpus` (None if not known), `split`, `step` and `settings`: the config,
        break_mode, window, context and checkpoint; of a run on streams, rows, too.

    Raises:
        InputError: no run or checkpoint, a corpus that is missing, a `window` longer than the split, and see `windows`; or
            the result, which has been printed by then, cannot be written.
    """
    config = read_config(workdir)
    batches, split = config["batches"], request.split
    window, break_mode = request.window or batches["sequence_length"], request.break_mode or batches["break_mode"]
    if batches["layout"] == "streams" and break_mode != "none":
        raise InputError(f"--break_mode={break_mode} is not for a run on streams, which reads the split as one text: leave it out")
    settings = Windows(window, request.context, break_mode, batches["layout"], rows=1)
    check_at_least(0, rows=request.rows)
    check_windows(settings)
    check_known(f"split={split!r}", split, SPLITS)
    check_known(f"method={request.method!r}", request.method, METHODS)
    vocabulary = read_words(workdir)
    corpus = load(_data(workdir, config, request), vocabulary=vocabulary, splits=(split,))
    ids = corpus.ids[split]
    if request.window > len(ids):
        raise InputError(f"window={window} is longer than the {split} split, {len(ids)} tokens: give that or less")
    words = describe_words(corpus, split)

    run = open_run(workdir, request.checkpoint, vocabulary)
    streams = batches["layout"] == "streams"
    rows = request.rows or (1 if streams else max(1, config["tokens_per_device"] // window) * run.mesh.size)
    settings = settings._replace(rows=rows)
    nll = METHODS[request.method](run, ids, settings, _progress)
    asked = {key: value for key, value in request._asdict().items() if key != "rows"}
    result = summary(nll, ids, vocabulary) | {
        "unseen": corpus.unseen.get(split),
        "split": split,
        "step": run.step,
        "settings": asked | ({"rows": rows} if streams else {}) | {"break_mode": break_mode, "window": window, "config": config},
    }
    hosts.say(
        f"{split}: perplexity {result['perplexity']:.2f} ({result['nll']:.4f} nats a word) over {result['words']:,} "
        f"words, unigram perplexity {result['unigram_perplexity']:.2f}; {words}; step {run.step:,}, break_mode {break_mode}, "
        f"window {window}, " + (_context_of_rows(rows) if streams else f"context {request.context}")
    )
    _write(workdir / "eval" / f"{_name(result)}.json", result)
    return result


def _context_of_rows(rows):
    """What tokens of layout "streams" see."""
    if rows == 1:
        return "each token after all before it"
    return f"in {rows:,} rows, of which {rows - 1:,} begin without what came before (--rows=1 scores exactly)"


def _write(path, result):
    """After the result has been printed: it must not be lost where it cannot be written."""
    if hosts.first():
        try:
            write_json(path, result)
        except OSError as error:
            raise InputError(
                f"cannot write {path}: {error.strerror}; the result stands above. To have the file, make room or get permission "
                "to write there, then evaluate again"
            ) from error
    hosts.say(str(path))


def _name(result):
    """The name of a result's file: results of other text, or of text broken otherwise, do not replace those of the run's own."""
    settings = result["settings"]
    name = f"{result['split']}-{settings['window']}-{settings['context']}-{result['step']}"
    if "rows" in settings and settings["rows"] > 1:
        name += f"-rows{settings['rows']}"
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
