"""Compiles the update of a config before any array exists, for present devices or for those that
`adaptive_jax.planning.targets` names.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from adaptive_jax.data.batches.layouts import layout_class
from adaptive_jax.errors import InputError, is_out_of_memory, one_line
from adaptive_jax.model.language_model import variable_shapes
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.parallel import sharding
from adaptive_jax.planning.plan import Parts, Plan, divide_update, make_plan
from adaptive_jax.planning.targets import Target, topology
from adaptive_jax.training.state import shape_of_state
from adaptive_jax.training.update import UpdateOptions, make_update

# Share of a device's memory that a program may take; the rest is lost between its arrays
USABLE_MEMORY = 0.9


class Memory(NamedTuple):
    """Bytes that a program needs on one device: its arguments, and all else while it runs."""

    state: int
    temporary: int


def memory_of(compiled: jax.stages.Compiled) -> Memory:
    """The memory of a program; results that reuse the memory of arguments count once."""
    analysis = compiled.memory_analysis()
    results = max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes)
    return Memory(analysis.argument_size_in_bytes, analysis.temp_size_in_bytes + results)


def compile_update(
    config: Mapping,
    plan: Plan,
    parts: Parts,
    devices: Sequence[jax.Device] | None = None,
    options: Mapping | None = None,
) -> jax.stages.Compiled:
    """Compiles the first update of a config.

    devices: those of the plan; None: those of this machine. options: of the compiler.
    """
    mesh = sharding.device_mesh(plan.fsdp, devices, plan.devices)
    (model, optimizer), rows = parts, plan.rows_per_device * plan.devices
    carried = (plan.accumulation, rows) if config["batches"]["layout"] == "streams" else None
    state = shape_of_state(model, optimizer, mesh, carried, sparse=config["compose_share"] < 1)
    replicated, by_rows = sharding.replicated(mesh), NamedSharding(mesh, sharding.batch_spec(1))
    lexicon = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=replicated),
        variable_shapes(model)["lexicon"],
    )
    layout = layout_class(config["batches"]["layout"], config["batches"]["break_mode"])

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct((plan.accumulation, rows, *shape), dtype, sharding=by_rows)

    time = plan.tokens_per_update // plan.rows_per_update
    tokens = array(jnp.int32, time)
    segments = tokens if layout.segmented else None
    reset = array(jnp.bool) if layout.continued else None
    batch = Batch(tokens, tokens, array(jnp.float32, time), array(jnp.int32), segments, reset)
    update = make_update(
        model, optimizer, mesh, config["seed"], state, UpdateOptions.from_config(config)
    )
    return update.lower(state, lexicon, batch).compile(dict(options or {}))


def plan_update(
    config: Mapping,
    parts: Parts,
    devices: Sequence[jax.Device],
    memory: int | None,
    options: Mapping | None = None,
) -> tuple[Plan, jax.stages.Compiled | None]:
    """Makes a plan. If `tokens_per_device` is 0, its microbatches are about the largest whose
    compiled update fits in memory, and that update is returned, too.

    memory: bytes of a device; None: not known.

    Raises:
        InputError: as `make_plan`, or a device cannot hold one row.
    """
    hosts = len({device.process_index for device in devices})
    plan = make_plan(config, parts, len(devices), memory, hosts)
    if config["tokens_per_device"] or memory is None:
        return plan, None
    length, limit = config["batches"]["sequence_length"], int(USABLE_MEMORY * memory)
    rows = plan.accumulation * plan.rows_per_device
    while rows:
        changes = {"tokens_per_device": rows * length, "fsdp": plan.fsdp}
        plan = make_plan(config | changes, parts, len(devices), memory, hosts)
        rows = plan.rows_per_device
        try:
            compiled = compile_update(config, plan, parts, devices, options)
            state, temporary = memory_of(compiled)
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            fitting_rows = rows // 2
        else:
            if state + temporary <= limit:
                return plan, compiled
            fitting_rows = rows * max(0, limit - state) / temporary
        divisions = (
            divide_update(config | {"tokens_per_device": n * length}, len(devices), hosts)
            for n in range(1, rows)
        )
        fewer = sorted({division.rows_per_device for division in divisions})
        rows = next((n for n in fewer if n >= fitting_rows), fewer[-1] if fewer else 0)
    raise InputError(
        f"a device of {memory / 1e9:,.1f} GB cannot hold one row of {length:,} tokens: make the"
        " model smaller, raise fsdp, or lower sequence_length"
    )


def compile_for(
    name: str, config: Mapping, parts: Parts
) -> tuple[Target, Plan, jax.stages.Compiled]:
    """Plans and compiles a config's update for other devices.

    Raises:
        InputError: as `topology` and `plan_update`; too little memory; a program that the compiler
            cannot compile.
    """
    target = topology(name)
    options = target.options
    try:
        plan, compiled = plan_update(config, parts, target.devices, target.memory, options)
        compiled = compiled or compile_update(config, plan, parts, target.devices, options)
    except jax.errors.JaxRuntimeError as error:
        problem = (
            f"--target={name} has too little memory: lower tokens_per_device, or raise fsdp"
            if is_out_of_memory(error)
            else f"jax {jax.__version__} cannot compile this for --target={name}, another version"
            " may: pip install -U -e '.[targets]'"
        )
        raise InputError(f"{problem}. The compiler says: {one_line(error)[:300]}") from error
    return target, plan, compiled


def counts(target: Target, compiled: jax.stages.Compiled) -> dict:
    """Entry of plan.json for a target; bytes of one device."""
    state, temporary = memory_of(compiled)
    return {
        "name": target.name,
        "devices": len(target.devices),
        "state_bytes": state,
        "temp_bytes": temporary,
    }


def describe(target: Target, counted: Mapping) -> str:
    """Lines of text for `counts`."""
    state, temporary = counted["state_bytes"], counted["temp_bytes"]
    full = ": too little memory" if state + temporary > target.memory else ""
    return (
        f"target       {target.name}: {len(target.devices)} x {target.devices[0].device_kind}, by"
        " its compiler, a device\n"
        f"memory       {_size(state + temporary)} of {_size(target.memory)}: state {_size(state)},"
        f" temporary {_size(temporary)}{full}"
    )


def _size(count):
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count / 1e6:,.3f} MB"
