"""Where rows and parameters lie: rows are cut over all devices, parameters over the axis `FSDP` alone.

Devices form a grid of two axes. With fsdp 1 every device holds all parameters (data parallelism). With fsdp n, n devices hold
them together, each 1/n of every matrix; a block's are gathered when its turn comes, in both passes, and its gradients
are summed onto the parts (fully sharded data parallelism; ZeRO, Rajbhandari et al. 2020). Everything that a layer computes it
computes on the rows of one device, under `shard_map`: no sort, hidden state or logit crosses devices.
"""

from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from adaptive_jax.errors import InputError

DATA, FSDP = "data", "fsdp"
ROWS = (DATA, FSDP)  # rows go over both axes
BLOCKS = "blocks"  # the parameters of a body's like layers, stacked along a first axis


def device_mesh(fsdp: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Devices, by default all, as a grid [data, fsdp]: those of a host side by side, so its rows are one stretch of a batch.

    Raises:
        InputError: the number of devices is no multiple of fsdp.
    """
    devices = sorted(devices or jax.devices(), key=lambda device: (device.process_index, device.id))
    if fsdp < 1 or len(devices) % fsdp:
        raise InputError(f"fsdp={fsdp} does not divide the {len(devices)} device(s): choose a number that does")
    return Mesh(np.reshape(devices, (-1, fsdp)), ROWS, axis_types=(AxisType.Auto, AxisType.Auto))


def whole(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds."""
    return NamedSharding(mesh, PartitionSpec())


def rows_along(axis: int) -> PartitionSpec:
    """How a batch is cut whose rows lie along `axis`."""
    return PartitionSpec(*[None] * axis, ROWS)


def put_rows(mesh: Mesh, batch, axis: int = 0):
    """A tree of host arrays as device arrays, the rows along `axis` shared out over the devices."""
    sharding = NamedSharding(mesh, rows_along(axis))
    # Not device_put, by which several hosts send each other every array to see that they are equal.
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, lambda index: a[index]), batch)


def put_share(mesh: Mesh, batch, axis: int = 0):
    """As `put_rows`, of a tree that holds only this host's share of the rows, the n-th of as many as there are hosts."""
    sharding, hosts = NamedSharding(mesh, rows_along(axis)), jax.process_count()

    def put(a):
        shape = (*a.shape[:axis], a.shape[axis] * hosts, *a.shape[axis + 1 :])
        return jax.make_array_from_process_local_data(sharding, np.ascontiguousarray(a), shape)

    return jax.tree.map(put, batch)


def over_hosts(count: int) -> int:
    """The sum over all hosts of a count that each has of its own."""
    return int(np.sum(multihost_utils.process_allgather(np.int32(count))))


def parameter_specs(tree, mesh: Mesh):
    """How parameters lie, or a tree that follows theirs (gradients, momentum): a tree of PartitionSpec.

    Vectors are whole on every device. Matrices are cut over `FSDP` along their first axis that divides; the axis that stacks
    layers does not count. So a table is cut by rows, or by width where its rows do not divide: as many bytes either way.
    """
    parts = mesh.shape[FSDP]

    def spec(path, a):
        stacked = int(any(getattr(key, "key", None) == BLOCKS for key in path))
        if parts > 1 and len(a.shape) - stacked >= 2:
            for axis in range(stacked, len(a.shape)):
                if a.shape[axis] % parts == 0:
                    return PartitionSpec(*[None] * axis, FSDP)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, tree)


def gathering(model, params, mesh: Mesh):
    """The model and a function of its parameters for use on one device of `mesh`, under `shard_map`.

    Args:
        params: of the model, or their shapes, as they are when nothing is cut.

    Returns:
        `(model, gather)`: `model.apply({"params": gather(cut)}, ...)` does with a device's part of the parameters what the
        model given does with all of them. What the body stacks it gathers layer by layer.
    """
    specs = parameter_specs(params, mesh)
    if mesh.shape[FSDP] == 1:
        return model, lambda cut: cut
    stacked = specs["body"].get(BLOCKS, {})
    # Without the axis that stacks.
    each = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), stacked)

    def gather_block(cut):
        return jax.tree.map(_gather, cut, each)

    def gather(cut):
        others = jax.tree.map(lambda spec: PartitionSpec(), stacked)
        return jax.tree.map(_gather, cut, specs | {"body": specs["body"] | ({BLOCKS: others} if stacked else {})})

    return (model.clone(body=model.body.clone(gather=gather_block)) if stacked else model), gather


def _gather(a, spec):
    """All of a matrix of which this device has a part; its gradient is summed over devices onto the parts."""
    return jax.lax.all_gather(a, FSDP, axis=spec.index(FSDP), tiled=True) if FSDP in spec else a


def sum_over_rows(mesh: Mesh, values, specs):
    """Sums over all devices what each has of its own rows: a tree alike `specs`, which say how it is cut.

    What is cut `_gather` has summed over `FSDP` already.
    """

    def add(a, spec):
        axes = tuple(axis for axis in ROWS if axis not in spec and mesh.shape[axis] > 1)
        return jax.lax.psum(a, axes) if axes else a

    return jax.tree.map(add, values, specs)


def accumulation(rows: int, rows_per_device: int, devices: int) -> int:
    """Batches that make up one update of `rows` rows, when a device holds at most `rows_per_device` at a time.

    128 rows at 8 a device make 16 batches on 1 device, 2 on 8 and 1 on 16 or more.

    Raises:
        InputError: the devices cannot share the rows of an update evenly.
    """
    if rows % devices:
        raise InputError(
            f"{devices} devices cannot share the {rows} rows of an update evenly: "
            "choose tokens_per_update as a multiple of block x devices"
        )
    share = rows // devices
    return next(parts for parts in range(1, share + 1) if share % parts == 0 and share // parts <= rows_per_device)
