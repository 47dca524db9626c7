"""Row-sparse updates: equal to those by the gradient of the whole table, or lazy; in place, and of
the batch's size.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from adaptive_jax import row_wise_adagrad, update_rows
from tests import refuses

ROWS, WIDTH = 23, 5


EXACT = {
    "sgd": optax.sgd(0.3),
    "a schedule": optax.sgd(optax.cosine_decay_schedule(0.3, 4)),
    "adagrad": optax.adagrad(0.3),
    "row-wise adagrad": row_wise_adagrad(0.3),
    "clipped": optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.3)),
}
BATCHES = {
    "repeated, most rows missing": [[3, 7, 3], [0, 3, 22]],
    "every row": [list(range(22, -1, -1))],
    "more ids than rows": [[5, 1] * 20],
    "one": [[4]],
}
# Every batch with the shortest and the longest of them; the two between take one.
CASES = [
    (name, batch)
    for name in EXACT
    for batch in BATCHES
    if name in ("sgd", "clipped") or batch == "repeated, most rows missing"
]


def tables(seed=0):
    """A table and a bias, of the same rows."""
    bits = np.random.default_rng(seed)
    shapes = {"table": (ROWS, WIDTH), "bias": (ROWS,)}
    return {name: jnp.asarray(bits.normal(size=s), jnp.float32) for name, s in shapes.items()}


def test_a_state_from_a_file():
    """It may be of NumPy arrays, as the table may."""
    table = np.ones((3, 2), np.float32)
    state = EXACT["adagrad"].init(table)
    rows = [1], jnp.ones((1, 2))
    found = update_rows(EXACT["adagrad"], table, jax.tree.map(np.asarray, state), *rows)
    right = update_rows(EXACT["adagrad"], table, state, *rows)
    jax.tree.map(np.testing.assert_array_equal, found, right)


def test_a_table_of_whole_numbers():
    """It is refused: a row of 5 that loses 0.3 became 4."""
    table = jnp.full((3, 2), 5)
    with refuses("table", "int32"):
        update_rows(EXACT["sgd"], table, EXACT["sgd"].init(table), [1], jnp.ones((1, 2)))


def loss_of(looked_up, step):
    """A loss whose gradient is another one for each occurrence, and each step; of so small weights
    that rounding does not grow from step to step.
    """
    vectors, biases = looked_up["table"], looked_up["bias"]
    weights = jnp.linspace(1.0, 3.0, biases.size).reshape(biases.shape) + step / 4
    return jnp.sum(jnp.sin(vectors.sum(-1) * weights) + jnp.cos(weights * biases))


def look_up(table, ids):
    return jax.tree.map(lambda a: a[ids], table)


@functools.partial(jax.jit, static_argnums=0)
def row_sparse(optimizer, table, state, ids, step):
    gradient = jax.grad(loss_of)(look_up(table, ids), step)
    return update_rows(optimizer, table, state, ids, gradient)


@functools.partial(jax.jit, static_argnums=0)
def dense(optimizer, table, state, ids, step):
    gradient = jax.grad(lambda table: loss_of(look_up(table, ids), step))(table)
    changes, state = optimizer.update(gradient, state, table)
    return optax.apply_updates(table, changes), state


@pytest.mark.parametrize("name, batch", CASES, ids=map(" - ".join, CASES))
def test_gradient_descent_and_adagrad_equal_the_dense_updates(name, batch):
    """Four updates in the table and in the optimizer's state: repeated ids are summed in their
    order, missing rows stay, no padding reaches a row. Gradient descent is equal bit for bit;
    Adagrad's root, whose last bit goes by how many rows the compiler takes at a time, and the norm
    that clips, a sum in another order, to that bit.
    """
    optimizer, ids = EXACT[name], jnp.asarray(BATCHES[batch])
    ours = theirs = tables(), optimizer.init(tables())
    for step in range(4):
        ours = row_sparse(optimizer, *ours, ids, step)
        theirs = dense(optimizer, *theirs, ids, step)
    same = np.testing.assert_array_equal
    if name not in ("sgd", "a schedule"):
        same = functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-7)
    jax.tree.map(same, ours, theirs)
    untouched = np.setdiff1d(np.arange(ROWS), ids)
    for after, before in zip(*map(jax.tree.leaves, (ours[0], tables())), strict=True):
        np.testing.assert_array_equal(after[untouched], before[untouched])
        assert (after[np.unique(ids)] != before[np.unique(ids)]).any()


def test_lazy_adam_and_lazy_momentum():
    """Against NumPy in float64: moments of a row decay in its own updates alone, while the
    correction counts all updates. Dense Adam and momentum end elsewhere.
    """
    steps = [[3, 7, 3], [7, 0, 0], [3, 3, 3]]
    adam, momentum = optax.adam(0.1, eps=1e-3), optax.sgd(0.1, momentum=0.9)
    table = np.asarray(tables()["table"], np.float64)
    expected = {"adam": table.copy(), "momentum": table.copy()}
    m, v, trace = np.zeros((3, ROWS, WIDTH))
    gradients = np.random.default_rng(1).normal(size=(3, 3, WIDTH))
    for t, (ids, gradient) in enumerate(zip(steps, gradients, strict=True), start=1):
        for row in set(ids):
            g = sum(gradient[i] for i in range(3) if ids[i] == row)
            m[row], v[row] = 0.9 * m[row] + 0.1 * g, 0.999 * v[row] + 0.001 * g**2
            trace[row] = 0.9 * trace[row] + g
            root = np.sqrt(v[row] / (1 - 0.999**t)) + 1e-3
            expected["adam"][row] -= 0.1 * m[row] / (1 - 0.9**t) / root
            expected["momentum"][row] -= 0.1 * trace[row]
    for name, optimizer in (("adam", adam), ("momentum", momentum)):
        ours = theirs = tables()["table"], optimizer.init(tables()["table"])
        for ids, gradient in zip(steps, jnp.asarray(gradients, jnp.float32), strict=True):
            ours = update_rows(optimizer, *ours, ids, gradient)
            whole = jnp.zeros((ROWS, WIDTH)).at[jnp.asarray(ids)].add(gradient)
            changes, state = optimizer.update(whole, theirs[1], theirs[0])
            theirs = optax.apply_updates(theirs[0], changes), state
        np.testing.assert_allclose(ours[0], expected[name], rtol=1e-4, atol=1e-5)
        assert np.abs(np.asarray(theirs[0]) - expected[name]).max() > 0.01


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(0.1),
        optax.chain(optax.add_decayed_weights(0.5, {"table": True, "bias": False}), optax.sgd(0.1)),
        optax.chain(optax.apply_every(3), optax.sgd(0.1, momentum=0.9)),
        optax.MultiSteps(optax.sgd(0.1), 2),
    ],
    ids=["adamw", "decay of matrices", "apply_every", "MultiSteps"],
)
def test_rows_without_a_gradient_stay(optimizer):
    """And so does the optimizer's state of them, bit for bit, whatever the optimizer does with
    gradients of 0.
    """
    start = tables(), optimizer.init(tables())
    before = row_sparse(optimizer, *start, jnp.array([1, 2]), 0)
    after = row_sparse(optimizer, *before, jnp.array([1]), 1)
    others = np.setdiff1d(np.arange(ROWS), [1])
    changed = False
    for old, new in zip(*map(jax.tree.leaves, (before, after)), strict=True):
        if old.ndim:
            np.testing.assert_array_equal(old[others], new[others])
            changed |= bool((old[1] != new[1]).any())
    assert changed


def test_a_rate_inside_jit():
    """An optimizer may be made inside jit, of a rate that is an argument."""
    table = tables()["table"]

    @jax.jit
    def update(rate):
        optimizer = optax.sgd(rate)
        return update_rows(optimizer, table, optimizer.init(table), [1], table[:1])[0]

    np.testing.assert_allclose(update(0.5)[1], table[1] - 0.5 * table[0], rtol=1e-6)


def test_a_state_of_another_optimizer():
    """Ended in an error inside of optax; one of another dtype went on."""
    table, optimizer = tables()["table"], optax.adagrad(0.1)
    with refuses("state", "optimizer.init"):
        update_rows(optimizer, table, optax.sgd(0.1).init(table), [1], table[:1])
    state = optimizer.init(table.astype(jnp.bfloat16))
    with refuses("dtype"):
        update_rows(optimizer, table, state, [1], table[:1])
    square, optimizer = jnp.ones((4, 4)), optax.sm3(0.1)  # it keeps a number a column, too
    with refuses("4 rows", "[4]"):
        update_rows(optimizer, square, optimizer.init(square), [1], square[:1])


def test_ids_that_do_not_exist():
    """Known, they are refused; inside jit they change nothing, the last row neither, and do not
    displace a row where all rows occur.
    """
    optimizer, table = optax.adagrad(0.3), tables()
    given = jnp.array([[-1, 3, ROWS], [2**31 - 1, 3, 0]])
    ours = row_sparse(optimizer, table, optimizer.init(table), given, 0)[0]
    changed = {int(row) for row in np.nonzero(ours["bias"] != table["bias"])[0]}
    assert changed == {0, 3}
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))  # by norms of real rows
    found = jax.jit(
        lambda ids, gradient: update_rows(
            clipped, table["bias"], clipped.init(table["bias"]), ids, gradient
        )[0]
    )(jnp.array([3, -1]), jnp.array([0.5, jnp.nan]))
    assert found[3] == table["bias"][3] - 0.5
    every = jnp.asarray([-1, *range(ROWS), ROWS])
    ours = row_sparse(optimizer, table, optimizer.init(table), every, 0)[0]
    assert (ours["bias"] != table["bias"]).all()
    with refuses("ids[0]=-1", "22"):
        update_rows(optimizer, table["bias"], optimizer.init(table["bias"]), [-1], jnp.ones(1))


def test_wrong_arrays():
    """Shapes that would broadcast or be cut, and states that are not of rows, fail in a line."""
    sgd, table = optax.sgd(0.1), tables()["table"]
    with refuses("gradient", "[2, 4]", "[2, 5]"):
        update_rows(sgd, table, sgd.init(table), [1, 2], jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="structure"):
        update_rows(sgd, {"table": table}, sgd.init({"table": table}), [1], jnp.ones((1, 5)))
    short = {"table": table, "bias": jnp.zeros(3)}
    with refuses("rows"):
        update_rows(sgd, short, sgd.init(short), [1], short)
    factored = optax.adafactor(0.1, min_dim_size_to_factor=2)
    with refuses("state", "23 rows", "[5]"):
        update_rows(factored, table, factored.init(table), [1], table[:1])


def test_gradients_of_a_bfloat16_model_are_summed_in_float32():
    """Of 1,024 gradients of 2^-8 for one row, bfloat16 would lose most beside their sum."""
    optimizer, gradient = optax.sgd(1.0), jnp.full((1024, 1), 2**-8, jnp.bfloat16)
    for dtype in jnp.float32, jnp.bfloat16:
        table = jnp.zeros((2, 1), dtype)
        after, _ = update_rows(optimizer, table, optimizer.init(table), [1] * 1024, gradient)
        np.testing.assert_array_equal(after, [[0], [-4]])


def test_memory_goes_by_the_ids():
    """With a thousand times the rows, the program needs not a byte more beside its arguments, and
    table and state stay where they lie.
    """
    optimizer, temporaries = optax.adagrad(0.1), set()
    for rows in 100, 100_000:
        table = jnp.zeros((rows, 8))
        state = optimizer.init(table)
        arguments = table, state, jnp.arange(32), jnp.ones((32, 8))
        step = functools.partial(update_rows, optimizer)
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*arguments).compile()
        temporaries.add(compiled.memory_analysis().temp_size_in_bytes)
        assert compiled.memory_analysis().alias_size_in_bytes >= 2 * table.nbytes
        places = [a.unsafe_buffer_pointer() for a in jax.tree.leaves((table, state)) if a.ndim]
        after = jax.tree.leaves(compiled(*arguments))
        assert [a.unsafe_buffer_pointer() for a in after if a.ndim] == places
    assert len(temporaries) == 1


def test_rows_over_devices(eight):
    """A table cut by rows over devices: the same numbers, and no device gets the others' rows; on
    Explicit axes, under `auto_axes`.
    """
    code = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from adaptive_jax import row_wise_adagrad, update_rows
optimizer, table = row_wise_adagrad(0.1), jnp.arange(4096.0).reshape(1024, 4)
ids, gradient = jnp.array([3, 1023, 3, 500]), jnp.arange(16.0).reshape(4, 4)
def step(*given):
    return update_rows(optimizer, *given)
alone = jax.jit(step)(table, optimizer.init(table), ids, gradient)
specs = jax.tree.map(lambda a: PartitionSpec("rows") if a.ndim else PartitionSpec(), alone)
for kind in jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit:
    mesh = jax.make_mesh((8,), ("rows",), axis_types=(kind,))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    held = jax.device_put((table, optimizer.init(table)), shardings)
    if kind == jax.sharding.AxisType.Explicit:
        step = jax.sharding.auto_axes(step, out_sharding=specs, axes=("rows",))
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*held, ids, gradient).compile()
        text, cut = compiled.as_text(), compiled(*held, ids, gradient)
    jax.tree.map(np.testing.assert_array_equal, alone, cut)
    assert "f32[128,4]" in text and "f32[1024" not in text
    shapes = {a.addressable_shards[0].data.shape for a in jax.tree.leaves(cut)}
    assert shapes == {(128, 4), (128,), ()}  # table, row-wise sums, a count
"""
    eight(code)
