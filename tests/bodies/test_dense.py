"""Affine maps in two parts: parameters and results of flax's layer of this name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from adaptive_jax.bodies.dense import Dense, added


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_dense_is_flaxs(dtype):
    """From one key the same parameters, and with a bias the same result and gradients."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 8)), dtype)
    theirs = nn.Dense(5, dtype=dtype, kernel_init=nn.initializers.xavier_uniform())
    params = theirs.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, Dense(5, dtype).init(jax.random.key(0), x), params)
    params["params"]["bias"] += jnp.arange(5.0)

    @jax.jit
    def both(params, x):
        forms = theirs.apply, lambda params, x: added(*Dense(5, dtype).apply(params, x))
        sums = [lambda *given, form=form: (form(*given) ** 2).sum() for form in forms]
        return [jax.value_and_grad(each, argnums=(0, 1))(params, x) for each in sums]

    for right, ours in zip(*map(jax.tree.leaves, both(params, x)), strict=True):
        assert ours.dtype == right.dtype
        ours, right = (np.asarray(each, np.float32) for each in (ours, right))
        # Sums differ by the order of their terms, and flax rounds gradients of bfloat16 before it
        # widens them.
        atol = (2**-7 if dtype == jnp.bfloat16 else 1e-6) * np.abs(right).max()
        np.testing.assert_allclose(ours, right, rtol=1e-6, atol=atol)


def test_gradient_of_a_bias():
    """Summed in float32: in bfloat16 a sum of ones ends at 256."""
    x, bias = jnp.ones((8, 512, 3), jnp.bfloat16), jnp.arange(3.0)
    out, back = jax.vjp(jax.jit(added), x, bias)
    of_x, of_bias = back(jnp.ones_like(out))
    assert out.dtype == of_x.dtype == jnp.bfloat16 and of_bias.dtype == jnp.float32
    np.testing.assert_array_equal(out[1, 2], [1, 2, 3])
    np.testing.assert_array_equal(of_bias, [4096] * 3)
