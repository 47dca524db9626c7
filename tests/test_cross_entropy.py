"""The public losses against a dense twin in float64, under every transformation of JAX, and cut over 8 devices by words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import linear_cross_entropy

TOKENS, WIDTH = 6, 4
ALL = {"bias": True, "weights": True, "soft_cap": 2.0, "label_smoothing": 0.2, "z_loss": 0.03}
OPTIONS = {"plain": {}, "bias and mask": {"bias": True, "weights": True}, "soft cap": {"soft_cap": 2.0}, "all": ALL}
CASES = [*((4_100, name) for name in OPTIONS), *((words, "all") for words in (1, 2, 32_003, 151_936, 267_735))]


def arrays(words, options, width=WIDTH):
    """hidden, table, bias and weights, and targets."""
    rng = np.random.default_rng(words)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    targets = np.concatenate([[0, words - 1], rng.integers(0, words, TOKENS - 2)]).astype(np.int32)
    bias = normal(words) if options.get("bias") else None
    weights = np.array([1, 2, 0, 1, 0, 0.5], np.float32) if options.get("weights") else None
    return (normal(TOKENS, width), normal(words, width), bias, weights), targets


def settings(options):
    return {name: value for name, value in options.items() if name not in ("bias", "weights")}


def reduced(each, weights, reduction):
    weights = jnp.ones_like(each) if weights is None else weights
    each = weights * each
    return each if reduction == "none" else each.sum() if reduction == "sum" else each.sum() / weights.sum()


def dense(hidden, table, bias, weights, targets, *, soft_cap=None, label_smoothing=0.0, z_loss=0.0, reduction="mean"):
    """All logits, in the dtype of the arrays."""
    logits = hidden @ table.T + (0 if bias is None else bias[None])
    logits = logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)
    normaliser = jax.scipy.special.logsumexp(logits, axis=1)
    scored = (1 - label_smoothing) * jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    each = normaliser - scored - label_smoothing * logits.mean(axis=1) + z_loss * normaliser**2
    return reduced(each, weights, reduction)


def ours(hidden, table, bias, weights, targets, **options):
    return linear_cross_entropy(hidden, table, targets, bias=bias, weights=weights, **options)


def pulled(loss, values, targets, pull, **options):
    """The loss for every reduction, and the gradients of all arrays."""

    def run(values, targets, pull):
        found = []
        for reduction in ("mean", "sum", "none"):
            value, back = jax.vjp(lambda v, r=reduction: loss(*v, targets, reduction=r, **options), values)
            found.append((value, back(pull if reduction == "none" else pull[0])))
        return found

    return jax.jit(run)(values, targets, pull)


def in_float64(function, *values):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64 if a.dtype.kind == "f" else jnp.int64), values)
        return jax.tree.map(np.asarray, function(*wide))


def check(fast, slow, rtol=2e-5, atol=2e-5):
    for one, other in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, rtol, atol)


PULL = np.array([0.7, -1.3, 0.4, 2.0, 1.1, -0.2], np.float32)


@pytest.mark.parametrize("words, name", CASES)
def test_against_the_dense_twin(words, name):
    """Values and gradients of all arrays, weights among them, for every reduction; "none" under a cotangent of any signs."""
    values, targets = arrays(words, OPTIONS[name])
    options = settings(OPTIONS[name])
    fast = pulled(ours, values, targets, PULL, **options)
    slow = in_float64(lambda *v: pulled(dense, *v, **options), values, targets, PULL)
    check(fast, slow)
