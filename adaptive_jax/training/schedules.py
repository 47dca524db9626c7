"""Schedules: the learning rate of each update, by updates done and, for `plateau`, by
validation losses.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import optax

from adaptive_jax.errors import InputError, check_at_least

LAST = 2**31 - 1  # updates that a schedule can count


class ScheduleState(NamedTuple):
    """What a schedule remembers: the updates done."""

    count: jnp.ndarray


class Schedule:
    """A learning rate that depends on updates done.

    Args:
        function: from the number of updates done to the rate of the next one.
    """

    def __init__(self, function: Callable):
        self.function = function

    def __call__(self, count):
        """The rate after `count` updates, divisions by validation losses left out."""
        return self.function(count)

    def init(self) -> ScheduleState:
        """The state before the first update."""
        return ScheduleState(jnp.zeros((), jnp.int32))

    def rate(self, state: ScheduleState):
        """The rate of the next update."""
        return self.function(state.count)

    def advance(self, state: ScheduleState) -> ScheduleState:
        """The state after one more update."""
        return state._replace(count=optax.safe_increment(state.count))

    def after_evaluation(self, state: ScheduleState, nll) -> ScheduleState:
        """The state, given the validation loss in nats a word."""
        return state

    def ended(self, state: ScheduleState):
        """Whether training should end."""
        return False


class PlateauState(NamedTuple):
    """What `plateau` remembers."""

    count: jnp.ndarray  # updates done
    best: jnp.ndarray  # the validation loss to be improved on
    waited: jnp.ndarray  # evaluations in a row that have not
    divided: jnp.ndarray  # times that the rate was divided


class Plateau(Schedule):
    """The schedule that `plateau` makes, which has the arguments."""

    def __init__(
        self,
        warmed_up: Callable,
        warmup_steps: int,
        when: tuple[int, float],
        factor: float,
        divisions: int,
    ):
        super().__init__(warmed_up)
        self.warmup_steps, (self.patience, self.threshold) = warmup_steps, when
        self.factor, self.divisions = factor, divisions

    def init(self) -> PlateauState:
        """No loss is known, and any is an improvement."""
        zeros = [jnp.zeros((), jnp.int32) for _ in range(3)]
        return PlateauState(zeros[0], jnp.asarray(math.inf), *zeros[1:])

    def rate(self, state: PlateauState):
        """The rate of the next update."""
        return self.function(state.count) / jnp.asarray(self.factor, float) ** state.divided

    def after_evaluation(self, state: PlateauState, nll) -> PlateauState:
        """Divides the rate if it is time to; a loss of the warm-up counts for nothing."""
        better = nll < state.best * (1 - self.threshold)
        waited = jnp.where(better, 0, state.waited + 1)
        divide = waited >= self.patience
        after = PlateauState(
            state.count,
            jnp.where(better, nll, state.best),
            jnp.where(divide, 0, waited),
            state.divided + divide,
        )
        warm = state.count > self.warmup_steps
        return PlateauState(
            *(
                jnp.where(warm, new, old).astype(old.dtype)
                for new, old in zip(after, state, strict=True)
            )
        )

    def ended(self, state: PlateauState):
        """Whether the rate was divided as often as it may be."""
        return self.divisions > 0 and state.divided >= self.divisions


def cosine_cycles(
    *,
    learning_rate: float,
    min_learning_rate: float,
    warmup_from: float,
    warmup_steps: int,
    cycle_steps: int,
    cycles: int,
    shrink: float,
) -> Schedule:
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
        InputError: a rate out of range, no cycle, or a cycle of no length.
    """
    if cycles < 1 or cycle_steps < 1:
        raise InputError(
            f"schedule.cycles={cycles} of schedule.cycle_steps={cycle_steps:,}: both must be 1 or"
            " more"
        )
    if cycles > 30 or warmup_steps + cycle_steps * (2**cycles - 1) > LAST:
        raise InputError(
            f"schedule.cycles={cycles} of schedule.cycle_steps={cycle_steps:,}: take fewer, at most"
            f" {LAST:,} updates"
        )
    _check_warm_up(learning_rate, warmup_from, warmup_steps)
    if not 0 <= min_learning_rate <= learning_rate:
        raise InputError(
            f"schedule.min_learning_rate={min_learning_rate} must be from 0 to"
            f" optimizer.learning_rate={learning_rate}"
        )
    if not 0 < shrink <= 1:
        raise InputError(
            f"schedule.shrink={shrink} must be above 0 and at most 1, which leaves all cycles as"
            " high"
        )
    return Schedule(
        optax.sgdr_schedule(
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
    )


def constant(*, learning_rate: float, warmup_from: float, warmup_steps: int) -> Schedule:
    """Linear warm-up, then one rate to the end.

    Args:
        learning_rate: after the warm-up.
        warmup_from: the learning rate of the first update, if there is a warm-up.
        warmup_steps: updates of the warm-up; 0: none.

    Raises:
        InputError: a number out of range.
    """
    _check_warm_up(learning_rate, warmup_from, warmup_steps)
    return Schedule(_warmed_up(learning_rate, warmup_from, warmup_steps))


def inverse_square_root(*, learning_rate: float, warmup_from: float, warmup_steps: int) -> Schedule:
    """Linear warm-up, then a rate proportional to 1 / √(updates done) (Vaswani et al. 2017,
    equation 3).

    Args:
        learning_rate: the highest, at the end of the warm-up.
        warmup_from: the learning rate of the first update.
        warmup_steps: updates of the warm-up; after four times as many the rate is half the highest.

    Raises:
        InputError: a number out of range.
    """
    check_at_least(1, **{"schedule.warmup_steps": warmup_steps})
    _check_warm_up(learning_rate, warmup_from, warmup_steps)
    rising = _warmed_up(learning_rate, warmup_from, warmup_steps)
    return Schedule(
        lambda count: (
            rising(count) * jnp.sqrt(warmup_steps / jnp.maximum(_float(count), warmup_steps))
        )
    )


def plateau(
    *,
    learning_rate: float,
    warmup_from: float,
    warmup_steps: int,
    factor: float,
    patience: int,
    threshold: float,
    divisions: int,
) -> Schedule:
    """Linear warm-up, then a rate that is divided by `factor` when the validation loss no longer
    falls.

    The loss falls if it is lower than the lowest so far by more than the share `threshold`. The
    recipe of the public GCNN code halves at each evaluation without a fall of 1e-4: factor 2,
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
        threshold: share of the lowest loss by which a loss must be lower to count as a fall.
        divisions: how many there are; the last one ends the run, whose rates are as many; 0: no
            end.

    Raises:
        InputError: a number out of range.
    """
    _check_warm_up(learning_rate, warmup_from, warmup_steps)
    if not 1 < factor < math.inf:
        raise InputError(
            f"schedule.factor={factor} must be above 1 and finite: the rate is divided by it, such"
            " as 2.0"
        )
    check_at_least(1, **{"schedule.patience": patience})
    if not 0 <= threshold < 1:
        raise InputError(
            f"schedule.threshold={threshold} must be from 0 to less than 1: a share of the loss,"
            " such as 1e-4"
        )
    check_at_least(0, **{"schedule.divisions": divisions})
    rising = _warmed_up(learning_rate, warmup_from, warmup_steps)
    return Plateau(rising, warmup_steps, (patience, threshold), factor, divisions)


def _check_warm_up(learning_rate, warmup_from, warmup_steps):
    check_at_least(0, **{"schedule.warmup_steps": warmup_steps})
    if not 0 < learning_rate < math.inf:
        raise InputError(
            f"optimizer.learning_rate={learning_rate} must be above 0 and finite, such as 1.0"
        )
    if not 0 <= warmup_from < math.inf:
        raise InputError(f"schedule.warmup_from={warmup_from} must be 0 or more, and finite")


def _warmed_up(learning_rate, warmup_from, warmup_steps):
    if not warmup_steps:
        return lambda count: jnp.asarray(learning_rate, float)
    rising = optax.linear_schedule(warmup_from, learning_rate, warmup_steps)
    return lambda count: rising(_float(count))


def _float(count):
    # JAX would divide a whole number in float32 where float64 is on.
    return jnp.asarray(count, float)


SCHEDULES = {
    "cosine_cycles": cosine_cycles,
    "constant": constant,
    "inverse_square_root": inverse_square_root,
    "plateau": plateau,
}
