"""The plan of a config, before anything runs: parameters, division of an update over devices, FLOPs
and memory.

    plan = make_plan(config, vocabulary_size=267_735, devices=8, memory=int(80e9))
    print(describe(plan))

Plans of one model for several numbers of devices trace it once; the rest is arithmetic.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from adaptive_jax.data.batches.layouts import check_layout
from adaptive_jax.data.batches.streams import DEVIATION, lattice
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.losses import long_tables
from adaptive_jax.model.language_model import build, output_features
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel.sharding import BLOCKS, DATA, FSDP, accumulation, parameter_specs
from adaptive_jax.planning import traced

MARGIN = 1.4  # memory that a device should have for each byte of the estimate; see `_memory`
TOKENS = 4_096  # that a device holds at a time where nothing says how many it can hold


class Plan(NamedTuple):
    """What one update of a config takes.

    Attributes:
        parameters: numbers in all ("total") and in each of "input", "body" and "output"; a tied
            table counts as the input's.
        accumulation: microbatches of an update.
        tokens_per_device: as the config says, or as `make_plan` chose; only whole rows of them are
            used.
        rows_per_device: rows of a microbatch on each device.
        fsdp: devices that share one copy of the parameters; see `adaptive_jax.parallel.sharding`.
        flops_per_token: FLOPs of matrix products, "forward" and "training" (three times as many).
            Tails of the output count by Zipf's law; vectors of all words are shared by the tokens
            of an update, of those that compose them; another character CNN counts as if every row
            had 256 distinct words, or fewer if it has fewer tokens.
        memory_per_device: estimated bytes, "total" and by use.
    """

    parameters: dict[str, int]
    vocabulary_size: int
    tokens_per_update: int
    rows_per_update: int
    devices: int
    accumulation: int
    tokens_per_device: int
    rows_per_device: int
    fsdp: int
    flops_per_token: dict[str, float]
    memory_per_device: dict[str, int]


def make_plan(
    config: Mapping, vocabulary_size: int, devices: int, memory: int | None = None
) -> Plan:
    """Plans an update of `config`.

    memory: bytes of a device. If the config leaves `fsdp` open (0), as few devices share the
    parameters as can hold the model together; without `memory`, one. If it leaves
    `tokens_per_device` open (0), microbatches are as large as `memory` holds; without `memory`,
    4,096 tokens.

    Raises:
        InputError: as `model.build`; sizes of an update that do not fit together or cannot be
            shared by the devices.
    """
    if not config["tokens_per_device"]:
        return _largest(config, vocabulary_size, devices, memory)
    rows, microbatches = divide_update(config, devices)
    length, per_device = config["batches"]["sequence_length"], rows // microbatches // devices
    longest = (
        length
        if config["batches"]["layout"] != "streams"
        else int(lattice(length, length + 4 * DEVIATION))
    )
    if "path" in config["body"]:  # of an LSTM: products inside cuDNN cannot be counted
        config = config | {"body": config["body"] | {"path": "scan"}}
    model = build(config, vocabulary_size)
    shapes = traced.variables(model)["params"]
    state = jax.eval_shape(optim.from_config(config).init, shapes)
    parts = {name: _count(shapes.get(name, {})) for name in ("input", "body", "output")}
    composed = config["compose_share"] * traced.composed_flops(model)
    forward = traced.forward_flops(model, length) + composed / (rows * length)

    def uses(fsdp):
        mesh = AbstractMesh((devices // fsdp, fsdp), (DATA, FSDP))
        return {"state": _held_bytes((shapes, state), mesh)} | _memory(
            model, longest, (rows // devices, per_device), (devices, fsdp)
        )

    fsdp = config["fsdp"] or _least(lambda fsdp: sum(uses(fsdp).values()), devices, memory)
    if devices % fsdp:
        raise InputError(
            f"fsdp={fsdp} does not divide the {devices} device(s): choose a number that does, or 0"
        )
    return Plan(
        parameters={"total": _count(shapes)} | parts,
        vocabulary_size=vocabulary_size,
        tokens_per_update=rows * length,
        rows_per_update=rows,
        devices=devices,
        accumulation=microbatches,
        tokens_per_device=config["tokens_per_device"],
        rows_per_device=per_device,
        fsdp=fsdp,
        flops_per_token={"forward": forward, "training": 3 * forward},
        memory_per_device={"total": sum(uses(fsdp).values())} | uses(fsdp),
    )


def _largest(config, vocabulary_size, devices, memory):
    """The plan with the fewest microbatches that `memory` holds with a margin, on as few
    devices a copy as hold 4,096 tokens.
    """
    length, rows = (
        config["batches"]["sequence_length"],
        divide_update(config, devices)[0] // devices,
    )

    def plan(tokens, **changes):
        return make_plan(
            config | {"tokens_per_device": max(tokens, length), **changes},
            vocabulary_size,
            devices,
            memory,
        )

    fallback = plan(TOKENS)
    if memory is None:
        return fallback
    plans = (
        plan(rows // parts * length, fsdp=fallback.fsdp)
        for parts in range(1, rows + 1)
        if rows % parts == 0
    )
    return next(
        (found for found in plans if MARGIN * found.memory_per_device["total"] <= memory),
        plan(length),
    )


def check_memory(plan: Plan, memory: int) -> None:
    """Raises InputError if a device with so many bytes cannot hold what the plan needs; the
    estimate is a low one.
    """
    if (needed := plan.memory_per_device["total"]) > memory:
        largest = max(
            (use for use in plan.memory_per_device if use != "total"),
            key=plan.memory_per_device.get,
        )
        raise InputError(
            f"an update needs about {needed / 1e9:,.1f} GB a device, most of it for {largest}, and"
            f" this one has {memory / 1e9:,.1f} GB: make the model smaller, lower tokens_per_device"
            " or sequence_length, or set body.remat=all in a transformer"
        )


def choose_fsdp(
    config: Mapping, vocabulary_size: int, devices: int, memory: int | None = None
) -> int:
    """Devices that share one copy of the parameters to evaluate: the config's `fsdp`, or as few as
    can hold the model.

    memory: bytes of a device; None: one device holds the model. Nothing of an update is traced: a
    forward pass keeps no activations, gradients or momentum.
    """
    if config["fsdp"]:
        return math.gcd(config["fsdp"], devices)
    model, length = build(config, vocabulary_size), config["batches"]["sequence_length"]
    tokens = rows_to_score(config, length) * length
    others = _composed_bytes(model, vocabulary_size) + _output_bytes(model, tokens)
    return _least(
        lambda fsdp: sum(_parameter_bytes(model, devices, fsdp)) + others, devices, memory
    )


def rows_to_score(config: Mapping, window: int) -> int:
    """Rows of so many tokens that a device scores at a time: the config's `tokens_per_device`,
    or 4,096 tokens if it is open.
    """
    return max(1, (config["tokens_per_device"] or TOKENS) // window)


def describe(plan: Plan) -> str:
    """The plan in a few lines."""
    parameters, uses, training = (
        plan.parameters,
        plan.memory_per_device,
        plan.flops_per_token["training"],
    )
    own = ", ".join(
        f"{name} {parameters[name] / 1e6:,.1f}M" for name in ("input", "body", "output")
    )
    parts = ", ".join(f"{name} {size / 1e9:,.2f}" for name, size in uses.items() if name != "total")
    update = _update_line(
        plan.tokens_per_update, plan.accumulation, plan.rows_per_device, plan.devices
    )
    rows, rest = divmod(
        plan.tokens_per_device, length := plan.tokens_per_update // plan.rows_per_update
    )
    rounded = (
        f"rounded      tokens_per_device={plan.tokens_per_device:,} to {rows * length:,}: {rows}"
        f" rows of {length:,} tokens\n"
    )
    return (
        f"parameters   {parameters['total'] / 1e6:,.1f}M  ({own})\n"
        f"vocabulary   {plan.vocabulary_size:,} words\n"
        f"{update}{f', parameters sharded over {plan.fsdp}' * (plan.fsdp > 1)}\n"
        f"{rounded * bool(rest)}"
        f"work         {training / 1e6:,.1f} MFLOP a token to train,"
        f" {training * plan.tokens_per_update / 1e12:,.2f} TFLOP an update\n"
        f"memory       about {uses['total'] / 1e9:,.2f} GB a device ({parts})"
    )


def scale(config: Mapping, memory: int, counts: Sequence[int] = (8, 32, 64)) -> list[str]:
    """One line for each number of accelerators, of `memory` bytes each: how they would hold an
    update of `config`.
    """
    lines = []
    for devices in counts:
        try:
            plan = make_plan(config, config["data"]["vocabulary_size"], devices, memory)
        except InputError as error:
            lines.append(f"on {devices:<10}{error}")
            continue
        needed = plan.memory_per_device["total"]
        cure = ": too little memory; lower tokens_per_device" + " or set body.remat=all" * (
            "remat" in config["body"]
        )
        lines.append(
            f"on {devices:<10}{plan.accumulation} x {plan.rows_per_device} rows on each,"
            " parameters "
            + (f"sharded over {plan.fsdp}" if plan.fsdp > 1 else "replicated")
            + f", about {needed / 1e9:,.1f} of {memory / 1e9:,.0f} GB"
            + cure * (needed > memory)
        )
    return lines


def dry_run_lines(config: Mapping, devices: int, memory: int) -> tuple[Plan | None, list[str]]:
    """The plan for `devices`, and the lines of a dry run: that plan, and those for accelerators
    with `memory` bytes; see `scale`.

    If the config leaves the size of the vocabulary open (0), there is no plan, and one line says
    what depends on that size. Raises InputError as `make_plan`.
    """
    if words := config["data"]["vocabulary_size"]:
        plan = make_plan(config, words, devices)
        return plan, [*describe(plan).splitlines(), *scale(config, memory)]
    rows, microbatches = divide_update(config, devices)
    update = _update_line(
        config["tokens_per_update"], microbatches, rows // microbatches // devices, devices
    )
    return None, [
        *([update] if config["tokens_per_device"] else []),
        (
            "unknown      parameters, work and memory: they depend on data.vocabulary_size, which"
            " is 0. Set it, or train: the plan is printed once the corpus is read"
        ),
    ]


def _update_line(tokens, microbatches, rows, devices):
    return f"update       {tokens:,} tokens = {microbatches} x {rows} rows x {devices} device(s)"


def divide_update(config: Mapping, devices: int) -> tuple[int, int]:
    """Rows and microbatches of an update; with `tokens_per_device=0` one, if memory holds it.

    Needs no corpus, so wrong settings are found before one is prepared.

    Raises:
        InputError: sizes that do not fit together or cannot be shared by the devices, or an unknown
            way of making rows.
    """
    length, break_mode, layout = (
        config["batches"][key] for key in ("sequence_length", "break_mode", "layout")
    )
    check_at_least(
        1, steps=config["steps"], keep=config["keep"], **{"batches.sequence_length": length}
    )
    check_layout(break_mode, layout)
    rows, rest = divmod(config["tokens_per_update"], length)
    if rest or not rows:
        raise InputError(
            f"tokens_per_update={config['tokens_per_update']:,} is not a multiple of"
            f" batches.sequence_length={length:,}: take {max(rows, 1) * length:,}"
        )
    held = config["tokens_per_device"]
    if held and held < length:
        raise InputError(
            f"tokens_per_device={held:,} does not hold one row of {length:,} tokens: take"
            f" {length:,} or more, or 0 for what memory holds"
        )
    return rows, accumulation(rows, held // length if held else rows, devices)


def _count(shapes):
    return sum(math.prod(a.shape) for a in jax.tree.leaves(shapes))


def _least(needed, devices, memory):
    """The smallest number of devices that divides all and leaves a margin over what is
    `needed(number)`; or all devices.
    """
    choices = [n for n in range(1, devices + 1) if devices % n == 0]
    return next((n for n in choices if memory is None or MARGIN * needed(n) <= memory), devices)


def _memory(model, length, rows, grid):
    """Bytes by use on one device at the peak of an update, without its state: an estimate.

    XLA counted 2% to 36% more, state included, on a CPU.

    `gradients`: those of a microbatch, and their sum. `gathered`: sharded matrices while they are
        in use, with their gradients.
    `composed`: word vectors that are computed from other parameters, with both gradients; and what
        the layers that read letters
    keep for the backward pass. `activations`: what the forward pass of
    input and body keeps for the backward pass, by shape, before the compiler saves any. `output`:
    the largest chunk of logits and the hidden states, with their gradients.

    rows: of one device, (in an update, in a microbatch). grid: (devices, fsdp).
    """
    held, gathered = _parameter_bytes(model, *grid)
    fixed, per_row = traced.activations(model, length)
    parts = {"gradients": 2 * held}
    parts |= {"gathered": 2 * gathered} if gathered else {}
    composed = _composed_bytes(model, rows[0] * length)
    parts |= {"composed": 3 * composed + _kept_bytes(model)} if composed else {}
    return parts | {
        "activations": fixed + per_row * rows[1],
        "output": 2 * _output_bytes(model, rows[1] * length),
    }


def _parameter_bytes(model, devices, fsdp):
    """Bytes of one device's parameters, and of the matrices that it gathers at a time: all
    tables, and one block's matrices.
    """
    shapes = traced.variables(model)["params"]
    specs = parameter_specs(shapes, AbstractMesh((devices // fsdp, fsdp), (DATA, FSDP)))
    sharded = jax.tree.map(lambda a, spec: math.prod(a.shape) * (FSDP in spec), shapes, specs)
    total, blocks = (
        sum(jax.tree.leaves(tree)) for tree in (sharded, sharded.get("body", {}).get(BLOCKS, {}))
    )
    block = blocks // model.body.layers * jnp.dtype(model.body.dtype).itemsize if blocks else 0
    return 4 * (_count(shapes) - total * (fsdp - 1) // fsdp), 4 * (total - blocks) + block


def _held_bytes(tree, mesh):
    """Bytes of one device's share of parameters, or of a state that has their structure."""
    specs = parameter_specs(tree, mesh)
    sizes = jax.tree.map(
        lambda a, spec: (
            math.prod(a.shape) * a.dtype.itemsize // (mesh.shape[FSDP] if FSDP in spec else 1)
        ),
        tree,
        specs,
    )
    return sum(jax.tree.leaves(sizes))


def _composed_bytes(model, tokens):
    words = model.input.vocabulary_size
    composed = {"none": 0, "inputs": min(tokens, words), "all": words}[model.composed_words()]
    return 4 * composed * model.input.features


def _kept_bytes(model):
    """What composing all words keeps for the backward pass; what composing those of rows keeps
    is among the activations.
    """
    readers = (
        [model.input, getattr(model.output.table, "cnn", None)]
        if model.composed_words() == "all"
        else []
    )
    return sum(
        layer.kept_bytes(model.input.vocabulary_size)
        for layer in readers
        if hasattr(layer, "kept_bytes")
    )


def _output_bytes(model, tokens):
    candidates = getattr(model.output, "samples", 0)
    shapes = [band.table.shape for band in traced.output_bands(model)]
    shapes = [(candidates, shapes[0][1])] if candidates else shapes
    logits = max(
        long_tables.plan(i, words, width).alive(tokens, words)
        for i, (words, width) in enumerate(shapes)
        if words
    )
    return 4 * (logits + tokens * output_features(model.body))
