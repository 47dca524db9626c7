"""Metrics of a run: means over the updates between two log lines, shown on the terminal and
written to the run's files, see writers.py.
"""

import math
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from adaptive_jax.config.keys import allow_flag
from adaptive_jax.files import naming
from adaptive_jax.parallel import accelerators, hosts, sharding
from adaptive_jax.parallel.progress import Bar, clock
from adaptive_jax.scores.scores import perplexity, perplexity_text
from adaptive_jax.training.writers import open_writers, recorded

# How the terminal shows the metrics that people watch, the most important first; the files hold all
# of them.
SHOWN = {
    "nll": "loss {:.3f}",
    "perplexity": "perplexity {}",
    "bits_per_character": "{:.3f} bits a character",
    "token_nll": "{:.3f} nats a token",
    "words_per_second": "{:,.0f} {unit}s/s",
    "tokens_per_second": "{:,.0f} tokens/s",
    "skipped": "{:,.0f} skipped",
    "learning_rate": "lr {:.3g}",
    "data_wait": "waiting for data {:.0%}",
    "compile_seconds": "{:.0f} s of compiling before",
}
LONG_WORD = 20  # tokens; texts of longer words have no spaces, and losses are shown by token
OF_WORDS = "nll", "perplexity", "words_per_second"
# Below this the terminal leaves the metric out
SHOWN_FROM = {"data_wait": 0.01, "skipped": 1, "compile_seconds": 1}


class Interval:
    """Means over the updates since the last log line.

    Args:
        work: FLOPs a token.
        devices: that share an update.
    """

    def __init__(self, work: float, devices: int):
        self.start, self.work, self.devices, self.last = time.perf_counter(), work, devices, {}
        self.nll, self.tokens, self.words, self.waited = 0.0, 0.0, 0, 0.0
        self.updates, self.skipped, self.compiled = 0, 0, 0.0

    def add(self, metrics: Mapping, words: int) -> None:
        """Adds an update's metrics, see `make_update`, and the number of words of the text that end
        in this host's rows.
        """
        skipped = bool(metrics.get("skipped", False))
        if not skipped:
            self.nll += float(metrics["nll"]) * float(metrics["tokens"])
            self.tokens += float(metrics["tokens"])
            self.words += words
        self.updates += 1
        self.skipped += skipped
        self.last = metrics

    def leave_out(self, seconds: float) -> None:
        """Leaves out the seconds that a program took to compile, and counts them separately."""
        self.start += seconds
        self.compiled += seconds

    def close(self) -> dict[str, float]:
        """Ends the interval and returns its metrics."""
        seconds = time.perf_counter() - self.start
        words = sharding.sum_over_hosts(self.words)
        metrics = {}
        if words:  # one may be longer than a batch
            nll = self.nll / words
            metrics = {
                "nll": nll,
                "perplexity": perplexity(nll),
                "words_per_second": words / seconds,
            }
        if words * LONG_WORD < self.tokens:
            metrics["token_nll"] = self.nll / self.tokens
            metrics["tokens_per_second"] = self.tokens / seconds
        metrics |= {
            "step_seconds": seconds / self.updates,
            "data_wait": self.waited / seconds,
            "learning_rate": float(self.last["learning_rate"]),
            "gradient_norm": float(self.last["gradient_norm"]),
        }
        if "skipped" in self.last:
            metrics["skipped"] = self.skipped
        if self.compiled:
            metrics["compile_seconds"] = self.compiled
        work, kind = self.work * self.tokens, jax.devices()[0].device_kind
        utilisation = accelerators.utilisation(work, seconds, self.devices, kind)
        if utilisation is not None:
            metrics["utilisation"] = utilisation
        return metrics


class Metrics:
    """Writes metrics and shows progress: a bar on a terminal, lines elsewhere. Only the first host
    does; the others keep the validation losses.

    A resumed run drops what was written after the step from which it resumes, so every step occurs
    once.

    Args:
        first_step: updates done when this process begins.
        unit: what the losses are a mean over, "word" or "token".
        limit: seconds to the end of the run, if its hours end it and not its updates.

    Attributes:
        losses: the validation losses of the whole run so far, in nats a word, by step.

    Raises:
        InputError: as `recorded` and `open_writers`.
    """

    def __init__(
        self,
        workdir: Path,
        first_step: int,
        config: Mapping,
        unit: str = "word",
        limit: float | None = None,
    ):
        self.workdir, self.first_step, self.steps = workdir, first_step, config["steps"]
        self.unit, self.start, self.allow = unit, time.perf_counter(), allow_flag(config)
        earlier_lines = recorded(workdir, first_step)
        losses = ((line["step"], line.get("validation/nll")) for line in earlier_lines)
        self.losses = {step: nll for step, nll in losses if nll is not None}
        self.extra = {line["step"] for line in earlier_lines if "validation/extra" in line}
        # A run resumed twice from one checkpoint repeats the evaluation that was due there.
        self.written = {(line["step"], key.split("/")[0]) for line in earlier_lines for key in line}
        self.writers = open_writers(workdir, earlier_lines, config) if hosts.first() else []
        self.bar = Bar(self.steps, first_step, ["starting"], visible=hosts.first(), limit=limit)

    def write(self, step: int, group: str, metrics: Mapping[str, float]) -> None:
        """Records the metrics of `group` ("train" or "validation") after `step` updates, unless the
        file already has them.
        """
        if (step, group) in self.written:
            return
        if group == "validation" and math.isfinite(metrics["nll"]):
            self.losses[step] = metrics["nll"]
            self.extra |= {step} if "extra" in metrics else set()
        with naming(self.workdir):
            for writer in self.writers:
                writer.write(step, {f"{group}/{name}": value for name, value in metrics.items()})
        left_out = OF_WORDS if "token_nll" in metrics else ()
        texts = dict(metrics)
        if "perplexity" in texts:
            texts["perplexity"] = perplexity_text(texts["perplexity"], digits=1)
        parts = [
            form.format(texts[name], unit=self.unit)
            for name, form in SHOWN.items()
            if name in metrics
            and name not in left_out
            and not metrics[name] < SHOWN_FROM.get(name, -math.inf)
        ]
        if group == "train" and self.bar.visible:
            self.bar.show(parts=parts)
        elif hosts.first():
            self.bar.say(f"step {step:,}/{self.steps:,}  {group}  {'  '.join(parts)}")

    def finish(self, step: int, reason: str) -> None:
        """Ends the bar and prints how the run ended after `step` updates: its time, its best
        evaluation, what to type next.

        reason: the first words of the line: "finished", "stopped early".
        """
        self.bar.close()
        updates, seconds = step - self.first_step, clock(time.perf_counter() - self.start)
        took, best = "", ""
        if not self.first_step:
            took = f" in {seconds}"
        elif updates:
            took = f", the last {updates:,} in {seconds}"
        if self.losses:
            best_step = min(self.losses, key=self.losses.__getitem__)
            value = perplexity_text(perplexity(self.losses[best_step]))
            best = f"; best validation perplexity {value} at update {best_step:,}"
        hosts.log0(f"{reason}: {step:,} updates{took}{best}")
        run = f"--workdir={shlex.quote(str(self.workdir))}{self.allow}"
        hosts.log0(f"evaluate:  python -m adaptive_jax evaluate {run} --split=test")

    def close(self) -> None:
        """Ends the bar and closes the files."""
        self.bar.close()
        with naming(self.workdir):
            for writer in self.writers:
                writer.close()
