"""Updates that diverge: how training notices them, and what it does then. The config's group
`divergence` has the settings.

stop      the run ends with an error
skip      the update is left out: parameters and momentum stay as they were, and the schedule goes
          on
rewind    training goes back to the last checkpoint and leaves out the batches that came after it
          (as Chowdhery et al. 2022, section 5.1, did by hand)
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.parallel import hosts
from adaptive_jax.workdir.settings import write_json

RECENT = 100  # updates, about, whose mean loss the next one is compared with
LEAST = 20  # updates before anything counts as a spike
FLOW = ("input", "body", "output")  # the order in which a model computes
SKIPPED = 20  # updates in a row: more, and skipping has not helped

logger = logging.getLogger(__name__)


class Diverged(InputError):
    """Training has diverged: the update number `step` is the first whose loss or gradient is not
    finite, or too large.

    policy: what the config says to do.
    """

    def __init__(self, step: int, what: str, policy: str):
        others = {
            "stop": ", or go on in this one with --config.divergence.policy=rewind or skip",
            "skip": ", or go on in this one with --config.divergence.policy=rewind",
        }.get(policy, "")
        super().__init__(
            f"update {step:,} gives {what}: lower optimizer.learning_rate or lengthen"
            f" schedule.warmup_steps in a new --workdir{others}; earlier checkpoints are intact"
        )
        self.step, self.what = step, what


class Watch:
    """Looks at the metrics of every update.

    Args:
        settings: the config's group `divergence`.
        names: of the parameters, in the order of `gradient_squares`.
    """

    def __init__(self, settings: Mapping, names: Sequence[str]):
        self.settings, self.names = settings, names
        self.mean, self.seen, self.skipped, self.spiking = 0.0, 0, 0, False

    def see(self, step: int, metrics: Mapping) -> dict[str, int]:
        """Counts of this update, 0 or 1: `spikes` and, where the policy is to skip, `skipped`.

        Raises:
            Diverged: its loss or gradient is not finite, or its loss at least `loss` nats a token.
        """
        loss, norm = float(metrics["nll"]), float(metrics["gradient_norm"])
        if not (
            math.isfinite(float(metrics["loss"]))
            and math.isfinite(norm)
            and loss < self.settings["loss"]
        ):
            return self._diverged(
                step,
                f"loss {loss:.4g} nats a token, gradient norm {norm:.4g}{self._place(metrics)}",
                metrics,
            )
        self.skipped, counts = 0, {"skipped": 0} if "skipped" in metrics else {}
        above, self.seen = loss - self.mean, self.seen + 1
        spike = self.seen > LEAST and above > self.settings["spike"]
        if spike and not self.spiking:
            logger.warning(
                "update %s: loss %.2f nats a token, %.2f above the recent mean",
                f"{step:,}",
                loss,
                above,
            )
        self.spiking = spike
        self.mean += above / min(self.seen, RECENT)
        return {"spikes": int(spike)} | counts

    def _diverged(self, step, what, metrics):
        self.skipped += 1
        if "skipped" not in metrics or self.skipped > SKIPPED:
            raise Diverged(step, what, self.settings["policy"])
        logger.warning("update %s gives %s: skipped", f"{step:,}", what)
        return {"spikes": 0, "skipped": 1}

    def _place(self, metrics):
        wrong = [
            name
            for name, square in zip(self.names, metrics["gradient_squares"], strict=True)
            if not np.isfinite(square)
        ]
        if not wrong or len(wrong) == len(self.names):
            return ", not finite in any parameter" if wrong else ""
        first = min(wrong, key=lambda name: FLOW.index(name.split("/")[0]))
        others = len(wrong) - 1
        return f", not finite in {first}" + f" and {others} other{'s' * (others > 1)}" * bool(
            others
        )


class Rewinds:
    """How often a run went back, and the batches that it left out; kept in workdir/rewinds.json.

    Raises:
        InputError: the file is damaged.
    """

    def __init__(self, workdir: Path):
        # A gap: (update, batches left out after it)
        self.path, self.count, self.gaps = workdir / "rewinds.json", 0, []
        if self.path.exists():
            try:
                read = json.loads(self.path.read_text())
                self.count, self.gaps = (
                    int(read["rewinds"]),
                    [(int(after), int(batches)) for after, batches in read["left_out"]],
                )
                if min(self.count, *(number for gap in self.gaps for number in gap), 0) < 0:
                    raise ValueError("a number is negative")
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                raise InputError(
                    f"{self.path} is damaged ({error}): restore it, or train in a new --workdir"
                ) from None

    def left_out(self, step: int) -> int:
        """How many batches were left out before update `step`."""
        return sum(batches for after, batches in self.gaps if after < step)

    def add(self, diverged: Diverged, resumed: int, most: int) -> None:
        """Goes back from an update that diverged to the one after update `resumed`, at most `most`
        times a run.

        Raises:
            Diverged: once more is too often.
        """
        if self.count >= most:
            raise Diverged(
                diverged.step,
                f"{diverged.what}, after {self.count} rewinds (divergence.rewinds={most})",
                "rewind",
            )
        # The next batch is the one after that of the update that diverged, whatever lay between.
        batches = (
            diverged.step - resumed + self.left_out(diverged.step) - self.left_out(resumed + 1)
        )
        self.count += 1
        self.gaps = [*(gap for gap in self.gaps if gap[0] <= resumed), (resumed, batches)]
        logger.warning(
            "update %s gives %s: back to update %s, without the batches of the %s updates since",
            f"{diverged.step:,}",
            diverged.what,
            f"{resumed:,}",
            f"{diverged.step - resumed:,}",
        )
        if hosts.first():
            write_json(self.path, {"rewinds": self.count, "left_out": self.gaps})
        hosts.wait(f"rewind {self.count}")
