"""Attention: against one written out in float64 with the same weights dropped; where its kernels
run.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.bodies.attention import Pairs, attention, kernels_fit
from adaptive_jax.bodies.positions import alibi_slopes
from adaptive_jax.numerics.dropout import keep_mask, positions, row_seeds
from adaptive_jax.numerics.platforms import tracing_for
from tests import refuses
from tests.programs import hasty_jit

RATE = 0.3


def tensors(rows, time, heads, width, dtype=jnp.float32):
    """Queries, keys, values and the gradient of the result, `[rows, time, heads, width]`."""
    bits = np.random.default_rng(0)
    return [jnp.asarray(bits.standard_normal((rows, time, heads, width)), dtype) for _ in range(4)]


def segments(rows, time):
    """Segments of about 20 tokens that differ between rows, int32 `[rows, time]`."""
    begins = np.random.default_rng(0).random((rows, time)) < 0.05
    return jnp.asarray(np.cumsum(begins, axis=1) % 3, jnp.int32)


def seeds_of(rows):
    return row_seeds(jax.random.key(5), jnp.arange(rows))


def with_gradients(attend, compiler=jax.jit, **options):
    """A compiled function to the result and the gradients of queries, keys and values."""

    def both(queries, keys, values, gradient):
        attended, pull = jax.vjp(functools.partial(attend, **options), queries, keys, values)
        return attended, *pull(gradient)

    return compiler(both)


def slow_twin(arrays, segment_ids=None, stays=None, slopes=()):
    """Section 3.2.1 of Vaswani et al. in float64, all pairs at once; `stays` is bool `[rows, heads,
    queries, keys]`.

    slopes: of ALiBi, Press et al. 2022, section 3.
    """
    time, width = arrays[0].shape[1], arrays[0].shape[3]
    bias = np.zeros((1, 1, 1))
    if slopes:
        bias = np.array(
            [
                [[slope * min(key - query, 0) for key in range(time)] for query in range(time)]
                for slope in slopes
            ]
        )
    mask = np.tri(time, dtype=bool)[None, None]
    if segment_ids is not None:
        segment_ids = np.asarray(segment_ids)
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None])

    def attend(queries, keys, values):
        weights = jnp.where(
            mask,
            jnp.exp(jnp.einsum("bqhw,bkhw->bhqk", queries, keys) / np.sqrt(width) + bias[None]),
            0,
        )
        weights /= weights.sum(axis=-1, keepdims=True)
        if stays is not None:
            weights *= stays / (1 - RATE)
        return jnp.einsum("bhqk,bkhw->bqhw", weights, values)

    arrays = [np.asarray(x).astype(np.float64) for x in arrays]
    with jax.enable_x64(True):
        return [np.asarray(x) for x in with_gradients(attend, hasty_jit)(*map(jnp.asarray, arrays))]


@pytest.mark.parametrize(
    "rows, time, heads, segmented, dropout, alibi",
    [
        (2, 1, 2, False, 0.0, False),
        (2, 7, 2, True, RATE, False),
        (2, 64, 2, False, RATE, True),
        (3, 130, 4, False, 0.0, False),
        (3, 130, 4, True, RATE, True),
        (1, 1100, 3, True, RATE, False),
    ],
)
def test_chunks_equal_the_slow_twin(rows, time, heads, segmented, dropout, alibi):
    """Results and gradients: less than a chunk, one chunk, chunks and a part of one; one group
    of heads and several; ALiBi.
    """
    arrays = tensors(rows, time, heads, 8)
    slopes = alibi_slopes(heads) if alibi else ()
    segment_ids = segments(rows, time) if segmented else None
    seeds = seeds_of(rows)
    mask = jax.jit(lambda seeds: keep_mask(seeds, positions((heads, time, time)), dropout))
    stays = np.asarray(mask(seeds)) if dropout else None
    expected = slow_twin(arrays, segment_ids, stays, slopes)
    run = with_gradients(attention, pairs=Pairs(segment_ids, slopes, dropout, seeds))
    for ours, right in zip(run(*arrays), expected, strict=True):
        assert ours.dtype == jnp.float32 and ours.shape == arrays[0].shape
        atol = 1e-5 * max(np.abs(right).max(), 1)
        np.testing.assert_allclose(ours, right, rtol=1e-4, atol=atol)


def test_bfloat16_and_large_scores():
    """In bfloat16 results are as close to float64 as bfloat16 allows; scores whose exponentials
    overflow stay finite.
    """
    arrays = tensors(2, 130, 2, 16, jnp.bfloat16)
    run = with_gradients(attention)
    for ours, right in zip(run(*arrays), slow_twin(arrays), strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), right, atol=0.02 * np.abs(right).max()
        )
    for each in run(*(300 * x for x in arrays[:2]), *arrays[2:]):
        assert np.all(np.isfinite(np.asarray(each, np.float32)))


def test_memory_of_chunks_grows_with_time():
    """Of the compiled forward and backward pass: in proportion to time, not to its square."""
    run = with_gradients(attention)
    short, long = (
        run.lower(*[jax.ShapeDtypeStruct((1, time, 1, 8), jnp.float32)] * 4)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for time in (1536, 3072)
    )
    assert 1.6 < long / short < 2.4


H100 = "gpu", "NVIDIA H100 80GB HBM3"


@pytest.mark.parametrize(
    "device, time, width, dtype, fits",
    [
        (("cpu", "cpu"), 128, 16, "bfloat16", False),
        (H100, 128, 16, "bfloat16", True),
        (H100, 64, 128, "float16", True),
        (H100, 128, 16, "float32", False),
        (H100, 100, 16, "bfloat16", False),
        (H100, 128, 48, "bfloat16", False),
        (("gpu", "Tesla V100-SXM2-16GB"), 128, 16, "bfloat16", False),
        (("tpu", "TPU v5 lite"), 128, 16, "bfloat16", False),
    ],
)
def test_shapes_that_kernels_take(device, time, width, dtype, fits):
    """The kernels in 16 bits, for the lengths and widths that they take; elsewhere chunks."""
    with tracing_for(*device):
        assert kernels_fit((time, 2, width), jnp.dtype(dtype)) == fits


def test_more_weights_than_a_mask_has_positions():
    """One line with the cure."""
    like = jax.ShapeDtypeStruct((1, 65_537, 2, 16), jnp.float32)
    with refuses("2 heads", "65537 tokens", "batches.sequence_length"):
        jax.eval_shape(functools.partial(attention, pairs=Pairs(dropout=0.1)), like, like, like)


@pytest.mark.parametrize("platform, backend", [("cuda", "gpu"), ("tpu", "tpu")])
def test_chunks_lower_for_accelerators(monkeypatch, platform, backend):
    """All heads at once, without a loop, and with float32 sums of bfloat16 products."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    attend = functools.partial(
        attention, pairs=Pairs(segments(8, 300), alibi_slopes(16), RATE, seeds_of(8))
    )
    step = jax.jit(
        jax.grad(lambda *arrays: attend(*arrays).sum().astype(jnp.float32), argnums=(0, 1, 2))
    )
    like = jax.ShapeDtypeStruct((8, 300, 16, 64), jnp.bfloat16)
    text = step.trace(like, like, like).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" not in text
    assert "tensor<128x128x256xbf16>" in text and "-> tensor<128x128x256xf32>" in text


@pytest.mark.parametrize(
    "heads, slopes",
    [
        (8, [2.0**-i for i in range(1, 9)]),
        (16, [2.0 ** (-i / 2) for i in range(1, 17)]),
        (1, [2.0**-8]),
        (6, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]),
        (12, [2.0**-i for i in range(1, 9)] + [2.0 ** (-i / 2) for i in (1, 3, 5, 7)]),
    ],
)
def test_slopes_of_alibi(heads, slopes):
    """Those of the paper for powers of two, and those of its public code for other numbers."""
    np.testing.assert_allclose(alibi_slopes(heads), slopes)
