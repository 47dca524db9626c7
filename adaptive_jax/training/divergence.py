"""Detects updates that diverge. The key `divergence` says what follows:

stop    the run ends with an error
skip    the update is left out: parameters and momentum stay as they were, and the schedule goes on
"""

import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np

from adaptive_jax.errors import InputError

LARGEST_LOSS = 100.0  # nats a token: an update whose loss reaches this has diverged
MOST_SKIPPED = 20  # updates in a row: more, and skipping has not helped
FLOW = ("input", "body", "output")  # the order in which a model computes

logger = logging.getLogger(__name__)


class Diverged(InputError):
    """Update number `step` is the first whose loss or gradient is not finite, or too large.

    skipping: whether leaving such updates out may help.
    """

    def __init__(self, step: int, fault: str, skipping: bool = False):
        skip = ", or resume this one with --config.divergence=skip" if skipping else ""
        super().__init__(
            f"update {step:,} has {fault}: lower optimizer.learning_rate or lengthen"
            f" schedule.warmup_steps in a new --workdir{skip}; earlier checkpoints are intact"
        )


class DivergenceMonitor:
    """Checks the metrics of every update.

    Args:
        names: of the parameters, in the order of `gradient_squares`.
    """

    def __init__(self, names: Sequence[str]):
        self.names, self.skipped_in_a_row = names, 0

    def check(self, step: int, metrics: Mapping) -> None:
        """Checks the metrics of an update, as `make_update` returns them; warns if it was skipped.

        Raises:
            Diverged: the update diverged and was not skipped, or too many in a row were.
        """
        loss, norm = float(metrics["nll"]), float(metrics["gradient_norm"])
        finite = math.isfinite(float(metrics["loss"])) and math.isfinite(norm)
        if finite and loss < LARGEST_LOSS:
            self.skipped_in_a_row = 0
            return
        fault = f"loss {loss:.4g} nats a token, gradient norm {norm:.4g}{self._where(metrics)}"
        self.skipped_in_a_row += 1
        if "skipped" not in metrics or self.skipped_in_a_row > MOST_SKIPPED:
            raise Diverged(step, fault, skipping="skipped" not in metrics)
        logger.warning("skipped update %s: it has %s", f"{step:,}", fault)

    def _where(self, metrics):
        """The first parameter, in the order of computation, whose gradient is not finite."""
        finite = np.isfinite(metrics["gradient_squares"])
        names = [name for name, good in zip(self.names, finite, strict=True) if not good]
        if not names:
            return ""
        first = min(names, key=lambda name: FLOW.index(name.split("/")[0]))
        return f", not finite in {first} ({len(names)} of {len(self.names)} parameters)"
