"""Numbers of a run: to TensorBoard, to metrics.jsonl, and to the terminal."""

import json
import math
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter


def perplexity(nll: float) -> float:
    """e^nll per word, infinite where that overflows."""
    return math.exp(nll) if nll < 700 else math.inf


class Metrics:
    """Writes what is measured at a step, and shows progress: a bar on a terminal, lines elsewhere.

    A run that is continued drops what was written after the step it continues from, so every step stands once.
    """

    def __init__(self, workdir: Path, first_step: int, steps: int):
        self.path = workdir / "metrics.jsonl"
        kept = [line for line in self.path.read_text().splitlines(keepends=True)
                if line.endswith("\n") and json.loads(line)["step"] <= first_step] if self.path.exists() else []
        self.path.write_text("".join(kept))
        self.file = self.path.open("a")
        self.board = SummaryWriter(str(workdir), purge_step=first_step + 1 if first_step else None)
        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[numbers]}"), TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=True), console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("train", total=steps, completed=first_step, numbers="compiling …")
        self.bar.start()

    def advance(self, step: int) -> None:
        """Moves the bar to `step` updates done."""
        self.bar.update(self.task, completed=step)

    def write(self, step: int, group: str, numbers: dict[str, float]) -> None:
        """Records `numbers` of `group` ("train" or "validation") after `step` updates."""
        named = {f"{group}/{name}": value for name, value in numbers.items()}
        self.file.write(json.dumps({"step": step} | named) + "\n")
        self.file.flush()
        for name, value in named.items():
            self.board.add_scalar(name, value, step)
        text = "  ".join(f"{name.replace('_', ' ')} {_short(value)}" for name, value in numbers.items())
        if self.bar.disable:
            print(f"step {step:,}  {group}  {text}", flush=True)
        elif group == "train":
            self.bar.update(self.task, numbers=text)
        else:
            self.bar.console.print(f"step {step:,}  {group}  {text}", highlight=False)

    def close(self) -> None:
        """Ends the bar and the files."""
        self.bar.stop()
        self.board.close()
        self.file.close()
        sys.stdout.flush()


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
