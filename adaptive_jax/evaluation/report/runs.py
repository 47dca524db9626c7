"""Runs as a report reads them: their scores, which evaluate.py keeps, and their logs."""

import contextlib
import dataclasses
import io
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.batches.layouts import scored_break_mode
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation import card
from adaptive_jax.evaluation.evaluate import Request, data_of, evaluate
from adaptive_jax.evaluation.report.frequency import Words, words_of
from adaptive_jax.evaluation.runs import Run
from adaptive_jax.evaluation.scoring import perplexity
from adaptive_jax.files import names_in
from adaptive_jax.workdir.checkpoints import Checkpoints
from adaptive_jax.workdir.identity import of_scores
from adaptive_jax.workdir.parameters import checkpoint_step, identity_of
from adaptive_jax.workdir.settings import is_exported


class RunReport(NamedTuple):
    """A run and what is known of it.

    Attributes:
        name: as the report calls it.
        ids: int32 `[tokens]` of the split.
        nll: float32 `[tokens]` in nats, NaN for tokens that are not scored.
        words: losses and frequencies of the words of the text.
        result: what evaluate.py says of these scores.
        others: its results of the same text and checkpoint with any window and context.
        log: the lines of metrics.jsonl.
        hours: of training until this checkpoint; None if unknown.
    """

    name: str
    workdir: Path
    config: dict
    vocabulary: Vocabulary
    ids: np.ndarray
    nll: np.ndarray
    words: Words
    result: dict
    others: list[dict]
    log: list[dict]
    hours: float | None

    def curve(self, split: str) -> list[tuple[int, float]]:
        """`(updates, loss)` in nats a word, as logged for "train" or "validation".

        Of an update that was logged twice, because the run was resumed, the later line counts.
        """
        key = f"{split}/nll"
        losses = {
            line["step"]: line[key] for line in self.log if isinstance(line.get(key), int | float)
        }
        return sorted((step, loss) for step, loss in losses.items() if math.isfinite(loss))

    @property
    def contexts(self) -> list[tuple[int, float, int]]:
        """`(context, perplexity, window)` of every result with the window of the report, except
        on streams.
        """
        if self.config["batches"]["layout"] == "streams":
            return []
        window = self.result["settings"]["window"]
        perplexities = {
            (each["settings"]["context"], each["perplexity"], each["settings"]["window"])
            for each in self.others
            if each["settings"]["window"] == window
        }
        return sorted(perplexities)

    def about(self) -> dict:
        """A line of the table of runs: layers, perplexities, size and speed; None if unknown."""
        config, result = self.config, self.result
        table, settings = config["output"]["table"]["name"], result["settings"]
        streams = config["batches"]["layout"] == "streams"
        speeds = [line.get("train/words_per_second") for line in self.log]
        speeds = sorted(speed for speed in speeds if speed)
        valid = dict(self.curve("validation")).get(result["step"])
        split = result["split"]
        paper = {each: card.published(self.workdir, each) for each in ("validation", split)}
        if paper[split] and not result["published"]:  # the scores are of another text
            paper = dict.fromkeys(paper)
        changed = next((found["changed"] for found in paper.values() if found), ())
        paper = {each: found and found["perplexity"] for each, found in paper.items()}
        return {
            "run": self.name,
            "input": config["input"]["name"],
            "body": config["body"]["name"],
            "output": config["output"]["name"] + (f", {table}" if table != "own" else ""),
            "reads": "stream"
            if streams
            else f"{settings['window']}, context {settings['context']}",
            "validation_perplexity": None if valid is None else perplexity(valid),
            "perplexity": result["perplexity"],
            "published_validation_perplexity": paper["validation"],
            "published_perplexity": paper[split],
            "changed_keys": ", ".join(changed) or None,
            "nll": result["nll"],
            "words": result["words"],
            "unknown": result["unknown"],
            "parameters": _parameters(self.workdir),
            "hours": self.hours,
            "words_per_second": speeds[len(speeds) // 2] if speeds else None,
            "updates": result["step"],
        }


def read_run(
    workdir: Path, name: str, request: Request, load_parameters: bool = False
) -> tuple[RunReport, Run | None]:
    """Reads a run, and scores it unless its `eval/` has the scores of this text, checkpoint,
    window and context.

    Returns:
        What is known of it, and the run itself, open, whose checkpoint training may have deleted
        since; None if there are scores and parameters were not asked for.

    Raises:
        InputError: no run or checkpoint there, no such text, or as `evaluate`.
    """
    saved = Run.of(workdir)
    config, vocabulary = saved.saved_config, saved.vocabulary
    streams = config["batches"]["layout"] == "streams"
    if streams and (request.rows or 1) == 1:  # a token sees all before it
        request = request._replace(context=0)
    data = data_of(workdir, config, request.data_path, request.split)
    ids = load(data, vocabulary=vocabulary, splits=(request.split,)).ids[request.split]
    asked = {
        "window": request.window or config["batches"]["sequence_length"],
        "context": request.context,
    }
    if streams:
        asked["rows"] = request.rows or 1

    def find(step, identity):
        scored = of_scores(step, identity, vocabulary, ids)
        return scored, _result(workdir, config, scored, asked, len(ids))

    run, step = None, checkpoint_step(workdir, request.checkpoint)
    scored, found = find(step, identity_of(workdir, step))
    if load_parameters or not found:
        run = dataclasses.replace(saved, checkpoint=request.checkpoint)
        step = run.step  # another one if training has replaced the checkpoint since
        scored, found = find(step, run.identity)
    hours = _hours(workdir, step)
    if not found:
        evaluate(workdir, request, run)
        found = _result(workdir, config, scored, asked, len(ids))
    result, nll = found
    words = words_of(ids, nll, vocabulary, config["data"], data)
    others = [each for each, _ in _results(workdir, config, scored)]
    log = _log(workdir / "metrics.jsonl")
    about = RunReport(
        name, workdir, config, vocabulary, ids, nll, words, result, others, log, hours
    )
    return about, run


def _result(workdir, config, scored, asked, tokens):
    """The result with the settings that are asked for, and the losses of so many tokens; or
    None.
    """
    for result, path in _results(workdir, config, scored):
        if asked.items() <= {key: result["settings"].get(key) for key in asked}.items():
            try:
                nll = np.load(io.BytesIO(path.read_bytes()))
            except (OSError, ValueError, EOFError):  # missing or damaged: scored anew
                continue
            if nll.shape == (tokens,):
                return result, nll
    return None


def _results(workdir, config, scored) -> list[tuple[dict, Path]]:
    """The plain results of a fingerprint, and where the losses of their tokens are."""
    results = []
    for name in sorted(names_in(workdir / "eval")):
        path = workdir / "eval" / name
        if path.suffix != ".json":
            continue
        try:
            result = json.loads(path.read_text())
            settings = result["settings"]
            usual = (
                settings["method"] == "plain"
                and settings["break_mode"] == scored_break_mode(config)
                and not {"vocabulary", "share"} & settings.keys()
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if usual and result.get("scored") == scored:
            results.append((result, path.with_suffix(".npy")))
    return results


def check_comparable(runs: Sequence[RunReport]) -> None:
    """Raises InputError unless all runs score the same words; `<unk>` stands for any word."""
    first = runs[0].words.hashes
    for run in runs[1:]:
        other = run.words.hashes
        if len(first) != len(other):
            differ = f"of {len(first):,} and {len(other):,} words"
        elif (wrong := (first != other) & (first > 0) & (other > 0)).any():
            differ = f"which differ at word {np.argmax(wrong) + 1:,}"
        else:
            continue
        raise InputError(
            f"{runs[0].workdir} and {run.workdir} score different texts, {differ}: pass"
            " --data_path=DIR to score one text, or make a report for each"
        )


def _log(path) -> list[dict]:
    """The lines of metrics.jsonl; one that is still being written is left out."""
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and "step" in value:
            records.append(value)
    return records


def _hours(workdir, step):
    if is_exported(workdir):
        return None
    with contextlib.closing(Checkpoints(workdir, read_only=True)) as checkpoints:
        return checkpoints.hours(step) or None


def _parameters(workdir):
    try:
        return int(json.loads((workdir / "plan.json").read_text())["parameters"]["total"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
