"""The scale of logits, applied to hidden states and biases, in which logits are linear."""

import jax
import jax.numpy as jnp

from adaptive_jax.numerics.arrays import floats
from adaptive_jax.numerics.meshes import vary_alike
from adaptive_jax.numerics.products import sum_dtype


def scaled_logits(scale, hidden, bands, clusters):
    """Multiplies hidden states and biases of `(hidden, bands, clusters)` by the scale."""
    scale = floats("logit_scale", scale)

    def times(array):
        return _times(*vary_alike((scale.astype(sum_dtype(array.dtype)), array)))

    def of_band(band):
        if band.bias is None:
            return band
        return band._replace(bias=times(band.bias.astype(sum_dtype(band.bias.dtype))))

    return times(hidden), [*map(of_band, bands)], None if clusters is None else of_band(clusters)


@jax.custom_vjp
def _times(scale, array):
    """`scale · array` in the array's dtype. Entries of cotangent 0 add nothing to the gradient of
    the scale, even if they are NaN.
    """
    return (array.astype(scale.dtype) * scale).astype(array.dtype)


def _backward(saved, cotangent):
    scale, array = saved
    wide = cotangent.astype(scale.dtype)
    of_scale = jnp.sum(jnp.where(wide == 0, 0, wide * array.astype(scale.dtype)))
    return of_scale, (wide * scale).astype(array.dtype)


_times.defvjp(lambda scale, array: (_times(scale, array), (scale, array)), _backward)
