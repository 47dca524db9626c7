"""What training asks of an optimizer, and the optimizers that are a direction and a schedule."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adaptive_jax.training.schedules import Schedule


class Optimizer:
    """Changes parameters against a direction, by the rate of a schedule.

    Its state is that of the direction, with the state of the schedule as last part.

    Args:
        direction: from gradients to a direction: clipping, L2 decay, momentum and the like, by
            `optax.chain`.
        schedule: the learning rate; a function from updates done to the rate will do.
        decay: share of the learning rate times which every update shrinks the parameters (decoupled
            weight decay).
    """

    def __init__(
        self,
        direction: optax.GradientTransformation,
        schedule: Schedule | Callable,
        decay: float = 0.0,
    ):
        self.direction, self.decay = direction, decay
        self.schedule = schedule if isinstance(schedule, Schedule) else Schedule(schedule)

    def init(self, params) -> Any:
        """The state before the first update."""
        return (*self.direction.init(params), self.schedule.init())

    def update(self, gradients, state, params, scale=1.0) -> tuple[Any, Any]:
        """The changes of the parameters, to be added to them, and the next state.

        scale: factor of the learning rate of this update. Streams scale it by the length of the
            window.
        """
        return self.step(gradients, state, params, self.schedule.rate(state[-1]) * scale)

    def step(self, gradients, state, params, rate) -> tuple[Any, Any]:
        """`update` at a given learning rate."""
        *inner, schedule = state
        directions, inner = self.direction.update(gradients, tuple(inner), params)
        if self.decay:
            directions = jax.tree.map(lambda d, p: d + self.decay * p, directions, params)
        changes = jax.tree.map(lambda d: jnp.asarray(-rate, d.dtype) * d, directions)
        return changes, (*inner, self.schedule.advance(schedule))

    def rate(self, state, step):
        """The learning rate of the update after `step` updates, before `scale`."""
        return self.schedule.rate(state[-1])

    def after_evaluation(self, state, nll: float) -> Any:
        """The next state, given the validation loss in nats a word: a schedule may wait for it to
        fall.

        Training calls it once for each evaluation that is due by `evaluate_every`.
        """
        return (*state[:-1], told(self.schedule.after_evaluation, state[-1], nll))

    def params_to_evaluate(self, state, params):
        """The parameters to score and to publish, which may be averages of those that are
        trained.
        """
        return params

    def ended(self, state) -> bool:
        """Whether training should end after this evaluation."""
        return bool(self.schedule.ended(state[-1]))


def told(after_evaluation: Callable, state, nll: float):
    """`after_evaluation(state, nll)` on the devices where `state` lies, which several hosts may
    share.
    """
    return jax.jit(after_evaluation, out_shardings=jax.tree.map(lambda a: a.sharding, state))(
        state, nll
    )
