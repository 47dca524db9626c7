"""Dropout whose masks are a function of the key and of the global number of each row, and of nothing else.

A row of an update drops the same entries on one device or on 64, in one batch or in sixteen, in whatever order a kernel
visits it: a mask is a hash of the row's seeds and of the entry's place in the row. So masks are also drawn again, bit for bit,
wherever keeping them would cost more memory than the few integer operations do.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn


def row_seeds(key: jax.Array, rows: jax.Array) -> jax.Array:
    """Two seed words for every row: int32 numbers `[rows]` to uint32 `[rows, 2]`, by threefry."""
    return jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, rows)).astype(jnp.uint32)


def kept(seeds: jax.Array, places: jax.Array, rate: float) -> jax.Array:
    """Which entries stay: True with probability 1 - rate.

    Args:
        seeds: uint32 `[rows, 2]`, or `[2]` of one row.
        places: uint32 `[...]`, the entries' places in a row, below 2^32; every row is asked for the same ones.
        rate: of what is dropped.

    Returns:
        bool `[rows, ...]`, or `[...]` of one row.
    """
    first, second = (seeds[..., i].reshape(seeds.shape[:-1] + (1,) * places.ndim) for i in range(2))
    # Multiply and shift, as integer hashes do: every bit of place and seeds reaches every bit of the result.
    x = places.reshape((1,) * (seeds.ndim - 1) + places.shape) ^ first
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = ((x ^ (x >> 15)) + second) * jnp.uint32(0x846CA68B)
    return (x ^ (x >> 16)) >= jnp.uint32(round(rate * 2**32))


def places(shape: tuple[int, ...]) -> jax.Array:
    """Places in a row of this shape, counted as its entries are laid out: uint32 `shape`."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    counts = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(len(shape))]
    return sum(count * jnp.uint32(stride) for count, stride in zip(counts, strides, strict=True))


class Dropout(nn.Module):
    """Zeroes entries with probability `rate` and divides the others by 1 - rate (Srivastava et al. 2014).

    The key is that of the rng stream "dropout".
    """

    rate: float

    @nn.compact
    def __call__(self, x: jax.Array, rows: jax.Array | None = None, *, train: bool) -> jax.Array:
        """`x [batch, ...]`, whose rows have the numbers `rows [batch]` in the update; by default 0, 1, 2 …"""
        if not train or not self.rate:
            return x
        rows = jnp.arange(len(x)) if rows is None else rows
        stays = kept(row_seeds(self.make_rng("dropout"), rows), places(x.shape[1:]), self.rate)
        return jnp.where(stays, x / (1 - self.rate), 0).astype(x.dtype)
