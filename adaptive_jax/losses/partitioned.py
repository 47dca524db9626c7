"""Runs a function of tokens on the devices that hold the tokens, under any mesh.

Sorting tokens and looping over slices of them defeats XLA's partitioner: under plain `jax.jit`
every device would compute all tokens. So the types of the mesh axes decide how the function runs:

- Manual, that is inside `jax.shard_map`, or one device: it is called directly.
- Explicit, the default of `jax.make_mesh`: types say how arrays are sharded, and `jax.shard_map`
  calls the function with the tokens of one device.
- Auto: the compiler alone knows how arrays are sharded. It asks for the program of one device
  through `jax.experimental.custom_partitioning`.

Tokens keep the axes that shard them. Either every device reads whole tables, which are gathered
once, or the devices of one or more axes share the softmax, each with some of the words (see
`adaptive_jax.losses.sharded`). They share it if these axes shard the table by words and do not
shard tokens. If hidden states have fewer numbers than tables, they also share it if the axes shard
tokens, which are then gathered, or the table by width, which is then exchanged once. Axes of size 1
are ignored.
"""

import dataclasses
import functools
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive_jax.errors import InputError
from adaptive_jax.losses.sharded import for_all
from adaptive_jax.numerics.meshes import compiled_once


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Gradients:
    """Flags of the gradients that a function of tokens computes: of its first array of tokens, and
    of each array that all tokens read.
    """

    tokens: bool
    shared: tuple[bool, ...]


def run(function, static, tokens, shared, by_words: tuple[bool, ...], gradients, gather_axes=None):
    """`function(static, None, tokens, shared)`, each device computing its own tokens.

    Args:
        function: returns `(results, d_tokens, d_shared)`: two trees of arrays with the leading
            sizes of the tokens, and the gradients of `shared`, summed over its tokens, None for
            those not requested. It is defined at module level. In place of None it may get the
            axis, or axes, of the mesh that shard the words. Then results must be the same on all
            devices of these axes, and gradients are summed over them, except those of rows.
        static: the other arguments of the function, hashable.
        tokens: a tree of arrays. All have the axes of tokens first; the first array has one more.
        shared: a tree of arrays that every token reads.
        by_words: which arrays of `shared` have a row for each word.
        gradients: a `Gradients`, or None to compute no gradient.
        gather_axes: axes of `jax.shard_map` over which tokens are gathered, so that each device
            computes those of all; see `adaptive_jax.losses.sharded.for_all`.

    Raises:
        InputError: a mesh with axes of several types.
    """
    if gather_axes is not None:
        return for_all(functools.partial(function, static, None), gather_axes, tokens, shared)
    mesh = mesh_of((tokens, shared))
    if mesh is None:
        return compiled_once(function, (static, None), tokens, shared)
    call, leaves = _call(function, static, tokens, shared, by_words, gradients, mesh)
    results, d_tokens, d_shared = _mapped(call)(*leaves)
    if gradients is None:
        return results, d_tokens, None
    d_shared = iter(d_shared)
    leaves = [next(d_shared) if flag else None for flag in gradients.shared]
    return results, d_tokens, jax.tree.unflatten(jax.tree.structure(shared), leaves)


def aligned(tokens, shared, by_words: tuple[bool, ...]):
    """Reshards `(tokens, shared)` on Explicit axes as `run` reads them: all tokens like the first
    array, `shared` replicated or sharded by words. Does nothing on other axes.

    For use around custom derivatives of `run`, whose gradients must be sharded like their arrays.

    Raises:
        InputError: as `run`.
    """
    mesh = mesh_of((tokens, shared))
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return tokens, shared
    call, leaves = _call(None, None, tokens, shared, by_words, None, mesh)
    return call.tree.unflatten(_aligned(call, *leaves))


class _Call(NamedTuple):
    """A call of `run` without its arrays, hashable."""

    function: Callable | None
    static: Any
    tree: Any  # structure of (tokens, shared)
    count: int  # arrays of tokens
    dims: int  # axes of tokens
    by_words: tuple[bool, ...]
    gradients: Gradients | None
    mesh: AbstractMesh
    numerics: tuple[Any, bool]  # precision of products, and jax_enable_x64
    levels: tuple[tuple[bool, ...], ...] = ()  # arrays that each vmap maps, the outermost first


def _call(function, static, tokens, shared, by_words, gradients, mesh):
    leaves, tree = jax.tree.flatten((tokens, shared))
    count, dims = len(jax.tree.leaves(tokens)), leaves[0].ndim - 1
    numerics = jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64
    call = _Call(function, static, tree, count, dims, by_words, gradients, mesh, numerics)
    return call, leaves


def mesh_of(tree) -> AbstractMesh | None:
    """The mesh over which `run` divides a call with these arrays, empty if unknown; None if `run`
    calls the function directly.

    Raises:
        InputError: as `run`.
    """
    meshes = [jax.typeof(leaf).sharding.mesh for leaf in jax.tree.leaves(tree)]
    mesh = next((mesh for mesh in meshes if not mesh.empty), jax.sharding.get_abstract_mesh())
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    kinds = {name: kind for name, size, kind in axes if kind != AxisType.Auto or size > 1}
    if len(set(kinds.values())) > 1:
        named = ", ".join(f"{name}: {kind.name}" for name, kind in kinds.items())
        raise InputError(
            f"axes of the mesh around this loss must have one type, got {named}: use"
            " jax.shard_map all axes (no axis_names), or jax.make_mesh equal axis_types"
        )
    if jax.config.jax_disable_jit and AxisType.Explicit not in mesh.axis_types:
        return None  # concrete arrays may be on any device
    if mesh.empty:
        return None if jax.device_count() == 1 else mesh
    return None if {*kinds.values()} <= {AxisType.Manual} else mesh


def _mapped(call):
    """`_program` of this call with a rule for vmap, which the primitive beneath lacks: the mapped
    axis becomes one more axis of the tokens, so it may be sharded, too.
    """
    placed = custom_vmap(lambda *leaves: _program(call)(*leaves))

    @placed.def_vmap
    def rule(size, mapped, *leaves):
        tokens = [
            leaf if is_mapped else jnp.broadcast_to(leaf, (size, *leaf.shape))
            for leaf, is_mapped in zip(leaves[: call.count], mapped[: call.count], strict=True)
        ]
        level = (*[True] * call.count, *mapped[call.count :])
        outer = _mapped(call._replace(levels=(level, *call.levels)))
        results = outer(*tokens, *leaves[call.count :])
        return results, jax.tree.map(lambda _: True, results)

    return placed


@functools.lru_cache
def _program(call):
    """`_placed` under `jax.jit`, for eager calls.

    JAX's compilation cache on disk identifies a call of custom_partitioning by its address, which
    another call may have later: the name tells them apart.
    """

    def placed(*leaves):
        return _placed(call, *leaves)

    if AxisType.Explicit not in call.mesh.axis_types:
        placed.__name__ = f"placed_{zlib.crc32(repr(call).encode()):08x}"
    return jax.jit(placed)


def _placed(call, *leaves):
    if AxisType.Explicit not in call.mesh.axis_types:
        return _auto(call, *leaves)
    layout = _layout_of_types(call, leaves, already_aligned=True)
    results = layout.tokens, layout.tokens, layout.gradients
    local = functools.partial(_local, call, layout)
    # `_local` sums over devices, and derivatives are around it: there is nothing to track.
    mapped = jax.shard_map(
        local, mesh=call.mesh, in_specs=layout.arguments, out_specs=results, check_vma=False
    )
    return mapped(*_resharded(call, layout, leaves))


@functools.partial(jax.jit, static_argnums=0)
def _aligned(call, *leaves):
    return _resharded(call, _layout_of_types(call, leaves), leaves)


def _resharded(call, layout, leaves):
    shardings = tuple(NamedSharding(call.mesh, spec) for spec in layout.arguments)
    return jax.sharding.reshard(leaves, shardings)


class _Layout(NamedTuple):
    """Shardings used inside one call.

    Attributes:
        tokens: of every array of tokens.
        arguments: of all arrays.
        gradients: of the requested gradients of `shared`.
        token_axes: mesh axes that shard tokens.
        word_axes: mesh axes that shard words.
        gathered: the dimension of tokens that `word_axes` shard, too, and that is gathered; or
            None.
        by_width: flags of the arrays of `shared` that arrive sharded by width, and that the device
            turns into rows by an all-to-all.
    """

    tokens: P
    arguments: tuple[P, ...]
    gradients: Sequence[P]
    token_axes: tuple[str, ...]
    word_axes: tuple[str, ...]
    gathered: int | None
    by_width: tuple[bool, ...]


class _Arrays(NamedTuple):
    """Shapes and shardings of a call's arrays.

    Attributes:
        sizes: of the axes of the mesh.
        specs, shapes: of each array.
    """

    sizes: dict[str, int]
    specs: list[P]
    shapes: list[tuple[int, ...]]

    def axes(self, leaf: int, dim: int) -> tuple[str, ...]:
        """Axes of more than one device that shard a dimension of an array."""
        spec = self.specs[leaf]
        names = spec[dim] if dim < len(spec) else None
        names = () if names is None else (names,) if isinstance(names, str) else names
        return tuple(name for name in names if self.sizes[name] > 1)

    def devices(self, axes) -> int:
        """Devices along all of these axes."""
        return math.prod(self.sizes[name] for name in axes)


class _Words(NamedTuple):
    """The sharding of words.

    Attributes:
        axes: mesh axes that shard them, if any.
        by_width: True if these axes shard the largest table by width on arrival.
        gathered: the dimension of tokens that they shard as well.
    """

    axes: tuple[str, ...] = ()
    by_width: bool = False
    gathered: int | None = None


def _token_axes(call, arrays):
    """Axes that shard each dimension of the tokens, those of vmap first: the axes of the first
    array that is sharded there, if they divide it evenly and shard no earlier dimension.
    """
    token_axes = []
    for dim in range(len(call.levels) + call.dims):
        names = next(filter(None, (arrays.axes(leaf, dim) for leaf in range(call.count))), ())
        uneven = arrays.shapes[0][dim] % arrays.devices(names)
        token_axes.append(() if uneven or {*itertools.chain(*token_axes)} & {*names} else names)
    return token_axes


def _words(call, arrays, token_axes, already_aligned):
    """The sharding of words, by that of the largest table.

    Words are not sharded if a table cannot be divided evenly; if its axes shard several dimensions
    of tokens; or, unless `already_aligned`, if tokens or the table would have to move and tokens
    are more numbers.
    """
    shapes, levels = arrays.shapes, len(call.levels)
    tables = [
        (leaf, sum(level[leaf] for level in call.levels))  # the dimension of its rows
        for leaf, is_table in enumerate(call.by_words, call.count)
        if is_table
    ]
    if not tables:
        return _Words()
    leaf, rows = max(tables, key=lambda table: math.prod(shapes[table[0]]))
    by_dim = [arrays.axes(leaf, dim) for dim in range(rows, len(shapes[leaf]))]
    axes, by_width = next(filter(None, by_dim), ()), not by_dim[0]
    count = arrays.devices(axes)
    if not axes or any(shapes[leaf][dim] % count or not shapes[leaf][dim] for leaf, dim in tables):
        return _Words()
    used = {*itertools.chain(*token_axes)}
    shared = [dim for dim, names in enumerate(token_axes[levels:]) if {*axes} <= {*names}]
    if used & {*axes} and not shared:
        return _Words()
    if not shared and not by_width:
        return _Words(axes)
    numbers = sum(math.prod(shapes[leaf]) for leaf, _ in tables)
    width = max(math.prod(shapes[leaf][dim + 1 :]) for leaf, dim in tables)
    tokens = math.prod(shapes[0][:-1]) // arrays.devices(used - {*axes})
    if not already_aligned and tokens * width >= numbers:
        return _Words()
    return _Words(axes, by_width, shared[0] if shared else None)


def _layout(call, arrays: _Arrays, already_aligned=False, may_transpose=False) -> _Layout:
    """The shardings of a call.

    Args:
        already_aligned: True if `aligned` has resharded the tables.
        may_transpose: True if the device may turn a table sharded by width into rows.
    """
    levels, token_axes = len(call.levels), _token_axes(call, arrays)
    words = _words(call, arrays, token_axes, already_aligned)
    may_transpose = may_transpose and words.by_width
    arguments, dims, by_width = [P(*token_axes)] * call.count, [], []
    for leaf, is_table in enumerate(call.by_words, call.count):
        mapped = [
            names
            for names, level in zip(token_axes[:levels], call.levels, strict=True)
            if level[leaf]
        ]
        rows, ndim = len(mapped), len(arrays.shapes[leaf])
        has_width = ndim == rows + 2 and arrays.axes(leaf, rows + 1) == words.axes
        by_width.append(may_transpose and is_table and has_width)
        by_rows = (words.axes,) if is_table and words.axes else ()
        dims.append((None, words.axes) if by_width[-1] else by_rows)
        arguments.append(P(*mapped, *dims[-1]))
    flags = () if call.gradients is None else call.gradients.shared
    return _Layout(
        tokens=P(*token_axes),
        arguments=tuple(arguments),
        gradients=[P(*token_axes[:levels], *dim) for dim in itertools.compress(dims, flags)],
        token_axes=tuple(itertools.chain(*token_axes[levels:])),
        word_axes=words.axes,
        gathered=words.gathered,
        by_width=tuple(by_width),
    )


def _layout_of_types(call, leaves, already_aligned=False):
    specs = [jax.typeof(leaf).sharding.spec for leaf in leaves]
    shapes = [leaf.shape for leaf in leaves]
    return _layout(call, _Arrays(dict(call.mesh.shape), specs, shapes), already_aligned)


def _local(call, layout, *leaves):
    """The program of one device, including its sums over devices."""
    words, by_width = layout.word_axes, layout.by_width
    axis_name = words[0] if len(words) == 1 else words or None
    function = functools.partial(call.function, call.static, axis_name)
    flags = () if call.gradients is None else call.gradients.shared

    def on_tokens(*leaves):
        tokens, shared = leaves[: call.count], leaves[call.count :]
        shared = [
            lax.all_to_all(leaf, axis_name, 0, 1, tiled=True) if transposes else leaf
            for leaf, transposes in zip(shared, by_width, strict=True)
        ]
        arrays = call.tree.unflatten([*tokens, *shared])
        if layout.gathered is None:
            results, d_tokens, d_shared = function(*arrays)
        else:
            outputs = for_all(function, axis_name, *arrays, dim=layout.gathered)
            results, d_tokens, d_shared = outputs
        with_gradient = itertools.compress(by_width, flags)
        return (
            results,
            d_tokens,
            [
                lax.all_to_all(leaf, axis_name, 1, 0, tiled=True) if transposes else leaf
                for leaf, transposes in zip(jax.tree.leaves(d_shared), with_gradient, strict=True)
            ],
        )

    for level in reversed(call.levels):
        on_tokens = jax.vmap(on_tokens, tuple(0 if is_mapped else None for is_mapped in level))
    results, d_tokens, d_shared = on_tokens(*leaves)
    if call.gradients is None:
        return results, d_tokens, d_shared
    token_axes = tuple(axis for axis in layout.token_axes if axis not in words)
    by_words = itertools.compress(call.by_words, flags)
    return (
        results,
        d_tokens if layout.gathered is not None else lax.psum(d_tokens, words),
        [
            lax.psum(gradient, token_axes if rows else token_axes + words)
            for gradient, rows in zip(d_shared, by_words, strict=True)
        ],
    )


def _unpartitioned(call, *leaves):
    """The program of the whole mesh; `jax.jit` holds its constants, which JAX would refuse."""
    layout = _Layout(P(), (), (), (), (), None, (False,) * len(call.by_words))
    return jax.jit(_local, static_argnums=(0, 1))(call, layout, *leaves)


_auto = custom_partitioning(_unpartitioned, static_argnums=(0,))


def _partition(call, mesh, arguments, results):
    specs = [_sharding_axes(mesh, array.sharding, len(array.shape)) for array in arguments]
    shapes = [array.shape for array in arguments]
    layout = _layout(call, _Arrays(dict(mesh.shape), specs, shapes), may_transpose=True)

    # The compiler calls this later, when context managers around the loss may have exited.
    def local(*leaves):
        precision, x64 = call.numerics
        with (
            jax.default_matmul_precision(precision),
            jax.enable_x64(x64),
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
        ):
            return _local(call, layout, *leaves)

    def on(spec):
        return NamedSharding(mesh, spec)

    by_token = jax.tree.map(lambda _: on(layout.tokens), results[:2])
    shardings = *by_token, [on(spec) for spec in layout.gradients]
    return mesh, local, shardings, tuple(map(on, layout.arguments))


def _sharding_axes(mesh, sharding, dims):
    """The axes of the mesh that shard each dimension, those with the largest parts first. One axis
    may shard several dimensions, which no `PartitionSpec` can express: 16 rows on 8 devices, which
    the program reshapes to 4 microbatches of 4 rows.
    """
    if not dims:
        return []
    parts = sharding.devices_indices_map((mesh.size,) * dims)  # every sharding divides it evenly
    begins = [[part.start or 0 for part in parts[device]] for device in mesh.devices.flat]
    begins = np.reshape(begins, (*mesh.devices.shape, dims))
    reach = {  # distance between the parts along an axis, by dimension
        name: np.ptp(begins, axis=i).reshape(-1, dims).max(axis=0)
        for i, name in enumerate(mesh.axis_names)
    }
    return [
        tuple(sorted((name for name in reach if reach[name][i]), key=lambda name: -reach[name][i]))
        for i in range(dims)
    ]


def _rule(call, mesh, arguments, results):
    """The sharding rule of custom_partitioning: axes of vmaps and tokens are sharded alike in all
    arrays, and an array of `shared` like its gradient.
    """
    del mesh
    levels = [f"m{i}" for i in range(len(call.levels))]
    token_dims = levels + [f"t{i}" for i in range(call.dims)]

    def names(kind, number, array, first):
        further = [f"{kind}{number}_{i}" for i in range(len(array.shape) - len(first))]
        return " ".join([*first, *further])

    flags = () if call.gradients is None else call.gradients.shared
    with_gradient = [i for i, flag in enumerate(flags, call.count) if flag]
    by_token = len(results) - len(with_gradient)
    left = [names("i", i, array, token_dims) for i, array in enumerate(arguments[: call.count])]
    for i, array in enumerate(arguments[call.count :], call.count):
        mapped = [name for name, level in zip(levels, call.levels, strict=True) if level[i]]
        left.append(names("i", i, array, mapped))
    right = [names("r", i, array, token_dims) for i, array in enumerate(results[:by_token])]
    for i, array in zip(with_gradient, results[by_token:], strict=True):
        right.append(names("i", i, array, levels))
    return f"{', '.join(left)} -> {', '.join(right)}"


_auto.def_partition(partition=_partition, sharding_rule=_rule, decode_shardings=False)
