"""What training changes and checkpoints keep."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from adaptive_jax.devices import sharding
from adaptive_jax.model import LanguageModel


class State(NamedTuple):
    """What an update changes."""

    step: jax.Array  # updates done, a scalar
    params: dict
    optimizer: optax.OptState


def initial_state(model: LanguageModel, optimizer: optax.GradientTransformation, seed: int, mesh) -> State:
    """The state before the first update, laid on `mesh` as `sharding.parameter_specs` says."""
    like = shape_of_state(model, optimizer, mesh)
    return jax.jit(lambda: _start(model, optimizer, seed), out_shardings=jax.tree.map(lambda a: a.sharding, like))()


def shape_of_state(model: LanguageModel, optimizer: optax.GradientTransformation, mesh) -> State:
    """The state as shapes, types and shardings, which is what `Checkpoints.restore` needs to know."""
    shapes = jax.eval_shape(lambda: _start(model, optimizer, 0))
    return jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        sharding.parameter_specs(shapes, mesh),
    )


def _start(model, optimizer, seed):
    ids = jnp.zeros((1, 2), jnp.int32)
    params = model.init(jax.random.key(seed), ids, ids, jnp.ones(ids.shape))["params"]
    return State(jnp.zeros((), jnp.int32), params, optimizer.init(params))
