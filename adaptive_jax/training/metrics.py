"""Metrics of a run: to its files, see writers.py, and to the terminal."""

import math
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from adaptive_jax.parallel import hosts
from adaptive_jax.parallel.progress import Bar, clock
from adaptive_jax.training.writers import open_writers

# How the terminal shows the metrics that people watch, the most important first; the files hold all
# of them.
SHOWN = {
    "nll": "loss {:.3f}",
    "perplexity": "perplexity {:,.1f}",
    "words_per_second": "{:,.0f} words/s",
    "skipped": "{:,.0f} skipped",
    "spikes": "{:,.0f} spikes",
    "learning_rate": "lr {:.3g}",
    "data_wait": "waiting for data {:.0%}",
}
# Below this the terminal leaves a metric out
LEAST = {"data_wait": 0.01, "skipped": 1, "spikes": 1}


def open_metrics(
    workdir: Path, first_step: int, config: Mapping, limit: float | None = None
) -> "Metrics | NoMetrics":
    """The metrics of a run on the first host, which writes and shows them; on the others, an object
    that does nothing.

    first_step: updates done when this process begins.
    limit: seconds to the end of the run, if not its updates but its hours end it.

    Raises:
        InputError: as `open_writers`.
    """
    return Metrics(workdir, first_step, config, limit) if hosts.first() else NoMetrics()


class NoMetrics:
    """Stands for `Metrics` on all hosts but the first."""

    def advance(self, step: int) -> None:
        """Does nothing."""

    def write(self, step: int, group: str, metrics: Mapping[str, float]) -> None:
        """Does nothing."""

    def finish(self, step: int, reason: str) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Metrics:
    """Writes metrics and shows progress: a bar on a terminal, lines elsewhere.

    A run that is resumed drops what was written after the step it resumes from, so every step
    occurs once.
    """

    def __init__(self, workdir: Path, first_step: int, config: Mapping, limit: float | None = None):
        self.workdir, self.first_step, self.steps = workdir, first_step, config["steps"]
        self.start = time.perf_counter()
        self.best = math.inf, math.inf, 0  # validation nll, perplexity, step
        before, self.writers = open_writers(workdir, first_step, config)
        # A run that is resumed twice from one checkpoint would repeat an evaluation that was left
        # out before it.
        self.written = {
            (line["step"], *{key.split("/")[0] for key in line if key != "step"}) for line in before
        }
        for line in before:
            self._remember(line["step"], line)
        self.bar = Bar(self.steps, first_step, ["starting"], limit=limit)

    def advance(self, step: int) -> None:
        """Moves the bar to `step` updates done."""
        self.bar.show(step)

    def write(self, step: int, group: str, metrics: Mapping[str, float]) -> None:
        """Records the metrics of `group` ("train" or "validation") after `step` updates, unless
        they stand there already.
        """
        if (step, group) in self.written:
            return
        named = {f"{group}/{name}": value for name, value in metrics.items()}
        for writer in self.writers:
            writer.write(step, named)
        self._remember(step, named)
        parts = [
            form.format(metrics[name])
            for name, form in SHOWN.items()
            if name in metrics and not metrics[name] < LEAST.get(name, -math.inf)
        ]
        if group == "train" and self.bar.shown:
            self.bar.show(parts=parts)
        else:
            self.bar.say(f"step {step:,}/{self.steps:,}  {group}  {'  '.join(parts)}")

    def _remember(self, step, named):
        nll, perplexity = named.get("validation/nll"), named.get("validation/perplexity")
        if nll is not None and nll < self.best[0]:
            self.best = nll, math.inf if perplexity is None else perplexity, step

    def finish(self, step: int, reason: str) -> None:
        """Ends the bar and prints how the run ended after `step` updates: its time, its best
        evaluation, what to type next.

        reason: the first word of the line: "finished", "stopped early".
        """
        self.bar.close()
        done, lasted = step - self.first_step, clock(time.perf_counter() - self.start)
        took = (
            f" in {lasted}"
            if not self.first_step
            else f", the last {done:,} in {lasted}"
            if done
            else ""
        )
        _, perplexity, at = self.best
        best = f"; best validation perplexity {perplexity:,.2f} at update {at:,}" if at else ""
        print(f"{reason}: {step:,} updates{took}{best}")
        print(
            f"evaluate:  python evaluate.py --workdir={shlex.quote(str(self.workdir))}"
            " --split=test",
            flush=True,
        )

    def close(self) -> None:
        """Ends the bar and closes the files."""
        self.bar.close()
        for writer in self.writers:
            writer.close()
