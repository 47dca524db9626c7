"""Non-monotonically triggered averaged gradient descent: see `nt_asgd` in optim.py."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

FORMS = ("paper", "torch")


class TriggerState(NamedTuple):
    """State that decides when averages begin."""

    switched: jax.Array  # whether averages are taken
    # The last `nonmono` validation losses; of nonmono=0 one, which nothing reads
    recent: jax.Array
    best: jax.Array  # the lowest one before those; infinite if there is none

    def after_evaluation(self, nll) -> "TriggerState":
        """Switches to averages if the loss is higher than the lowest of those that came more than
        `nonmono` evaluations ago.
        """
        newest = jnp.concatenate([self.recent[1:], jnp.reshape(nll, 1).astype(self.recent.dtype)])
        best = jnp.minimum(self.best, self.recent[0])
        return TriggerState(self.switched | (nll > self.best), newest, best)


class AveragedState(NamedTuple):
    """The state of `descend_and_average`."""

    average: Any  # the averages; before the switch, the parameters
    averaged: jax.Array  # updates since the switch, float32
    rate: jax.Array  # the rate of the last update
    trigger: TriggerState


def descend_and_average(
    learning_rate, nonmono: int, form: str
) -> optax.GradientTransformationExtraArgs:
    """The last part of `nt_asgd`: steps against the directions, and the averages.

    `update(..., frozen=TREE)`: parameters that TREE, of booleans, names stay as they are.
    """
    lags = form == "torch"

    def init(params):
        trigger = TriggerState(
            jnp.asarray(not nonmono), jnp.full((max(1, nonmono),), math.inf), jnp.asarray(math.inf)
        )
        zeros = jnp.zeros(()), jnp.zeros(())
        return AveragedState(jax.tree.map(jnp.copy, params), *zeros, trigger)

    def update(directions, state, params, *, frozen=None, **extra):
        rate = jnp.asarray(learning_rate, state.rate.dtype)
        step_rate = jnp.where(state.averaged > 0, state.rate, rate) if lags else rate
        changes = jax.tree.map(lambda d: jnp.asarray(-step_rate, d.dtype) * d, directions)
        if frozen is not None:
            changes = jax.tree.map(lambda f, c: jnp.zeros_like(c) if f else c, frozen, changes)
        averaged = jnp.where(state.trigger.switched, state.averaged + 1, 0)
        # Parameters that are averaged
        count = jnp.maximum(1, averaged - 1 if lags else averaged + 1)

        def add(average, new):
            return jnp.where(count > 1, average + (new - average) / count.astype(new.dtype), new)

        average = jax.tree.map(add, state.average, optax.apply_updates(params, changes))
        return changes, AveragedState(average, averaged, rate, state.trigger)

    return optax.GradientTransformationExtraArgs(init, update)
