"""Schedules: the learning rate of each update, by updates done and, for `plateau`, by validation
losses; and `scheduled`, which gives any optimizer of optax these rates.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adaptive_jax.config.options import (
    NonNegativeFloat,
    NonNegativeInt,
    Option,
    PositiveInt,
    Share,
)
from adaptive_jax.errors import InputError

MAX_UPDATES = 2**31 - 1  # updates that a schedule can count


def cosine_cycles(
    learning_rate: float,
    *,
    min_learning_rate: NonNegativeFloat = 1e-5,
    warmup_from: NonNegativeFloat = 1e-7,
    warmup_steps: NonNegativeInt = 500,
    cycle_steps: PositiveInt = 1_000,
    cycles: Annotated[int, Option(within="[1, 30]")] = 3,
    shrink: Annotated[float, Option(within="(0, 1]")] = 0.75,
) -> optax.Schedule:
    """Linear warm-up, then cosine cycles, each twice as long as the one before (Loshchilov & Hutter
    2016).

    Cycle c falls from `learning_rate · shrink^c` to `min_learning_rate · shrink^c` in `cycle_steps
    · 2^c` updates. The warm-up comes before the cycles: WikiText-103 trains 16K + 18K·(1+2+4+8) =
    286K updates with shrink 0.75, Billion Word 16K + 137K·(1+2+4) = 975K with shrink 0.6. After the
    last cycle the rate stays at its minimum.

    Args:
        learning_rate: the highest, at the start of the first cycle.
        min_learning_rate: at the end of the first cycle.
        warmup_from: the learning rate of the first update.
        warmup_steps: updates of the warm-up.
        cycle_steps: updates of the first cycle; each of the others takes twice as many as the one
            before.
        cycles: how many there are.
        shrink: factor of the highest and the lowest rate from cycle to cycle.

    Raises:
        InputError: a rate above `learning_rate`, or more updates than 32 bits count.
    """
    if (updates := warmup_steps + cycle_steps * (2**cycles - 1)) > MAX_UPDATES:
        raise InputError(
            f"schedule.cycles={cycles} of schedule.cycle_steps={cycle_steps:,} must be at most"
            f" {MAX_UPDATES:,} updates, got {updates:,}"
        )
    _check_rates(learning_rate, min_learning_rate=min_learning_rate, warmup_from=warmup_from)
    falling = optax.sgdr_schedule(
        [
            dict(
                init_value=learning_rate * shrink**c,
                peak_value=learning_rate * shrink**c,
                warmup_steps=0,
                decay_steps=cycle_steps * 2**c,
                end_value=min_learning_rate * shrink**c,
            )
            for c in range(cycles)
        ]
    )
    if not warmup_steps:
        return falling
    rising = constant(learning_rate, warmup_from=warmup_from, warmup_steps=warmup_steps)
    return optax.join_schedules([rising, falling], [warmup_steps])


def constant(
    learning_rate: float,
    *,
    warmup_from: NonNegativeFloat = 1e-7,
    warmup_steps: NonNegativeInt = 500,
) -> optax.Schedule:
    """Linear warm-up, then one rate to the end.

    Args:
        learning_rate: after the warm-up.
        warmup_from: the learning rate of the first update, if there is a warm-up.
        warmup_steps: updates of the warm-up; 0: none.

    Raises:
        InputError: `warmup_from` is above `learning_rate`.
    """
    if not warmup_steps:
        return lambda count: jnp.asarray(learning_rate, float)
    _check_rates(learning_rate, warmup_from=warmup_from)

    def rate(count):
        # JAX would divide a whole number in float32 where float64 is on.
        risen = jnp.minimum(jnp.asarray(count, float) / warmup_steps, 1)
        # optax's linear schedule adds to the difference, beside which float32 loses 1e-7.
        return warmup_from * (1 - risen) + learning_rate * risen

    return rate


def inverse_square_root(
    learning_rate: float, *, warmup_from: NonNegativeFloat = 1e-7, warmup_steps: PositiveInt = 500
) -> optax.Schedule:
    """Linear warm-up, then a rate proportional to 1 / √(updates done) (Vaswani et al. 2017,
    equation 3).

    Args:
        learning_rate: the highest, at the end of the warm-up.
        warmup_from: the learning rate of the first update.
        warmup_steps: updates of the warm-up; after four times as many the rate is half the highest.

    Raises:
        InputError: as `constant`.
    """
    rising = constant(learning_rate, warmup_from=warmup_from, warmup_steps=warmup_steps)
    return lambda count: (
        rising(count)
        * jnp.sqrt(warmup_steps / jnp.maximum(jnp.asarray(count, float), warmup_steps))
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Plateau:
    """Linear warm-up, then a rate that is divided by `factor` when the validation loss no longer
    falls.

    The loss falls if it is lower, by more than the share `threshold`, than the last one that fell.
    The recipe of the public GCNN code halves at each evaluation without a fall of 1e-4: factor 2,
    patience 1, threshold 1e-4. The thesis on hierarchical softmax, section 4.1, divides by 10, has
    patience 3, and stops after a fixed number of divisions. Evaluations up to the end of the
    warm-up do not count. Which evaluations count depends on `evaluate_every`, not on
    `checkpoint_every`. Losses are compared in float32.

    Args:
        learning_rate: after the warm-up.
        warmup_from: the learning rate of the first update, if there is a warm-up.
        warmup_steps: updates of the warm-up; 0: none.
        factor: what the rate is divided by.
        patience: evaluations in a row without a fall after which the rate is divided; PyTorch and
            fairseq count one less.
        threshold: share of that loss by which a loss must be lower to count as a fall.
        divisions: the run ends after this many, so that it has as many rates; 0: no limit.
    """

    learning_rate: float
    warmup_from: NonNegativeFloat = 1e-7
    warmup_steps: NonNegativeInt = 500
    factor: Annotated[float, Option(within="(1, inf)")] = 2.0
    patience: PositiveInt = 1
    threshold: Share = 1e-4
    divisions: NonNegativeInt = 0

    def __call__(self, count):
        """The rate after `count` updates, without divisions."""
        rate, start, steps = self.learning_rate, self.warmup_from, self.warmup_steps
        return constant(rate, warmup_from=start, warmup_steps=steps)(count)

    def init(self) -> "PlateauState":
        """No loss is known, and any is an improvement."""
        zeros = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return PlateauState(self, zeros[0], jnp.asarray(math.inf), *zeros[1:])


class PlateauState(NamedTuple):
    """State of `plateau`."""

    plateau: Plateau  # its settings; no array
    step: jax.Array  # updates done
    best: jax.Array  # the last validation loss that fell
    waited: jax.Array  # evaluations in a row that have not
    divided: jax.Array  # times that the rate was divided

    def after_evaluation(self, nll) -> "PlateauState":
        """Divides the rate if it is time to; a loss of the warm-up counts for nothing."""
        counts = self.step > self.plateau.warmup_steps
        better = counts & (nll < self.best * (1 - self.plateau.threshold))
        waited = jnp.where(better, 0, self.waited + counts)
        divide = waited >= self.plateau.patience
        return self._replace(
            best=jnp.where(better, nll, self.best).astype(self.best.dtype),
            waited=jnp.where(divide, 0, waited),
            divided=self.divided + divide,
        )

    def ended(self):
        """True if the rate was divided as often as it may be."""
        return self.plateau.divisions > 0 and self.divided >= self.plateau.divisions


class ScheduleState(NamedTuple):
    """State of a schedule that depends on the number of updates alone."""

    step: jax.Array  # updates done


class ScheduledState(NamedTuple):
    """The state of `scheduled`."""

    schedule: ScheduleState | PlateauState
    learning_rate: jax.Array  # of the last update
    inner: Any  # the optimizer's


def scheduled(
    optimizer: Callable[..., optax.GradientTransformation], schedule: optax.Schedule | Plateau
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that takes the learning rate of each update from a schedule.

    `update(gradients, state, params, scale=0.5)` multiplies the rate of this update: streams scale
    it by the length of the window. Other extra arguments go to the optimizer.

    Args:
        optimizer: from a learning rate to the optimizer, as `optax.lion` is. Its state must not
            depend on the rate.
        schedule: from updates done to the rate of the next one; or `Plateau`.
    """
    waits = isinstance(schedule, Plateau)

    def init(params):
        first = schedule.init() if waits else ScheduleState(jnp.zeros((), jnp.int32))
        rate = jnp.asarray(schedule(0), float)
        return ScheduledState(first, jnp.zeros_like(rate), optimizer(rate).init(params))

    def update(gradients, state, params=None, *, scale=1.0, **extra):
        rate = schedule(state.schedule.step)
        if waits:
            rate = rate / jnp.asarray(schedule.factor, float) ** state.schedule.divided
        rate = jnp.asarray(rate * scale, state.learning_rate.dtype)
        now = optax.with_extra_args_support(optimizer(rate))
        changes, inner = now.update(gradients, state.inner, params, **extra)
        after = state.schedule._replace(step=optax.safe_increment(state.schedule.step))
        return changes, ScheduledState(after, rate, inner)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_rates(highest, **rates):
    for name, rate in rates.items():
        if rate > highest:
            raise InputError(f"schedule.{name} must be in [0, {highest:g}], got {rate!r}")


SCHEDULES = {
    "cosine_cycles": cosine_cycles,
    "constant": constant,
    "inverse_square_root": inverse_square_root,
    "plateau": Plateau,
}
