"""Numbers of a run: to TensorBoard, to metrics.jsonl, and to the terminal."""

import json
import math
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adaptive_jax.devices import hosts
from adaptive_jax.files import replacing

# How the numbers that people watch are shown; the files hold all of them.
SHOWN = {
    "nll": "loss {:.3f}",
    "perplexity": "perplexity {:,.1f}",
    "words_per_second": "{:,.0f} words/s",
    "learning_rate": "lr {:.3g}",
    "data_wait": "waiting for data {:.0%}",
}
LEAST = {"data_wait": 0.01}  # below which a number is nothing to look at


def perplexity(nll: float) -> float:
    """e^nll per word, infinite where that overflows."""
    return math.exp(nll) if nll < 700 else math.inf


def open_metrics(workdir: Path, first_step: int, steps: int) -> "Metrics | Unwritten":
    """The metrics of a run, which one host writes and shows; what the others are told goes nowhere."""
    return Metrics(workdir, first_step, steps) if hosts.first() else Unwritten()


class Unwritten:
    """What stands for `Metrics` on all hosts but the first."""

    def advance(self, step: int) -> None:
        """Does nothing."""

    def write(self, step: int, group: str, numbers: dict[str, float]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Metrics:
    """Writes what is measured at a step, and shows progress: a bar on a terminal, lines elsewhere.

    A run that is continued drops what was written after the step it continues from, so every step stands once.
    """

    def __init__(self, workdir: Path, first_step: int, steps: int):
        # Here, because it imports torch where there is one, and only the host that writes should wait for that.
        from tensorboardX import SummaryWriter

        path = workdir / "metrics.jsonl"
        continued = path.exists()
        kept = _lines_until(path, first_step) if continued else []
        with replacing(path) as file:
            file.write("".join(kept).encode())
        self.file = path.open("a")
        # A killed run may have left TensorBoard without its last numbers: metrics.jsonl has them, so they are told again.
        self.board = SummaryWriter(str(workdir), purge_step=1 if continued else None, flush_secs=5)
        for line in map(json.loads, kept):
            self._plot(line.pop("step"), line)
        self.steps = steps
        console = Console(stderr=True)
        self.bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("train", total=steps, completed=first_step, numbers="starting")
        self.bar.start()

    def advance(self, step: int) -> None:
        """Moves the bar to `step` updates done."""
        self.bar.update(self.task, completed=step)

    def write(self, step: int, group: str, numbers: dict[str, float]) -> None:
        """Records `numbers` of `group` ("train" or "validation") after `step` updates."""
        named = {f"{group}/{name}": value for name, value in numbers.items()}
        self.file.write(json.dumps({"step": step} | named) + "\n")
        self.file.flush()
        self._plot(step, named)
        text = "  ".join(SHOWN[name].format(value) for name, value in numbers.items()
                         if name in SHOWN and value >= LEAST.get(name, -math.inf))  # fmt: skip
        line = f"step {step:,}/{self.steps:,}  {group}  {text}"
        if self.bar.disable:
            print(line, flush=True)
        elif group == "train":
            self.bar.update(self.task, numbers=text)
        else:
            self.bar.console.print(line, highlight=False)

    def _plot(self, step, named):
        for name, value in named.items():
            self.board.add_scalar(name, value, step)

    def close(self) -> None:
        """Ends the bar and the files."""
        self.bar.stop()
        self.board.close()
        self.file.close()


def _lines_until(path, step):
    """The whole lines of a metrics.jsonl that report no later step."""
    return [
        line
        for line in path.read_text().splitlines(keepends=True)
        if line.endswith("\n") and json.loads(line)["step"] <= step
    ]
