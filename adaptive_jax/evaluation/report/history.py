"""What a run has logged: curves of training, and results of evaluate.py."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.files import names_in
from adaptive_jax.workdir.checkpoints import Checkpoints
from adaptive_jax.workdir.exported import is_exported


class Curves(NamedTuple):
    """Losses in nats a word by update: lists of (updates, loss)."""

    train: list[tuple[int, float]]
    validation: list[tuple[int, float]]


class Context(NamedTuple):
    """A perplexity with so many tokens of context, of windows of so many tokens."""

    window: int
    context: int
    perplexity: float


def curves(workdir: Path) -> Curves:
    """The losses that training logged; empty for a run that logged none, such as one converted
    from elsewhere.
    """
    logged = list(_lines(workdir / "metrics.jsonl"))
    return Curves(*(_curve(logged, key) for key in ("train/nll", "validation/nll")))


def _curve(logged, key):
    # A run that was resumed may have logged an update twice: the later line is that of the
    # parameters.
    found = {each["step"]: each[key] for each in logged if isinstance(each.get(key), int | float)}
    return sorted((step, loss) for step, loss in found.items() if math.isfinite(loss))


def _lines(path):
    """The JSON objects of a log; one that is being written at its end is left out."""
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and isinstance(found.get("step"), int):
            yield found


def hours(workdir: Path, step: int) -> float | None:
    """Hours of training until an update; None if the run does not say, as an exported model
    does not.
    """
    if is_exported(workdir):
        return None
    checkpoints = Checkpoints(workdir, read_only=True)
    found = checkpoints.hours(step)
    checkpoints.close()
    return found or None


def speed(workdir: Path) -> float | None:
    """Median words a second of training; None if the run did not log it."""
    speeds = [
        each["train/words_per_second"]
        for each in _lines(workdir / "metrics.jsonl")
        if each.get("train/words_per_second")
    ]
    return sorted(speeds)[len(speeds) // 2] if speeds else None


def parameters(workdir: Path) -> int | None:
    """Parameters of the model; None if the run does not say."""
    try:
        return int(json.loads((workdir / "plan.json").read_text())["parameters"]["total"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def contexts(workdir: Path, split: str, step: int) -> list[Context]:
    """The perplexities that evaluate.py found with the plain model for a split and a
    checkpoint, by context.
    """
    found = {each for each in map(_context, _results(workdir, split, step)) if each}
    return sorted(found, key=lambda each: (each.context, each.window))


def _results(workdir, split, step) -> Iterator[dict]:
    for name in sorted(names_in(workdir / "eval")):
        if not name.endswith(".json"):
            continue
        try:
            result = json.loads((workdir / "eval" / name).read_text())
        except (OSError, ValueError):
            continue
        if isinstance(result, dict) and (result.get("split"), result.get("step")) == (split, step):
            yield result


def _context(result):
    """The context and perplexity of a result on the run's own text and words; None of others."""
    try:
        settings = result["settings"]
        own = (
            settings["method"] == "plain"
            and settings["data_path"] is None
            and not {"vocabulary", "share"} & settings.keys()
        )
        usual = (
            settings["break_mode"] == settings["config"]["batches"]["break_mode"]
            and settings.get("rows", 1) == 1
        )
        return (
            Context(settings["window"], settings["context"], float(result["perplexity"]))
            if own and usual
            else None
        )
    except (KeyError, TypeError, ValueError):
        return None
