"""Exact search for the nearest of many entries, a block at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Entries of a group; most groups of a block that are sorted by themselves, see `nearest`
GROUP, FEW = 8, 384


class Nearest(NamedTuple):
    """The nearest neighbours of some queries.

    Attributes:
        nearness: minus squared distances, float32 `[queries, neighbours]`, descending; -inf where
            there are fewer neighbours.
        hit: bool `[queries, neighbours]`, whether the neighbour's word is the query's target.
    """

    nearness: jax.Array
    hit: jax.Array


def no_neighbours(*shape: int) -> Nearest:
    """No neighbours yet: nearness -inf, no hits. shape: `(..., queries, neighbours)`."""
    return Nearest(jnp.full(shape, -jnp.inf), jnp.zeros(shape, bool))


def nearest(
    before: Nearest, queries: jax.Array, keys: jax.Array, valid: jax.Array, hit: jax.Array
) -> Nearest:
    """Merges a block of entries into the nearest neighbours of earlier blocks.

    After many entries, most of a block is farther away than all neighbours so far. If at most FEW
    groups of its entries have a nearer one, only those groups are sorted.

    Args:
        queries: `[queries, features]`.
        keys: `[block, features]`.
        valid: entries that count, bool `[1 or queries, block]`.
        hit: entries whose word is the query's target, bool `[queries, block]`.
    """
    (count, neighbours), block = before.nearness.shape, len(keys)
    queries, keys = queries.astype(jnp.float32), keys.astype(jnp.float32)
    # Distances are differences of products, which lose digits if all states share an offset. So
    # subtract the first query: a mean would let words see later ones.
    queries, keys = queries - queries[:1], keys - queries[:1]
    products = jnp.matmul(queries, keys.T, precision=lax.Precision.HIGHEST)
    squares = jnp.sum(queries**2, axis=1)[:, None] + jnp.sum(keys**2, axis=1)[None]
    nearness = jnp.where(valid, -jnp.maximum(squares - 2 * products, 0.0), -jnp.inf)

    def merge(nearness, hit):
        nearness, index = lax.top_k(
            jnp.concatenate([before.nearness, nearness], axis=1), neighbours
        )
        hit = jnp.concatenate([before.hit, hit], axis=1)
        return Nearest(nearness, jnp.take_along_axis(hit, index, axis=1))

    if block % GROUP or block // GROUP <= FEW:
        return merge(nearness, hit)
    closest = nearness.reshape(count, -1, GROUP).max(axis=2)

    def merge_groups():
        which = lax.top_k(closest, FEW)[1][..., None]

        def chosen(array):
            groups = array.reshape(count, -1, GROUP)
            return jnp.take_along_axis(groups, which, axis=1).reshape(count, -1)

        return merge(chosen(nearness), chosen(hit))

    few_groups = jnp.max(jnp.sum(closest > before.nearness[:, -1:], axis=1)) <= FEW
    return lax.cond(few_groups, merge_groups, lambda: merge(nearness, hit))
