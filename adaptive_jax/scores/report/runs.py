"""Runs in a report: results written by evaluate.py, and logs of training."""

import contextlib
import dataclasses
import functools
import io
import json
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from adaptive_jax.config.keys import allow_flag
from adaptive_jax.data.corpora.cached import checksum
from adaptive_jax.errors import InputError
from adaptive_jax.files import names_in
from adaptive_jax.runs.checkpoints import recorded
from adaptive_jax.scores import card
from adaptive_jax.scores.frequency import Words
from adaptive_jax.scores.scores import perplexity

# Settings that may differ between results of one curve over contexts
VARYING = "context", "checkpoint", "data_path", "config"


@dataclasses.dataclass(frozen=True)
class RunReport:
    """A run with one of its results, whose files are read on first use.

    Attributes:
        name: name in the report.
        path: path of the result's JSON.
        result: content of the JSON.
    """

    name: str
    path: Path
    result: dict

    @property
    def workdir(self) -> Path:
        """Directory of the run."""
        return self.path.parent.parent

    @property
    def config(self) -> dict:
        """Config that the run was started with."""
        return self.result["settings"]["config"]

    @functools.cached_property
    def nll(self) -> np.ndarray:
        """The .npy file: losses `[tokens]` in nats, NaN for tokens that are not scored."""
        return self._load(".npy")

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """The .npz file: the fields of `Words`, the vocabulary's `new_words` and, with
        --sample_words, the results of `passage_stats` as `sample_*`.
        """
        return self._load(".npz")

    @functools.cached_property
    def words(self) -> Words:
        """Words of the text."""
        return Words(*map(self.arrays.get, Words._fields))

    @functools.cached_property
    def log(self) -> list[dict]:
        """The lines of metrics.jsonl, without one that is still being written."""
        path, records = self.workdir / "metrics.jsonl", []
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict) and "step" in record]

    def _load(self, suffix):
        try:
            content = np.load(io.BytesIO(self.path.with_suffix(suffix).read_bytes()))
            if suffix == ".npz":  # an archive, with checksums of its own
                return dict(content)
            if self.result.get("checksum") not in (None, checksum(content)):
                raise ValueError(f"the checksum of {suffix} differs")
            return content
        except (OSError, ValueError, EOFError, zipfile.BadZipFile):
            command = _command(self.workdir, self.result["settings"])
            raise InputError(
                f"{self.path} lacks its {suffix}, or it is damaged: run evaluate again: {command}"
            ) from None

    def curve(self, split: str) -> list[tuple[int, float]]:
        """`(updates, loss)` in nats a word, as logged for "train" or "validation".

        If an update was logged twice, because the run was resumed, the later line counts.
        """
        key = f"{split}/nll"
        losses = {
            line["step"]: line[key] for line in self.log if isinstance(line.get(key), int | float)
        }
        return sorted((step, loss) for step, loss in losses.items() if math.isfinite(loss))

    @functools.cached_property
    def contexts(self) -> list[tuple[int, float, int]]:
        """`(context, perplexity, window)` of the run's results that differ only in the context."""

        def curve(result):
            settings = result["settings"].items()
            return result["scored"], {k: v for k, v in settings if k not in VARYING}

        return sorted(
            (result["settings"]["context"], result["perplexity"], result["settings"]["window"])
            for _, result in _results(self.path.parent)
            if curve(result) == curve(self.result) and result["perplexity"] is not None
        )

    def about(self) -> dict:
        """A row of the table of runs: layers, perplexities, size and speed; None if unknown."""
        config, result = self.config, self.result
        table, settings = config["output"]["table"]["name"], result["settings"]
        streams = config["batches"]["layout"] == "streams"
        speeds = [line.get("train/words_per_second") for line in self.log]
        speeds = sorted(speed for speed in speeds if speed)
        valid = dict(self.curve("validation")).get(result["step"])
        saved = self.workdir / "checkpoints" / str(result["step"])
        split = result["split"]
        published = {name: card.published(self.workdir, name) for name in ("validation", split)}
        if published[split] and not result["published"]:  # another text was scored
            published = dict.fromkeys(published)
        changed = next((record["changed"] for record in published.values() if record), ())
        paper_perplexity = {
            name: record and record["perplexity"] for name, record in published.items()
        }
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
            "bits_per_character": result["bits_per_character"],
            "published_validation_perplexity": paper_perplexity["validation"],
            "published_perplexity": paper_perplexity[split],
            "changed_keys": ", ".join(changed) or None,
            "nll": result["nll"],
            "words": result["words"],
            "unknown": result["unknown"],
            "parameters": _parameters(self.workdir),
            "hours": recorded(saved, "hours") or None,
            "words_per_second": speeds[len(speeds) // 2] if speeds else None,
            "updates": result["step"],
        }


def read_runs(places: Sequence[Path], names: Sequence[str]) -> list[RunReport]:
    """Reads one result per place, all of the same text: a JSON file of evaluate.py, or the newest
    result of a run's model alone.

    Raises:
        InputError: no result, or no text that all have scored; `<unk>` equals any word.
    """
    runs = list(map(_results_of, places, names))
    for first in runs[0]:
        of_one_text = [
            next((result for result in results if not difference(first.words, result.words)), None)
            for results in runs
        ]
        if None not in of_one_text:
            return of_one_text
    first = runs[0][0]
    other = next(newest for newest, *_ in runs if difference(first.words, newest.words))
    raise InputError(
        f"{first.path} and {other.path} score different texts,"
        f" {difference(first.words, other.words)}: evaluate both on one text by --data_path=DIR, or"
        " make a report for each"
    )


def difference(words: Words, other_words: Words) -> str:
    """Describes the first difference of two texts; "" if there is none. `<unk>` equals any word."""
    first, other = words.hashes, other_words.hashes
    if len(first) != len(other):
        return f"of {len(first):,} and {len(other):,} words"
    differs = (first != other) & (first > 0) & (other > 0)
    return f"which differ at word {np.argmax(differs) + 1:,}" if differs.any() else ""


def _results_of(place, name):
    """The result in a JSON file, or a run's results of the model alone, newest first."""
    if place.suffix == ".json":
        try:
            result = json.loads(place.read_text())
            result["settings"]["config"]
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(f"{place} must be a result that evaluate.py wrote") from None
        return [RunReport(name, place, result)]
    results = [
        RunReport(name, path, result)
        for path, result in _results(place / "eval")
        if result["settings"]["method"] == "plain"
        and not {"vocabulary", "share"} & result["settings"].keys()
    ]
    if not results:
        command = _command(place, {"split": "test"})
        raise InputError(f"{place} has no result for a report: run evaluate first: {command}")
    return sorted(results, key=lambda run: run.result["date"], reverse=True)


def _results(folder):
    """The results in a folder with their paths, without those of versions that stored no words.

    Raises InputError: one is damaged.
    """
    results = {}
    for path in sorted(folder / name for name in names_in(folder) if name.endswith(".json")):
        try:
            results[path] = json.loads(path.read_text())
        except ValueError as error:
            raise InputError(f"{path} is damaged ({error}): remove it, or evaluate again") from None
    return [(path, result) for path, result in results.items() if "date" in result]


def _command(workdir, settings):
    """The command that evaluates a run with these settings."""
    keys = "split", "window", "context", "data_path"
    flags = [f"--{key}={settings[key]}" for key in keys if settings.get(key)]
    place = f"--workdir={workdir}{allow_flag(settings.get('config', {}))}"
    return " ".join(["python evaluate.py", place, *flags])


def _parameters(workdir):
    """The number of parameters in plan.json; None if unknown."""
    try:
        return json.loads((workdir / "plan.json").read_text())["parameters"]["total"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
