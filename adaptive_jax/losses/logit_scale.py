"""The scale of logits, as a factor of the hidden states and biases in which they are linear."""

import jax
import jax.numpy as jnp

from adaptive_jax.numerics.arrays import floats
from adaptive_jax.numerics.meshes import vary_alike
from adaptive_jax.numerics.products import sum_dtype


def scaled_logits(scale, hidden, bands, clusters):
    """`(hidden, bands, clusters)` with hidden states and biases times the scale of the logits."""
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
    """`scale · array` in the array's dtype. Entries without a gradient add none to that of the
    scale, as 0 · NaN would.
    """
    return (array.astype(scale.dtype) * scale).astype(array.dtype)


def _backward(saved, cotangent):
    scale, array = saved
    wide = cotangent.astype(scale.dtype)
    of_scale = jnp.sum(jnp.where(wide == 0, 0, wide * array.astype(scale.dtype)))
    return of_scale, (wide * scale).astype(array.dtype)


_times.defvjp(lambda scale, array: (_times(scale, array), (scale, array)), _backward)
