"""Sharding of rows and parameters: rows are split over all devices, parameters over the axes `FSDP`
only.

Devices form a grid [data, fsdp_outer, fsdp_inner]. With fsdp 1, every device holds all parameters
(data parallelism). With fsdp n, each of n devices holds 1/n of every matrix (fully sharded data
parallelism; ZeRO, Rajbhandari et al. 2020), see `parameter_specs`: the matrices of a body's layer
are gathered just before they are used, in the forward and in the backward pass, and their gradients
are summed into shards. The body says which are gathered together, see `adaptive_jax.bodies.blocks`;
all others, such as tables, are gathered before the model runs. Layers run under `shard_map` on the
rows of one device: no sort, hidden state or logit crosses devices.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from adaptive_jax.errors import InputError
from adaptive_jax.numerics.meshes import axes_of

DATA = "data"
OUTER, INNER = FSDP = ("fsdp_outer", "fsdp_inner")
BATCH_AXES = (DATA, *FSDP)  # rows are split over all


def device_mesh(
    fsdp: int = 1, devices: Sequence[jax.Device] | None = None, count: int | None = None
) -> Mesh:
    """A grid of devices, see `grid`. Devices of one host are neighbours, so that they hold
    consecutive rows, and so are hosts of one TPU slice.

    devices: all by default. count: number of devices to use, the first ones of each host; all by
        default.

    Raises:
        InputError: fsdp does not divide the number of devices.
    """
    # Not jax.make_mesh, which may order TPUs so that a host's rows are not consecutive.
    devices = sorted(
        devices or jax.devices(),
        key=lambda d: (getattr(d, "slice_index", None) or 0, d.process_index, d.id),
    )
    if count is not None:
        hosts = [list(group) for _, group in itertools.groupby(devices, lambda d: d.process_index)]
        devices = [device for host in hosts for device in host[: count // len(hosts)]]
    if fsdp < 1 or len(devices) % fsdp:
        raise InputError(
            f"fsdp={fsdp} does not divide the {len(devices)} device(s): choose a number that does"
        )
    sizes = grid(len(devices), fsdp)
    return Mesh(np.reshape(devices, sizes), BATCH_AXES, axis_types=(AxisType.Auto,) * len(sizes))


def abstract_mesh(devices: int, fsdp: int) -> AbstractMesh:
    """`device_mesh` of this many devices, which need not exist."""
    return AbstractMesh(grid(devices, fsdp), BATCH_AXES)


def grid(devices: int, fsdp: int) -> tuple[int, int, int]:
    """Sizes of the axes `BATCH_AXES`. The last two, as equal as possible and the smaller one first,
    have the product fsdp: (1, 2, 4) for 8 devices that share one copy.
    """
    outer = max(n for n in range(1, math.isqrt(fsdp) + 1) if fsdp % n == 0)
    return devices // fsdp, outer, fsdp // outer


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds completely."""
    return NamedSharding(mesh, PartitionSpec())


def batch_spec(axis: int) -> PartitionSpec:
    """The spec of a batch with its rows along `axis`."""
    return PartitionSpec(*[None] * axis, BATCH_AXES)


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Puts an array, of which every host has a complete copy, on the devices."""
    # Not device_put, which sends every array to all hosts to check that they are equal.
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def put_batch(mesh: Mesh, batch: Any, axis: int = 0) -> Any:
    """Puts a tree of host arrays on the devices and splits the rows, along `axis`, among them."""
    sharding = NamedSharding(mesh, batch_spec(axis))
    return jax.tree.map(lambda a: put(a, sharding), batch)


def put_host_share(mesh: Mesh, batch: Any) -> Any:
    """`put_batch` for a tree of arrays `[microbatches, rows, ...]` that holds only this host's
    rows: host i of n holds the i-th of n equal shares.
    """
    sharding, hosts = NamedSharding(mesh, batch_spec(1)), jax.process_count()

    def put(a):
        microbatches, rows, *rest = a.shape
        shape = (microbatches, rows * hosts, *rest)
        return jax.make_array_from_process_local_data(sharding, np.ascontiguousarray(a), shape)

    return jax.tree.map(put, batch)


def on_host(tree: Any, mesh: Mesh) -> Any:
    """Copies a tree of arrays on `mesh` to complete, writable NumPy arrays on every host."""
    gather = jax.jit(lambda a: a, out_shardings=replicated(mesh))
    return jax.tree.map(
        lambda a: np.array(a if a.is_fully_addressable or a.is_fully_replicated else gather(a)),
        tree,
    )


def sum_over_hosts(count: int) -> int:
    """The exact sum of one integer from each host; integers may exceed 32 bits."""
    words = np.array(divmod(count, 2**30), np.int32)  # two, because jax converts int64 to int32
    return sum(
        int(high) * 2**30 + int(low) for high, low in multihost_utils.process_allgather(words)
    )


def texts_of_hosts(text: str) -> list[str]:
    """The text of each host, in the order of hosts."""
    if jax.process_count() == 1:
        return [text]
    letters = np.frombuffer(text.encode(), np.uint8)
    lengths = multihost_utils.process_allgather(np.int32(len(letters)))
    padded = np.pad(letters, (0, int(lengths.max()) - len(letters)))
    texts = multihost_utils.process_allgather(padded)
    return [row[:n].tobytes().decode() for row, n in zip(texts, lengths, strict=True)]


def parameter_specs(tree: Any, mesh: Mesh | AbstractMesh, model: Any) -> Any:
    """The sharding of the model's parameters, or of a tree with their structure (gradients,
    momentum): a tree of PartitionSpec.

    A matrix is split over `FSDP` along its first axis that fsdp divides, not counting an axis that
    stacks blocks. So a table is split by rows, or by width if fsdp does not divide its rows; both
    give the same bytes. If fsdp divides no axis, as 8 divides none of [5, 850, 1700], the matrix is
    split along two axes, into 2 x 4 parts; or along one, into 4 or 2 parts. The `row_moments` of an
    optimizer, one number for each row, are split as a table by rows.

    Other vectors, and matrices with no axis that divides, are replicated. Padding could split them,
    but the state would not have the shapes of checkpoints. At 8 devices it would save two of the
    rows in configs/ 80 MB a device with momentum (billion_word:gcnn_13 and
    wikitext103:awd_sm_small, whose tables have an odd number of words), and the others less than 20
    MB.
    """
    if fsdp_of(mesh) == 1:
        return jax.tree.map(lambda _: PartitionSpec(), tree)

    def spec(path, a):
        stacked = is_stacked(path, model)
        by_row = any(getattr(key, "name", None) == "row_moments" for key in path)
        axes = _split_axes(a.shape[stacked:] + (1,) * by_row, mesh)
        return PartitionSpec(*[None] * stacked, *axes) if axes else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, tree)


def with_shardings(shapes: Any, specs: Any, mesh: Mesh) -> Any:
    """Adds the shardings of a tree of PartitionSpec to shapes and dtypes."""
    return jax.tree.map(
        lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)),
        shapes,
        specs,
    )


def is_stacked(path: tuple, model: Any) -> bool:
    """True if the first axis of the parameter at `path` stacks blocks of the body; False in a list
    of blocks, which `on_each_layer` makes for optimizers.
    """
    keys, name = _keys(path), _name_in_body(path)
    listed = name and keys[keys.index("body") + 2 :][:1] == (None,)
    return not listed and any(group.stacked and name in group.names for group in _groups(model))


def _split_axes(shape, mesh):
    """For each axis of an array, the axes of `mesh` that split it; `()` if none is split."""
    if len(shape) < 2:
        return ()
    ways = [{axis: FSDP} for axis in range(len(shape))]
    ways += [{i: OUTER, j: INNER} for i, j in itertools.permutations(range(len(shape)), 2)]
    ways += [{axis: name} for name in (INNER, OUTER) for axis in range(len(shape))]
    for way in ways:
        sizes = {axis: _size(mesh, _names_of(entry)) for axis, entry in way.items()}
        if all(n > 1 and shape[axis] % n == 0 for axis, n in sizes.items()):
            return tuple(way.get(axis) for axis in range(max(way) + 1))
    return ()


def shards(spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> int:
    """Number of shards of an array."""
    return _size(mesh, _names(spec))


def fsdp_of(mesh: Mesh | AbstractMesh) -> int:
    """Number of devices that share one copy of the parameters."""
    return _size(mesh, FSDP)


def _size(mesh, names):
    return math.prod(mesh.shape[name] for name in names)


def _names_of(entry):
    """The names in an entry of a PartitionSpec: a name, several or None."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _names(spec):
    return [name for entry in spec for name in _names_of(entry)]


def _groups(model):
    return getattr(model.body, "parameter_groups", ())


def _keys(path):
    """The keys along the path to a leaf of nested dicts; None for other containers."""
    return tuple(getattr(key, "key", None) for key in path)


def _name_in_body(path):
    """The body's name for a parameter, or for its layer; None for parameters outside the body."""
    keys = _keys(path)
    return keys[keys.index("body") + 1] if "body" in keys[:-1] else None


def gathered_bytes(params: Any, mesh: Mesh | AbstractMesh, model: Any) -> int:
    """The most bytes of gathered matrices that a device of `mesh` holds at once: all that are
    gathered before the model runs, and those of the largest layer.

    params: the model's unsharded parameters or their shapes.
    """
    if fsdp_of(mesh) == 1:
        return 0
    body, word_tables = params.get("body", {}), model.word_tables() if model.shard_words else {}
    dtypes = _table_dtypes(model)
    specs = jax.tree_util.tree_map_with_path(
        lambda path, spec: (
            PartitionSpec() if _needs_no_gather(spec, word_tables.get(_keys(path))) else spec
        ),
        parameter_specs(params, mesh, model),
    )

    def size(tree, specs, dtype=jnp.float32):
        sizes = jax.tree_util.tree_map_with_path(
            lambda path, a, spec: (
                a.size * jnp.dtype(dtypes.get(_keys(path), dtype)).itemsize * bool(_names(spec))
            ),
            tree,
            specs,
        )
        return sum(jax.tree.leaves(sizes))

    layers, total = [], size(params, specs)
    for group in _groups(model):
        group_tensors = [(body[name], specs["body"][name]) for name in group.names]
        total -= sum(size(*pair) for pair in group_tensors)
        stack = len(jax.tree.leaves(group_tensors[0][0])[0]) if group.stacked else 1
        layers.append(sum(size(*pair, group.dtype) for pair in group_tensors) // stack)
    return total + max(layers, default=0)


def gathering(
    model: Any, params: Any, mesh: Mesh, by_layer: bool = False, by_words: bool = False
) -> tuple[Any, Any]:
    """The model and a function that gathers its parameters, for use on one device of `mesh` under
    `shard_map`.

    Args:
        params: the model's unsharded parameters or their shapes.
        by_layer: sum a layer's gradients over all devices inside the backward pass, where the next
            layer can be computed meanwhile.
        by_words: do not gather tables if the model has `shard_words`. Such a model computes only
            losses and nll.

    Returns:
        `(model, gather)`: `model.apply({"params": gather(shards)}, ...)` computes from a device's
        shards what the original model computes from all parameters. The body gathers its
        `parameter_groups` itself, one at a time, in their dtype.
    """
    groups = _groups(model)
    if mesh.size == 1 or not ((by_layer and groups) or fsdp_of(mesh) > 1):
        return model, lambda shards: shards
    specs, word_tables = parameter_specs(params, mesh, model), {}
    if by_words and model.shard_words:
        model, word_tables = model.over_words(FSDP), model.word_tables()
    group_of = {name: group for group in groups for name in group.names}
    dtypes = _table_dtypes(model)

    def gather_layer(name, shards):
        group, layer_specs = group_of[name], specs["body"][name]
        if group.stacked:  # one layer lacks the stacking axis
            layer_specs = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), layer_specs)
        if by_layer:
            shards = jax.tree.map(
                lambda a, spec: _sum_gradient(a, _axes_to_sum(mesh, spec, a)), shards, layer_specs
            )
        return jax.tree.map(functools.partial(_gather, mesh, group.dtype), shards, layer_specs)

    def gather(shards):
        def gather_parameter(path, shard, spec):
            if words := word_tables.get(_keys(path)):
                return _rows_of_device(mesh, shard, spec, words)
            body_gathers = _name_in_body(path) in group_of
            dtype = dtypes.get(_keys(path), jnp.float32)
            return shard if body_gathers else _gather(mesh, dtype, shard, spec)

        return jax.tree_util.tree_map_with_path(gather_parameter, shards, specs)

    return (model.clone(body=model.body.clone(gather=gather_layer)) if groups else model), gather


def _table_dtypes(model):
    """Dtypes in which word tables are gathered, by path: the compute dtype, because lookups and
    losses sum a row's gradients in float32 whatever the table's dtype.

    All tables are gathered in float32 if the output first computes with one in float32: weight
    normalisation divides rows by their norms, and a computed table is a function of the input's.
    """
    table = model.output.table
    if getattr(table, "weight_norm", False) or hasattr(table, "compose"):
        return {}
    return dict.fromkeys(model.word_tables(), getattr(model.input, "dtype", jnp.float32))


def _needs_no_gather(spec, words):
    """True if devices get their rows of a word table without gathering it."""
    return words is not None and len(words) == 1 and tuple(spec) in ((FSDP,), (None, FSDP))


def _rows_of_device(mesh, shard, spec, words):
    """A device's rows of a parameter with one row for each word of some bands, of sizes `words`. It
    is an equal share of each band, padded with ones, because weight normalisation divides every row
    by its norm.
    """
    devices = fsdp_of(mesh)
    fill = {"constant_values": 1}
    if _needs_no_gather(spec, words):
        if spec[0] == FSDP:
            return shard
        shard = jnp.pad(shard, [(0, -words[0] % devices), (0, 0)], **fill)
        return jax.lax.all_to_all(shard, FSDP, split_axis=0, concat_axis=1, tiled=True)
    table, bands = _gather(mesh, jnp.float32, shard, spec), []
    for band in jax.lax.split(table, words):
        rows = -(-len(band) // devices)
        missing = [(0, rows * devices - len(band))] + [(0, 0)] * (band.ndim - 1)
        band = jnp.pad(band, missing, **fill)
        first = jax.lax.axis_index(FSDP) * rows
        bands.append(jax.lax.dynamic_slice_in_dim(band, first, rows))
    return jnp.concatenate(bands)


def _gather(mesh, dtype, shard, spec):
    """Gathers a matrix in `dtype`; its gradient is summed over devices into float32 shards."""
    axes = tuple(
        (axis, tuple(name for name in _names_of(entry) if mesh.shape[name] > 1))
        for axis, entry in enumerate(spec)
        if entry is not None
    )
    return _all_gather(shard, axes, jnp.dtype(dtype)) if axes else shard


def _cast_and_gather(shard, axes, dtype):
    matrix = shard.astype(dtype)
    for axis, names in axes:
        matrix = jax.lax.all_gather(matrix, names, axis=axis, tiled=True)
    return matrix


def _sum_into_shards(axes, dtype, _, gradient):
    gradient = gradient.astype(jnp.float32)
    for axis, names in reversed(axes):
        gradient = jax.lax.psum_scatter(gradient, names, scatter_dimension=axis, tiled=True)
    return (gradient,)


_all_gather = jax.custom_vjp(_cast_and_gather, nondiff_argnums=(1, 2))
# The forward pass is the plain function: rematerialisation must see the gather, and not a
# custom_vjp, to repeat it in the backward pass.
_all_gather.defvjp(lambda *arguments: (_cast_and_gather(*arguments), None), _sum_into_shards)


def sum_over_devices(
    mesh: Mesh, values: Any, specs: Any, model: Any, by_layer: bool = False
) -> Any:
    """Sums what each device computed on its rows over all devices: a tree with the structure of
    `specs`, its sharding.

    `gathering` has already summed gradients of sharded parameters over the axes that split them,
    and with `by_layer` those of the body's `parameter_groups` over all axes.
    """
    summed = {name for group in _groups(model) for name in group.names} if by_layer else set()

    def add(path, a, spec):
        is_summed = _name_in_body(path) in summed
        return a if is_summed else _sum(a, _axes_to_sum(mesh, spec, a))

    return jax.tree_util.tree_map_with_path(add, values, specs)


def _axes_to_sum(mesh, spec, a):
    """The axes over which a gradient with this spec is still to be summed, including axes of one
    device where JAX tracks them.
    """
    return tuple(
        axis
        for axis in BATCH_AXES
        if axis not in _names(spec) and (mesh.shape[axis] > 1 or axis in axes_of(a))
    )


def _sum(a, axes):
    return jax.lax.psum(a, axes) if axes else a


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_gradient(a, axes):
    """Returns the array; its gradient is summed over devices."""
    return a


_sum_gradient.defvjp(lambda a, axes: (a, None), lambda axes, _, g: (_sum(g, axes),))
