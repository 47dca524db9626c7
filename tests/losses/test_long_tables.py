"""Tables that are computed a tile of words at a time, against the same at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import Band, adaptive_cross_entropy, linear_cross_entropy
from adaptive_jax.losses import long_tables
from adaptive_jax.losses.long_tables import Plan, plan
from tests.losses.test_banded import ALL as OPTIONS
from tests.losses.test_banded import CASES, arrays, check, fast_loss, seeds_and_masks


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("case", ["head projected", "no words in the head"])
def test_tiles_equal_the_whole(monkeypatch, case, kept):
    """Loss, nll and all gradients, of head and tails with biases, projections, clusters, dropout,
    smoothing and z-loss; tiles divide the words or do not, or are longer.
    """
    values = arrays(case)
    seeds, _ = seeds_and_masks(values[3], OPTIONS.tail_dropout)
    # A function of its own each time, or JAX would run the program of the last plan.
    run = lambda: jax.jit(lambda *v: fast_loss.__wrapped__(*v, OPTIONS, seeds))(*values)
    whole = run()
    for words in 10, 16, 64:
        monkeypatch.setattr(
            long_tables, "plan", lambda _, n, __, w=words: Plan(7, w if n > w else None, kept)
        )
        if sum(CASES[case][0]) > words:
            check(run(), whole)


@pytest.mark.parametrize("words", [64, 23])
def test_words_cut_over_devices_and_tiles(monkeypatch, words):
    """Inside shard_map with an axis that cuts words, on one device: loops over tiles hold what
    varies over the axis, and sums are taken once.
    """
    (hidden, targets, weights, bands, clusters), axis = arrays("head projected"), "words"
    mesh = jax.make_mesh((1,), (axis,), axis_types=(jax.sharding.AxisType.Auto,))
    every, rows = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec(axis)
    specs = [Band(rows, every, rows) for _ in bands], every

    def loss(softmax, axis_name=None):
        options = {"label_smoothing": 0.1, "z_loss": 0.1, "reports": ("correct",)}
        total, report = adaptive_cross_entropy(
            hidden, *softmax, targets, weights=weights, axis_name=axis_name, **options
        )
        return total, report.correct.astype(jnp.float32)

    step = jax.value_and_grad(loss, has_aux=True)
    wanted = jax.jit(step)((bands, clusters))
    monkeypatch.setattr(long_tables, "plan", lambda *_: Plan(7, words, False))
    cut = jax.shard_map(
        lambda softmax: jax.value_and_grad(loss, has_aux=True)(softmax, axis),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=((every, every), specs),
    )
    check(jax.jit(cut)((bands, clusters)), wanted)


@pytest.mark.parametrize(
    "backend, band, expected",
    [
        ("cpu", (0, 20_000, 1024), Plan(512)),
        ("cpu", (0, 262_144, 512), Plan(128, 8_192, True)),
        ("cpu", (0, 10**7, 64), Plan(512, 8_192, False)),
        ("cpu", (1, 10**7, 64), Plan(96, 43_648, False)),
        ("gpu", (0, 70_002, 1024), Plan(896)),
        ("gpu", (0, 262_144, 2048), Plan(4096, 16_384, False)),
        ("tpu", (0, 262_144, 2048), Plan(4096, 16_384, False)),
    ],
)
def test_plans(monkeypatch, backend, band, expected):
    """Logits are kept where a chunk has the tokens for it; short tables are whole."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert plan(*band) == expected


@pytest.mark.parametrize("tokens, width, words", [(2_048, 512, 262_144), (1_024, 64, 10**7)])
def test_memory_of_a_long_table(tokens, width, words):
    """Beside the table and its gradient there is no array of its size: a third, that of the logits,
    where they are kept, and hardly any where they are computed again.
    """
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, width), (words, width))]
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    step = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))
    found = step.lower(*like, targets).compile().memory_analysis()
    assert found.temp_size_in_bytes < 4 * words * width / 3
    assert plan(0, words, width).kept or found.temp_size_in_bytes < 4 * words * width / 50


def test_scaled_in_place(monkeypatch):
    """Every row once, also where the last tile of rows begins in the one before."""
    monkeypatch.setattr(long_tables, "LONG", 1)
    monkeypatch.setattr(long_tables, "TILE_NUMBERS", 12)
    array = np.random.default_rng(0).standard_normal((10, 3)).astype("f")
    scaled = jax.jit(long_tables.times)(jnp.float32(0.3), array)
    np.testing.assert_array_equal(scaled, np.float32(0.3) * array)
