"""Normalisation of vectors (Ba et al. 2016), in float32 whatever the dtype of the vectors."""

import functools

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.bodies.remat import keep
from adaptive_jax.numerics.platforms import platform


class LayerNorm(nn.LayerNorm):
    """flax's layer of this name, with a gradient of its own on accelerators; the result has the
    dtype `dtype`.
    """

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`x [..., features]` to the same shape."""
        # A CPU has the memory for what JAX's own gradient keeps: float32 copies of the vectors.
        if platform() == "cpu":
            return super().__call__(x)
        scale = self.param("scale", self.scale_init, x.shape[-1:])
        bias = self.param("bias", self.bias_init, x.shape[-1:])
        return normalise(x, scale, bias, self.dtype, self.epsilon)


def _statistics(x, epsilon):
    """Mean and 1 / standard deviation of each vector, float32 `[..., 1]`."""
    x = x.astype(jnp.float32)
    mean, squares = (jnp.mean(each, axis=-1, keepdims=True) for each in (x, jnp.square(x)))
    return mean, jax.lax.rsqrt(jnp.maximum(0.0, squares - jnp.square(mean)) + epsilon)


def _shift(x, mean, inverse, scale, bias, dtype):
    wide = (1,) * (x.ndim - 1) + scale.shape
    return ((x - mean) * (inverse * scale.reshape(wide)) + bias.reshape(wide)).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def normalise(x, scale, bias, dtype, epsilon):
    """What `LayerNorm` computes. Its gradient reads the vectors in their own dtype and two
    numbers of each.
    """
    return _shift(x, *_statistics(x, epsilon), scale, bias, dtype)


def _forward(x, scale, bias, dtype, epsilon):
    mean, inverse = (keep(each) for each in _statistics(x, epsilon))
    return _shift(x, mean, inverse, scale, bias, dtype), (x, mean, inverse, scale)


def _backward(dtype, epsilon, residuals, gradient):
    x, mean, inverse, scale = residuals
    gradient = gradient.astype(jnp.float32)
    normal = (x - mean) * inverse
    scaled = gradient * scale.reshape((1,) * (x.ndim - 1) + scale.shape)
    along = (
        jnp.mean(scaled, axis=-1, keepdims=True),
        normal * jnp.mean(scaled * normal, axis=-1, keepdims=True),
    )
    rows = tuple(range(x.ndim - 1))
    return (
        (inverse * (scaled - along[0] - along[1])).astype(x.dtype),
        (gradient * normal).sum(rows),
        gradient.sum(rows),
    )


normalise.defvjp(_forward, _backward)
