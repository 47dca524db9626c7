"""Arrays on a mesh: the axes of `jax.shard_map` over which they differ from device to device, and
functions of tokens on axes that are Explicit, the default of `jax.make_mesh`.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def as_tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    """A name or a sequence of names, as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names)


def axes_of(tree) -> frozenset[str]:
    """The axes over which any array of a tree varies, as JAX tracks them under `check_vma` of
    `shard_map`; without it, or outside `shard_map`, none.
    """
    return frozenset().union(
        *(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(tree))
    )


def pvary(tree, axes: frozenset[str]):
    """Casts every array of a tree to vary over these axes of `shard_map` as well. The transpose
    sums gradients over devices.
    """

    def one(leaf):
        missing = tuple(sorted(axes - axes_of(leaf)))
        return lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(one, tree)


def vary_alike(tree):
    """Casts all arrays of a tree to vary over the same axes, as operations with custom gradients
    require.
    """
    return pvary(tree, axes_of(tree))


def kernel_arguments(arrays, shapes):
    """The arrays and result shapes of a Pallas kernel, cast to vary over the same axes, as
    `check_vma` of `shard_map` requires.
    """
    arrays = vary_alike(arrays)
    axes = jax.typeof(arrays[0]).manual_axis_type
    return arrays, [
        jax.ShapeDtypeStruct(shape.shape, shape.dtype, manual_axis_type=axes) for shape in shapes
    ]


def compiled_once(function: Callable, static: tuple, *arrays):
    """`function(*static, *arrays)`, compiled once outside `jax.jit`, where JAX would compile its
    loops at every call.

    Args:
        function: defined at module level.
        static: hashable.
    """
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(arrays)):
        return function(*static, *arrays)
    return _compiled(function, static, *arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(function, static, *arrays):
    return function(*static, *arrays)


def by_token(function: Callable, tokens: jax.Array, shared) -> jax.Array:
    """`function(tokens, shared)`; on Explicit axes each device computes its own tokens.

    On Explicit axes JAX requires an output sharding for every gather, reshape and product; inside
    `jax.shard_map` it does not.

    Args:
        function: returns an array with the axes of tokens first. It is defined at module level.
        tokens: ids `[...]`, or hidden states `[..., features]`, sharded over any axes; features are
            gathered.
        shared: a tree of arrays that every token reads. Each device gathers them, and their
            gradients are summed over devices.
    """
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves((tokens, shared))]
    mesh = next((mesh for mesh in meshes if {*mesh.axis_types} == {AxisType.Explicit}), None)
    if mesh is None:
        return compiled_once(function, (), tokens, shared)
    sharding = jax.typeof(tokens).sharding
    spec = P() if sharding.mesh.empty else sharding.spec
    if jnp.issubdtype(tokens.dtype, jnp.floating):
        spec = P(*spec[: tokens.ndim - 1])
    return _mapped(function, mesh, spec, tokens, shared)


# Under `jax.jit` for eager calls, where types of arrays name no devices.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _mapped(function, mesh, spec, tokens, shared):
    def local(tokens, shared):
        return function(tokens, pvary(shared, axes_of(tokens)))

    tokens, shared = jax.sharding.reshard(
        (tokens, shared), (NamedSharding(mesh, spec), NamedSharding(mesh, P()))
    )
    return jax.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=spec)(tokens, shared)
