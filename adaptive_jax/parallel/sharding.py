"""Where rows and parameters lie: rows are split over all devices, parameters over the axis `FSDP`
only.

Devices form a grid of two axes. With fsdp 1, every device holds all parameters (data parallelism).
With fsdp n, each of n devices holds 1/n of every matrix (fully sharded data parallelism; ZeRO,
Rajbhandari et al. 2020): a block's matrices are gathered just before they are used, in the forward
and in the backward pass, and their gradients are summed into shards. Layers run under `shard_map`
on the rows of one device: no sort, hidden state or logit crosses devices.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from adaptive_jax.errors import InputError
from adaptive_jax.numerics.meshes import axes_of

DATA, FSDP = "data", "fsdp"
BATCH_AXES = (DATA, FSDP)  # rows are split over both
BLOCKS = "blocks"  # the parameters of a body's blocks, stacked along a first axis


def device_mesh(fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Devices, all by default, as a grid [data, fsdp]; those of one host are neighbours, so they
    hold consecutive rows.

    So are the hosts of one slice of TPUs, whose chips share a fast network.

    Raises:
        InputError: fsdp does not divide the number of devices.
    """
    # Not jax.make_mesh, which may order TPUs so that a host's rows are apart.
    devices = sorted(
        devices or jax.devices(),
        key=lambda device: (_slice(device), device.process_index, device.id),
    )
    if fsdp < 1 or len(devices) % fsdp:
        raise InputError(
            f"fsdp={fsdp} does not divide the {len(devices)} device(s): choose a number that does"
        )
    return Mesh(
        np.reshape(devices, (-1, fsdp)), BATCH_AXES, axis_types=(AxisType.Auto, AxisType.Auto)
    )


def _slice(device):
    return getattr(device, "slice_index", None) or 0


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds completely."""
    return NamedSharding(mesh, PartitionSpec())


def batch_spec(axis: int) -> PartitionSpec:
    """The layout of a batch whose rows lie along `axis`."""
    return PartitionSpec(*[None] * axis, BATCH_AXES)


def put_batch(mesh: Mesh, batch: Any, axis: int = 0) -> Any:
    """Puts a tree of host arrays on the devices and splits the rows, along `axis`, among them."""
    sharding = NamedSharding(mesh, batch_spec(axis))
    # Not device_put: with several hosts it sends every array to all of them, to check that they are
    # equal.
    return jax.tree.map(
        lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index]), batch
    )


def put_host_share(mesh: Mesh, batch: Any, axis: int = 0) -> Any:
    """`put_batch` for a tree that holds only this host's rows: host i of n holds the i-th of n
    equal shares.
    """
    sharding, hosts = NamedSharding(mesh, batch_spec(axis)), jax.process_count()

    def put(a):
        shape = (*a.shape[:axis], a.shape[axis] * hosts, *a.shape[axis + 1 :])
        return jax.make_array_from_process_local_data(sharding, np.ascontiguousarray(a), shape)

    return jax.tree.map(put, batch)


def on_host(tree: Any, mesh: Mesh) -> Any:
    """A tree of arrays on the devices of `mesh` as whole NumPy arrays, writable, on every host."""
    # Every host gets the parts of the others.
    gather = jax.jit(lambda a: a, out_shardings=replicated(mesh))
    return jax.tree.map(
        lambda a: np.array(a if a.is_fully_addressable else gather(a).addressable_data(0)), tree
    )


def sum_over_hosts(count: int) -> int:
    """The exact sum of one integer from each host; integers may exceed 32 bits."""
    words = np.array(divmod(count, 2**30), np.int32)  # two, because jax cuts int64 to 32 bits
    return sum(
        int(high) * 2**30 + int(low) for high, low in multihost_utils.process_allgather(words)
    )


def parameter_specs(tree: Any, mesh: Mesh) -> Any:
    """The layout of parameters, or of a tree that has their structure (gradients, momentum): a tree
    of PartitionSpec.

    Vectors are replicated. A matrix is split over `FSDP` along its first axis that fsdp divides,
    not counting the axis that stacks blocks. So a table is split by rows, or by width if its rows
    do not divide: as many bytes either way.
    """
    parts = mesh.shape[FSDP]

    def spec(path, a):
        stacked = _stacked(path)
        if parts > 1 and len(a.shape) - stacked >= 2:
            for axis in range(stacked, len(a.shape)):
                if a.shape[axis] % parts == 0:
                    return PartitionSpec(*[None] * axis, FSDP)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, tree)


def gathering(model: Any, params: Any, mesh: Mesh, by_block: bool = False) -> tuple[Any, Any]:
    """The model and a function of its parameters, for use on one device of `mesh` under
    `shard_map`.

    Args:
        params: the model's parameters or their shapes, not sharded.
        by_block: sum a block's gradients over all devices inside the backward pass, where the next
            block can be computed meanwhile.

    Returns:
        `(model, gather)`: `model.apply({"params": gather(shards)}, ...)` computes with a device's
        shards what the given model computes with all parameters. The body's blocks are gathered one
        at a time, in the body's dtype.
    """
    specs = parameter_specs(params, mesh)
    stacked = specs.get("body", {}).get(BLOCKS, {})  # a body may have no parameters
    if mesh.shape[FSDP] == 1 and not (by_block and stacked):
        return model, lambda shards: shards
    # Without the axis that stacks.
    of_block = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), stacked)

    def gather_block(shards):
        if by_block:
            shards = jax.tree.map(
                lambda a, spec: _sum_gradient(a, _axes_to_sum(mesh, spec, a)), shards, of_block
            )
        # Blocks cast their matrices to this dtype anyway; to gather first and then cast would move
        # twice the bytes of bfloat16.
        gather = functools.partial(_gather, dtype=model.body.dtype)
        return jax.tree.map(gather, shards, of_block)

    def gather(shards):
        # Tables stay float32: a lookup adds the gradients of many tokens into one row.
        others = jax.tree.map(lambda spec: PartitionSpec(), stacked)
        specs_now = specs | ({"body": specs["body"] | {BLOCKS: others}} if stacked else {})
        return jax.tree.map(_gather, shards, specs_now)

    return (model.clone(body=model.body.clone(gather=gather_block)) if stacked else model), gather


def _gather(shard, spec, dtype=jnp.float32):
    """The whole matrix in `dtype`; its gradient is summed over devices, in float32, into their
    float32 shards.
    """
    return _all_gather(shard, spec.index(FSDP), jnp.dtype(dtype)) if FSDP in spec else shard


def _cast_and_gather(shard, axis, dtype):
    return jax.lax.all_gather(shard.astype(dtype), FSDP, axis=axis, tiled=True)


def _sum_into_shards(axis, dtype, _, gradient):
    gradient = gradient.astype(jnp.float32)
    return (jax.lax.psum_scatter(gradient, FSDP, scatter_dimension=axis, tiled=True),)


_all_gather = jax.custom_vjp(_cast_and_gather, nondiff_argnums=(1, 2))
# The plain function: rematerialisation must see the gather, to repeat it in the backward pass, and
# not a custom_vjp.
_all_gather.defvjp(lambda *arguments: (_cast_and_gather(*arguments), None), _sum_into_shards)


def sum_over_devices(mesh: Mesh, values: Any, specs: Any, by_block: bool = False) -> Any:
    """Sums over all devices what each computed on its own rows: a tree with the structure of
    `specs`, their layout.

    Gradients of sharded parameters are already summed over `FSDP`, by `gathering`, and with
    `by_block` those of blocks over all.
    """

    def add(path, a, spec):
        done = by_block and _stacked(path)
        return a if done else _sum(a, _axes_to_sum(mesh, spec, a))

    return jax.tree_util.tree_map_with_path(add, values, specs)


def _stacked(path):
    """1 for a parameter of blocks, which stands behind an axis that stacks them; else 0."""
    return int(any(getattr(key, "key", None) == BLOCKS for key in path))


def _axes_to_sum(mesh, spec, a):
    """The axes over which a gradient with this layout is still to be summed; where JAX tracks
    them, those of one device, too.
    """
    return tuple(
        axis
        for axis in BATCH_AXES
        if axis not in spec and (mesh.shape[axis] > 1 or axis in axes_of(a))
    )


def _sum(a, axes):
    return jax.lax.psum(a, axes) if axes else a


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _sum_gradient(a, axes):
    """The array; its gradient is summed over devices."""
    return a


_sum_gradient.defvjp(lambda a, axes: (a, None), lambda axes, _, g: (_sum(g, axes),))


def accumulation(rows: int, rows_per_device: int, devices: int) -> int:
    """Microbatches of an update of `rows` rows, if a device holds at most `rows_per_device` at a
    time.

    128 rows at 8 a device make 16 microbatches on 1 device, 2 on 8 and 1 on 16 or more.

    Raises:
        InputError: the rows of an update do not divide evenly among the devices.
    """
    if rows % devices:
        raise InputError(
            f"{devices} devices cannot share the {rows} rows of an update evenly: "
            "choose tokens_per_update as a multiple of sequence_length x devices"
        )
    share = rows // devices
    return next(
        parts
        for parts in range(1, share + 1)
        if share % parts == 0 and share // parts <= rows_per_device
    )
