"""Losses whose gradients JAX derives, a chunk of tokens at a time, while the chunk's logits are
there.

The softmax of bands and clusters, whose gradients are written out, is `adaptive_jax.losses.banded`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adaptive_jax.losses import partitioned
from adaptive_jax.losses.banded import scaled
from adaptive_jax.losses.chunks import lifted, through_projection
from adaptive_jax.losses.plans import even_rows
from adaptive_jax.numerics.arrays import exists, floats, ids
from adaptive_jax.numerics.meshes import axes_of, pvary, vary_alike
from adaptive_jax.numerics.products import sum_dtype, wide


def checked(hidden, targets, weights, words: int) -> tuple[jax.Array, jax.Array]:
    """Targets and weights `[...]` of hidden states `[..., features]`; None: weights of 1.

    A target that does not exist becomes 0, and its weight NaN if it is not 0.

    Raises:
        InputError: as `adaptive_jax.losses.banded.loss`.
    """
    shape = hidden.shape[:-1]
    targets = ids("targets", targets, words, *shape, weights=weights)
    dtype = sum_dtype(hidden.dtype)
    weights = jnp.ones(shape) if weights is None else floats("weights", weights, *shape)
    weights = weights.astype(dtype)
    exist = exists(targets, words)
    return jnp.where(exist, targets, 0), jnp.where(exist | (weights == 0), weights, jnp.nan)


class ChunkedLoss(NamedTuple):
    """What is computed of each chunk of tokens. Functions are defined outside any other function.

    Attributes:
        prepare: `prepare(targets [tokens], bands, given)` is `(own, others)`, a tree of arrays with
            a row for each token and a tree that all tokens read.
        losses: `losses(how, hidden, targets, own, others, given)` is `(loss [n], nll [n])` of n
            tokens.
        chunk: tokens at a time, at most.
        how: hashable.
    """

    prepare: Callable
    losses: Callable
    chunk: int
    how: Any = None


def total_and_nll(chunked: ChunkedLoss, hidden, targets, weights, bands, given=()):
    """The sum of `weights · loss`, whose gradients the same pass computes, and the nll `[...]` of
    every token, 0 where the weight is 0, without gradient.

    Args:
        hidden: `[..., features]`.
        targets, weights: `[...]`, of `checked`.
        bands: a tree of arrays that have gradients.
        given: a tree of others.
    """
    total, nll = _total(chunked, *_arranged(hidden, targets, weights, bands, given))
    return total, jax.lax.stop_gradient(jnp.where(weights == 0, 0.0, nll + 0 * weights))


def nll_of(chunked: ChunkedLoss, hidden, targets, weights, bands, given=()):
    """The nll `[...]` of every token; gradients for any cotangent need a second pass. Arguments as
    those of `total_and_nll`, weights of 1 or NaN.
    """
    _, nll = _each(chunked, *_arranged(hidden, targets, weights, bands, given))
    return nll + 0 * weights


def _arranged(hidden, targets, weights, bands, given):
    # A sum over tokens may exceed float16.
    bands = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.float16 else a, bands)
    tokens, shared = vary_alike(((hidden, targets, weights), (bands, given)))
    tokens, shared = partitioned.aligned(tokens, shared, _by_words(shared))
    return *tokens, *shared


def _by_words(shared):
    return (False,) * len(jax.tree.leaves(shared))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _total(chunked, hidden, targets, weights, bands, given):
    pulls = jnp.stack([weights, jnp.zeros_like(weights)], axis=-1)
    (loss, nll), _, _ = _run(chunked, hidden, targets, pulls, bands, given, gradients=False)
    return jnp.sum(weights * loss), nll


def _total_forward(chunked, hidden, targets, weights, bands, given):
    pulls = jnp.stack([weights, jnp.zeros_like(weights)], axis=-1)
    (loss, nll), *slopes = _run(chunked, hidden, targets, pulls, bands, given, gradients=True)
    return (jnp.sum(weights * loss), nll), (*slopes, loss)


def _total_backward(chunked, saved, cotangents):
    times = functools.partial(scaled, cotangents[0], in_place=False)
    d_hidden, d_bands, d_weights = jax.tree.map(times, saved)
    return d_hidden, None, d_weights, d_bands, None


_total.defvjp(_total_forward, _total_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each(chunked, hidden, targets, weights, bands, given):
    pulls = jnp.stack([weights, weights], axis=-1)
    return _run(chunked, hidden, targets, pulls, bands, given, gradients=False)[0]


def _each_forward(chunked, *arrays):
    return _each(chunked, *arrays), arrays


def _each_backward(chunked, arrays, cotangents):
    hidden, targets, weights, bands, given = arrays
    pulls = jnp.stack(cotangents, axis=-1)
    _, *slopes = _run(chunked, hidden, targets, pulls, bands, given, gradients=True)
    return slopes[0], None, jnp.zeros_like(weights), slopes[1], None


_each.defvjp(_each_forward, _each_backward)


def _run(chunked, hidden, targets, pulls, bands, given, gradients):
    """`((loss, nll), d_hidden, d_bands)`, each device computing its own tokens. pulls: cotangents
    `[..., 2]` of loss and nll; a token that has none costs time, and changes nothing.
    """
    tokens, shared = (hidden, targets, pulls), (bands, given)
    static, by_words = (chunked, gradients), _by_words(shared)
    flags = partitioned.Gradients(True, (True,) * len(by_words)) if gradients else None
    results, d_hidden, slopes = partitioned.run(_local, static, tokens, shared, by_words, flags)
    return results, d_hidden, slopes[0] if gradients else None


def _local(static, _, tokens, shared):
    """What `partitioned.run` calls with the tokens of one device."""
    (chunked, with_gradients), shape = static, tokens[1].shape
    hidden, targets, pulls = (a.reshape(math.prod(shape), *a.shape[len(shape) :]) for a in tokens)
    bands, given = shared
    live = jnp.any(pulls != 0, axis=1)  # 0 · NaN is NaN
    hidden, targets = jnp.where(live[:, None], hidden, 0), jnp.where(live, targets, 0)
    (own, others), back = jax.vjp(lambda bands: chunked.prepare(targets, bands, given), bands)
    rows = even_rows(len(targets), chunked.chunk)

    def in_chunks(array):
        room = [(0, -len(array) % rows)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, room).reshape(-1, rows, *array.shape[1:])

    def whole(array):
        return array.reshape(-1, *array.shape[2:])[: len(targets)]

    def visit(sums, part):
        hidden, targets, pulls, own = part

        def losses(hidden, own, others):
            return chunked.losses(chunked.how, hidden, targets, own, others, given)

        if not with_gradients:
            return sums, (losses(hidden, own, others), None, None)
        found, pull = jax.vjp(losses, hidden, own, others)
        cotangents = zip(pulls.T, found, strict=True)
        d_hidden, d_own, more = pull(tuple(x.astype(of.dtype) for x, of in cotangents))
        sums = jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, more)
        return sums, (found, d_hidden, d_own)

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, sum_dtype(a.dtype)), others)
    zeros = pvary(zeros, axes_of((tokens, shared)))
    parts = jax.tree.map(in_chunks, (hidden, targets, pulls, own))
    sums, results = jax.lax.scan(visit, zeros, parts)
    found, d_hidden, d_own = jax.tree.map(whole, results)
    found = [jnp.where(live, each, 0).reshape(shape) for each in found]
    if not with_gradients:
        return found, None, None
    sums = jax.tree.map(lambda a, of: a.astype(of.dtype), sums, others)
    [d_bands] = back((d_own, sums))
    return found, d_hidden.reshape(*shape, -1), (d_bands, jax.tree.map(jnp.zeros_like, given))


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
    """Logits `[tokens, words]` of `x [tokens, width]` from `project`; all products run in
    `dtype`, sums in float32, or float64 of those.
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
