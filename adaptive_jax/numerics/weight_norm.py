"""Weight normalisation: the length and the direction of a weight vector are parameters of their
own (Salimans & Kingma 2016).
"""

import jax
import jax.numpy as jnp


def norms(v: jax.Array, axis: int) -> jax.Array:
    """The Euclidean norms of the vectors that lie along `axis`: `v [n, m]` with axis 0 gives
    `[m]`.
    """
    return jnp.sqrt(jnp.sum(v * v, axis=axis))


def weight_norm(v: jax.Array, g: jax.Array, axis: int = 0) -> jax.Array:
    """`g v / |v|`, equation 2: every vector along `axis` of `v [n, m]` gets the length that `g`
    says, `[m]` with axis 0.

    A layer that starts with g = `norms(v, axis)` has the weights v at first, so its initialisation
    is that of v.
    """
    return v * jnp.expand_dims(g / norms(v, axis), axis)
