"""One update: its arithmetic, accumulation, carry and penalties."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from adaptive_jax.model.language_model import BODIES, build
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.optimizers import optim
from adaptive_jax.optimizers.schedules import scheduled
from adaptive_jax.parallel import sharding
from adaptive_jax.runs.checkpoints import Checkpoints
from adaptive_jax.training.state import initial_state, restored_state, shape_of_state
from adaptive_jax.training.update import UpdateOptions, make_update
from tests.toys import Recurrent
from tests.training.test_runs import assert_close


def random_batch(microbatches, rows, time):
    """Tokens of which a varying number of each row counts, as `[microbatches, rows, time]`."""
    bits = np.random.Generator(np.random.Philox(3))
    tokens = bits.integers(0, 122, (microbatches, rows, time + 1), dtype=np.int32)
    lengths = bits.integers(0, time + 1, (microbatches, rows, 1))
    lengths[0] = time
    row_ids = np.arange(microbatches * rows, dtype=np.int32).reshape(microbatches, rows)
    return Batch(
        tokens[..., :-1], tokens[..., 1:], (np.arange(time) < lengths).astype(np.float32), row_ids
    )


def start_update(config, optimizer=None, rows=None):
    """`(model, state, update)` with which to make single updates; `rows` as in `shape_of_state`."""
    mesh, optimizer = sharding.device_mesh(), optimizer or optim.from_config(config)
    model = build(config, config["data"]["vocabulary_size"])
    layout = shape_of_state(model, optimizer, mesh, rows)
    update = make_update(model, optimizer, mesh, 0, layout)
    return (
        model,
        initial_state(model, optimizer, config["seed"], layout),
        lambda state, batch: update(state, {}, batch),
    )


def norm_of(tree):
    """The norm of all entries of arrays."""
    return np.linalg.norm(np.concatenate([np.ravel(a) for a in jax.tree.leaves(tree)]))


def descent(rate):
    return scheduled(optax.sgd, optax.constant_schedule(rate))


def test_an_update_keeps_the_types_of_the_state(config):
    """Momentum became float64 with JAX_ENABLE_X64=1, and the second update failed."""
    with jax.enable_x64(True):
        _, state, update = start_update(config())
        new, _ = jax.eval_shape(update, state, random_batch(2, 2, 16))
    types = lambda tree: jax.tree.map(lambda a: a.dtype, tree)
    assert types(new) == types(state)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_an_update_weighs_every_token_alike(config, microbatches):
    """The gradient is that of the sum over all tokens divided by the sum of weights, in one batch
    or in uneven four.

    Plain descent at rate 1 shows the gradient; the mean of the parts' means would be another, and
    so would padding that counts.
    """
    model, state, update = start_update(config(), descent(1.0))
    batch = random_batch(4, 2, 16)
    flat = jax.tree.map(lambda a: a.reshape(8, *a.shape[2:]), batch)

    def mean(params, batch):
        return model.apply({"params": params}, batch)[0].total / batch.weights.sum()

    run, before = jax.jit(jax.value_and_grad(mean)), jax.tree.map(np.array, state.params)
    loss, gradients = jax.device_get(run(before, flat))
    cut = jax.tree.map(lambda a: a.reshape(microbatches, 8 // microbatches, *a.shape[2:]), batch)
    state, metrics = update(state, cut)
    assert_close(
        jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params), gradients, 1e-6
    )
    assert metrics["tokens"] == batch.weights.sum() < batch.weights.size
    assert metrics["nll"] == pytest.approx(float(loss), rel=1e-6)

    parts = [Batch(*part) for part in zip(*batch[:4], strict=True)]
    means = [jax.device_get(run(before, part)[1]) for part in parts]
    gap = jax.tree.map(lambda whole, *each: np.abs(whole - sum(each) / 4).max(), gradients, *means)
    assert max(jax.tree.leaves(gap)) > 1e-3

    # Where no token has weight, all masked, nothing is NaN and nothing moves.
    after = jax.tree.map(np.array, state.params)
    state, metrics = update(state, cut._replace(weights=np.zeros_like(cut.weights)))
    assert metrics["nll"] == metrics["tokens"] == 0
    assert_close(state.params, after, 0)


def test_the_reported_norm_is_before_clipping(config):
    """`gradient_norm` is the norm of the raw gradient, while the step taken is clipped to
    `clip_norm`.
    """
    settings = config(**{"optimizer.clip_norm": 0.01, "schedule.warmup_from": 0.25})
    model, state, update = start_update(settings)
    batch = random_batch(1, 4, 16)
    before = jax.tree.map(np.array, state.params)
    total = jax.jit(jax.grad(lambda params, batch: model.apply({"params": params}, batch)[0].total))
    gradients = total(before, jax.tree.map(lambda a: a[0], batch))
    state, metrics = update(state, batch)
    norm = norm_of(gradients) / batch.weights.sum()
    assert norm > 0.1
    assert metrics["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    change = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    # Nesterov's first step is (1 + momentum) times the clipped gradient.
    assert norm_of(change) == pytest.approx(0.25 * 1.9 * 0.01, rel=1e-3)


@pytest.fixture
def recurrent(config, monkeypatch):
    """The small config with a body that carries a state and sows a penalty."""
    monkeypatch.setitem(BODIES, "recurrent", Recurrent)
    return config() | {"body": {"name": "recurrent", "features": 32}}


def test_a_carry_continues_rows_from_update_to_update(recurrent):
    """Two updates on the halves of rows see what one update on whole rows sees; a row that is
    reset sees its own half alone.
    """
    model, state, update = start_update(recurrent, descent(0.0), rows=(4, 2))
    batch = random_batch(4, 2, 16)
    batch = batch._replace(weights=np.ones_like(batch.weights))
    flat = jax.tree.map(lambda a: a.reshape(8, *a.shape[2:]), batch)
    apply = jax.jit(lambda params, batch: model.apply({"params": params}, batch)[0].nll)
    whole, params = apply(state.params, flat), jax.tree.map(jnp.copy, state.params)

    def half(columns, reset=None):
        arrays = ("inputs", "targets", "weights")
        cut = batch._replace(**{name: getattr(batch, name)[..., columns] for name in arrays})
        return cut if reset is None else cut._replace(reset=np.full(batch.row_ids.shape, reset))

    state, first = update(state, half(slice(0, 8)))
    carried = jax.tree.map(jnp.copy, state)
    _, second = update(carried, half(slice(8, 16)))
    assert float(first["nll"]) == pytest.approx(float(whole[:, :8].mean()), rel=1e-6)
    assert float(second["nll"]) == pytest.approx(float(whole[:, 8:].mean()), rel=1e-6)
    _, alone = update(state, half(slice(8, 16), reset=True))
    assert float(alone["nll"]) != pytest.approx(float(second["nll"]), rel=1e-4)
    own = apply(params, jax.tree.map(lambda a: a[:, 8:] if a.ndim > 1 else a, flat))
    assert float(alone["nll"]) == pytest.approx(float(own.mean()), rel=1e-6)


def test_an_update_that_is_left_out_moves_the_carry(recurrent):
    """Parameters stay; the next window continues the text of this one, so the carry is that of
    this one.
    """
    mesh, optimizer, rows = sharding.device_mesh(), descent(0.1), (1, 4)
    model = build(recurrent, 122)
    layout = shape_of_state(model, optimizer, mesh, rows)
    update = make_update(model, optimizer, mesh, 0, layout, UpdateOptions(skip_from=0.01))
    before = initial_state(model, optimizer, 0, layout)
    params = jax.tree.map(np.array, before.params)
    after, metrics = update(before, {}, random_batch(1, 4, 8))
    assert metrics["skipped"]
    assert_close(after.params, params, 0)
    assert float(jnp.abs(after.carry).min(axis=-1).max()) > 0


def test_a_carry_is_saved_by_row(recurrent, tmp_path):
    """A checkpoint restores it bit for bit, and into another number of microbatches row by row."""
    model, state, update = start_update(recurrent, descent(0.1), rows=(4, 2))
    state, _ = update(state, random_batch(4, 2, 16))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state.items(), 1.0)
    for rows in (4, 2), (1, 8):
        layout = shape_of_state(model, descent(0.1), sharding.device_mesh(), rows)
        restored = restored_state(layout, 1, lambda like: checkpoints.restore(1, like))
        assert restored.carry.shape == (*rows, 32)
        np.testing.assert_array_equal(restored.carry.reshape(8, 32), state.carry.reshape(8, 32))
        assert_close(restored.params, state.params, 0)
    checkpoints.close()


def test_penalties_are_weighted_and_accumulated_like_the_loss(recurrent):
    """A loss that a layer sows is added to the loss of its token, and its gradient to the others,
    and not to the plain nll.
    """
    model, state, update = start_update(recurrent, descent(1.0))
    batch = random_batch(4, 2, 16)
    flat = jax.tree.map(lambda a: a.reshape(8, *a.shape[2:]), batch)

    def mean(params):
        (loss, _), sown = model.apply({"params": params}, flat, mutable=["penalties"])
        [penalty] = jax.tree.leaves(sown)
        tokens = flat.weights.sum()
        return (loss.total + jnp.sum(flat.weights * penalty)) / tokens, loss.total / tokens

    before = jax.tree.map(np.array, state.params)
    (loss, plain), gradients = jax.jit(jax.value_and_grad(mean, has_aux=True))(before)
    state, metrics = update(state, batch)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert float(metrics["nll"]) == pytest.approx(float(plain), rel=1e-6) != float(loss)
    assert_close(
        jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params), gradients, 1e-6
    )
