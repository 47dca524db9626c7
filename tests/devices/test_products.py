"""Products with parameters: the same numbers and gradients as a plain product."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.devices.platforms import tracing_for
from adaptive_jax.devices.products import dot_general, product


def arrays(shape, width, dtype=np.float64):
    random = np.random.default_rng(0)
    return [random.standard_normal(size).astype(dtype) for size in (shape, (shape[-1], width), (*shape[:-1], width))]


@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (2, 3, 4), (2, 1, 2, 7), (64, 16)])
@pytest.mark.parametrize("width", [1, 4, 40])
def test_product_and_gradients(shape, width):
    """Against products written out in float64, of matrices that widen, narrow and keep the width."""
    x, matrix, slope = arrays(shape, width)
    rows, slopes = x.reshape(-1, shape[-1]), slope.reshape(-1, width)
    wanted = x @ matrix, (slopes @ matrix.T).reshape(shape), rows.T @ slopes
    of_dense = lambda x, matrix: dot_general(x, matrix, (((x.ndim - 1,), (0,)), ((), ())), precision=None)  # noqa: E731
    for function in (product, of_dense):
        out, back = jax.vjp(jax.jit(function), *(jnp.asarray(a, jnp.float32) for a in (x, matrix)))
        for ours, theirs in zip((out, *back(jnp.asarray(slope, jnp.float32))), wanted, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
            assert ours.shape == theirs.shape


@pytest.mark.parametrize("width", [2, 6])
def test_product_under_transformations(width):
    """Batched, in a scan under rematerialisation and in bfloat16, gradients are those of a plain product."""
    x, matrix, _ = arrays((3, 8, 4), width, np.float32)
    turn = arrays((1, width), 4, np.float32)[1]

    def loss(product, x, matrix):
        def block(x, _):
            return product(product(x, matrix), turn), None

        return jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(block), x, length=3)[0]))

    for way in (lambda f: f, lambda f: jax.vmap(f, in_axes=(0, None))):
        ours, plain = (
            jax.jit(way(jax.grad(lambda x, m, each=each: loss(each, x, m), argnums=(0, 1))))(x, matrix)
            for each in (product, jnp.matmul)
        )
        for one, other in zip(ours, plain, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
    half = [jnp.asarray(a, jnp.bfloat16) for a in (x, matrix)]
    ours, plain = (jax.grad(lambda *a, each=each: jnp.sum(each(*a)), argnums=(0, 1))(*half) for each in (product, jnp.matmul))
    for one, other in zip(ours, plain, strict=True):
        assert one.dtype == other.dtype == jnp.bfloat16
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("width", [3, 40])
def test_gradient_of_a_matrix_keeps_its_dtype(gpu, width):
    """Of bfloat16 vectors and a float32 matrix: summed in float32, so 50 times closer to float64 than bfloat16 could be."""
    x, matrix, slope = arrays((512, 8), width)
    half = [jnp.asarray(a, jnp.bfloat16) for a in (x, slope)]
    with tracing_for("gpu", "NVIDIA H100 80GB HBM3") if gpu else nullcontext():
        out, back = jax.vjp(product, half[0], jnp.asarray(matrix, jnp.float32))
        of_x, of_matrix = back(half[1])
    assert out.dtype == of_x.dtype == jnp.bfloat16 and of_matrix.dtype == jnp.float32
    x, slope = (np.asarray(each, np.float64) for each in half)
    np.testing.assert_allclose(of_matrix, x.T @ slope, atol=2**-9 / 50 * np.abs(x.T @ slope).max())
