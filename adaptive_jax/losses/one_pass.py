"""Sums of losses over tokens whose logits exist a chunk of tokens at a time, with gradients in the
same pass.

For softmaxes that visit all their columns with every token. The one of bands and clusters, which
sorts tokens, is `adaptive_jax.losses.banded`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses.chunks import rows_of_chunk
from adaptive_jax.numerics.arrays import exists, floats, ids
from adaptive_jax.numerics.products import wide


def weighted(losses: Callable, chunk: int, params, states, targets, weights, constants=None):
    """The sum of weighted losses, differentiable once in all that is float but targets and
    constants.

    Args:
        losses: a function of `(params, states, targets, constants)` of a chunk to `(loss [tokens],
            nll [tokens])`, defined outside any other function.
        chunk: tokens of a chunk, at most.
        params, constants: arrays that all tokens share; constants have no gradient.
        states, targets: arrays `[tokens, ...]`; targets have no gradient.
        weights: `[tokens]`.

    Returns:
        `(sum(weights · loss), nll [tokens])`; nll has no gradient.
    """
    total, nll = _weighted(
        (losses, rows_of_chunk(len(weights), chunk)), weights, params, states, targets, constants
    )
    return total, lax.stop_gradient(nll)


def unweighted(losses: Callable, chunk: int, params, states, targets):
    """The losses `[tokens]` of `weighted`, differentiable for any cotangent: the backward pass
    computes logits again.
    """
    weights = jnp.ones(len(targets), jnp.float32)
    return _visit(
        (losses, rows_of_chunk(len(targets), chunk)), False, weights, params, states, targets, None
    )[0]


def flat(hidden, targets, weights, words: int):
    """What a caller gives to a loss, as rows: `hidden [tokens, features]`, `targets`, `weights` and
    `exist`, each `[tokens]`.

    A target that does not exist becomes 0, and its weight NaN if it is not 0.

    Raises:
        InputError: as `adaptive_jax.losses.banded.loss`.
    """
    shape = hidden.shape[:-1]
    targets = ids("targets", targets, words, *shape, weights=weights)
    weights = (
        jnp.ones(shape, jnp.float32) if weights is None else floats("weights", weights, *shape)
    )
    exist = exists(targets, words)
    weights = jnp.where(exist | (weights == 0), weights, jnp.nan)
    return (
        hidden.reshape(-1, hidden.shape[-1]),
        jnp.where(exist, targets, 0).ravel(),
        weights.ravel(),
        exist.ravel(),
    )


@jax.custom_vjp
def product(x: jax.Array, table: jax.Array) -> jax.Array:
    """Float32 logits `[tokens, words]` of `x [tokens, width]`; all products run in the dtype of
    x, sums in float32.
    """
    return wide(x, table.astype(x.dtype).T)


def _product_forward(x, table):
    return product(x, table), (x, table)


def _product_backward(residuals, d_logits):
    x, table = residuals
    d_logits = d_logits.astype(x.dtype)
    d_x = wide(d_logits, table.astype(x.dtype))
    d_table = wide(d_logits.T, x)
    return d_x.astype(x.dtype), d_table.astype(table.dtype)


product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted(static, weights, *rest):
    loss, nll, _ = _visit(static, False, weights, *rest)
    return jnp.sum(weights * loss), nll


def _weighted_forward(static, weights, *rest):
    loss, nll, gradients = _visit(static, True, weights, *rest)
    return (jnp.sum(weights * loss), nll), (loss.astype(weights.dtype), *gradients)


def _weighted_backward(static, gradients, cotangents):
    scale, _ = cotangents
    return *jax.tree.map(lambda g: (scale * g).astype(g.dtype), gradients), None, None


_weighted.defvjp(_weighted_forward, _weighted_backward)


def _visit(static, with_gradients, weights, params, states, targets, constants):
    """`(loss [tokens], nll [tokens], gradients of (params, states))`; without gradients it can
    be differentiated itself.
    """
    losses, chunk = static
    count = len(weights)

    def in_chunks(array):
        rest = [(0, -count % chunk)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, rest).reshape(-1, chunk, *array.shape[1:])

    def visit(sums, part):
        weight, states, targets = part

        def total(params, states):
            each = losses(params, states, targets, constants)
            return jnp.sum(weight * each[0]), each

        if not with_gradients:
            return sums, (total(params, states)[1], None)
        (d_params, d_states), each = jax.grad(total, (0, 1), has_aux=True)(params, states)
        return jax.tree.map(lambda one, other: one + other.astype(jnp.float32), sums, d_params), (
            each,
            d_states,
        )

    zeros = (
        jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), params) if with_gradients else None
    )
    parts = jax.tree.map(in_chunks, (weights, states, targets))
    sums, of_tokens = lax.scan(visit if with_gradients else jax.checkpoint(visit), zeros, parts)
    (loss, nll), d_states = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:count], of_tokens)
    if not with_gradients:
        return loss, nll, None
    return loss, nll, (jax.tree.map(lambda g, of: g.astype(of.dtype), sums, params), d_states)
