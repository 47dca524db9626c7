"""Means over the updates between two log lines."""

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from adaptive_jax.evaluation.scoring import perplexity
from adaptive_jax.parallel import accelerators, sharding


class Interval:
    """Means over the updates since the last log line.

    Args:
        work: FLOPs a token.
        names: of the parameters, in the order of `gradient_squares`.
    """

    def __init__(self, work: float, names: Sequence[str] = ()):
        self.start, self.work, self.names = time.perf_counter(), work, names
        self.nll, self.words, self.waited, self.tokens, self.updates = 0.0, 0, 0.0, 0.0, 0
        self.counts, self.last = Counter(), {}

    def add(self, metrics: Mapping, words: int, counts: Mapping[str, int]) -> None:
        """Adds an update's metrics, the words of the text that this host's rows of it end, and
        counts to be summed by name.
        """
        if not counts.get("skipped"):
            self.nll += float(metrics["nll"]) * float(metrics["tokens"])
            self.tokens += float(metrics["tokens"])
            self.words += words
        self.updates += 1
        self.counts.update(counts)
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
            **self.counts,
        }
        if "change_squares" in self.last:
            for what in "gradient", "change":
                metrics |= norms_by_group(f"{what}_norm", self.names, self.last[f"{what}_squares"])
        kind = jax.devices()[0].device_kind
        utilisation = accelerators.utilisation(
            self.work * self.tokens, seconds, jax.device_count(), kind
        )
        self.__init__(self.work, self.names)
        return metrics if utilisation is None else metrics | {"utilisation": utilisation}


def norms_by_group(what: str, names: Sequence[str], squares: np.ndarray) -> dict[str, float]:
    """`{"gradient_norm/body/blocks": 0.1, …}`: norms of groups of parameters, named by the first
    two parts of their names.

    squares: `[parameters]`, the sum of squares of each.
    """
    sums = Counter()
    for name, square in zip(names, squares, strict=True):
        sums["/".join([what, *name.split("/")[:2]])] += float(square)
    return {name: math.sqrt(total) for name, total in sums.items()}
