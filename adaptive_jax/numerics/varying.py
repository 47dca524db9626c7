"""Over which axes of `jax.shard_map` arrays differ from device to device, as JAX tracks it where
`check_vma` is on.

Where it is off, or outside `shard_map`, no array varies, and nothing here changes anything.
"""

import jax
from jax import lax


def axes_of(tree) -> frozenset[str]:
    """The axes over which any array of a tree varies."""
    return frozenset().union(
        *(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(tree))
    )


def vary(tree, axes: frozenset[str]):
    """The tree, each of whose arrays varies over these axes too. Its transpose sums gradients
    over devices.
    """

    def one(leaf):
        more = tuple(sorted(axes - axes_of(leaf)))
        return lax.pcast(leaf, more, to="varying") if more else leaf

    return jax.tree.map(one, tree)
