"""Losses that JAX differentiates, computed a chunk of tokens at a time: the backward pass computes
the logits of each chunk again.

The softmax of bands and clusters, which needs no second pass, is `adaptive_jax.losses.banded`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from adaptive_jax.losses.chunks import lifted, rows_of_chunk, through_projection
from adaptive_jax.numerics.arrays import exists, floats, ids
from adaptive_jax.numerics.meshes import by_token, vary_alike
from adaptive_jax.numerics.products import sum_dtype, wide


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


def total_and_nll(function: Callable, tokens, shared, *static) -> tuple[jax.Array, jax.Array]:
    """The sum of `weights · loss`, and the nll `[...]` of every token, 0 where the weight is 0; on
    Explicit axes each device computes its own tokens.

    Args:
        function: `function(*static, tokens, shared)` is what `in_chunks` returns; it is defined
            outside any other function.
        tokens: `(hidden [..., features], targets [...], weights [...])`.
        shared: a tree of arrays that every token reads.
        static: hashable.
    """
    found, weights = by_token(function, tokens, shared, *static), tokens[2]
    loss, nll = found[..., 0], found[..., 1]
    return jnp.sum(weights * loss), jnp.where(weights == 0, 0.0, nll + 0 * weights)


def in_chunks(losses: Callable, chunk: int, weights: jax.Array, *arrays) -> jax.Array:
    """Loss and nll `[..., 2]` of every token.

    Args:
        losses: from arrays `[tokens, ...]`, those of a chunk, to `(loss [tokens], nll [tokens])`.
        chunk: tokens of a chunk, at most.
        weights: `[...]`.
        arrays: trees of arrays with the axes of the weights first.
    """
    count = weights.size
    rows = rows_of_chunk(count, chunk)

    def cut(array):
        array = array.reshape(count, *array.shape[weights.ndim :])
        room = [(0, -count % rows)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, room).reshape(-1, rows, *array.shape[1:])

    def visit(part):
        return jnp.stack(losses(*part), axis=1)

    def counted(array):  # 0 · NaN is NaN
        live = (weights != 0).reshape(*weights.shape, *[1] * (array.ndim - weights.ndim))
        return jnp.where(live, array, jnp.zeros_like(array))

    parts = jax.tree.map(lambda array: cut(counted(array)), arrays)
    found = jax.lax.map(jax.checkpoint(visit), parts)
    return found.reshape(-1, 2)[:count].reshape(*weights.shape, 2)


def project(hidden: jax.Array, projection: jax.Array | None) -> jax.Array:
    """Hidden states `[tokens, features]` in the width of a band, float32 or wider."""
    if projection is None:
        return hidden.astype(sum_dtype(hidden.dtype))
    return _project(*vary_alike((hidden, projection)))


@jax.custom_vjp
def _project(hidden, projection):
    return wide(hidden, projection.T.astype(hidden.dtype))


def _from_projected(residuals, d_x):
    hidden, projection = residuals
    d_hidden, d_projection = through_projection(d_x, hidden, projection.astype(hidden.dtype))
    return d_hidden.astype(hidden.dtype), d_projection.astype(projection.dtype)


_project.defvjp(lambda *given: (_project(*given), given), _from_projected)


def logits_of(x: jax.Array, table: jax.Array, dtype) -> jax.Array:
    """Float32 logits `[tokens, words]` of `x [tokens, width]` from `project`; all products run in
    `dtype`, sums in float32.
    """
    return _logits_of(dtype, *vary_alike((x, table)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _logits_of(dtype, x, table):
    return wide(x.astype(dtype), table.astype(dtype).T)


def _from_logits(dtype, residuals, d_logits):
    x, table = residuals
    d_logits, lowering = lifted(d_logits, dtype)
    d_x = wide(d_logits, table.astype(dtype)) * lowering
    d_table = wide(d_logits.T, x.astype(dtype)) * lowering
    return d_x.astype(x.dtype), d_table.astype(table.dtype)


_logits_of.defvjp(lambda dtype, *given: (_logits_of(dtype, *given), given), _from_logits)
