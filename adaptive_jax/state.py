"""What training changes and checkpoints keep."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from adaptive_jax import sharding
from adaptive_jax.model import LanguageModel


class State(NamedTuple):
    """What an update changes."""

    step: jax.Array  # updates done, a scalar
    params: dict
    optimizer: optax.OptState


def initial_state(model: LanguageModel, optimizer: optax.GradientTransformation, seed: int, mesh) -> State:
    """The state before the first update, whole on every device of `mesh`."""
    return jax.jit(lambda: _start(model, optimizer, seed), out_shardings=sharding.whole(mesh))()


def shape_of_state(model: LanguageModel, optimizer: optax.GradientTransformation, mesh) -> State:
    """The state as shapes, types and shardings, which is what `Checkpoints.restore` needs to know."""
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding.whole(mesh)),
        jax.eval_shape(lambda: _start(model, optimizer, 0)),
    )


def _start(model, optimizer, seed):
    ids = jnp.zeros((1, 2), jnp.int32)
    params = model.init(jax.random.key(seed), ids, ids, jnp.ones(ids.shape))["params"]
    return State(jnp.zeros((), jnp.int32), params, optimizer.init(params))
