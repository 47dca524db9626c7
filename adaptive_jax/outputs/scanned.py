"""Losses that JAX differentiates, computed a chunk of tokens at a time: the backward pass computes
the logits of each chunk again.

The softmax of bands and clusters, which needs no second pass, is `adaptive_jax.losses.banded`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from adaptive_jax.losses.chunks import LIFT, rows_of_chunk
from adaptive_jax.numerics.arrays import exists, floats, ids
from adaptive_jax.numerics.meshes import vary_alike
from adaptive_jax.numerics.products import wide


def checked(hidden, targets, weights, words: int) -> tuple[jax.Array, jax.Array]:
    """Targets and weights `[...]` of hidden states `[..., features]`; None: weights of 1.

    A target that does not exist becomes 0, and its weight NaN if it is not 0.

    Raises:
        InputError: as `adaptive_jax.losses.banded.loss`.
    """
    shape = hidden.shape[:-1]
    targets = ids("targets", targets, words, *shape, weights=weights)
    weights = jnp.ones(shape) if weights is None else floats("weights", weights, *shape)
    exist = exists(targets, words)
    return jnp.where(exist, targets, 0), jnp.where(exist | (weights == 0), weights, jnp.nan)


def scanned_loss(losses: Callable, chunk: int, weights: jax.Array, *by_token):
    """The sum of `weights · loss`, and the nll `[...]` of every token, 0 where the weight is 0.

    Args:
        losses: from arrays `[tokens, ...]`, those of a chunk, to `(loss [tokens], nll [tokens])`.
        chunk: tokens of a chunk, at most.
        weights: `[...]`.
        by_token: trees of arrays with the axes of the weights first.
    """
    count = weights.size
    rows = rows_of_chunk(count, chunk)

    def in_chunks(array):
        array = array.reshape(count, *array.shape[weights.ndim :])
        room = [(0, -count % rows)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, room).reshape(-1, rows, *array.shape[1:])

    def visit(part):
        return losses(*part)

    def counted(array):  # 0 · NaN is NaN
        live = (weights != 0).reshape(*weights.shape, *[1] * (array.ndim - weights.ndim))
        return jnp.where(live, array, jnp.zeros_like(array))

    parts = jax.tree.map(lambda array: in_chunks(counted(array)), by_token)
    loss, nll = (
        each.ravel()[:count].reshape(weights.shape)
        for each in jax.lax.map(jax.checkpoint(visit), parts)
    )
    return jnp.sum(weights * loss), jnp.where(weights == 0, 0.0, nll + 0 * weights)


def logits_of(x: jax.Array, table: jax.Array) -> jax.Array:
    """Float32 logits `[tokens, words]` of `x [tokens, width]`; all products run in the dtype of
    x, sums in float32.
    """
    return _logits_of(*vary_alike((x, table)))


@jax.custom_vjp
def _logits_of(x, table):
    return wide(x, table.astype(x.dtype).T)


def _forward(x, table):
    return _logits_of(x, table), (x, table)


def _backward(residuals, d_logits):
    x, table = residuals
    lowering = 1.0
    if x.dtype == jnp.float16:  # of small weights the gradients would be 0
        largest = jnp.max(jnp.abs(d_logits))
        lowering = jnp.where(largest == 0, 1.0, largest) / LIFT
        d_logits = d_logits / lowering
    d_logits = d_logits.astype(x.dtype)
    d_x = wide(d_logits, table.astype(x.dtype)) * lowering
    return d_x.astype(x.dtype), (wide(d_logits.T, x) * lowering).astype(table.dtype)


_logits_of.defvjp(_forward, _backward)
