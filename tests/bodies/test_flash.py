"""The kernels for NVIDIA GPUs: interpreted, against attention in chunks; compiled
for a GPU as far as JAX goes here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.bodies.attention import ALONE, Pairs, attention, joint_attention
from adaptive_jax.bodies.flash import Blocks, flash
from adaptive_jax.bodies.positions import alibi_slopes
from adaptive_jax.numerics.dropout import row_seeds
from adaptive_jax.numerics.platforms import tracing_for

RATE = 0.1


def arrays(rows, time, heads, width, dtype=jnp.float32):
    """Queries, keys and values `[rows, time, 3, heads, width]`, and the gradient of the result."""
    bits = np.random.default_rng(0)
    return [
        jnp.asarray(bits.standard_normal((rows, time, *more, heads, width)), dtype)
        for more in ((3,), ())
    ]


def segments(rows, time):
    """Segments of about 50 tokens; some begin and end inside a block, and one number comes back."""
    return jnp.asarray(
        np.cumsum(np.random.default_rng(0).random((rows, time)) < 0.02, axis=1) % 3, jnp.int32
    )


def of_all_pairs(joint, pairs=ALONE):
    return attention(*(joint[:, :, part] for part in range(3)), pairs)


def with_gradient(attend, given, gradient):
    attended, pull = jax.vjp(attend, *given)
    return attended, *pull(gradient)


@pytest.mark.parametrize(
    "time, segmented, dropout, heads, blocks",
    [
        (192, True, RATE, 2, None),
        (128, False, RATE, 2, (Blocks(128, 32), Blocks(32, 64))),
        (128, True, 0.0, 3, (Blocks(32, 128), Blocks(128, 32))),
        (64, False, 0.0, 2, None),
    ],
)
def test_kernels_equal_all_pairs(time, segmented, dropout, heads, blocks):
    """Results and gradients, with the same weights dropped; blocks that the diagonal cuts, larger
    than a step and smaller.

    With ALiBi where rows have segments.
    """
    joint, gradient = arrays(2, time, heads, 16)
    bias = jnp.asarray(np.random.default_rng(1).standard_normal((3, heads, 16)), jnp.float32)
    seeds = row_seeds(jax.random.key(5), jnp.arange(2)) if dropout else None
    pairs = (
        Pairs(segments(2, time), alibi_slopes(heads), dropout, seeds)
        if segmented
        else Pairs(dropout=dropout, seeds=seeds)
    )

    def in_one(joint, bias):
        return flash(joint, pairs, bias, blocks=blocks)

    def apart(joint, bias):
        return of_all_pairs(joint + bias[None, None], pairs)

    @jax.jit
    def both(joint, bias, gradient):
        return [with_gradient(attend, (joint, bias), gradient) for attend in (in_one, apart)]

    for ours, right in zip(*both(joint, bias, gradient), strict=True):
        assert ours.shape == right.shape
        np.testing.assert_allclose(ours, right, rtol=1e-4, atol=3e-6 * np.abs(right).max())


def test_kernels_under_x64():
    """Numbers of 64 bits do not reach them, where they ended in a TypeError; nor the scores of
    ALiBi in chunks, which were float64.
    """
    pairs = Pairs(slopes=alibi_slopes(1))
    with jax.enable_x64(True):
        joint, gradient = arrays(1, 64, 1, 16)
        run = functools.partial(with_gradient, functools.partial(flash, pairs=pairs))
        twin = functools.partial(with_gradient, functools.partial(of_all_pairs, pairs=pairs))
        assert "f64[1" not in str(jax.make_jaxpr(twin)((joint,), gradient))  # but for plain numbers
        for ours, right in zip(
            jax.jit(run)((joint,), gradient), jax.jit(twin)((joint,), gradient), strict=True
        ):
            np.testing.assert_allclose(ours, right, rtol=1e-4, atol=3e-6 * np.abs(right).max())


def test_bfloat16_and_large_scores():
    """In bfloat16, the dtype of the products, results are as close to float32 as its rounding
    allows; large scores stay finite.
    """
    joint, gradient = arrays(1, 128, 1, 16, jnp.bfloat16)
    run = jax.jit(functools.partial(with_gradient, functools.partial(flash, pairs=ALONE)))
    twin = jax.jit(functools.partial(with_gradient, of_all_pairs))
    right = jax.device_get(twin((joint.astype(jnp.float32),), gradient.astype(jnp.float32)))
    for ours, theirs in zip(run((joint,), gradient), right, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), theirs, atol=0.01 * np.abs(theirs).max()
        )
    for each in run((300 * joint,), gradient):
        assert np.all(np.isfinite(np.asarray(each, np.float32)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_programs_for_a_gpu(dtype):
    """One kernel forward and one backward, which take queries, keys and values where they lie:
    nothing is copied or transposed.
    """
    like, bias = (
        jax.ShapeDtypeStruct((4, 256, 3 * 8 * 64), dtype),
        jax.ShapeDtypeStruct((3 * 8 * 64,), jnp.float32),
    )
    ids, seeds = jax.ShapeDtypeStruct((4, 256), jnp.int32), jax.ShapeDtypeStruct((4, 2), jnp.uint32)

    def loss(joint, bias, ids, seeds):
        mixed = joint_attention(
            joint, bias, 8, Pairs(ids, alibi_slopes(8), RATE, seeds), path="triton"
        )
        return (mixed.astype(jnp.float32) ** 2).sum()

    with tracing_for("gpu", "NVIDIA H100 80GB HBM3"):
        text = (
            jax.jit(jax.grad(loss, argnums=(0, 1)))
            .trace(like, bias, ids, seeds)
            .lower(lowering_platforms=("cuda",))
            .as_text()
        )
    assert text.count("@__gpu$xla.gpu.triton") == 2
    assert (
        "256x256" not in text and "4x8x256x64" not in text
    )  # weights of a head; heads before time
    moves = [
        line
        for line in text.splitlines()
        if "stablehlo.transpose" in line or "stablehlo.concatenate" in line
    ]
    assert not [line for line in moves if "x8x64x" in line]
