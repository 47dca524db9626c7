"""Means over the updates between two log lines, and the check that a run has not diverged."""

import math
import time

import jax

from adaptive_jax.devices import accelerators, sharding
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.scoring import perplexity


def check_finite(step: int, **metrics: float) -> None:
    """Stops a run that has diverged, before anything of it is saved.

    Raises:
        InputError: with the step, the metrics and the cure.
    """
    if not all(map(math.isfinite, metrics.values())):
        shown = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in metrics.items())
        raise InputError(
            f"update {step:,} gives {shown}: lower optimizer.learning_rate or lengthen schedule.warmup_steps, and train in a "
            "new --workdir; earlier checkpoints are intact"
        )


class Interval:
    """Means over the updates since the last log line. `work` is FLOPs a token."""

    def __init__(self, work: float):
        self.start, self.work = time.perf_counter(), work
        self.nll, self.words, self.waited, self.tokens, self.updates = 0.0, 0, 0.0, 0.0, 0
        self.last = {}

    def add(self, step: int, metrics: dict, words: int) -> None:
        """Adds an update's metrics and the words of the text that this host's rows of it end."""
        check_finite(step, loss=float(metrics["loss"]), gradient_norm=float(metrics["gradient_norm"]))
        self.nll += float(metrics["nll"]) * float(metrics["tokens"])
        self.tokens += float(metrics["tokens"])
        self.updates += 1
        self.words += words
        self.last = metrics

    def close(self) -> dict[str, float]:
        """The metrics of the interval; the next one starts."""
        seconds = time.perf_counter() - self.start
        words = sharding.sum_over_hosts(self.words)
        nll = self.nll / words if words else math.inf  # one word may be longer than a batch
        metrics = {
            "nll": nll,
            "perplexity": perplexity(nll),
            "words_per_second": words / seconds,
            "step_seconds": seconds / self.updates,
            "data_wait": self.waited / seconds,
            "learning_rate": float(self.last["learning_rate"]),
            "gradient_norm": float(self.last["gradient_norm"]),
        }
        kind = jax.devices()[0].device_kind
        utilisation = accelerators.utilisation(self.work * self.tokens, seconds, jax.device_count(), kind)
        self.__init__(self.work)
        return metrics if utilisation is None else metrics | {"utilisation": utilisation}
