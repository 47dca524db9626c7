"""Where the metrics of a run go: metrics.jsonl always, TensorBoard and Weights & Biases if the
config says so.

To add one, write a class with `write(step, metrics)` and `close()`, and a line in `open_writers`.
`write` gets metrics by name, in the order of their steps; a number that is not finite is unknown.
"""

import importlib.util
import io
import json
import logging
import math
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

from adaptive_jax.errors import InputError, one_line
from adaptive_jax.files import in_bucket, write_bytes
from adaptive_jax.runs.settings import as_json, to_json

NAME = "metrics.jsonl"
PROJECT = "adaptive_jax"  # in Weights & Biases
SECONDS = 5  # between two flushes of TensorBoard's file


def check(settings: Mapping) -> None:
    """Finds a missing package before training begins.

    settings: the group `metrics` of a config.

    Raises:
        InputError: Weights & Biases or TensorBoard is switched on and not installed.
    """
    for key, package in ("wandb", "wandb"), ("tensorboard", "tensorboardX"):
        spec = importlib.util.find_spec(package)
        if settings[key] and not (spec and spec.origin):  # a folder of that name has no origin
            raise InputError(
                f"metrics.{key}=True needs the package {package}: run `pip install {package}`, or"
                f" set --config.metrics.{key}=False"
            )


def recorded(workdir: Path, last_step: int) -> list[dict]:
    """The lines of a run's metrics.jsonl up to `last_step`: `{"step": 20, "train/nll": 6.1}`. Of
    a new run, whose `last_step` is 0, the list is empty; the file is still checked.

    Raises:
        InputError: the file is damaged.
    """
    path = workdir / NAME
    try:
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # A killed process may have left half a line.
        read = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line for line in read if line["step"] <= last_step]
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(
            f"{path} is damaged ({one_line(error)}): restore it, or move it away to go on"
            " without it"
        ) from None


def open_writers(workdir: Path, before: list[dict], config: Mapping) -> list:
    """The writers of a run whose metrics so far are `before`, see `recorded`. Later metrics are
    dropped, so that a resumed run writes every step once.

    Raises:
        InputError: Weights & Biases refuses to start.
    """
    settings = config["metrics"]
    resumed = (workdir / NAME).exists()
    writers = [JsonLines(workdir, before)]
    if settings["tensorboard"]:
        writers.append(TensorBoard(workdir, resumed, before, config))
    if settings["wandb"]:
        writers.append(WeightsAndBiases(workdir, config))
    return writers


class JsonLines:
    """metrics.jsonl, an object a line: `{"step": 20, "train/nll": 6.1}`. Numbers that are not
    finite are null.

    In a bucket, where nothing can be appended, the file is written whole after every evaluation, so
    before the checkpoint that follows, and at the end.
    """

    def __init__(self, workdir: Path, before: list[dict]):
        self.path = workdir / NAME
        lines = "".join(to_json(line) + "\n" for line in before).encode()
        write_bytes(self.path, lines)
        self.file = io.BytesIO() if in_bucket(workdir) else self.path.open("ab")
        if in_bucket(workdir):
            self.file.write(lines)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line."""
        self.file.write((to_json({"step": step} | dict(metrics)) + "\n").encode())
        self.file.flush()
        if "validation/nll" in metrics:
            self._upload()

    def close(self) -> None:
        """Closes the file."""
        self._upload()
        self.file.close()

    def _upload(self):
        if isinstance(self.file, io.BytesIO):
            write_bytes(self.path, self.file.getvalue())


class TensorBoard:
    """TensorBoard's event files in the workdir: curves of the metrics, and the config as text.

    tensorboardX's SummaryWriter writes in a thread, which a full disk ends; after that it would
    wait for the thread for ever. This one writes at once.

    resumed: whether an earlier process wrote there. It may have been killed before it wrote its
        last metrics to TensorBoard, so all of `before` replace what it wrote.
    """

    def __init__(self, workdir: Path, resumed: bool, before: list[dict], config: Mapping):
        # Imports torch where there is one, which takes seconds.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import text

        self.event, self.summary, self.flushed = Event, Summary, 0.0
        self.file = EventsWriter(f"{workdir}/events")
        if resumed:  # TensorBoard drops what earlier files have from this step on
            start = SessionLog(status=SessionLog.START)
            self.file.write_event(Event(wall_time=time.time(), step=1, session_log=start))
        # Four spaces are code in Markdown, which TensorBoard shows.
        lines = "".join(f"    {key}: {value}\n" for key, value in as_json(config).items())
        self.file.write_event(Event(wall_time=time.time(), summary=text("config", lines)))
        for line in before:
            self.write(line["step"], {key: value for key, value in line.items() if key != "step"})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a point to the curve of each metric that is finite."""
        points = [
            self.summary.Value(tag=name, simple_value=value)
            for name, value in _finite(metrics).items()
        ]
        summary = self.summary(value=points)
        self.file.write_event(self.event(wall_time=time.time(), step=step, summary=summary))
        if time.monotonic() - self.flushed > SECONDS:
            self.file.flush()
            self.flushed = time.monotonic()

    def close(self) -> None:
        """Writes pending points and closes the file."""
        self.file.close()


def _finite(metrics):
    return {
        name: value for name, value in metrics.items() if value is not None and math.isfinite(value)
    }


class WeightsAndBiases:
    """A run of Weights & Biases, named like the workdir, which keeps its id: a resumed run
    continues there.

    Without an account or network: WANDB_MODE=offline.
    """

    def __init__(self, workdir: Path, config: Mapping):
        import wandb

        file = workdir / "wandb" / "id"
        if not file.exists():
            write_bytes(file, uuid.uuid4().hex[:12].encode())
        logging.getLogger("wandb").setLevel(logging.ERROR)
        try:
            self.run = wandb.init(
                project=PROJECT,
                name=workdir.resolve().name,
                id=file.read_text(),
                resume="allow",
                config=json.loads(to_json(config)),
                dir=None if in_bucket(workdir) else str(workdir),  # None: ./wandb
                # It would take over stdout, and break the bar.
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            raise InputError(
                f"Weights & Biases does not start ({one_line(error)}): run `wandb login`, set"
                " WANDB_MODE=offline, or set --config.metrics.wandb=False"
            ) from error

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds a point to the curve of each metric that is finite."""
        self.run.log(_finite(metrics), step=step)

    def close(self) -> None:
        """Sends pending points and ends the run."""
        self.run.finish()
