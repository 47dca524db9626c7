"""Runs a function of tokens on the devices where the tokens lie, whatever mesh a program has.

Sorting tokens and looping over slices of them defeats XLA's partitioner: under plain `jax.jit`
every device would compute all tokens. So the axes of the mesh decide how the function runs:

- Manual, that is inside `jax.shard_map`, or one device: it is called as it is.
- Explicit, the default of `jax.make_mesh`: types say how arrays are cut, and `jax.shard_map` calls
  the function with the tokens of one device.
- Auto: the compiler alone knows how arrays are cut. It asks for the program of one device through
  `jax.experimental.custom_partitioning`.

Tokens keep the axes that cut them, and every device reads whole tables, which are gathered once, or
the devices of one axis share the softmax, each with some of the words, see
`adaptive_jax.losses.sharded`: where that axis cuts the table by words and does not cut tokens; and,
if hidden states are fewer numbers than tables, also where it cuts tokens, which are gathered then,
or the table by width, which crosses once.
"""

import contextlib
import functools
import itertools
import math
import zlib
from collections.abc import Callable
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


def run(function: Callable, static, tokens, shared, by_words: tuple[bool, ...], gradients: bool):
    """`function(static, None, tokens, shared)`, each device computing its own tokens.

    Args:
        function: returns `(results, d_tokens, d_shared)`: two trees of arrays with the leading
            sizes of the tokens, and the gradients of `shared`, summed over its tokens; both
            gradients are None without `gradients`. It is defined outside any other function. In
            place of None it may get the axis of the mesh that cuts words: then results must be the
            same on all devices of that axis, and gradients a share that is summed over it, but
            those of rows.
        static: whatever else the function needs, hashable.
        tokens: a tree of arrays. All have the axes of tokens first; the first array has one more.
        shared: a tree of arrays that every token reads.
        by_words: which arrays of `shared` have a row for each word.

    Raises:
        InputError: a mesh with axes of several types.
    """
    mesh = _mesh((tokens, shared))
    if mesh is None:
        return compiled_once(function, static, None)(tokens, shared)
    call, leaves = _call(function, static, tokens, shared, by_words, gradients, mesh)
    results, d_tokens, d_shared = _mapped(call)(*leaves)
    of = jax.tree.structure(shared)
    return results, d_tokens, of.unflatten(d_shared) if gradients else None


def cuts(tree) -> bool:
    """Whether `run` may cut a call with these arrays; else it calls the function as it is.

    Raises:
        InputError: as `run`.
    """
    return _mesh(tree) is not None


def aligned(tokens, shared, by_words: tuple[bool, ...]):
    """`(tokens, shared)` cut on Explicit axes as `run` reads them: all tokens as the first array,
    `shared` whole or by words. On other axes it changes nothing.

    For use around custom derivatives of `run`, whose gradients must be cut as their arrays are.

    Raises:
        InputError: as `run`.
    """
    mesh = _mesh((tokens, shared))
    if mesh is None or AxisType.Explicit not in mesh.axis_types:
        return tokens, shared
    call, leaves = _call(None, None, tokens, shared, by_words, False, mesh)
    return call.tree.unflatten(_aligned(call, *leaves))


class _Call(NamedTuple):
    """All of a call but its arrays, hashable."""

    function: Callable | None
    static: Any
    tree: Any  # structure of (tokens, shared)
    count: int  # arrays of tokens
    dims: int  # axes of tokens
    by_words: tuple[bool, ...]
    gradients: bool
    mesh: AbstractMesh
    numerics: tuple[Any, bool]  # precision of products, and whether 64 bits are on
    levels: tuple[tuple[bool, ...], ...] = ()  # which arrays each vmap maps, the outermost first


def _call(function, static, tokens, shared, by_words, gradients, mesh):
    leaves, tree = jax.tree.flatten((tokens, shared))
    count, dims = len(jax.tree.leaves(tokens)), leaves[0].ndim - 1
    numerics = jax.config.jax_default_matmul_precision, jax.config.jax_enable_x64
    call = _Call(function, static, tree, count, dims, by_words, gradients, mesh, numerics)
    return call, leaves


def _mesh(tree):
    """The mesh of the arrays, empty if it is not known, or None if nothing is to be cut."""
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
        return None  # arrays at hand may lie anywhere
    if mesh.empty:
        return None if jax.device_count() == 1 else mesh
    return None if {*kinds.values()} <= {AxisType.Manual} else mesh


def _mapped(call):
    """`_placed` of this call with a rule for vmap, which the primitive beneath lacks: the mapped
    axis goes where the tokens are computed, so that it may be cut, too.
    """
    placed = custom_vmap(lambda *leaves: _program(call)(*leaves))

    @placed.def_vmap
    def rule(size, mapped, *leaves):
        tokens = [
            leaf if here else jnp.broadcast_to(leaf, (size, *leaf.shape))
            for leaf, here in zip(leaves[: call.count], mapped[: call.count], strict=True)
        ]
        level = (*[True] * call.count, *mapped[call.count :])
        outer = _mapped(call._replace(levels=(level, *call.levels)))
        results = outer(*tokens, *leaves[call.count :])
        return results, jax.tree.map(lambda _: True, results)

    return placed


@functools.lru_cache
def _program(call):
    """`_placed` under `jax.jit`, for arrays at hand, whose program this is.

    JAX's cache of compiled programs on disk knows a call of custom_partitioning by its address
    alone, which may later be that of another call: the name tells them apart.
    """

    def placed(*leaves):
        return _placed(call, *leaves)

    placed.__name__ = f"placed_{zlib.crc32(repr(call).encode()):08x}"
    return jax.jit(placed)


def _placed(call, *leaves):
    if AxisType.Explicit not in call.mesh.axis_types:
        return _auto(call, *leaves)
    cut = _cut_of_types(call, leaves, decided=True)
    results = cut.tokens, cut.tokens, cut.gradients if call.gradients else []
    local = functools.partial(_local, call, cut)
    # Sums over devices are in `_local`, and derivatives around it: nothing is to be tracked.
    mapped = jax.shard_map(
        local, mesh=call.mesh, in_specs=cut.arguments, out_specs=results, check_vma=False
    )
    return mapped(*_resharded(call, cut, leaves))


@functools.partial(jax.jit, static_argnums=0)
def _aligned(call, *leaves):
    return _resharded(call, _cut_of_types(call, leaves), leaves)


def _resharded(call, cut, leaves):
    shardings = tuple(NamedSharding(call.mesh, spec) for spec in cut.arguments)
    return jax.sharding.reshard(leaves, shardings)


class _Cut(NamedTuple):
    """How the arrays of a call lie on the mesh while it runs."""

    tokens: P  # of every array of tokens
    arguments: tuple[P, ...]
    gradients: list[P]  # of `shared`
    over: tuple[str, ...]  # axes that cut tokens
    words: str | None  # the axis that cuts words
    gathered: int | None  # the axis of tokens that `words` cuts, too, and which is gathered over it


def _cut(call, sizes, specs, shapes, decided=False):
    """Where a call runs, from the sizes of the mesh's axes and the specs and shapes of its
    arrays. decided: whether `aligned` has put the tables where they are to be read.
    """

    def axes(leaf, i):
        found = specs[leaf][i] if i < len(specs[leaf]) else None
        return () if found is None else (found,) if isinstance(found, str) else tuple(found)

    lead, taken, levels = [], set(), len(call.levels)
    for i in range(levels + call.dims):
        mine = next(filter(None, (axes(leaf, i) for leaf in range(call.count))), ())
        uneven = shapes[0][i] % math.prod(sizes[axis] for axis in mine)
        lead.append(() if uneven or taken.intersection(mine) else mine)
        taken.update(lead[-1])
    shared = range(call.count, len(shapes))
    mapped = [
        [mine for mine, level in zip(lead[:levels], call.levels, strict=True) if level[leaf]]
        for leaf in shared
    ]
    rows = [
        (leaf, len(mine))
        for leaf, mine, by_words in zip(shared, mapped, call.by_words, strict=True)
        if by_words
    ]
    words = gathered = None
    if rows:
        leaf, i = max(rows, key=lambda row: math.prod(shapes[row[0]]))
        of_rows, *of_width = (axes(leaf, dim) for dim in range(i, len(shapes[leaf])))
        cutting = next(filter(None, (of_rows, *of_width)), ())
        if len(cutting) == 1 and all(
            shapes[leaf][i] and shapes[leaf][i] % sizes[cutting[0]] == 0 for leaf, i in rows
        ):
            (words,) = cutting
    if words is not None and (words in taken or not of_rows):  # tokens or the table must move
        others = math.prod(sizes[axis] for axis in taken - {words})
        tables = sum(math.prod(shapes[leaf]) for leaf, _ in rows)
        width = max(math.prod(shapes[leaf][i + 1 :]) for leaf, i in rows)
        fewer = decided or math.prod(shapes[0][:-1]) // others * width < tables
        cut_by_words = [i for i, mine in enumerate(lead[levels:]) if words in mine]
        if not fewer or (words in taken and not cut_by_words):
            words = None
        elif cut_by_words:
            (gathered,) = cut_by_words
    own = [(words,) * by_words for by_words in call.by_words]
    return _Cut(
        tokens=P(*lead),
        arguments=(
            *[P(*lead)] * call.count,
            *(P(*mine, *row) for mine, row in zip(mapped, own, strict=True)),
        ),
        gradients=[P(*lead[:levels], *row) for row in own],
        over=tuple(itertools.chain(*lead[levels:])),
        words=words,
        gathered=gathered,
    )


def _cut_of_types(call, leaves, decided=False):
    specs = [jax.typeof(leaf).sharding.spec for leaf in leaves]
    shapes = [leaf.shape for leaf in leaves]
    return _cut(call, dict(call.mesh.shape), specs, shapes, decided)


def _local(call, cut, *leaves):
    """What one device computes, sums over devices included. `cut`: None on a whole mesh."""

    words, gathered = (None, None) if cut is None else (cut.words, cut.gathered)
    function = functools.partial(call.function, call.static, words)

    def one(*leaves):
        arrays = call.tree.unflatten(leaves)
        if gathered is None:
            found = function(*arrays)
        else:
            found = for_all(function, words, *arrays, dim=gathered)
        return *found[:2], jax.tree.leaves(found[2])

    for level in reversed(call.levels):
        one = jax.vmap(one, tuple(0 if here else None for here in level))
    results, d_tokens, d_shared = one(*leaves)
    if cut is None or not call.gradients:
        return results, d_tokens, d_shared
    own = () if words is None else (words,)
    others = tuple(axis for axis in cut.over if axis != words)
    return (
        results,
        d_tokens if gathered is not None else lax.psum(d_tokens, own),
        [
            lax.psum(gradient, others if by_words else others + own)
            for gradient, by_words in zip(d_shared, call.by_words, strict=True)
        ],
    )


def _whole(call, *leaves):
    """The program of the whole mesh. `jax.jit` holds its constants, which would be refused."""
    return jax.jit(_local, static_argnums=(0, 1))(call, None, *leaves)


_auto = custom_partitioning(_whole, static_argnums=(0,))


def _partition(call, mesh, arguments, results):
    specs = [_axes_cutting(mesh, each.sharding, len(each.shape)) for each in arguments]
    cut = _cut(call, dict(mesh.shape), specs, [each.shape for each in arguments])

    # The compiler calls this later, when settings that held around the loss may have ended.
    def local(*leaves):
        precision, x64 = call.numerics
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.default_matmul_precision(precision))
            stack.enter_context(jax.enable_x64(x64))
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
            return _local(call, cut, *leaves)

    def on(spec):
        return NamedSharding(mesh, spec)

    by_token = jax.tree.map(lambda _: on(cut.tokens), results[:2])
    gradients = [on(spec) for spec in cut.gradients] if call.gradients else []
    return mesh, local, (*by_token, gradients), tuple(map(on, cut.arguments))


def _axes_cutting(mesh, sharding, dims):
    """The axes of the mesh that cut each dimension, those of the largest parts first. One axis may
    cut several, of which no `PartitionSpec` can tell: 8 devices with 16 rows, which the program
    reshapes to 4 microbatches of 4 rows.
    """
    parts = sharding.devices_indices_map((mesh.size,) * dims)  # every sharding divides it evenly
    begins = [[part.start or 0 for part in parts[device]] for device in mesh.devices.flat]
    begins = np.reshape(begins, (*mesh.devices.shape, dims))
    reach = {  # how far the parts along an axis lie apart, by dimension
        name: np.ptp(begins, axis=i).reshape(-1, dims).max(axis=0)
        for i, name in enumerate(mesh.axis_names)
    }
    return [
        tuple(sorted((name for name in reach if reach[name][i]), key=lambda name: -reach[name][i]))
        for i in range(dims)
    ]


def _rule(call, mesh, arguments, results):
    """Which axes of the arrays are cut alike, in the notation of custom_partitioning: those of
    vmaps and tokens everywhere, those of an array of `shared` and of its gradient.
    """
    del mesh
    levels = [f"m{i}" for i in range(len(call.levels))]
    lead = levels + [f"t{i}" for i in range(call.dims)]

    def names(kind, number, array, first):
        own = [f"{kind}{number}_{i}" for i in range(len(array.shape) - len(first))]
        return " ".join([*first, *own])

    ends = len(results) - (len(call.by_words) if call.gradients else 0)
    given = [names("i", i, array, lead) for i, array in enumerate(arguments[: call.count])]
    for i, array in enumerate(arguments[call.count :], call.count):
        mapped = [name for name, level in zip(levels, call.levels, strict=True) if level[i]]
        given.append(names("i", i, array, mapped))
    found = [names("r", i, array, lead) for i, array in enumerate(results[:ends])]
    for i, array in enumerate(results[ends:], call.count):
        found.append(names("i", i, array, levels))
    return f"{', '.join(given)} -> {', '.join(found)}"


_auto.def_partition(partition=_partition, sharding_rule=_rule, decode_shardings=False)
