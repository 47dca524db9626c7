"""Optimizers that keep one second moment for each row of a table, in place of one for each number.

    optimizer = row_wise_adagrad(0.1)
    state = optimizer.init(table)  # of 10M rows of 32 numbers 40 MB, where Adam keeps 2,560

They differ from what optax has: `adafactor` and `sm3` keep moments of columns, too, which every row
shares, so that an update of some rows would have to read all of them; and `sm3`, as Adam, a first
moment as large as the table.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from adaptive_jax.errors import InputError, check_within
from adaptive_jax.numerics.products import sum_dtype


class RowWiseState(NamedTuple):
    """State of the optimizers here."""

    count: jax.Array  # updates done
    first: Any  # means of gradients, of the tables' shapes; () where b1 is 0
    row_moments: Any  # `[rows]` of each table; `parallel.sharding` knows this name


def row_wise_adagrad(
    learning_rate: optax.ScalarOrSchedule, *, epsilon: float = 1e-8
) -> optax.GradientTransformation:
    """Adagrad (Duchi et al. 2011) with one sum for each row r of a table, as recommenders are
    trained (FBGEMM's EXACT_ROWWISE_ADAGRAD):

        v_r += mean(g_r²)
        table_r -= learning_rate · g_r / (√v_r + epsilon)

    Rows without a gradient stay as they are, so that `update_rows` gives what this does with the
    gradient of the whole table. The numbers v_r are float32 or wider.

    Args:
        learning_rate: a number, or a schedule of optax.
        epsilon: added to the root, above 0.

    Raises:
        InputError: a number out of range.
    """
    return _row_wise(learning_rate, epsilon, 0.0, None)


def row_wise_adam(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b1: float = 0.0,
    b2: float = 0.999,
    epsilon: float = 1e-8,
) -> optax.GradientTransformation:
    """Adam (Kingma & Ba 2015) with one second moment for each row r of a table (FBGEMM's
    PARTIAL_ROWWISE_ADAM), in update t:

        m_r = b1 · m_r + (1 - b1) · g_r
        v_r = b2 · v_r + (1 - b2) · mean(g_r²)
        table_r -= learning_rate · m_r / (1 - b1^t) / (√(v_r / (1 - b2^t)) + epsilon)

    By default there is no first moment, which is as large as the table. The numbers v_r are float32
    or wider.

    Args:
        learning_rate: a number, or a schedule of optax.
        b1: decay rate of the mean of gradients; 0: none is kept. It decides the state, so that
            `optax.inject_hyperparams` takes it as one of its `static_args`.
        b2: decay rate of the mean of their squares.
        epsilon: added to the root, above 0.

    Raises:
        InputError: a number out of range, or a b1 that is an array.
    """
    if isinstance(b1, jax.Array):
        raise InputError(
            "b1 must be a number, got an array: use"
            ' optax.inject_hyperparams(row_wise_adam, static_args="b1")'
        )
    check_within("[0, 1)", **_numbers(b1=b1, b2=b2))
    return _row_wise(learning_rate, epsilon, b1, b2)


def _numbers(**values):
    """The values that are not arrays; `optax.inject_hyperparams` passes arrays."""
    return {name: value for name, value in values.items() if not isinstance(value, jax.Array)}


def _row_wise(learning_rate, epsilon, b1, b2):
    """The optimizer; with b2=None a sum of squares in place of their mean."""
    check_within("(0, inf)", **_numbers(epsilon=epsilon))

    def init(tables):
        moments = jax.tree.map(lambda a: jnp.zeros(a.shape[:1], sum_dtype(a.dtype)), tables)
        first = optax.tree.zeros_like(tables) if b1 else ()
        return RowWiseState(jnp.zeros((), jnp.int32), first, moments)

    def mean_squares(gradient):
        squares = jnp.square(gradient.astype(sum_dtype(gradient.dtype)))
        return jnp.mean(squares, axis=tuple(range(1, gradient.ndim)))

    def update(gradients, state, tables=None):
        count = optax.safe_increment(state.count)
        squares = jax.tree.map(mean_squares, gradients)
        if b2 is None:
            moments = roots = optax.tree.add(state.row_moments, squares)
        else:
            moments = optax.tree.update_moment(squares, state.row_moments, b2, 1)
            roots = optax.tree.bias_correction(moments, b2, count)
        first = optax.tree.update_moment(gradients, state.first, b1, 1) if b1 else ()
        changes = optax.tree.bias_correction(first, b1, count) if b1 else gradients

        def divide(change, moment):
            root = jnp.sqrt(moment) + epsilon
            return (change / jnp.expand_dims(root, range(1, change.ndim))).astype(change.dtype)

        return jax.tree.map(divide, changes, roots), RowWiseState(count, first, moments)

    scale = optax.GradientTransformation(init, update)
    return optax.chain(scale, optax.scale_by_learning_rate(learning_rate))
