"""Loss and gradients of a batch, summed over microbatches and devices."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from adaptive_jax.model.composition import compose_for_update, encoded, joined
from adaptive_jax.model.language_model import LanguageModel, parameter_shapes
from adaptive_jax.model.on_devices import on_devices
from adaptive_jax.numerics.meshes import axes_of, pvary
from adaptive_jax.numerics.platforms import platform
from adaptive_jax.parallel import sharding


class Sums(NamedTuple):
    """Sums over the tokens of a batch."""

    loss: jax.Array  # weighted, in nats, with regularisation and penalties
    nll: jax.Array  # weighted, in nats, without these but with dropout
    tokens: jax.Array  # sum of the weights

    @property
    def divisor(self) -> jax.Array:
        """The denominator of a mean: `tokens`, or 1 where no token has weight."""
        return jnp.where(self.tokens == 0, 1, self.tokens)


def make_gradients(
    model: LanguageModel, mesh: Mesh, seed: int, *, shares_tables: bool = False, train: bool = True
) -> Callable:
    """Returns `gradients(params, lexicon, step, batch, carry, stored) -> (gradients, carry,
    Sums, stored)`, to be called under `jax.jit`.

    `batch` is a `Batch` of `[microbatches, rows, time]` and `carry` the body's carry of these rows,
    `[microbatches, rows, ...]`, both sharded by rows; `params` and gradients are sharded by
    `sharding.parameter_specs`, `lexicon` is replicated. Gradients are those of `Sums.loss`, the
    weighted sum over tokens of the loss and of what layers sow as "penalties".

    Each device sums the gradients of its rows over microbatches. Gradients are summed over devices
    once, after the last microbatch; on accelerators with one microbatch, those of each layer of the
    body during the backward pass. Dropout is a function of seed, step and row id, so no layout of
    devices and microbatches changes it.

    shares_tables: whether `stored` is the costly part of the composed tables
        (`composition.encoded`), of all words and replicated. If it is `{}` it is computed and
        returned; otherwise it is used, and parameters that serve nothing else have gradients of 0.
        If False, `stored` is always `{}`.
    train: False for the loss of an evaluation, without dropout, penalties and regularisation.
    """
    specs = sharding.parameter_specs(parameter_shapes(model), mesh, model)

    def loss_of(params_and_tables, local, stored, lexicon, batch, carry, key):
        (params, tables), (local_model, gather) = params_and_tables, local
        variables = {"params": gather(params), "lexicon": lexicon, "tables": joined(stored, tables)}
        (loss, carry), sown = local_model.apply(
            variables, batch, carry, train=train, rngs={"dropout": key}, mutable=["penalties"]
        )
        # Blocks of a scan sow arrays with a leading axis of layers.
        sown = [penalty.reshape(-1, *batch.weights.shape) for penalty in jax.tree.leaves(sown)]
        penalties = sum(jnp.sum(batch.weights[None] * penalty) for penalty in sown)
        return loss.total + penalties, (carry, jnp.sum(loss.nll * batch.weights))

    def on_one_device(params, lexicon, step, batch, carry, stored):
        # Every device computes with separate parameters, whose gradients are summed at the end.
        axes = axes_of(batch.inputs)
        if batch.weights is None:
            batch = batch._replace(weights=jnp.ones_like(batch.inputs, jnp.float32))
        params, lexicon, stored, carry = pvary((params, lexicon, stored, carry), axes)
        key = jax.random.fold_in(jax.random.key(seed), step)
        # Under check_vma, JAX would take a sum within the backward pass for varying.
        by_layer = len(batch.inputs) == 1 and platform() != "cpu" and not axes
        local = sharding.gathering(model, parameter_shapes(model), mesh, by_layer, by_words=True)
        tables, ids, inputs, pull = compose_for_update(*local, mesh)(
            params, lexicon, batch.inputs, key if train else None, stored
        )

        def add(total, part):
            microbatch, carry = part
            (loss, (carry, nll)), gradients = jax.value_and_grad(loss_of, has_aux=True)(
                (params, tables), local, joined(stored, ids), lexicon, microbatch, carry, key
            )
            sums = Sums(loss, nll, jnp.sum(microbatch.weights))
            return jax.tree.map(jnp.add, total, (gradients, sums)), carry

        zero = jnp.zeros((), jnp.float32)
        zeros = pvary(
            (jax.tree.map(jnp.zeros_like, (params, tables)), Sums(zero, zero, zero)), axes
        )
        ((gradients, d_tables), sums), carry = jax.lax.scan(
            add, zeros, (batch._replace(inputs=inputs), carry)
        )
        if tables:
            gradients = jax.tree.map(jnp.add, gradients, pull(d_tables))
        gradients, sums = sharding.sum_over_devices(
            mesh,
            (gradients, sums),
            (specs, Sums(replicated, replicated, replicated)),
            model,
            by_layer,
        )
        if shares_tables and not stored:  # without the padding of the last device's share
            stored = jax.tree.map(
                lambda a: a[: model.input.vocabulary_size], encoded(model, tables)
            )
        return gradients, carry, sums, stored

    replicated, by_rows = PartitionSpec(), sharding.batch_spec(1)
    in_specs = replicated, replicated, by_rows, by_rows, replicated
    out_specs = specs, by_rows, replicated, replicated
    return on_devices(model, mesh, on_one_device, in_specs, out_specs)
