"""Optimizers and schedules, by name."""

import math
from collections.abc import Mapping

import optax

from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.registry import make

LAST = 2**31 - 1  # updates that a schedule can count


class Optimizer:
    """An optax transformation, and what training asks of an optimizer besides.

    Args:
        transformation: from gradients to changes of the parameters.
        schedule: the learning rate after so many updates.
    """

    def __init__(self, transformation: optax.GradientTransformation, schedule: optax.Schedule):
        self.init, self.update, self.schedule = transformation.init, transformation.update, schedule

    def rate(self, state, step):
        """The learning rate of the update after `step` updates."""
        return self.schedule(step)

    def after_evaluation(self, state, nll: float):
        """The optimizer's next state, given the validation loss in nats a word: a schedule may wait for it to fall."""
        return state

    def params_to_evaluate(self, state, params):
        """The parameters to score and to publish, which may be averages of those that are trained."""
        return params


def cosine_cycles(
    *,
    learning_rate: float,
    min_learning_rate: float,
    warmup_from: float,
    warmup_steps: int,
    cycle_steps: int,
    cycles: int,
    shrink: float,
) -> optax.Schedule:
    """Linear warm-up, then cosine cycles, each twice as long as the one before (Loshchilov & Hutter 2016).

    Cycle c falls from `learning_rate · shrink^c` to `min_learning_rate · shrink^c` in `cycle_steps · 2^c` updates. The
    warm-up comes before the cycles: WikiText-103 trains 16K + 18K·(1+2+4+8) = 286K updates with shrink 0.75, Billion Word
    16K + 137K·(1+2+4) = 975K with shrink 0.6. After the last cycle the rate stays at its minimum.

    Args:
        learning_rate: the highest, at the start of the first cycle.
        min_learning_rate: at the end of the first cycle.
        warmup_from: the learning rate of the first update.
        warmup_steps: updates of the warm-up.
        cycle_steps: updates of the first cycle; each of the others takes twice as many as the one before.
        cycles: how many there are.
        shrink: factor of the highest and the lowest rate from cycle to cycle.

    Returns:
        A function from the number of updates done to the rate of the next one.

    Raises:
        InputError: a rate out of range, no cycle, or a cycle of no length.
    """
    if cycles < 1 or cycle_steps < 1:
        raise InputError(f"schedule.cycles={cycles} of schedule.cycle_steps={cycle_steps:,}: both must be 1 or more")
    if cycles > 30 or warmup_steps + cycle_steps * (2**cycles - 1) > LAST:
        raise InputError(f"schedule.cycles={cycles} of schedule.cycle_steps={cycle_steps:,}: take fewer, at most {LAST:,} updates")
    check_at_least(0, **{"schedule.warmup_steps": warmup_steps})
    if not 0 < learning_rate < math.inf:
        raise InputError(f"optimizer.learning_rate={learning_rate} must be above 0 and finite, such as 1.0")
    if not 0 <= min_learning_rate <= learning_rate:
        raise InputError(
            f"schedule.min_learning_rate={min_learning_rate} must be from 0 to optimizer.learning_rate={learning_rate}"
        )
    if not 0 <= warmup_from < math.inf:
        raise InputError(f"schedule.warmup_from={warmup_from} must be 0 or more, and finite")
    if not 0 < shrink <= 1:
        raise InputError(f"schedule.shrink={shrink} must be above 0 and at most 1, which leaves all cycles as high")
    return optax.sgdr_schedule(
        [
            dict(
                init_value=warmup_from if c == 0 else learning_rate * shrink**c,
                peak_value=learning_rate * shrink**c,
                warmup_steps=warmup_steps if c == 0 else 0,
                decay_steps=cycle_steps * 2**c + (warmup_steps if c == 0 else 0),
                end_value=min_learning_rate * shrink**c,
            )
            for c in range(cycles)
        ]
    )


def nag(schedule: optax.Schedule, *, momentum: float, clip_norm: float | None) -> Optimizer:
    """Nesterov's accelerated gradient of gradients clipped to a global norm (Baevski & Auli 2019, section 4.5).

    Args:
        learning_rate: the highest; the schedule says when.
        momentum: share of the last change that an update repeats.
        clip_norm: the largest norm of all gradients together; None does not clip.

    Raises:
        InputError: a number out of range.
    """
    if not 0 <= momentum < 1:
        raise InputError(f"optimizer.momentum={momentum} must be from 0 to less than 1, such as 0.99")
    if clip_norm is not None and not clip_norm > 0:
        raise InputError(f"optimizer.clip_norm={clip_norm} must be above 0, such as 0.1; none does not clip")
    clip = optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    steps = optax.trace(decay=momentum, nesterov=True), optax.scale_by_learning_rate(schedule)
    return Optimizer(optax.chain(clip, *steps), schedule)


OPTIMIZERS = {"nag": nag}
SCHEDULES = {"cosine_cycles": cosine_cycles}


def from_config(config: Mapping) -> Optimizer:
    """The optimizer that a config's groups `optimizer` and `schedule` describe; `optimizer.learning_rate` is the schedule's.

    Raises:
        InputError: a name or a key that does not exist or is missing, or a value out of range.
    """
    settings = dict(config["optimizer"])
    rate = {"learning_rate": settings.pop("learning_rate")} if "learning_rate" in settings else {}
    schedule = make("schedule", SCHEDULES, config["schedule"], **rate)
    return make("optimizer", OPTIMIZERS, settings, schedule=schedule)
