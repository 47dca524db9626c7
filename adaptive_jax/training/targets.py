"""The update of a config, compiled for devices that are not here; `adaptive_jax.planning.targets`
has their names.

report(compiled_update(config, "h100"))["temp_bytes"], with `adaptive_jax.planning.programs.report`
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from adaptive_jax.data.batches.layouts import LAYOUTS
from adaptive_jax.errors import InputError, one_line
from adaptive_jax.model.language_model import build, variable_shapes
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.platforms import tracing_for
from adaptive_jax.parallel import sharding
from adaptive_jax.planning.plan import Plan, make_plan
from adaptive_jax.planning.programs import report
from adaptive_jax.planning.targets import OPTIONS, Target, topology
from adaptive_jax.training import sparse
from adaptive_jax.training.state import shape_of_state
from adaptive_jax.training.update import Extras, make_update


def compiled_update(config: Mapping, name: str) -> jax.stages.Compiled:
    """The first update of a config, for its `data.vocabulary_size` words, compiled for the devices
    that `name` stands for.

    Raises:
        InputError: as `topology` and `make_plan`, or the devices have too little memory.
    """
    target = topology(name)
    return compile_for(target, config, plan_for(target, config))


def plan_for(target: Target, config: Mapping) -> Plan:
    """The plan of a config on these devices. Raises InputError as `make_plan`, or if the config
    leaves the vocabulary open.
    """
    if not (words := config["data"]["vocabulary_size"]):
        raise InputError(
            f"--target={target.name} needs the size of the vocabulary: set data.vocabulary_size,"
            " which is 0"
        )
    with tracing_for(target.platform, target.devices[0].device_kind):
        return make_plan(config, words, len(target.devices), target.memory)


def compile_for(
    target: Target, config: Mapping, plan: Plan, options: Mapping | None = None
) -> jax.stages.Compiled:
    """`compiled_update` with the plan of `plan_for`, and with more options of the compiler."""
    mesh, model = (
        sharding.device_mesh(plan.fsdp, target.devices),
        build(config, plan.vocabulary_size),
    )
    rows, streams = plan.rows_per_device * plan.devices, config["batches"]["layout"] == "streams"
    carried = (plan.accumulation, rows) if streams else None
    optimizer = sparse.optimizer(config, model)
    state = shape_of_state(model, optimizer, mesh, carried, sparse=config["compose_share"] < 1)
    whole, by_rows = sharding.replicated(mesh), NamedSharding(mesh, sharding.batch_spec(1))
    words = variable_shapes(model).get("lexicon", {})
    words = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), words)
    time = plan.tokens_per_update // plan.rows_per_update
    of_text, of_examples = LAYOUTS[config["batches"]["layout"]]
    layout = of_text if config["batches"]["break_mode"] == "none" else of_examples

    def array(dtype, *shape):
        return jax.ShapeDtypeStruct((plan.accumulation, rows, *shape), dtype, sharding=by_rows)

    tokens = array(jnp.int32, time)
    segments, reset = (
        tokens if layout.segmented else None,
        array(jnp.bool) if layout.continued else None,
    )
    batch = Batch(tokens, tokens, array(jnp.float32, time), array(jnp.int32), segments, reset)
    update = make_update(model, optimizer, mesh, config["seed"], state, Extras.from_config(config))
    try:
        return update.lower(state, words, batch).compile(
            {**OPTIONS[target.platform], **(options or {})}
        )
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "memory" not in str(error):
            raise
        raise InputError(
            f"--target={target.name} has too little memory: lower tokens_per_device, or raise fsdp."
            f" The compiler says: {one_line(error)[:300]}"
        ) from error


def counts(target: Target, plan: Plan, compiled: jax.stages.Compiled) -> dict:
    """What plan.json says of a target: its `name`, its `devices`, `programs.report`, and the
    `tokens` that a device can hold.

    tokens: in a microbatch, about: memory that the compiled microbatch takes beside its gradients
    is scaled to all that is free. Where gradients are planned as most of what the compiler takes,
    the planned activations are scaled instead.
    """
    found, length = report(compiled), plan.tokens_per_update // plan.rows_per_update
    fixed = sum(plan.memory_per_device.get(use, 0) for use in ("gradients", "gathered", "composed"))
    of_row = (
        max(found["temp_bytes"] - fixed, plan.memory_per_device["activations"])
        / plan.rows_per_device
    )
    rows = max(0, target.memory - found["state_bytes"] - fixed) / of_row
    return {
        "name": target.name,
        "devices": len(target.devices),
        **found,
        "tokens": int(rows) * length,
    }


def describe(target: Target, counted: Mapping) -> list[str]:
    """`counts` in lines."""
    needed = counted["temp_bytes"] + counted["state_bytes"]
    collectives = ", ".join(
        f"{one['count']} {one['kind']} of {_size(one['bytes'])}" for one in counted["collectives"]
    )
    looped = [loop for loop in counted["loops"] if loop["hoisted"] > 2**20][:2]
    largest = counted["largest"][:4]
    return [
        (
            f"target       {target.name}: {len(target.devices)} x {target.devices[0].device_kind};"
            " counts of its compiler, a device"
        ),
        f"memory       {_size(needed)} of {_size(target.memory)}: state"
        f" {_size(counted['state_bytes'])}, temporary {_size(counted['temp_bytes'])}"
        + ": too little memory"
        * (needed > target.memory),
        *(
            f"largest      {one['count']} x {one['shape']}, {_size(one['bytes'])} "
            f" …{one['source'][-70:]}"
            for one in largest
        ),
        *(
            f"repeated     {_size(loop['hoisted'])} in each of {loop['trips']} trips "
            f" …{loop['source'][-70:]}"
            for loop in looped
        ),
        f"moved        {_size(counted['moved_bytes'])} an update, outside matrix products",
        f"collectives  {collectives or 'none'}",
        (
            f"tokens       a device holds about {counted['tokens']:,} at a time; tokens_per_device"
            " says how many it is given"
        ),
    ]


def _size(count):
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count / 1e6:,.3f} MB"
