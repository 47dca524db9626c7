"""One data axis over all devices: batches are cut along it, parameters are whole on every device."""

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from adaptive_jax.errors import InputError

DATA = "data"


def data_mesh() -> Mesh:
    """A mesh of all devices along the axis `DATA`."""
    return jax.make_mesh((jax.device_count(),), (DATA,), axis_types=(AxisType.Auto,))


def whole(mesh: Mesh) -> NamedSharding:
    """The sharding of what every device holds: parameters, optimizer state, keys."""
    return NamedSharding(mesh, PartitionSpec())


def cut(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """The sharding of a batch whose rows lie along `axis`."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))


def put_rows(mesh: Mesh, batch, axis: int = 0):
    """A tree of host arrays as device arrays, the rows along `axis` shared out over the devices."""
    sharding = cut(mesh, axis)
    return jax.tree.map(lambda a: jax.device_put(np.ascontiguousarray(a), sharding), batch)


def put_share(mesh: Mesh, batch, axis: int = 0):
    """As `put_rows`, of a tree that holds only this host's share of the rows, the n-th of as many as there are hosts."""
    sharding, hosts = cut(mesh, axis), jax.process_count()

    def put(a):
        shape = (*a.shape[:axis], a.shape[axis] * hosts, *a.shape[axis + 1 :])
        return jax.make_array_from_process_local_data(sharding, np.ascontiguousarray(a), shape)

    return jax.tree.map(put, batch)


def over_hosts(count: int) -> int:
    """The sum over all hosts of a count that each has of its own."""
    return int(np.sum(multihost_utils.process_allgather(np.int32(count))))


def local_input(model, mesh: Mesh):
    """The input layer, run by every device on its own rows alone: the distinct words of a batch are those of the device.

    Returns:
        `vectors(params, tokens [batch, time]) -> [batch, time, features]`, differentiable in the parameters.
    """
    every, rows = PartitionSpec(), PartitionSpec(DATA)
    mapped = jax.shard_map(
        lambda params, tokens: model.apply({"params": params}, tokens, method=lambda m, tokens: m.input(tokens)),
        mesh=mesh, in_specs=(every, rows), out_specs=rows, check_vma=False,
    )  # fmt: skip
    return lambda params, tokens: mapped(_of(params, "input"), tokens)


def local_loss(model, mesh: Mesh):
    """The output's training loss, run by every device on its own rows alone.

    The output sorts its tokens by band; under `shard_map` each device sorts only its own and runs its own number of
    chunks, so no sort, gather or logit crosses devices. Tail dropout differs from device to device.

    Returns:
        `loss(params, hidden, targets, weights, key) -> (sum of weighted losses, nll [batch, time])`, differentiable in
        the parameters (of input and output) and in the hidden states.
    """

    def on_one_device(params, hidden, targets, weights, key):
        key = jax.random.fold_in(key, jax.lax.axis_index(DATA))
        loss, nll = model.apply(
            {"params": params}, hidden, targets, weights, train=True, method="loss", rngs={"dropout": key}
        )
        return loss[None], nll

    every, rows = PartitionSpec(), PartitionSpec(DATA)
    # Losses leave the devices one by one and are summed outside, so that the transposition of the unsharded parameters
    # is the only sum over devices inside; check_vma would ask for casts in the core's loops, which know no axes.
    mapped = jax.shard_map(
        on_one_device, mesh=mesh, in_specs=(every, rows, rows, rows, every), out_specs=(rows, rows), check_vma=False
    )

    def loss(params, *arrays):
        losses, nll = mapped(_of(params, "input", "output"), *arrays)
        return losses.sum(), nll

    return loss


def _of(params, *parts):
    return {part: params[part] for part in parts if part in params}


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
