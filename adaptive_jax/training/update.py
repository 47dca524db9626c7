"""One update: from a batch and the state before to the state after."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from adaptive_jax.data.batches.batching import Batch
from adaptive_jax.devices import sharding
from adaptive_jax.model import LanguageModel
from adaptive_jax.training.state import State, shape_of_state


def make_update(model: LanguageModel, optimizer: optax.GradientTransformation, rate: optax.Schedule, mesh, seed: int):
    """Compiles one update.

    Every device sums the gradients of its own rows, batch after batch; they cross devices once, at the end. Dropout is a
    function of the seed, the step and the number of a row in the update, so no layout of devices and batches changes it.

    Returns:
        `update(state, batch) -> (state, numbers)`: `batch` is a `Batch` of `[accumulation, rows, time]`; gradients are summed
        over all tokens of the update and divided once by the sum of their weights. The state given is used up. `numbers`
        are scalars: `nll` (plain, nats a token, dropout on), `loss` (with regularisation), `learning_rate`,
        `gradient_norm` (before clipping) and `tokens` (the sum of weights).
    """
    shapes = shape_of_state(model, optimizer, mesh)
    specs = sharding.parameter_specs(shapes.params, mesh)
    local_model, gather = sharding.gathering(model, shapes.params, mesh)

    def batch_loss(params, batch, rows, key):
        loss, nll = local_model.apply(
            {"params": gather(params)}, *batch, rows=rows, train=True, rngs={"dropout": key}
        )
        return loss, jnp.sum(nll * batch.weights)

    def on_one_device(params, step, batch):
        """Sums over this device's rows, of all batches `[accumulation, rows, time]`, then over all devices."""
        key = jax.random.fold_in(jax.random.key(seed), step)
        count = batch.inputs.shape[1]
        rows = jax.lax.axis_index(sharding.ROWS) * count + jnp.arange(count)

        def add(total, part):
            number, batch = part
            (loss, nll), gradients = jax.value_and_grad(batch_loss, has_aux=True)(
                params, batch, number * (count * mesh.size) + rows, key
            )
            return jax.tree.map(jnp.add, total, (gradients, (loss, nll, jnp.sum(batch.weights)))), None

        zeros = (jax.tree.map(jnp.zeros_like, params), (0.0, 0.0, 0.0))
        (gradients, sums), _ = jax.lax.scan(add, zeros, (jnp.arange(len(batch.inputs)), batch))
        return sharding.sum_over_rows(mesh, (gradients, sums), out)

    whole, cut = PartitionSpec(), sharding.rows_along(1)
    out = specs, (whole, whole, whole)
    summed = jax.shard_map(on_one_device, mesh=mesh, in_specs=(specs, whole, cut), out_specs=out, check_vma=False)

    def update(state: State, batch: Batch):
        gradients, (loss, nll, tokens) = summed(state.params, state.step, batch)
        gradients = jax.tree.map(lambda g: g / tokens, gradients)
        changes, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
        numbers = {
            "nll": nll / tokens,
            "loss": loss / tokens,
            "learning_rate": rate(state.step),
            "gradient_norm": optax.global_norm(gradients),
            "tokens": tokens,
        }
        return State(state.step + 1, optax.apply_updates(state.params, changes), optimizer_state), numbers

    layout = jax.tree.map(lambda a: a.sharding, shapes)
    return jax.jit(
        update, donate_argnums=0, in_shardings=(layout, NamedSharding(mesh, cut)), out_shardings=(layout, sharding.whole(mesh))
    )
