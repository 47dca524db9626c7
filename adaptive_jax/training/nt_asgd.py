"""Non-monotonically triggered averaged gradient descent: see `nt_asgd` in optim.py."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adaptive_jax.training.optimizer import Optimizer, told
from adaptive_jax.training.schedules import Schedule

FORMS = ("paper", "torch")


class NtAsgdState(NamedTuple):
    """What the optimizer remembers."""

    plain: Any  # the state of the descent
    average: Any  # the averages; before the switch, the parameters
    switched: jax.Array  # whether averages are taken
    averaged: (
        jax.Array
    )  # updates since the switch; a float, because an update that is left out must not count
    rate: jax.Array  # the rate of the last update
    # The last `nonmono` validation losses before the switch; one if that is 0, which is never read
    recent: jax.Array
    best: jax.Array  # the lowest one before those; infinite if there is none


class NtAsgd(Optimizer):
    """The optimizer that `nt_asgd` makes, which has the arguments."""

    def __init__(
        self,
        direction: optax.GradientTransformation,
        schedule: Schedule | Callable,
        nonmono: int,
        form: str,
        decay: float = 0.0,
    ):
        super().__init__(direction, schedule, decay)
        self.nonmono, self.form = nonmono, form

    def init(self, params) -> NtAsgdState:
        """The state before the first update."""
        plain, average = super().init(params), jax.tree.map(jnp.copy, params)
        switched, recent, zero = (
            jnp.asarray(not self.nonmono),
            jnp.full((max(1, self.nonmono),), math.inf),
            jnp.zeros(()),
        )
        return NtAsgdState(
            plain, average, switched, zero, jnp.zeros(()), recent, jnp.asarray(math.inf)
        )

    def update(self, gradients, state: NtAsgdState, params, scale=1.0) -> tuple[Any, NtAsgdState]:
        """The changes of the parameters, to be added to them, and the next state, with the
        averages after the update.
        """
        rate = jnp.asarray(self.schedule.rate(state.plain[-1]) * scale, state.rate.dtype)
        lags = self.form == "torch"
        used = jnp.where(state.averaged > 0, state.rate, rate) if lags else rate
        changes, plain = self.step(gradients, state.plain, params, used)
        averaged = jnp.where(state.switched, state.averaged + 1, 0)
        count = jnp.maximum(
            1, averaged - 1 if self.form == "torch" else averaged + 1
        )  # parameters that are averaged

        def add(average, new):
            return jnp.where(count > 1, average + (new - average) / count.astype(new.dtype), new)

        average = jax.tree.map(add, state.average, optax.apply_updates(params, changes))
        return changes, state._replace(plain=plain, average=average, averaged=averaged, rate=rate)

    def rate(self, state: NtAsgdState, step):
        """The learning rate of the update after `step` updates, before `scale`."""
        return super().rate(state.plain, step)

    def after_evaluation(self, state: NtAsgdState, nll: float) -> NtAsgdState:
        """Switches to averages if the loss is higher than the lowest of those that came more
        than `nonmono` evaluations ago.
        """
        plain = super().after_evaluation(state.plain, nll)
        switched, recent, best = told(_switch, (state.switched, state.recent, state.best), nll)
        return state._replace(plain=plain, switched=switched, recent=recent, best=best)

    def params_to_evaluate(self, state: NtAsgdState, params):
        """The averages; before the switch, the parameters."""
        return state.average

    def ended(self, state: NtAsgdState) -> bool:
        """Whether training should end after this evaluation."""
        return super().ended(state.plain)


def _switch(losses, nll):
    before, recent, best = losses
    switched = before | (nll > best)
    newest = jnp.concatenate([recent[1:], jnp.reshape(nll, 1).astype(recent.dtype)])
    return (
        switched,
        jnp.where(switched, recent, newest),
        jnp.where(switched, best, jnp.minimum(best, recent[0])),
    )
