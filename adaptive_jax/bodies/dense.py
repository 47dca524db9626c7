"""Affine maps of vectors in two parts, so that what comes next adds the bias where it costs no
pass over memory.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.numerics.products import product


class Dense(nn.Module):
    """A product with a matrix of parameters, and a bias for the caller to add.

    Attributes:
        features: of the result.
        dtype: of the product; parameters are float32.
    """

    features: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`x [..., n]` to the product `[..., features]` and the bias `[features]`, float32."""
        kernel = self.param(
            "kernel", nn.initializers.xavier_uniform(), (x.shape[-1], self.features)
        )
        return product(x.astype(self.dtype), kernel), self.param(
            "bias", nn.initializers.zeros_init(), (self.features,)
        )


@jax.custom_vjp
def added(vectors: jax.Array, bias: jax.Array) -> jax.Array:
    """`vectors [..., n]` with a bias `[n]` added in their dtype. The gradient of the bias is summed
    in its own.

    JAX would sum it in that of the vectors: XLA on a CPU then adds up thousands of tokens in
        bfloat16, slowly and to two digits.
    """
    return vectors + bias.astype(vectors.dtype).reshape((1,) * (vectors.ndim - 1) + bias.shape)


def _forward(vectors, bias):
    return added(vectors, bias), bias


def _backward(bias, gradient):
    return gradient, jnp.sum(gradient, axis=tuple(range(gradient.ndim - 1)), dtype=bias.dtype)


added.defvjp(_forward, _backward)
