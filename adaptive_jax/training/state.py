"""State of training, which checkpoints keep."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from optax.tree_utils import tree_get, tree_set

from adaptive_jax.model.composition import encoded_shapes
from adaptive_jax.model.language_model import LanguageModel, init_params, parameter_shapes
from adaptive_jax.optimizers.optim import is_field
from adaptive_jax.parallel import sharding


class State(NamedTuple):
    """Arrays that an update changes."""

    step: jax.Array  # updates done, a scalar
    params: dict
    optimizer: object  # the optimizer's state
    # The body's state of the rows, [microbatches, rows, ...]; () where rows stand alone
    carry: object = ()
    # Encodings of all words that sparse updates use again, see `composition.encoded`; {} without
    # those
    tables: dict = {}

    def items(self) -> dict:
        """Items of a checkpoint besides the step: the carry `[rows, ...]` by row id, so that it
        fits any microbatches.

        The averages of an optimizer are an item of their own, for evaluation to read them alone.
        """
        averages = tree_get(self.optimizer, "average", (), is_field)
        return {
            "params": self.params,
            "averages": averages,
            "optimizer": tree_set(self.optimizer, is_field, average=())
            if averages
            else self.optimizer,
            "carry": {"rows": _by_row(self.carry)},
            "tables": self.tables,
        }


def restored_state(layout: State, step: int, restore: Callable[[dict], dict]) -> State:
    """The state that was saved after `step` updates, laid out as `shape_of_state` says.

    restore: reads the items whose shapes it gets.
    """
    items = restore(layout.items())
    carry = jax.tree.map(
        lambda a, like: _make_reshape(like.shape, like.sharding)(a),
        items["carry"]["rows"],
        layout.carry,
    )
    step_array = jax.make_array_from_callback((), layout.step.sharding, lambda _: np.int32(step))
    optimizer, averages = items["optimizer"], items["averages"]
    optimizer = tree_set(optimizer, is_field, average=averages) if averages else optimizer
    return State(step_array, items["params"], optimizer, carry, items["tables"])


def shape_of_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    rows: tuple[int, int] | None = None,
    *,
    sparse: bool = False,
) -> State:
    """The state as shapes, dtypes and shardings.

    rows: microbatches, and rows of each, of which the body carries a state; None where rows stand
    alone. sparse: whether the state has tables.
    """
    shapes = jax.eval_shape(
        lambda params: _initial(model, optimizer, params, rows), parameter_shapes(model)
    )
    tables = encoded_shapes(model) if sparse else {}
    specs = sharding.parameter_specs(shapes._replace(carry=()), mesh, model)
    specs = specs._replace(
        carry=jax.tree.map(lambda a: sharding.batch_spec(1), shapes.carry),
        tables=jax.tree.map(lambda a: PartitionSpec(), tables),
    )
    shapes = shapes._replace(tables=tables)
    return sharding.with_shardings(shapes, specs, mesh)


def initial_state(
    model: LanguageModel,
    optimizer: optax.GradientTransformation,
    seed: int,
    layout: State,
) -> State:
    """The state before the first update; its tables, if any, are 0.

    layout: see `shape_of_state`.
    """
    rows = next((a.shape[:2] for a in jax.tree.leaves(layout.carry)), None)

    def start():
        tables = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), layout.tables)
        state = _initial(model, optimizer, init_params(model, seed), rows)._replace(tables=tables)
        return state if rows else state._replace(carry=layout.carry)

    return jax.jit(start, out_shardings=jax.tree.map(lambda a: a.sharding, layout))()


def parameter_names(params: dict) -> list[str]:
    """The names of the parameters, as body/blocks/query, in the order of `jax.tree.leaves`."""
    return ["/".join(key.key for key in path) for path, _ in jax.tree.leaves_with_path(params)]


def _by_row(carry):
    """A carry, arrays or shapes `[microbatches, rows, ...]`, as `[microbatches * rows, ...]`."""

    def flat(a):
        shape = (a.shape[0] * a.shape[1], *a.shape[2:])
        by_row = NamedSharding(a.sharding.mesh, sharding.batch_spec(0))
        if isinstance(a, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, a.dtype, sharding=by_row)
        return _make_reshape(shape, by_row)(a)

    return jax.tree.map(flat, carry)


@functools.lru_cache(maxsize=64)
def _make_reshape(shape, sharding):
    # Compiled, because several hosts cannot reshape an array together otherwise.
    return jax.jit(lambda a: a.reshape(shape), out_shardings=sharding)


def _initial(model, optimizer, params, rows):
    """The state without tables, before the first update."""
    carry = ()
    if rows is not None:
        microbatches, count = rows
        carry = jax.tree.map(lambda a: jnp.stack([a] * microbatches), model.initial_carry(count))
    return State(jnp.zeros((), jnp.int32), params, optimizer.init(params), carry)
