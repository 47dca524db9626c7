"""Times to evaluate, to save and to end a run."""

import time
from collections.abc import Mapping, Sequence

import jax

from adaptive_jax.parallel import hosts, sharding


def due(step: int, every: int, last: bool = False) -> bool:
    """True if something done every `every` updates is due after `step` updates; everything is
    due after the last one.
    """
    return last or (every > 0 and step % every == 0)


def validates(config: Mapping, step: int, last: bool) -> tuple[bool, bool]:
    """Two bools: evaluate after `step` updates, and save.

    Every checkpoint is evaluated, so that the best one is known.
    """
    save = due(step, config["checkpoint_every"], last)
    return save or due(step, config["evaluate_every"], last), save


class Clock:
    """The hours that a run has trained.

    They count compiling, updates, evaluations and saving, from when `Clock` is made, after the
    corpus was prepared. A resumed run starts from the hours of its checkpoint, so time that a crash
    lost does not count.

    Args:
        limit: hours of training; 0: no limit.
        before: hours that the run had trained before.
    """

    def __init__(self, limit: float, before: float):
        self.limit, self.before, self.start = limit, before, time.monotonic()

    def hours(self) -> float:
        """Hours of training so far."""
        return self.before + (time.monotonic() - self.start) / 3600

    def left(self) -> float | None:
        """Seconds to the limit; None: there is none."""
        return max(0.0, 3600 * (self.limit - self.hours())) if self.limit else None

    def over(self, together: bool = True) -> bool:
        """True if the limit is reached, by the clock of host 0, so that all hosts end after the
        same update.

        together: whether all hosts call this after this update. If not, a run of several hosts
            returns False without looking.
        """
        if not self.limit or (jax.distributed.is_initialized() and not together):
            return False
        return bool(sharding.sum_over_hosts(hosts.first() and self.hours() >= self.limit))


def reason(
    config: Mapping, step: int, losses: Sequence[float], late: bool, ended: bool
) -> str | None:
    """The reason that a run ends after `step` updates, which begins its last line; None: it
    continues.

    losses: of all evaluations so far that are due by `validates`. late: whether the hours are over.
        ended: whether the optimizer ends the run.
    """
    if step == config["steps"]:
        return "finished"
    if late:
        return f"finished after {config['hours']:g} hours"
    if ended:
        return "finished by its schedule"
    patience = config["early_stopping"]
    if patience and len(losses) > patience and min(losses[:-patience]) <= min(losses[-patience:]):
        return "stopped early"
    return None
