"""Dropout whose masks depend only on the key, the row number in the update and the entry's place.

A mask is a hash of the row's seeds and of the entry's position in the row. So a row drops the same
entries on one device or 64, in one microbatch or sixteen, in any order of computation, and the
backward pass can recompute masks bit for bit where keeping them would cost too much memory.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_jax.numerics.arrays import whole_numbers


def row_seeds(key: jax.Array, row_ids: jax.Array) -> jax.Array:
    """Two seed words for every row, uint32 `[rows, 2]`, from `row_ids` int32 `[rows]`."""
    row_ids = whole_numbers("row_ids", row_ids, "rows")
    return shared_seeds(jax.vmap(jax.random.fold_in, (None, 0))(key, row_ids))


def shared_seeds(key: jax.Array) -> jax.Array:
    """Two seed words, uint32 `[2]`, for a mask that all rows of an update share; `[..., 2]` for
    keys `[...]`. Keys of threefry have two words, those of "rbg" four.
    """
    return jax.random.key_data(key)[..., :2].astype(jnp.uint32)


def keep_mask(seeds: jax.Array, positions: jax.Array, rate: float) -> jax.Array:
    """Mask of the entries to keep: True with probability 1 - rate.

    Args:
        seeds: uint32 `[rows, 2]`, or `[2]` for one row.
        positions: uint32 `[...]`, the entries' positions in a row, the same for every row.
        rate: the probability that an entry is dropped.

    Returns:
        bool `[rows, ...]`, or `[...]` for one row.
    """
    first, second = (
        seeds[..., i].reshape(seeds.shape[:-1] + (1,) * positions.ndim) for i in range(2)
    )
    return stays(first, second, positions.reshape((1,) * (seeds.ndim - 1) + positions.shape), rate)


def stays(first: jax.Array, second: jax.Array, positions: jax.Array, rate: float) -> jax.Array:
    """`keep_mask` for two seed words and positions that broadcast, also inside kernels."""
    # Multiply and shift, as integer hashes do: every bit of position and seeds affects every bit of
    # the result.
    x = positions ^ first
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = ((x ^ (x >> 15)) + second) * jnp.uint32(0x846CA68B)
    return (x ^ (x >> 16)) >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def positions(shape: tuple[int, ...], start=0) -> jax.Array:
    """The positions of the entries of a row of this shape, uint32 `shape`, in row-major order from
    `start` on.
    """
    total = jnp.asarray(start, jnp.uint32)
    for axis, size in enumerate(shape):
        counts = jnp.arange(size, dtype=jnp.uint32).reshape((1,) * axis + (size,))
        total = total[..., None] + counts * jnp.uint32(math.prod(shape[axis + 1 :]))
    return total


def tied(value: jax.Array, array: jax.Array) -> jax.Array:
    """The scalar `value` with a false data dependency on an `array`; it has no gradient.

    XLA hoists out of a loop everything that does not depend on its variables, such as the positions
    of a mask or the zeros of a `where`, and keeps these large arrays in memory. If they are
    computed from a tied scalar, they stay in the loop.
    """
    array = jax.lax.stop_gradient(array)
    sharding = jax.typeof(array).sharding
    if any(sharding.spec):  # over Explicit axes, which allow no slice
        replicated = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec())
        array = jax.sharding.reshard(array, replicated)
    return jax.lax.optimization_barrier((value, array[(0,) * array.ndim]))[0]


@jax.custom_vjp
def masked(x: jax.Array, mask: jax.Array, fill: jax.Array) -> jax.Array:
    """`jnp.where(mask, x, fill)` for a tied `fill`, without the gradient of `fill`."""
    return jnp.where(mask, x, fill)


masked.defvjp(
    lambda x, mask, fill: (jnp.where(mask, x, fill), mask),
    lambda mask, slope: (jnp.where(mask, slope, 0), None, None),
)


class Mask(NamedTuple):
    """Dropout mask of one call of `Dropout`."""

    stays: jax.Array  # bool, True for entries to keep; broadcasts to the array
    zero: jax.Array  # a zero tied to the seeds, for the other entries


def drop(x: jax.Array, mask: Mask | None, rate: float) -> jax.Array:
    """`x` with dropped entries zeroed and the others divided by 1 - rate; without a mask, `x`."""
    return x if mask is None else masked(x / (1 - float(rate)), mask.stays, mask.zero)
