"""Several losses on one table in one program: products, and gradients of the table that are kept,
as docs/losses.md counts them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import linear_cross_entropy
from tests.losses.test_banded import check

LOSSES, TOKENS, WIDTH, WORDS = 4, 8, 32, 3_000
RNG = np.random.default_rng(0)
HIDDEN = RNG.standard_normal((LOSSES, TOKENS, WIDTH)).astype("f")
TABLE = RNG.standard_normal((WORDS, WIDTH)).astype("f") / 6
TARGETS = RNG.integers(0, WORDS, (LOSSES, TOKENS)).astype(np.int32)
SHARES = np.array([1.0, 0.5, 0.25, 2.0], "f")  # of each loss in the sum


def apart(hidden, table):
    """A call for each."""
    return sum(
        share * linear_cross_entropy(h, table, y)
        for share, h, y in zip(SHARES, hidden, TARGETS, strict=True)
    )


def stacked(hidden, table):
    """One call, whose weights are the share over the count of each."""
    weights = jnp.broadcast_to(SHARES[:, None] / TOKENS, TARGETS.shape)
    return linear_cross_entropy(hidden, table, TARGETS, weights=weights, reduction="sum")


def scanned(hidden, table, one=linear_cross_entropy):
    """A scan, whose gradient is taken outside."""

    def step(total, part):
        h, y, share = part
        return total + share * one(h, table, y), None

    return jax.lax.scan(step, 0.0, (hidden, TARGETS, SHARES))[0]


def checkpointed(hidden, table):
    """The same with `jax.checkpoint` around the loss."""
    return scanned(hidden, table, jax.checkpoint(lambda *a: linear_cross_entropy(*a)))


def mapped(hidden, table):
    """`jax.vmap` over the losses."""
    each = jax.vmap(linear_cross_entropy, (0, None, 0))(hidden, table, TARGETS)
    return jnp.sum(SHARES * each)


def inside(hidden, table):
    """Gradients inside the scan, summed there."""

    def step(sums, part):
        h, y, share = part
        value, (d_h, d_table) = jax.value_and_grad(
            lambda h, t: share * linear_cross_entropy(h, t, y), (0, 1)
        )(h, table)
        return (sums[0] + value, sums[1] + d_table), d_h

    start = 0.0, jnp.zeros_like(table)
    (value, d_table), d_hidden = jax.lax.scan(step, start, (hidden, TARGETS, SHARES))
    return value, (d_hidden, d_table)


def slopes(function):
    return function if function is inside else jax.value_and_grad(function, (0, 1))


def products(jaxpr) -> int:
    """Matrix products of a program, those of a scan as often as it runs."""
    count = 0
    for equation in jaxpr.eqns:
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        inner = [*jax.core.jaxprs_in_params(equation.params)]
        count += times * sum(map(products, inner)) + (equation.primitive.name == "dot_general")
    return count


@functools.cache
def of_each_apart():
    """The loss and gradients of `apart`, compiled once for all cases."""
    return jax.jit(slopes(apart))(HIDDEN, TABLE)


@pytest.mark.parametrize(
    "function, computed, gradients",
    [
        (apart, 12, 4),
        (stacked, 3, 2),
        (scanned, 12, 7.5),
        (checkpointed, 16, 2),
        (inside, 12, 2),
        (mapped, 3, 5),
    ],
)
def test_cost(function, computed, gradients):
    """The numbers of docs/losses.md: products, and arrays of the table's size, the result among
    them. Of vmap, a product is of all losses.
    """
    traced = jax.jit(slopes(function)).trace(HIDDEN, TABLE)
    assert products(traced.jaxpr.jaxpr) == computed
    program = traced.lower().compile()
    analysis = program.memory_analysis()
    held = (analysis.temp_size_in_bytes + analysis.output_size_in_bytes) / TABLE.nbytes
    assert abs(held - gradients) < 0.6, held
    check(program(HIDDEN, TABLE), of_each_apart())
