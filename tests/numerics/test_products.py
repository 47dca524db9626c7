"""Products with parameters: the same numbers and gradients as a plain product."""

import re
from contextlib import nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.bodies.lstm import LSTM
from adaptive_jax.inputs.adaptive import AdaptiveInput
from adaptive_jax.inputs.char_cnn import CharacterCNN
from adaptive_jax.numerics.platforms import tracing_for
from adaptive_jax.numerics.products import product, wide

CPU = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""


def arrays(shape, width, dtype=np.float64):
    random = np.random.default_rng(0)
    return [
        random.standard_normal(size).astype(dtype)
        for size in (shape, (shape[-1], width), (*shape[:-1], width))
    ]


@pytest.mark.parametrize("shape, width", [((5, 3), 40), ((2, 1, 2, 7), 3), ((1, 1), 1)])
def test_product_and_gradients(shape, width):
    """Against products written out in float64, of matrices that widen, narrow and keep the
    width.
    """
    x, matrix, slope = arrays(shape, width)
    rows, slopes = x.reshape(-1, shape[-1]), slope.reshape(-1, width)
    expected = x @ matrix, (slopes @ matrix.T).reshape(shape), rows.T @ slopes
    out, back = jax.vjp(jax.jit(product), *(jnp.asarray(a, jnp.float32) for a in (x, matrix)))
    for ours, theirs in zip((out, *back(jnp.asarray(slope, jnp.float32))), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
        assert ours.shape == theirs.shape


@pytest.mark.parametrize("width", [2, 6])
def test_product_under_transformations(width):
    """Batched, in a scan under rematerialisation and in bfloat16, gradients are those of a
    plain product.
    """
    x, matrix, _ = arrays((3, 8, 4), width, np.float32)
    turn = arrays((1, width), 4, np.float32)[1]

    def loss(product, x, matrix):
        def block(x, _):
            return product(product(x, matrix), turn), None

        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(block), x, length=3)[0]))

    for way in (lambda f: f, lambda f: jax.vmap(f, in_axes=(0, None))):
        ours, plain = (
            jax.jit(way(jax.grad(lambda x, m, each=each: loss(each, x, m), argnums=(0, 1))))(
                x, matrix
            )
            for each in (product, jnp.matmul)
        )
        for one, other in zip(ours, plain, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    half = [jnp.asarray(a, jnp.bfloat16) for a in (x, matrix)]
    ours, plain = (
        jax.jit(jax.grad(lambda *a, each=each: jnp.sum(each(*a)), argnums=(0, 1)))(*half)
        for each in (product, jnp.matmul)
    )
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype == other.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            *(np.asarray(each, np.float32) for each in (one, other)), rtol=2e-2, atol=2e-2
        )


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("width", [3, 40])
def test_gradient_of_a_matrix_keeps_its_dtype(gpu, width):
    """Of bfloat16 vectors and a float32 matrix: summed in float32, so 50 times closer to
    float64 than bfloat16 could be.
    """
    x, matrix, slope = arrays((512, 8), width)
    half = [jnp.asarray(a, jnp.bfloat16) for a in (x, slope)]

    def pulled(x, matrix, slope):
        out, back = jax.vjp(product, x, matrix)
        return out, *back(slope)

    with tracing_for("gpu", "NVIDIA H100 80GB HBM3") if gpu else nullcontext():
        out, of_x, of_matrix = jax.jit(pulled)(half[0], matrix, half[1])
    assert out.dtype == of_x.dtype == jnp.bfloat16 and of_matrix.dtype == jnp.float32
    x, slope = (np.asarray(each, np.float64) for each in half)
    np.testing.assert_allclose(of_matrix, x.T @ slope, atol=2**-9 / 50 * np.abs(x.T @ slope).max())


@pytest.mark.parametrize("shape", [(64, 130, 96), (1, 130, 17), (130, 1, 1), (0, 3, 5)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_wide_product(shape, dtype):
    """Row-major and column-major matrices: products are summed in float32, so as near to float64
    as the rounded operands allow.
    """
    random = np.random.default_rng(0)
    n, k, m = shape
    left, right = (jnp.asarray(random.standard_normal(size), dtype) for size in ((n, k), (k, m)))
    expected = np.asarray(left, np.float64) @ np.asarray(right, np.float64)

    @jax.jit
    def ways(left, right, left_turned, right_turned):
        turned = wide(left_turned.T, right), wide(left, right_turned.T), wide(right.T, left.T).T
        return wide(left, right), *turned, jax.vmap(wide)(left[None], right[None])[0]

    for each in ways(left, right, jnp.array(left.T), jnp.array(right.T)):
        assert each.dtype == jnp.float32
        np.testing.assert_allclose(each, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(
    "avx512_bf16" not in CPU and "amx_bf16" not in CPU,
    reason="no bfloat16 instructions: XLA widens all",
)
def test_bfloat16_reaches_the_cpu():
    """Products of two layers and all their gradients take bfloat16: what is widened first is
    slower than float32.
    """
    x, matrix = jnp.zeros((256, 128), jnp.bfloat16), jnp.zeros((128, 512))

    def loss(x, matrix, back):
        return jnp.sum(jnp.sin(product(jnp.sin(product(x, matrix)), back)))

    program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(x, matrix, matrix.T).compile().as_text()
    dtypes, operands = {}, []
    for line in program.splitlines():
        if found := re.match(r"\s*(?:ROOT )?(%[\w.-]+) = (\w+)\[", line):
            dtypes[found[1]] = found[2]
        if " dot(" in line:
            operands += [
                dtypes[name]
                for name in re.findall(r"%[\w.-]+", line.split(" dot(")[1].split(")")[0])
            ]
    assert operands == 6 * 2 * ["bf16"]


@pytest.mark.parametrize(
    "layer, given",
    [
        (AdaptiveInput(9, 8, cutoffs=(4,), dtype=jnp.bfloat16), jnp.arange(4)),
        (CharacterCNN(9, 8, 4, ((1, 4), (2, 4)), length=4, dtype=jnp.bfloat16), jnp.arange(4)),
        (LSTM(8, (8,), dtype=jnp.bfloat16), jnp.ones((2, 5, 8))),
    ],
    ids=["adaptive", "char_cnn", "lstm"],
)
def test_loops_write_no_part_of_a_bfloat16_array(layer, given):
    """On a CPU, XLA would widen and narrow all of the array for each part."""
    variables = jax.jit(layer.init)(jax.random.key(0), given)
    if hasattr(layer, "lexicon_shapes"):
        known = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), layer.lexicon_shapes(9))
        variables |= {"lexicon": known}

    def loss(params):
        made = layer.apply(variables | {"params": params}, given)
        return jax.tree.leaves(made)[0].astype(jnp.float32).sum()

    program = str(jax.make_jaxpr(jax.grad(loss))(variables["params"]))
    written = set(re.findall(r":(\w+)\[[\d,]*\] = dynamic_update_slice", program))
    assert "u16" in written and "bf16" not in written
