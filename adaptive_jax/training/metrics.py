"""Metrics of a run: to TensorBoard, to metrics.jsonl, and to the terminal."""

import json
import math
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adaptive_jax.devices import hosts
from adaptive_jax.files import replacing
from adaptive_jax.workdir.settings import to_json

# How the terminal shows the metrics that people watch; the files hold all of them.
SHOWN = {
    "nll": "loss {:.3f}",
    "perplexity": "perplexity {:,.1f}",
    "words_per_second": "{:,.0f} words/s",
    "learning_rate": "lr {:.3g}",
    "data_wait": "waiting for data {:.0%}",
}
LEAST = {"data_wait": 0.01}  # below this the terminal leaves a metric out


def open_metrics(workdir: Path, first_step: int, steps: int) -> "Metrics | NoMetrics":
    """The metrics of a run on the first host, which writes and shows them; on the others, an object that does nothing."""
    return Metrics(workdir, first_step, steps) if hosts.first() else NoMetrics()


class NoMetrics:
    """Stands for `Metrics` on all hosts but the first."""

    def advance(self, step: int) -> None:
        """Does nothing."""

    def write(self, step: int, group: str, metrics: dict[str, float]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Metrics:
    """Writes metrics and shows progress: a bar on a terminal, lines elsewhere.

    A run that is resumed drops what was written after the step it resumes from, so every step occurs once.
    """

    def __init__(self, workdir: Path, first_step: int, steps: int):
        # Here, because it imports torch where there is one, and only the host that writes should wait for that.
        from tensorboardX import SummaryWriter

        path = workdir / "metrics.jsonl"
        resumed = path.exists()
        lines = _lines_until(path, first_step) if resumed else []
        with replacing(path) as file:
            file.write("".join(lines).encode())
        self.file = path.open("a")
        # A killed run may have left TensorBoard without its last metrics: metrics.jsonl has them, so write them again.
        self.board = SummaryWriter(str(workdir), purge_step=1 if resumed else None, flush_secs=5)
        for line in map(json.loads, lines):
            self._plot(line.pop("step"), line)
        # A run that is resumed twice from one checkpoint would repeat an evaluation that was left out before it.
        self.written = {(line["step"], *{key.split("/")[0] for key in line if key != "step"}) for line in map(json.loads, lines)}
        self.steps = steps
        console = Console(stderr=True)
        self.bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[metrics]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("train", total=steps, completed=first_step, metrics="starting")
        self.bar.start()

    def advance(self, step: int) -> None:
        """Moves the bar to `step` updates done."""
        self.bar.update(self.task, completed=step)

    def write(self, step: int, group: str, metrics: dict[str, float]) -> None:
        """Records the metrics of `group` ("train" or "validation") after `step` updates, unless they stand there already."""
        if (step, group) in self.written:
            return
        named = {f"{group}/{name}": value for name, value in metrics.items()}
        self.file.write(to_json({"step": step} | named) + "\n")
        self.file.flush()
        self._plot(step, named)
        text = "  ".join(SHOWN[name].format(value) for name, value in metrics.items()
                         if name in SHOWN and value >= LEAST.get(name, -math.inf))  # fmt: skip
        line = f"step {step:,}/{self.steps:,}  {group}  {text}"
        if self.bar.disable:
            print(line, flush=True)
        elif group == "train":
            self.bar.update(self.task, metrics=text)
        else:
            self.bar.console.print(line, highlight=False)

    def _plot(self, step, named):
        for name, value in named.items():
            if value is not None:  # metrics.jsonl writes an infinity as null
                self.board.add_scalar(name, value, step)

    def close(self) -> None:
        """Ends the bar and closes the files."""
        self.bar.stop()
        self.board.close()
        self.file.close()


def _lines_until(path, step):
    """The complete lines of a metrics.jsonl that report no later step."""
    return [
        line
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n") and json.loads(line)["step"] <= step
    ]
