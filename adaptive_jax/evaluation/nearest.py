"""The nearest of many entries, a block at a time."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# Entries of a group, and groups of a block that are sorted where all others are farther
GROUP, FEW = 8, 384

# Nearness `[queries, neighbours]`, descending, and whether each is the target
Best = tuple[jax.Array, jax.Array]


def nearest(best: Best, products: jax.Array, near: Callable, hit: Callable) -> Best:
    """The nearest of those found before and of a block of entries. Exact, whatever the block holds.

    With many entries before it, most of a block is farther than all neighbours so far. Where at
    most FEW groups of entries have a nearer one, only those groups are sorted.

    Args:
        products: of queries and entries, float32 `[queries, block]`.
        near: `near(products, which)`, the nearness of entries of the block: products `[queries,
            n]`, places `[1 or queries, n]`.
        hit: `hit(which)`, whether these are the targets: bool `[queries, n]`, for places `[queries,
            n]`.
    """
    (queries, block), neighbours = products.shape, best[0].shape[1]

    def merge(products, which):
        found, at = lax.top_k(jnp.concatenate([best[0], near(products, which)], axis=1), neighbours)
        which = jnp.broadcast_to(which, products.shape)
        new = hit(jnp.take_along_axis(which, jnp.maximum(at - neighbours, 0), axis=1))
        return found, jnp.where(
            at < neighbours,
            jnp.take_along_axis(best[1], jnp.minimum(at, neighbours - 1), axis=1),
            new,
        )

    every = jnp.arange(block)[None]
    if block % GROUP or block // GROUP <= FEW:
        return merge(products, every)
    groups = near(products, every).reshape(queries, -1, GROUP).max(axis=2)

    def some():
        which = lax.top_k(groups, FEW)[1][..., None]
        chosen = jnp.take_along_axis(products.reshape(queries, -1, GROUP), which, axis=1)
        return merge(
            chosen.reshape(queries, -1),
            (which * GROUP + jnp.arange(GROUP)[None, None]).reshape(queries, -1),
        )

    few = jnp.max(jnp.sum(groups > best[0][:, -1:], axis=1)) <= FEW
    return lax.cond(few, some, lambda: merge(products, every))
