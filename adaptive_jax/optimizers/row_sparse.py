"""Row-sparse updates: of a table of millions of rows, an update reads and writes those alone that a
batch looks up.

A gradient of a whole table is as large as the table, and so is what an optimizer does with it. The
gradient of the looked-up rows is as large as the batch: look the rows up first, differentiate by
them, and give that gradient to `update_rows`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adaptive_jax.errors import InputError
from adaptive_jax.inputs.letters import distinct
from adaptive_jax.numerics import arrays
from adaptive_jax.numerics.products import sum_dtype

# Numbers of updates: schedules begin and end somewhere between, and what an optimizer holds back
# comes with one of the first 12.
TRIED = *range(1, 13), *(10**n for n in range(2, 7))


def update_rows(
    optimizer: optax.GradientTransformation,
    table: Any,
    state: Any,
    ids: jax.Array,
    gradient: Any,
    *,
    lazy: bool = False,
) -> tuple[Any, Any]:
    """One update of the rows of a table that a batch looked up; all other rows stay as they are.

        optimizer = optax.adagrad(0.1)
        state = optimizer.init(table)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def update(table, state, ids):
            loss, gradient = jax.value_and_grad(loss_of)(table[ids])
            return *update_rows(optimizer, table, state, ids, gradient), loss

    Time and memory go by the ids, not by the rows of the table, where the table and the state are
    donated, as here; otherwise XLA copies both. The gradients of an id that occurs several times
    are summed first. Then the optimizer sees these rows and their part of its state, as if there
    were no others.

    Gradient descent and Adagrad (Duchi et al. 2011), of a fixed rate or a schedule, are thereby
    what they are with the gradient of the whole table. An optimizer that would also move rows
    without a gradient, by momentum, decayed averages or weight decay, becomes another method, which
    passes over these: lazy momentum, lazy Adam. It needs `lazy=True`. Counts of updates, by which
    Adam corrects its moments, stay those of the whole table, as in TensorFlow's LazyAdam.

    Args:
        optimizer: of optax, elementwise, made outside `jax.jit`. A clip to a norm sees the norm of
            these gradients alone.
        table: `[rows, ...]`, or a tree of such arrays of the same rows, as a table and its bias.
        state: `optimizer.init(table)`, or what the update before returned.
        ids: rows that the batch looked up, whole numbers of any shape `[...]`, in any order.
        gradient: of what `table[ids]` gave, `[..., *row]`; of a tree, a tree.
        lazy: accept an optimizer whose row-sparse form is another method, such as lazy Adam.

    Returns:
        The table and the state after the update.

    Raises:
        InputError: shapes that do not fit; ids that do not exist (inside `jax.jit`, where ids are
            not known, those change nothing); an optimizer that needs `lazy=True`, that was made
            inside `jax.jit` of a number not known there, that needs more than a gradient, or that
            keeps an array that is neither a number nor shaped as the table.
    """
    tables = jax.tree.map(lambda a: _table(jnp.asarray(a)), table)
    state = jax.tree.map(jnp.asarray, state)  # which may come from a file
    rows, shapes = _checked(tables, state)
    _check_state(optimizer, tables, state)
    leaves, structure = jax.tree.flatten(tables)
    try:
        structure.flatten_up_to(gradient)
    except (TypeError, ValueError):
        trees = f"{structure}, got {jax.tree.structure(gradient)}"
        raise InputError(f"gradient must be a tree as the table, {trees}") from None
    kinds = tuple((a.shape[1:], a.dtype) for a in leaves)
    if not lazy and _moves_other_rows(optimizer, structure, kinds):
        raise InputError(
            "this optimizer also moves rows without a gradient, by momentum, decayed averages or"
            " weight decay, or reads whole arrays: use lazy=True for the method that leaves them,"
            " such as lazy Adam, or optax.sgd or optax.adagrad"
        )
    ids = arrays.ids("ids", ids, rows, ...)
    known = arrays.exists(ids, rows)
    words, place = distinct(jnp.where(known, ids, rows).ravel(), rows, 1)
    number = jnp.arange(len(words), dtype=words.dtype)
    words = jnp.where(words < rows, words, rows + number)  # padding: rows beyond, each another one
    how = {"indices_are_sorted": True, "unique_indices": True}

    def summed(table, gradient):
        row = table.shape[1:]
        gradient = arrays.floats("gradient", gradient, *ids.shape, *row).reshape(ids.size, *row)
        gradient = jnp.where(known.reshape(-1, *[1] * len(row)), gradient, 0)
        zeros = jnp.zeros((len(words), *row), sum_dtype(table.dtype))
        return zeros.at[place].add(gradient.astype(zeros.dtype)).astype(table.dtype)

    def read(a):
        return a.at[words].get(mode="fill", fill_value=0, **how) if a.shape in shapes else a

    def write(a, new):
        return a.at[words].set(new, mode="drop", **how) if a.shape in shapes else new

    own, own_state = jax.tree.map(read, (tables, state))
    gradient = jax.tree.map(summed, tables, gradient)
    changes, own_state = _updated(optimizer, gradient, own_state, own)
    own = optax.apply_updates(own, changes)
    return jax.tree.map(write, tables, own), jax.tree.map(write, state, own_state)


def _table(array):
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(f"table of dtype {array.dtype} must be of floats, such as float32")
    return array


def _checked(tables, state):
    """The number of rows, and the shapes of all arrays that have a row for each."""
    shapes = [a.shape for a in jax.tree.leaves(tables)]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise InputError(f"arrays of a table must have the same rows, got shapes {shapes}")
    for a in jax.tree.leaves(state):
        if a.shape and a.shape not in shapes:
            raise InputError(
                f"the optimizer keeps an array {list(a.shape)} beside a table {list(shapes[0])},"
                " whose rows are not those of the table: use an elementwise optimizer, such as"
                " optax.adagrad"
            )
    return shapes[0][0], shapes


def _check_state(optimizer, tables, state):
    if not hasattr(optimizer, "init"):
        raise InputError(f"optimizer={optimizer!r} must be one of optax, such as optax.sgd(0.1)")
    right = jax.eval_shape(optimizer.init, tables)
    if jax.tree.structure(state) != jax.tree.structure(right):
        raise InputError("state must be `optimizer.init(table)`, got that of another optimizer")
    for a, wanted in zip(*map(jax.tree.leaves, (state, right)), strict=True):
        if a.ndim and a.dtype != wanted.dtype:
            dtypes = f"{wanted.dtype}, got an array of {a.dtype}"
            raise InputError(f"state must be `optimizer.init(table)`, of {dtypes}")


def _updated(optimizer, gradient, state, table):
    """What `optimizer.update` gives."""
    try:
        return optimizer.update(gradient, state, table)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        raise InputError(
            f"the optimizer needs more than a gradient ({error}): use one that does not, such as"
            " optax.sgd or optax.adagrad"
        ) from error


@functools.lru_cache(maxsize=64)
def _moves_other_rows(optimizer, structure, kinds):
    """Whether an update that has a gradient for one row changes another, or what the optimizer
    keeps of it, or depends on that other row or on where it has moved; tried after many updates, as
    it may wait, and with a large gradient, as it may clip.

    structure: of the tree of tables; kinds: shape of a row, and dtype, of each.
    """

    def filled(rows, other, one=1):
        return structure.unflatten(
            [jnp.full((rows, *shape), one, dtype).at[1:].set(other) for shape, dtype in kinds]
        )

    def updated(rows, done, first, size, sign=1, follow=False):
        """The second update, of row 0 alone. first: gradients of row 0 and of others before it;
        follow: the table is what the first one made of it.
        """
        table = filled(rows, sign, sign)
        given = filled(rows, first[1], first[0])
        changes, state = _updated(optimizer, given, optimizer.init(table), table)
        table = optax.apply_updates(table, changes) if follow else table
        state = jax.tree.map(lambda a: _counted(jnp.asarray(a), done), state)
        changes, after = _updated(optimizer, filled(rows, 0, size), state, table)
        trees = changes, state, after
        return [[a for a in jax.tree.leaves(tree) if jnp.shape(a)] for tree in trees]

    def differs(done, sign=1, size=1):
        changes, before, after = updated(2, done, (size, size), size, sign)
        moved = [(a[1] != 0).any() for a in changes]
        moved += [(a[1] != b[1]).any() for a, b in zip(before, after, strict=True)]
        for first in (size, 0), (0, size):  # where a clip to a norm sees one row
            both = (updated(rows, done, first, size, follow=True)[0] for rows in (2, 1))
            pairs = zip(*both, strict=True)
            moved += [~jnp.allclose(a[0], b[0], 1e-5) for a, b in pairs]
        return any(map(bool, moved))

    with jax.ensure_compile_time_eval():
        try:
            return differs(1, sign=-1) or differs(1, size=1000) or any(map(differs, TRIED))
        except jax.errors.ConcretizationTypeError as error:
            raise InputError(
                "the optimizer has a number that is not known yet: make it outside jax.jit, with a"
                " schedule or optax.inject_hyperparams for a rate that changes"
            ) from error


def _counted(array, done):
    """A number of updates becomes `done`; anything else stays."""
    counts = not array.shape and jnp.issubdtype(array.dtype, jnp.integer)
    return jnp.full_like(array, done) if counts else array
