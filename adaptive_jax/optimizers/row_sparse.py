"""Row-sparse updates: an update of a table of millions of rows reads and writes only those that a
batch looks up.

The gradient of a whole table is as large as the table, and an optimizer reads and writes all of it.
The gradient of the looked-up rows is as large as the batch: look the rows up first, differentiate
with respect to them, and pass that gradient to `update_rows`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from adaptive_jax.errors import InputError
from adaptive_jax.numerics import arrays
from adaptive_jax.numerics.products import sum_dtype


def update_rows(
    optimizer: optax.GradientTransformation,
    table: Any,
    state: Any,
    ids: jax.Array,
    gradient: Any,
) -> tuple[Any, Any]:
    """One update of the rows of a table that a batch looked up; all other rows, and what the
    optimizer keeps of them, stay as they are.

        optimizer = optax.adagrad(0.1)
        state = optimizer.init(table)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def update(table, state, ids):
            loss, gradient = jax.value_and_grad(loss_of)(table[ids])
            return *update_rows(optimizer, table, state, ids, gradient), loss

    Time and memory grow with the ids, not with the rows of the table, where the table and the state
    are donated, as here; otherwise XLA copies both. The gradients of an id that occurs several
    times are summed first. Then the optimizer sees only these rows and their part of its state.

    Gradient descent and Adagrad (Duchi et al. 2011), of a fixed rate or a schedule, give what they
    give with the gradient of the whole table. Momentum, decayed averages and weight decay, which
    also move rows without a gradient, leave those here: lazy momentum, lazy Adam. Counts of
    updates, by which Adam corrects its moments, are those of the whole table, as in TensorFlow's
    LazyAdam.

    Args:
        optimizer: of optax. Its state holds single numbers, and arrays whose first axis is the
            rows of the table: `[rows, ...]`, or `[rows]`, as row-wise Adagrad has it. A clip to a
            norm sees the norm of these gradients alone.
        table: `[rows, ...]`, or a tree of such arrays of the same rows, as a table and its bias.
        state: `optimizer.init(table)`, or what the update before returned.
        ids: rows that the batch looked up, whole numbers of any shape `[...]`, in any order.
        gradient: of what `table[ids]` gave, `[..., *row]`; of a tree, a tree.

    Returns:
        The table and the state after the update.

    Raises:
        InputError: shapes that do not fit; ids that do not exist (inside `jax.jit`, where ids are
            not known, these change nothing); the state of another optimizer, or one with an array
            whose first axis is not the rows.
    """
    tables = jax.tree.map(jnp.asarray, table)
    state = jax.tree.map(jnp.asarray, state)  # which may come from a file
    rows = _row_count(tables)
    _check_state(optimizer, tables, state, rows)
    ids = arrays.ids("ids", ids, rows, ...)
    valid = arrays.exists(ids, rows)
    words, place = arrays.distinct(jnp.where(valid, ids, rows).ravel(), rows, 1)
    number = jnp.arange(len(words), dtype=words.dtype)
    words = jnp.where(words < rows, words, rows + number)  # padding: distinct rows beyond
    promises = {"indices_are_sorted": True, "unique_indices": True}

    def summed(table, gradient):
        row = table.shape[1:]
        gradient = arrays.floats("gradient", gradient, *ids.shape, *row).reshape(ids.size, *row)
        gradient = jnp.where(valid.reshape(-1, *[1] * len(row)), gradient, 0)
        zeros = jnp.zeros((len(words), *row), sum_dtype(table.dtype))
        return zeros.at[place].add(gradient.astype(zeros.dtype)).astype(table.dtype)

    def read(a):
        return a.at[words].get(mode="fill", fill_value=0, **promises) if a.ndim else a

    def write(a, new):
        return a.at[words].set(new, mode="drop", **promises) if a.ndim else new

    table_rows, state_rows = jax.tree.map(read, (tables, state))
    gradient = jax.tree.map(summed, tables, gradient)
    changes, state_rows = optimizer.update(gradient, state_rows, table_rows)
    table_rows = optax.apply_updates(table_rows, changes)
    return jax.tree.map(write, tables, table_rows), jax.tree.map(write, state, state_rows)


def _row_count(tables):
    """The number of rows, the same in all arrays of a table.

    Raises:
        InputError: it is not, or they are not of floats.
    """
    arrays = jax.tree.leaves(tables)
    shapes = [a.shape for a in arrays]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise InputError(f"arrays of a table must have the same rows, got shapes {shapes}")
    if not all(jnp.issubdtype(a.dtype, jnp.floating) for a in arrays):
        raise InputError(f"table must be of floats, got {[a.dtype.name for a in arrays]}")
    return shapes[0][0]


def _check_state(optimizer, tables, state, rows):
    """Raises InputError for a state of another optimizer, or with arrays that are not of rows."""
    one_more = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((rows + 1, *a.shape[1:]), a.dtype), tables
    )
    right, longer = (jax.eval_shape(optimizer.init, t) for t in (tables, one_more))
    dtypes, expected = (jax.tree.map(lambda a: a.dtype if a.ndim else 0, t) for t in (state, right))
    if dtypes != expected:
        raise InputError("state must be `optimizer.init(table)`, got another structure or dtype")
    # Of a square table, an array of columns has as many numbers as one of rows.
    for a, grown in zip(jax.tree.leaves(state), jax.tree.leaves(longer), strict=True):
        if a.ndim and (a.shape[0], grown.shape[0]) != (rows, rows + 1):
            raise InputError(
                f"state must have {rows} rows in each array, got shape {list(a.shape)}"
            )
