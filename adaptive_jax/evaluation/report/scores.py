"""Scores of every token of a split, kept in the eval/ of the run that they are of."""

import functools
import hashlib
import io
import logging
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches.windows import Windows, check_windows
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.runs import Run, SavedRun
from adaptive_jax.evaluation.scoring import plain
from adaptive_jax.files import replacing
from adaptive_jax.parallel.progress import Bar
from adaptive_jax.planning.plan import rows_to_score
from adaptive_jax.workdir.parameters import checkpoint_step

logger = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """What to score, as evaluate.py takes it.

    window: 0 is the sequence length of the run. rows: 0 is one for streams, else as many as a
    device holds. data_path: a directory with the split, instead of the corpus of the run.
    """

    split: str = "test"
    window: int = 0
    context: int = 0
    checkpoint: str = "best"
    data_path: str | None = None
    rows: int = 0


class Subject(NamedTuple):
    """A run of the report and the text that it is scored on.

    Attributes:
        name: as the report calls it.
        ids: int32 `[tokens]` of the split.
        own_text: whether the split is that of the run's own corpus.
        windows: how the split is cut; `rows` is 0 where the devices decide.
        step: updates of the checkpoint.
        digest: hexadecimal digits that change with parameters, text and windows.
        open: opens the run with its parameters; they stay until `open.cache_clear()`.
    """

    name: str
    workdir: Path
    config: dict
    vocabulary: Vocabulary
    ids: np.ndarray
    own_text: bool
    windows: Windows
    step: int
    digest: str
    open: Callable[[], Run]


def subject(workdir: Path, name: str, wanted: Wanted) -> Subject:
    """Reads all of a run but its parameters, and its text.

    Raises:
        InputError: no run or checkpoint there, no such split, or settings that do not fit.
    """
    saved = SavedRun.read(workdir)
    config, vocabulary = saved.config, saved.vocabulary
    batches = config["batches"]
    rows = wanted.rows or (1 if batches["layout"] == "streams" else 0)
    window = wanted.window or batches["sequence_length"]
    windows = Windows(window, wanted.context, batches["break_mode"], batches["layout"], rows)
    check_windows(windows._replace(rows=max(1, rows)))
    data = config["data"] | ({} if wanted.data_path is None else {"path": wanted.data_path})
    if data["corpus"] == "text_files" and not data["path"]:
        raise InputError(
            f"{workdir} names no text: give --data_path=DIR, a directory with {wanted.split}.txt"
        )
    ids = load(data, vocabulary=vocabulary, splits=(wanted.split,)).ids[wanted.split]
    if window > len(ids) and wanted.window:
        raise InputError(
            f"window={window} is longer than the {wanted.split} split, {len(ids)} tokens: give that"
            " or less"
        )
    step = checkpoint_step(workdir, wanted.checkpoint)
    digest = hashlib.sha256(repr((windows, vocabulary.digest, _identity(workdir, step))).encode())
    digest.update(np.ascontiguousarray(ids[:]))
    opened = functools.cache(lambda: saved.load(str(step)))
    return Subject(
        name,
        workdir,
        config,
        vocabulary,
        ids,
        wanted.data_path is None,
        windows,
        step,
        digest.hexdigest()[:16],
        opened,
    )


def check_same_text(runs: Sequence[Subject]) -> None:
    """Raises InputError unless all runs score the same words, as their number and the places of
    `<eos>` tell.
    """
    texts = []
    for run in runs:
        ids = np.asarray(run.ids)
        texts.append(ids[run.vocabulary.ends[ids]] == run.vocabulary.eos)
    for run, text in zip(runs, texts, strict=True):
        if not np.array_equal(texts[0], text):
            raise InputError(
                f"{runs[0].workdir} and {run.workdir} score other texts, of {len(texts[0]):,} and"
                f" {len(text):,} words: give --data_path=DIR to score one text, or make a report"
                " for each"
            )


def scores_of(run: Subject) -> np.ndarray:
    """Negative log-likelihoods of the tokens, float32 `[tokens]` in nats, NaN where none counts:
    kept ones, or computed now.

    Raises:
        InputError: some are infinite.
    """
    nll = kept(run, "scores", lambda: {"nll": _scored(run)})["nll"]
    if wrong := int(np.isinf(nll).sum()):
        raise InputError(
            f"{run.workdir} gives {wrong:,} of {len(nll):,} tokens no finite score: give a run that"
            " has not diverged"
        )
    return nll


def kept(
    run: Subject, what: str, make: Callable[[], dict[str, np.ndarray]]
) -> dict[str, np.ndarray]:
    """The arrays that `make()` returns, of an earlier call if the run's `eval/` has them."""
    path = run.workdir / "eval" / f"{what}-{run.digest}.npz"
    try:
        with np.load(io.BytesIO(path.read_bytes())) as found:
            return dict(found)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        logger.warning("%s cannot be read (%s) and is made anew", path, type(error).__name__)
    made = make()
    try:
        with replacing(path) as file:
            np.savez(file, **made)
    except OSError as error:
        logger.warning("cannot keep %s: %s; the next report scores again", path, error.strerror)
    return made


def with_rows(run: Subject) -> Windows:
    """The windows of a run, with as many rows as its devices hold."""
    rows = rows_to_score(run.config, run.windows.window) * run.open().mesh.size
    return run.windows._replace(rows=run.windows.rows or rows)


def _scored(run):
    return plain(
        run.open(), run.ids, with_rows(run), functools.partial(shown, what=f"scoring {run.name}")
    )


def shown(batches: Iterable, count: int, what: str) -> Iterator:
    """The batches, with a bar that shows how far they are."""
    bar = Bar(count, 0, [what])
    try:
        for number, batch in enumerate(batches):
            yield batch
            bar.show(number + 1)
    finally:
        bar.close()


def _identity(workdir, step):
    """Bytes that change when another training writes a checkpoint of the same step, or another
    model is exported.
    """
    checkpoint = workdir / "checkpoints" / str(step)
    files = (
        checkpoint / "checksums.sha256",
        checkpoint / "_CHECKPOINT_METADATA",
        workdir / "model.sha256",
    )
    return [path.read_bytes() for path in files if path.exists()]
