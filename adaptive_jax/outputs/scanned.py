"""Losses by autodiff, a chunk of tokens at a time. The forward pass computes the gradients, while a
chunk's logits exist: three products, where `jax.checkpoint` around a chunk needs four.

The softmax of bands and clusters, whose gradients are written out, is `adaptive_jax.losses.banded`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses import fused, partitioned
from adaptive_jax.losses.arguments import token_targets
from adaptive_jax.losses.chunks import lifted
from adaptive_jax.losses.plans import even_rows
from adaptive_jax.numerics.arrays import in_chunks
from adaptive_jax.numerics.meshes import axes_of, pvary, vary_alike
from adaptive_jax.numerics.products import sum_dtype, wide


class ChunkedLoss(NamedTuple):
    """A loss that is computed a chunk of tokens at a time. Its functions must not be closures.

    Attributes:
        prepare: `prepare(targets [tokens], bands, constants)` returns `(rows, shared)`, a tree of
            arrays with a row for each token and a tree that all tokens read.
        losses: `losses(static, hidden, targets, rows, shared, constants)` returns `(loss [n], nll
            [n])` of n tokens.
        words: number of words.
        chunk: the most tokens of a chunk.
        static: a hashable argument of `losses`.
    """

    prepare: Callable
    losses: Callable
    words: int
    chunk: int
    static: Any = None


def total_and_nll(chunked: ChunkedLoss, hidden, targets, weights, bands, constants=()):
    """The sum of `weights · loss`, whose gradients the same pass computes, and the nll `[...]` of
    every token, 0 where the weight is 0, without gradient.

    Args:
        hidden: `[..., features]`.
        targets: `[...]`; one outside of the vocabulary gives NaN unless its weight is 0.
        weights: `[...]`, or None: all 1.
        bands: a tree of arrays to differentiate.
        constants: a tree of arrays without gradients.

    Raises:
        InputError: as `adaptive_jax.losses.banded.loss`.
    """
    arguments = _arguments(chunked, hidden, targets, weights, bands, constants)
    _, (*_, weights), _ = arguments
    total, [nll] = fused.total(*arguments)
    return total, lax.stop_gradient(jnp.where(weights == 0, 0.0, nll + 0 * weights))


def losses_of(chunked: ChunkedLoss, hidden, targets, bands):
    """The loss `[...]` of every token; gradients take a second pass. Arguments and errors are those
    of `total_and_nll`.
    """
    arguments = _arguments(chunked, hidden, targets, None, bands, ())
    _, (*_, weights), _ = arguments
    return fused.each(*arguments) + 0 * weights


def _arguments(chunked, hidden, targets, weights, bands, constants):
    """Checks arguments for `fused.total` and `fused.each`; on Explicit axes gives them the same
    sharding.
    """
    dtype = sum_dtype(hidden.dtype)
    targets = token_targets(
        targets, weights, None, hidden.shape[:-1], chunked.words, ignored=None, dtype=dtype
    )
    # A sum over tokens may exceed float16, and gradients are scaled first and rounded last.
    hidden, bands = jax.tree.map(
        lambda a: a.astype(jnp.float32) if a.dtype == jnp.float16 else a, (hidden, bands)
    )
    tokens = hidden, targets.ids, targets.weights
    tokens, shared = vary_alike((tokens, (bands, constants)))
    flags = [True] * len(jax.tree.leaves(bands)) + [False] * len(jax.tree.leaves(constants))
    by_words = (False,) * len(flags)
    loss = fused.FusedLoss(_local, chunked, by_words, tuple(flags))
    return loss, *partitioned.aligned(tokens, shared, by_words)


def _local(static, _, tokens, shared):
    """Losses and gradients of the tokens of one device, for `FusedLoss`; tokens of weight 0 have no
    effect.
    """
    (chunked, gradients), (bands, constants), shape = static, shared, tokens[1].shape
    hidden, targets, weights = (a.reshape(math.prod(shape), *a.shape[len(shape) :]) for a in tokens)
    live = weights != 0  # 0 · NaN is NaN
    hidden, targets = jnp.where(live[:, None], hidden, 0), jnp.where(live, targets, 0)
    (rows, shared), pull_bands = jax.vjp(lambda b: chunked.prepare(targets, b, constants), bands)
    size = even_rows(len(targets), chunked.chunk)

    def in_one(array):
        return array.reshape(-1, *array.shape[2:])[: len(targets)]

    def visit(d_shared, chunk):
        hidden, targets, weights, rows = chunk

        def losses(hidden, rows, shared):
            return chunked.losses(chunked.static, hidden, targets, rows, shared, constants)

        if not gradients:
            return d_shared, (losses(hidden, rows, shared), None, None)
        loss, pull, nll = jax.vjp(losses, hidden, rows, shared, has_aux=True)
        d_hidden, d_rows, d_chunk = pull(weights.astype(loss.dtype))
        d_shared = jax.tree.map(lambda a, b: a + b.astype(a.dtype), d_shared, d_chunk)
        return d_shared, ((loss, nll), d_hidden, d_rows)

    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, sum_dtype(a.dtype)), shared)
    zeros = pvary(zeros, axes_of(tokens) | axes_of((bands, constants)))
    chunks = jax.tree.map(lambda a: in_chunks(a, size), (hidden, targets, weights, rows))
    d_shared, results = lax.scan(visit, zeros, chunks)
    results, d_hidden, d_rows = jax.tree.map(in_one, results)
    results = [jnp.where(live, values, 0).reshape(shape) for values in results]
    if not gradients:
        return results, None, None
    d_shared = jax.tree.map(lambda a, like: a.astype(like.dtype), d_shared, shared)
    [d_bands] = pull_bands((d_rows, d_shared))
    return results, d_hidden.reshape(*shape, -1), (d_bands, jax.tree.map(lambda _: None, constants))


def project(hidden: jax.Array, projection: jax.Array | None) -> jax.Array:
    """Projects hidden states `[tokens, features]` to the width of a band, in float32 or wider."""
    if projection is None:
        return hidden.astype(sum_dtype(hidden.dtype))
    return product(hidden, projection, hidden.dtype)


def product(x: jax.Array, table: jax.Array, dtype) -> jax.Array:
    """`x [tokens, width]` times `table [words, width]`, `[tokens, words]` in float32, or float64 of
    those; it and its gradients are products in `dtype`.
    """
    return _product(dtype, *vary_alike((x, table)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype, x, table):
    return wide(x.astype(dtype), table.astype(dtype).T)


def _product_backward(dtype, residuals, cotangent):
    x, table = residuals
    cotangent, lowering = lifted(cotangent, dtype)
    d_x = wide(cotangent, table.astype(dtype)) * lowering
    d_table = wide(cotangent.T, x.astype(dtype)) * lowering
    return d_x.astype(x.dtype), d_table.astype(table.dtype)


_product.defvjp(lambda dtype, *arrays: (_product(dtype, *arrays), arrays), _product_backward)
