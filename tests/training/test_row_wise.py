"""One second moment a row: the formulas in NumPy, tables of a config, and their runs on devices."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from adaptive_jax import build, row_wise_adagrad, row_wise_adam, update_rows
from adaptive_jax.config.keys import complete
from adaptive_jax.model.language_model import parameter_shapes
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import sharding
from adaptive_jax.training import sparse
from adaptive_jax.training.loop import train
from tests import refuses
from tests.toys import plan_of, random_params
from tests.training.test_metrics import metrics
from tests.training.test_resuming import arrays_of, check_ended_alike

RATE, EPSILON = 0.3, 1e-3
OPTIMIZERS = {
    "adagrad": row_wise_adagrad(RATE, epsilon=EPSILON),
    "adam": row_wise_adam(RATE, b2=0.9, epsilon=EPSILON),
    "first moment": row_wise_adam(RATE, b1=0.8, b2=0.9, epsilon=EPSILON),
    "schedule": row_wise_adagrad(optax.constant_schedule(RATE), epsilon=EPSILON),
}
SHAPES = {"table": (23, 5), "even": (24, 8), "bias": (23,), "cube": (6, 2, 3)}


def drawn(seed):
    """A table, a bias and others; half of the rows have no gradient."""
    bits = np.random.default_rng(seed)
    return {
        name: bits.normal(size=shape) * (bits.random(shape[0]) < 0.5).reshape(-1, *[1] * len(row))
        for name, shape in SHAPES.items()
        for row in [shape[1:]]
    }


def slow_twin(name, params, gradients):
    """The formulas of the docstrings, a row at a time in float64."""
    b1, b2 = {"adam": (0.0, 0.9), "first moment": (0.8, 0.9)}.get(name, (0.0, None))
    after = {}
    for key, table in params.items():
        table, first, moments = table.copy(), np.zeros_like(table), np.zeros(len(table))
        for t, gradient in enumerate(gradients, start=1):
            for r, g in enumerate(gradient[key]):
                square = np.mean(g**2)
                moments[r] = moments[r] + square if b2 is None else b2 * moments[r] + 0.1 * square
                first[r] = b1 * first[r] + (1 - b1) * g
                root = np.sqrt(moments[r] / (1 - (b2 or 0.0) ** t)) + EPSILON
                table[r] -= RATE * first[r] / (1 - b1**t) / root
        after[key] = table, moments
    return after


@functools.partial(jax.jit, static_argnums=0)
def step(optimizer, params, state, gradients):
    changes, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, changes), state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_formulas(name):
    """Three updates of tables of any rank: FBGEMM's formulas, and a state of a number a row."""
    params, gradients = drawn(0), [drawn(seed) for seed in (1, 2, 3)]
    expected = slow_twin(name, params, gradients)
    table = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)
    state = OPTIMIZERS[name].init(table)
    sizes = sum(a.size for a in jax.tree.leaves(state))
    whole = sum(a.size for a in table.values()) if name == "first moment" else 0
    assert sizes - whole - sum(map(len, table.values())) <= 2  # counts
    for gradient in gradients:
        table, state = step(OPTIMIZERS[name], table, state, gradient)
    for key, (right, moments) in expected.items():
        np.testing.assert_allclose(table[key], right, rtol=2e-5, atol=2e-5, err_msg=key)
        np.testing.assert_allclose(state[0].row_moments[key], moments, rtol=2e-5, err_msg=key)


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_injected_hyperparameters(name):
    """`optax.inject_hyperparams` makes arrays of numbers, also of defaults; b1 decides a state."""
    make, settings, static = row_wise_adagrad, {"epsilon": EPSILON}, ()
    if name == "adam":
        make, settings, static = row_wise_adam, settings | {"b2": 0.9}, "b1"
        with refuses("b1", "static_args"):
            optax.inject_hyperparams(make)(RATE).init(drawn(0))
    injected = optax.inject_hyperparams(make, static_args=static)(RATE, **settings)
    table, gradient = jnp.asarray(drawn(0)["table"], jnp.float32), drawn(1)["table"]
    optimizers = injected, OPTIMIZERS[name]
    results = [step(each, table, each.init(table), gradient)[0] for each in optimizers]
    np.testing.assert_allclose(*results, atol=1e-6)


@pytest.mark.parametrize("name", ["adagrad", "adam"])
def test_touched_rows_equal_the_dense_update(name):
    """The first update of looked-up rows is that of the whole table, Adagrad's next ones, too; all
    other rows and their moments stay. A sum of squares in bfloat16 would soon stop to grow.
    """
    optimizer, table = OPTIMIZERS[name], jnp.asarray(drawn(0)["table"], jnp.float32)
    ids, gradient = jnp.array([3, 7, 3]), jnp.linspace(0.1, 2.0, 15).reshape(3, 5)
    dense = sparse_rows = table, optimizer.init(table)
    of_half = jax.eval_shape(optimizer.init, table.astype(jnp.bfloat16))
    assert of_half[0].row_moments.dtype == jnp.float32
    for _ in range(2 if name == "adagrad" else 1):
        before = sparse_rows
        sparse_rows = update_rows(optimizer, *sparse_rows, ids, gradient)
        dense = step(optimizer, *dense, jnp.zeros_like(table).at[ids].add(gradient))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
        jax.tree.map(close, sparse_rows, dense)
    others = np.setdiff1d(np.arange(23), ids)
    for old, new in zip(*map(jax.tree.leaves, (before, sparse_rows)), strict=True):
        if old.ndim:
            np.testing.assert_array_equal(old[others], new[others])
            assert (old[3] != new[3]).any()


@pytest.mark.parametrize(
    "settings", [{"epsilon": 0.0}, {"b1": 1.0}, {"b2": -0.1}, {"b2": float("nan")}]
)
def test_numbers_out_of_range(settings):
    """An epsilon of 0 divides 0 by 0 in every row without a gradient."""
    [(name, value)] = settings.items()
    with refuses(name, repr(value)):
        row_wise_adam(0.1, **settings)


def test_clipping_and_decay_of_tables():
    """Gradients are clipped by the norm of all, then both decays; the rate is `tables_scale` times
    that of the others, which are as without tables.
    """
    settings = {"optimizer.name": "adam", "optimizer.learning_rate": 0.1}
    settings |= {"optimizer.clip_norm": 0.5, "optimizer.l2_decay": 0.2}
    settings |= {"optimizer.decoupled_decay": 0.3}
    settings |= {"schedule.name": "constant", "schedule.warmup_steps": 0}
    tables = {"optimizer.tables": "row_wise_adagrad", "optimizer.tables_scale": 0.5}
    names = {"table": "table", "other": "even"}
    params, gradients = (
        {name: jnp.asarray(drawn(seed)[key], float) for name, key in names.items()}
        for seed in (0, 1)
    )
    plain, of_tables = (
        optim.from_config(complete(settings | extra), [("table",)]) for extra in ({}, tables)
    )
    expected, _ = plain.update(gradients, plain.init(params), params)
    changes, _ = of_tables.update(gradients, of_tables.init(params), params)
    np.testing.assert_allclose(changes["other"], expected["other"], rtol=1e-6)
    norm = optax.tree.norm(gradients)
    gradient = gradients["table"] * 0.5 / norm + 0.2 * params["table"]
    root = np.sqrt(np.mean(gradient**2, axis=1, keepdims=True)) + 1e-8
    right = -0.05 * (gradient / root + 0.3 * params["table"])
    np.testing.assert_allclose(changes["table"], right, rtol=1e-4, atol=1e-7)


TABLES = {"optimizer.tables": "row_wise_adam", "optimizer.tables_scale": 0.03}
OF_NGRAMS = {"input.name": "ngrams", "input.words.name": "adaptive", "input.rows": 64}
OF_NGRAMS |= {"input.words.cutoffs": (24, 64), "input.row_width": 4, "input.orders": (2,)}


def own_table(**changes):
    """The config of words and pairs of words, with an output of its own table."""
    body = {"body.layers": 1, "body.features": 16, "body.heads": 2, "body.feed_forward": 16}
    output = {"output.table.cutoffs": (24,), "output.table.bias": True}
    return complete(OF_NGRAMS | body | output | TABLES | changes)


@pytest.mark.parametrize("name", ["nag", "lion", "muon"])
def test_tables_of_a_model(name):
    """Tables of words and of n-grams, and no others, have one number a row, split over devices as
    the rows are; optimizers that treat arrays as layers have the others.
    """
    config = own_table(**{"optimizer.name": name})
    model = build(config, 122)
    shapes = parameter_shapes(model)
    state = jax.eval_shape(sparse.optimizer(config, model).init, shapes)
    specs = sharding.parameter_specs(state, sharding.abstract_mesh(8, 8), model)
    cuts = {
        jax.tree_util.keystr(path).partition("row_moments")[2]: (a.shape, spec)
        for (path, a), spec in zip(
            jax.tree.leaves_with_path(state), jax.tree.leaves(specs), strict=True
        )
    }
    rows, halves = (sharding.PartitionSpec(axes) for axes in (sharding.FSDP, sharding.OUTER))
    del cuts[""]
    assert cuts == {
        "['input']['ngrams_2']['table_0']": ((64,), rows),
        "['input']['words']['table_0']": ((24,), rows),
        "['input']['words']['table_1']": ((40,), rows),
        "['input']['words']['table_2']": ((58,), halves),
        "['output']['table']['bias']": ((122,), halves),
        "['output']['table']['table_0']": ((24,), rows),
        "['output']['table']['table_1']": ((98,), halves),
    }
    params, optimizer = random_params(shapes), sparse.optimizer(config, model)
    changes, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert all(np.isfinite(a).all() and a.any() for a in jax.tree.leaves(changes))


def test_sparse_updates_with_tables():
    """An update with stored encodings leaves the encoder, and moves the table of words."""
    layers = {"input.name": "lookup", "output.name": "softmax", "output.table.name": "composed"}
    layers |= {f"output.table.cnn.{key}": n for key, n in (("width", 3), ("length", 5))}
    layers |= {"output.table.cnn.filters": ((1, 4),), "compose_share": 0.5}
    layers |= {"body.layers": 1, "body.features": 8, "body.heads": 1, "body.feed_forward": 8}
    config = complete(layers | TABLES)
    model = build(config, 40)
    optimizer, params = sparse.optimizer(config, model), random_params(parameter_shapes(model))
    update = functools.partial(optimizer.update, params, optimizer.init(params), params)
    for stored in (False, True):
        changes, _ = jax.jit(functools.partial(update, stored=stored))()
        assert jnp.any(changes["input"]["table"] != 0)
        moved = [bool(jnp.any(a)) for a in jax.tree.leaves(changes["output"]["table"]["cnn"])]
        assert any(moved) != stored


def test_models_without_tables():
    """And an optimizer that averages are refused: the averages would lack the tables."""
    with refuses("optimizer.tables", "optimizer.name='nt_asgd'", "'row_wise_adam'"):
        sparse.parts_of(own_table(**{"optimizer.name": "nt_asgd"}), 122)
    composed = {"input.name": "char_cnn", "output.table.name": "composed"}
    config = complete(composed | {"optimizer.tables": "row_wise_adam"})
    with refuses("optimizer.tables", "'row_wise_adam'"):
        sparse.parts_of(config, 122)


@pytest.mark.parametrize("fsdp", [1, 8])
def test_the_plan_counts_a_number_a_row(fsdp):
    """In place of a second and a third table: a plan that counts more refuses models that fit."""
    config = own_table(**{"optimizer.name": "adam", "fsdp": fsdp, "tokens_per_update": 16_384})
    without = config | {"optimizer": config["optimizer"] | {"tables": ""}}
    tables = {"input.ngrams": 64 * 4, "input": 24 * 16 + 40 * 4 + 58, "head": 24 * 16 + 98 * 4}
    less = 2 * (sum(tables.values()) + 122) - (64 + 3 * 122)
    plans = [plan_of(each, 122, 8) for each in (without, config)]
    saved = plans[0].state_bytes - plans[1].state_bytes + 4  # a second count of updates
    if fsdp == 1:
        assert saved == 4 * less
    else:  # tables of which 8 does not divide the rows are cut into fewer parts
        assert 0.8 * 4 * less / 8 < saved < 4 * less / 4


TRAIN = """
import json, pathlib, sys
from adaptive_jax.training.loop import train
from tests.shared_programs import sharing
with sharing():
    train(json.loads(sys.argv[1]) | {"steps": 2, "fsdp": 8}, pathlib.Path(sys.argv[2]))
"""


def test_runs_with_tables(with_layers, eight, tmp_path):
    """A run that goes on after its checkpoint is, bit for bit, one that never stopped; one that
    moves from eight devices, which share the tables, to one takes the same updates.
    """
    layers = {key: value for key, value in own_table().items() if isinstance(value, dict)}
    steps = {"steps": 4, "log_every": 1, "evaluate_every": 0, "checkpoint_every": 2, "keep": 9}
    steps |= {"tokens_per_update": 128, "schedule.warmup_steps": 1}
    config = with_layers(steps) | {name: layers[name] for name in ("input", "output", "optimizer")}
    train(config, tmp_path / "one")
    assert len([name for name in arrays_of(tmp_path / "one") if "row_moments" in name]) == 7
    shutil.copytree(tmp_path / "one", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "4")
    train(config, tmp_path / "stopped")
    check_ended_alike(tmp_path / "stopped", tmp_path / "one")
    eight(TRAIN, json.dumps(config), tmp_path / "moved")
    train(config, tmp_path / "moved")
    ours, theirs = map(arrays_of, (tmp_path / "moved", tmp_path / "one"))
    for name in theirs:
        np.testing.assert_allclose(ours[name], theirs[name], atol=2e-5, err_msg=name)
    ours, theirs = (
        [line["train/nll"] for line in metrics(tmp_path / name) if "train/nll" in line]
        for name in ("moved", "one")
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
