"""Tables that are computed a tile of words at a time, against the same at once."""

import jax
import jax.numpy as jnp
import pytest

from adaptive_jax import Band, adaptive_cross_entropy, linear_cross_entropy
from adaptive_jax.losses import plans
from adaptive_jax.losses.plans import Plan, plan
from adaptive_jax.numerics.devices import DEVICES, GPUS
from adaptive_jax.numerics.platforms import tracing_for
from tests.losses.test_banded import ALL as OPTIONS
from tests.losses.test_banded import arrays, check, fast_loss, seeds_and_masks


@pytest.mark.parametrize("case", ["head projected", "no words in the head"])
def test_tiles_equal_the_whole(monkeypatch, case):
    """Loss, nll and all gradients, of head and tails with biases, projections, clusters, dropout,
    smoothing and z-loss; tiles divide the words or do not; logits are kept or computed again.
    """
    values = arrays(case)
    seeds, _ = seeds_and_masks(values[3], OPTIONS.tail_dropout)
    # A function of its own each time, or JAX would run the program of the last plan.
    run = lambda: jax.jit(lambda *v: fast_loss.__wrapped__(*v, OPTIONS, seeds))(*values)
    untiled = run()
    for kept in True, False:
        monkeypatch.setattr(
            plans, "plan", lambda _, n, *__, k=kept: Plan(7, 10 if max(n) > 10 else None, k)
        )
        check(run(), untiled)


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
    expected = jax.jit(step)((bands, clusters))
    monkeypatch.setattr(plans, "plan", lambda *_: Plan(7, words, False))
    cut = jax.shard_map(
        lambda softmax: jax.value_and_grad(loss, has_aux=True)(softmax, axis),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=((every, every), specs),
    )
    check(jax.jit(cut)((bands, clusters)), expected)


@pytest.mark.parametrize(
    "band, tokens, itemsize, expected",
    [
        ((0, 20_000, 1024), 4_096, 4, Plan(512)),
        ((0, 20_000, 1024), 100, 4, Plan(100)),
        ((0, 262_144, 512), 4_096, 4, Plan(128, 8_192, True)),
        ((0, 262_144, 512), 4_096, 2, Plan(128)),
        ((0, 10**7, 64), 4_096, 4, Plan(512, 8_192, False)),
        ((0, 10**7, 64), 4_096, 2, Plan(512, 8_192, False)),
        ((1, 10**7, 64), 4_096, 4, Plan(96, 43_648, False)),
    ],
)
def test_plans_of_a_cpu(band, tokens, itemsize, expected):
    """Logits are kept where a chunk has the tokens for it; short tables are whole, and in bfloat16
    long ones, too: of tiles an update would take twice as long.
    """
    assert plan(band[0], band[1:2], band[2], tokens, itemsize) == expected


@pytest.mark.parametrize(
    "device, band, tokens, rows",
    [
        # 4 chunks on an H100 and, of 16,384, a v6e, 8 on a v5e and a v5p: none has empty rows.
        ("h100", (0, 262_144, 4_096), 8_192, 2_048),
        ("v5e", (0, 128_256, 4_096), 8_192, 1_024),
        ("v5p", (0, 262_144, 4_096), 8_192, 1_024),
        ("v6e", (0, 128_256, 4_096), 16_384, 4_096),
        ("h100", (0, 262_144, 2_048), 32_768, 2_048),
        ("h100", (0, 262_144, 4_096), 8_184, 2_048),
        ("h100", (0, 262_144, 4_096), 512, 512),  # one chunk, whatever the number
        ("h100", (0, 262_144, 4_096), 4_096, 4_096),
        ("v5p", (0, 32_000, 2_048), 8_192, 2_048),  # as many rows as 2^26 logits have
        ("h100", (0, 8_000, 4_096), 16_384, 4_096),
        ("h100", (0, 4_000_000, 1_024), 8_192, 768),  # a quarter of the memory
        ("h100", (1, 262_144, 512), 8_192, 512),
        ("h100", (1, 262_144, 512), 100, 100),
        ("other", (0, 262_144, 2_048), 8_192, 2_048),
        ("other", (0, 2_000_000, 2_048), 8_192, 4_096),  # too little memory: computed again
    ],
)
def test_plans_of_accelerators(device, band, tokens, rows):
    """The number of chunks with the fewest empty rows, of those that hide the traffic of the
    table's gradient; without it every table of 75,000 words costs four products for three.
    """
    kind = GPUS[device].kind if device in GPUS else "an unlisted device"
    kind = DEVICES[device].name if device in DEVICES and device not in GPUS else kind
    with tracing_for("tpu" if device.startswith("v") else "gpu", kind):
        result = plan(band[0], band[1:2], band[2], tokens, 2)
    assert result.tokens == rows
    assert result.keeps_logits == (result.words is None) == (band[1] != 2_000_000)


@pytest.mark.parametrize("tokens, width, words", [(2_048, 512, 262_144), (1_024, 64, 10**7)])
def test_memory_of_a_long_table(tokens, width, words):
    """Beside the table and its gradient there is no array of its size: a third, that of the logits,
    where they are kept, and hardly any where they are computed again.
    """
    like = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, width), (words, width))]
    targets = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    step = jax.jit(jax.value_and_grad(linear_cross_entropy, (0, 1)))
    memory = step.lower(*like, targets).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * words * width / 3
    assert (
        plan(0, (words,), width, tokens).keeps_logits
        or memory.temp_size_in_bytes < 4 * words * width / 50
    )
