"""Losses of tokens by a function that computes its gradients in the same pass."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adaptive_jax.losses import partitioned
from adaptive_jax.losses.arguments import not_differentiable
from adaptive_jax.losses.banded import ONCE, scaled


class FusedLoss(NamedTuple):
    """A function of tokens `(hidden, ..., weights)` and of shared arrays that all tokens read.

    Attributes:
        function: as `partitioned.run` takes it, with `(static, gradients)` as its first argument.
            It returns the loss of each token and reports, and the gradients of the sum of
            weights · loss. It is defined at module level.
        static: hashable.
        by_words: flags of the shared arrays that have a row for each word.
        has_gradient: flags of the shared arrays that have a gradient.
    """

    function: Callable
    static: Any
    by_words: tuple[bool, ...]
    has_gradient: tuple[bool, ...]

    def run(self, tokens, shared, gradients: bool):
        """`((loss, *reports), d_hidden, d_shared)`, each device computing its own tokens."""
        flags = partitioned.Gradients(True, self.has_gradient) if gradients else None
        static = self.static, gradients
        return partitioned.run(self.function, static, tokens, shared, self.by_words, flags)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def total(fused: FusedLoss, tokens, shared):
    """`(sum of weights · loss, reports)`, differentiable once; reports have no gradient."""
    (loss, *reports), *_ = fused.run(tokens, shared, False)
    return jnp.sum(tokens[-1] * loss), reports


def _total_forward(fused, tokens, shared):
    tokens, shared = not_differentiable((tokens, shared), ONCE)
    (loss, *reports), d_hidden, d_shared = fused.run(tokens, shared, True)
    return (jnp.sum(tokens[-1] * loss), reports), (tokens[1:-1], d_hidden, loss, d_shared)


def _total_backward(fused, saved, cotangents):
    ids, *gradients = saved
    scale = functools.partial(scaled, cotangents[0])
    d_hidden, d_weights, d_shared = jax.tree.map(scale, gradients)
    return (d_hidden, *[None] * len(ids), d_weights), d_shared


total.defvjp(_total_forward, _total_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def each(fused: FusedLoss, tokens, shared):
    """The loss of every token, differentiable once and for any cotangent by a second pass. Weights
    are 1; 0 for tokens that do not count; or NaN for targets outside the vocabulary.
    """
    return fused.run(tokens, shared, False)[0][0]


def _each_backward(fused, saved, cotangent):
    (*tokens, weights), shared = not_differentiable(saved, ONCE)
    # Unused losses change no gradient, even if their weight is NaN.
    weights = jnp.where(cotangent == 0, 0, weights * cotangent)
    _, d_hidden, d_shared = fused.run((*tokens, weights), shared, True)
    return (d_hidden, *[None] * len(tokens)), d_shared


each.defvjp(lambda fused, *arrays: (each(fused, *arrays), arrays), _each_backward)
