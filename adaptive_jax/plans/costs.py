"""What a config will cost, before anything is run: parameters, tokens, accumulation, FLOPs and memory."""

import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from adaptive_jax.data.batches.batching import ROWS
from adaptive_jax.data.batches.examples import BREAK_MODES
from adaptive_jax.devices.sharding import BLOCKS, DATA, FSDP, accumulation, parameter_specs
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.model import LanguageModel, build
from adaptive_jax.outputs.banded import chunk_size


def plan(config: dict, vocabulary_size: int, devices: int, memory: int | None = None) -> dict:
    """Counts what one update of `config` takes, from shapes alone.

    Args:
        memory: bytes of a device, by which `fsdp` is chosen where the config leaves it open (0): on as few devices as hold
            the model together. None, where it is not known, means 1.

    Returns:
        `parameters`: `total`, and what each of `input`, `body` and `output` owns; a tied table counts as the input's.
        `tokens_per_update`, `rows_per_update`, `devices`, `accumulation` and `rows_per_device`: see `sharding.accumulation`.
        `fsdp`: devices that hold the parameters together, see `sharding`.
        `flops_per_token`: matrix work of one `forward`, and of `training`, three times that. The output's tails are
        weighted by how often Zipf's law, p(word of rank r) proportional to 1/r, sends a token there. A character CNN counts
        as if every row had 256 distinct words, or as many as tokens if those are fewer.
        `memory_per_device`: an estimate in bytes; see `_memory`.

    Raises:
        InputError: as `model.build`, and where tokens, block and devices do not fit together.
    """
    block = config["data"]["block"]
    check_at_least(1, steps=config["steps"], keep=config["keep"], **{"data.block": block})
    for key, known in ("break_mode", BREAK_MODES), ("rows", ROWS):
        check_known(f"data.{key}={config['data'][key]!r}", config["data"][key], known)
    rows, rest = divmod(config["tokens_per_update"], block)
    if rest or not rows:
        raise InputError(
            f"tokens_per_update={config['tokens_per_update']:,} is not a multiple of data.block={block:,}: "
            f"take {max(rows, 1) * block:,}"
        )
    if config["tokens_per_device"] < block:
        raise InputError(
            f"tokens_per_device={config['tokens_per_device']:,} does not hold one block of {block:,} tokens: "
            f"take {block:,} or more"
        )
    parts = accumulation(rows, config["tokens_per_device"] // block, devices)
    local = rows // parts // devices
    model = build(config, vocabulary_size)
    shapes = parameter_shapes(model)
    parameters = {name: _count(shapes.get(name, {})) for name in ("input", "body", "output")}
    forward = _flops(model, shapes, block)
    activations = _activations(model, shapes, local, block)

    def needed(fsdp):
        return _memory(model, shapes, (devices, fsdp), local, block, activations)

    fsdp = config["fsdp"] or _least(needed, devices, memory)
    if devices % fsdp:
        raise InputError(f"fsdp={fsdp} does not divide the {devices} device(s): choose a number that does, or 0")
    return {
        "parameters": {"total": _count(shapes)} | parameters,
        "vocabulary_size": vocabulary_size,
        "tokens_per_update": rows * block,
        "rows_per_update": rows,
        "devices": devices,
        "accumulation": parts,
        "rows_per_device": local,
        "fsdp": fsdp,
        "flops_per_token": {"forward": forward, "training": 3 * forward},
        "memory_per_device": needed(fsdp),
    }


def parameter_shapes(model: LanguageModel) -> dict:
    """The tree of the model's parameters, as shapes."""
    ids = jax.ShapeDtypeStruct((1, 2), jnp.int32)
    weights = jax.ShapeDtypeStruct((1, 2), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), ids, ids, weights)["params"]


def describe(numbers: dict) -> str:
    """The plan as the few lines that `--dry_run` prints."""
    parameters, memory = numbers["parameters"], numbers["memory_per_device"]
    own = ", ".join(f"{name} {parameters[name] / 1e6:,.1f}M" for name in ("input", "body", "output"))
    parts = ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in memory.items() if name != "total")
    return "\n".join(
        [
            f"parameters   {parameters['total'] / 1e6:,.1f}M  ({own})",
            f"vocabulary   {numbers['vocabulary_size']:,} words",
            f"update       {numbers['tokens_per_update']:,} tokens = {numbers['accumulation']} x {numbers['rows_per_device']} rows "
            f"x {numbers['devices']} device(s)" + f", parameters cut over {numbers['fsdp']}" * (numbers["fsdp"] > 1),
            f"work         {numbers['flops_per_token']['training'] / 1e6:,.1f} MFLOP a token to train, "
            f"{numbers['flops_per_token']['training'] * numbers['tokens_per_update'] / 1e12:,.2f} TFLOP an update",
            f"memory       about {memory['total'] / 2**30:,.2f} GiB a device ({parts})",
        ]
    )


def scale(config: dict, memory: int, counts=(8, 32, 64)) -> list[str]:
    """A line for each number of accelerators with `memory` bytes each: how they would hold an update of `config`."""
    lines = []
    for devices in counts:
        try:
            numbers = plan(config, config["data"]["vocabulary_size"], devices, memory)
        except InputError as error:
            lines.append(f"on {devices:<10}{error}")
            continue
        need, cut = numbers["memory_per_device"]["total"], numbers["fsdp"]
        lines.append(
            f"on {devices:<10}{numbers['accumulation']} x {numbers['rows_per_device']} rows on each, parameters "
            + (f"cut over {cut}" if cut > 1 else "whole on each")
            + f", about {need / 1e9:,.1f} of {memory / 1e9:,.0f} GB"
            + ": too little; lower tokens_per_device or set body.remat=all" * (need > memory)
        )
    return lines


def _count(shapes):
    return sum(math.prod(a.shape) for a in jax.tree.leaves(shapes))


def _flops(model, shapes, block):
    """Forward FLOPs a token of a row of `block` tokens."""
    tokens = jax.ShapeDtypeStruct((1, block), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda p, t: model.apply({"params": p}, t, method="hidden"))(shapes, tokens)
    return _products(jaxpr.jaxpr) / block + _output_flops(_bands(model, shapes))


def _products(jaxpr):
    """FLOPs of all matrix products in a jaxpr; what a scan repeats counts as often as it runs.

    Of loops of unknown length the dearest counts, once: of the character CNN, a chunk of long words.
    """
    total, loops = 0, [0]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * math.prod(eqn.outvars[0].aval.shape) * depth
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        inner = sum(_products(inner) for inner in jax.extend.core.jaxprs_in_params(eqn.params))
        if eqn.primitive.name == "while":
            loops.append(inner)
        else:
            total += times * inner
    return total + max(loops)


def _bands(model, shapes):
    return jax.eval_shape(lambda p: model.apply({"params": p}, method=lambda m: m.output.table.bands()), shapes)


def _output_flops(bands):
    reached = 1 / np.arange(1, sum(table.shape[0] for table, _ in bands) + 1)
    ends = np.cumsum([table.shape[0] for table, _ in bands])
    shares = np.diff(np.cumsum(reached)[ends - 1], prepend=0) / reached.sum()
    total = 0
    for i, ((table, projection), share) in enumerate(zip(bands, shares, strict=True)):
        words, width = table.shape
        columns = words + len(bands) - 1 if i == 0 else words
        work = 2 * width * (columns + (projection.shape[1] if projection is not None else 0))
        total += work if i == 0 else share * work
    return float(total)


def _least(needed, devices, memory):
    """The fewest devices that hold the model together, each with room for 1.4 times what is estimated; see `_memory`."""
    choices = [n for n in range(1, devices + 1) if devices % n == 0]
    return next((n for n in choices if memory is None or 1.4 * needed(n)["total"] <= memory), devices)


def _memory(model, shapes, grid, rows, block, activations):
    """Bytes a device needs at the height of an update, an estimate: XLA's own count on a CPU was 2% to 36% higher.

    `state`: parameters and momentum, float32. `gradients`: those of one batch and the sum over batches. `gathered`: matrices
    that are whole for a while only, with their gradients: the tables, and one block's. `activations`:
    what the forward pass of input and body keeps for the backward pass, by shape, before the compiler saves any. `output`:
    the largest chunk of logits with its gradient, and the hidden states in order of their bands with theirs.
    """
    devices, fsdp = grid
    specs = parameter_specs(shapes, AbstractMesh((devices // fsdp, fsdp), (DATA, FSDP)))
    cut = jax.tree.map(lambda a, spec: a if FSDP in spec else jax.ShapeDtypeStruct((0,), a.dtype), shapes, specs)
    stacked = _count(cut.get("body", {}).get(BLOCKS, {}))
    parameters = 4 * (_count(shapes) - _count(cut) * (fsdp - 1) // fsdp)
    sizes = [table.shape[0] for table, _ in _bands(model, shapes)]
    logits = max(min(rows * block, chunk_size(i, words)) * words for i, words in enumerate(sizes))
    parts = {"state": 2 * parameters, "gradients": 2 * parameters}
    if fsdp > 1:
        parts["gathered"] = 2 * 4 * (_count(cut) - stacked + stacked // model.body.layers)
    parts |= {"activations": activations, "output": 2 * 4 * logits + 2 * 4 * rows * block * model.body.features}
    return {"total": sum(parts.values())} | parts


def _activations(model, shapes, rows, block):
    tokens = jax.ShapeDtypeStruct((rows, block), jnp.int32)

    def kept(params, tokens):
        def hidden(p):
            return model.apply({"params": p}, tokens, train=True, method="hidden", rngs={"dropout": jax.random.key(0)})

        return jax.vjp(hidden, params)[1]

    weights = {(a.shape, a.dtype) for a in jax.tree.leaves(shapes)}
    residuals = jax.tree.leaves(jax.eval_shape(kept, shapes, tokens))
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in residuals if (a.shape, a.dtype) not in weights)
