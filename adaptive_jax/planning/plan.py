"""Plans a config before it runs: its parameters, the division of an update over devices, its work.

    plan = make_plan(config, parts_of(config, 267_735), devices=8, memory=int(80e9))
    print(describe(plan, config["data"]))

Nothing is compiled; `adaptive_jax.training.compiled` counts the memory of a complete update.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from adaptive_jax.data.batches.layouts import check_layout, scored_break_mode
from adaptive_jax.errors import InputError
from adaptive_jax.model.composition import encoded_shapes
from adaptive_jax.model.language_model import LanguageModel, band_shapes, parameter_shapes
from adaptive_jax.numerics.devices import DEVICES
from adaptive_jax.numerics.layers import word_layer
from adaptive_jax.parallel.sharding import (
    abstract_mesh,
    gathered_bytes,
    is_stacked,
    parameter_specs,
    shards,
)
from adaptive_jax.planning.division import Division, divide, divisors, one_of, rows_for_all

MOST = 64  # devices up to which `describe` lists numbers, if there are not more
TOKENS = 4_096  # on a device at a time, where neither config nor memory says how many
ROOM = 2  # needed memory over that of parameters, optimizer and gradients, for activations too
# Devices whose hours are shown, and the share of their peak: 0.43 was measured of one H200
SHOWN, SHARE = ("h100", "b200", "v5e", "v5p", "v6e"), 0.4
TABLES = "table", "characters", "symbols"  # names of tables for lookups; others are multiplied


class Parts(NamedTuple):
    """The model of a config and its optimizer, see `adaptive_jax.training.sparse.parts_of`."""

    model: LanguageModel
    optimizer: Any  # an `optax.GradientTransformation`


class Plan(NamedTuple):
    """Sizes and costs of one update of a config.

    Attributes:
        parameters: number of parameters, "total" and of "input", "body" and "output"; a tied table
            counts as the input's.
        ngrams: "rows", "parameters" and "bytes" of the input's n-gram tables and their projections,
            over all orders; {} without n-grams.
        devices: number of devices that share an update, of the `present` ones.
        accumulation: microbatches of an update.
        rows_per_device: rows of a microbatch on each device.
        fsdp: devices that share one copy of the parameters; see `adaptive_jax.parallel.sharding`.
        shard_words: whether each of them computes the words that it holds.
        flops_per_token: FLOPs to train on a token, see `training_flops`.
        composes: words that an update composes, beside these FLOPs: "none", "inputs" or "all".
        state_bytes: bytes of parameters and the optimizer's state on each device.
        gathered_bytes: the most bytes of gathered matrices that a device holds at once: all tables,
            unless `shard_words`, and the largest layer; 0 without `fsdp`.
        vector_bytes: bytes of the word vectors of a microbatch on each device, a lower bound for
            its activations.
    """

    parameters: dict[str, int]
    ngrams: dict[str, int]
    vocabulary_size: int
    tokens_per_update: int
    rows_per_update: int
    devices: int
    present: int
    accumulation: int
    rows_per_device: int
    fsdp: int
    shard_words: bool
    flops_per_token: float
    composes: str
    state_bytes: int
    gathered_bytes: int
    vector_bytes: int


def make_plan(
    config: Mapping, parts: Parts, devices: int, memory: int | None = None, hosts: int = 1
) -> Plan:
    """Plans an update of `config`.

    devices: number of devices of all hosts.
    memory: bytes of a device. With `fsdp=0` in the config, the parameters are shared by as few
        devices as hold them, the optimizer's state and gradients in half of their memory; by one
        without `memory`. With `tokens_per_device=0`, a device holds 4,096.

    Raises:
        InputError: as `divide_update`.
    """
    division = divide_update(config, devices, hosts)
    devices_used, model = division.devices, parts.model
    length = config["batches"]["sequence_length"]
    shapes = parameter_shapes(model)
    state = shapes, jax.eval_shape(parts.optimizer.init, shapes)
    stored = encoded_shapes(model) if config["compose_share"] < 1 else {}
    stored = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(stored))  # on every device

    def state_bytes(fsdp):
        return _sharded_bytes(model, state, devices_used, fsdp) + stored

    def with_gradients(fsdp):
        # Gradients of a microbatch, and their sum.
        return state_bytes(fsdp) + 2 * _sharded_bytes(model, shapes, devices_used, fsdp)

    fsdp = config["fsdp"] or _fewest(with_gradients, devices_used, memory)
    counts = {name: _count(shapes.get(name, {})) for name in ("input", "body", "output")}
    return Plan(
        parameters={"total": _count(shapes)} | counts,
        ngrams=_sizes_of_ngrams(model, shapes),
        vocabulary_size=model.input.vocabulary_size,
        tokens_per_update=division.rows * length,
        rows_per_update=division.rows,
        devices=devices_used,
        present=devices,
        accumulation=division.microbatches,
        rows_per_device=division.rows_per_device,
        fsdp=fsdp,
        shard_words=model.shard_words,
        flops_per_token=training_flops(model, length),
        composes=model.composed_words(),
        state_bytes=state_bytes(fsdp),
        gathered_bytes=gathered_bytes(shapes, abstract_mesh(devices_used, fsdp), model),
        vector_bytes=4 * division.rows_per_device * length * model.body.features,
    )


def divide_update(config: Mapping, devices: int, hosts: int = 1) -> Division:
    """Divides the rows of an update over the devices of all hosts; with `tokens_per_device=0`, a
    device holds 4,096 tokens. Empty rows may be added to rows that are independent.

    It needs no corpus, so that wrong settings are found before one is prepared.

    Raises:
        InputError: inconsistent sizes, rows that hosts or `fsdp` do not divide, or an unknown
            layout or break mode.
    """
    batches, tokens_held = config["batches"], config["tokens_per_device"]
    length = batches["sequence_length"]
    check_layout(batches["break_mode"], batches["layout"])
    check_layout(scored_break_mode(config), batches["layout"], "evaluate_break_mode")
    rows, rest = divmod(config["tokens_per_update"], length)
    if rest or rows < 1:
        raise InputError(
            f"tokens_per_update={config['tokens_per_update']:,} must be a multiple"
            f" of batches.sequence_length={length:,}, and not 0: take {max(rows, 1) * length:,}"
        )
    if tokens_held and tokens_held < length:
        raise InputError(
            f"tokens_per_device={tokens_held:,} does not hold one row of {length:,} tokens: take"
            f" {length:,} or more, or 0 for what memory holds"
        )
    rows_held = (tokens_held or max(TOKENS, length)) // length
    pad = batches["layout"] != "streams"
    division = divide(rows, rows_held, devices, hosts, pad=pad)
    devices_used, fsdp = division.devices, config["fsdp"]
    if fsdp and devices_used % fsdp:
        number = f"{devices_used} of {devices}" if devices_used < devices else devices_used
        raise InputError(
            f"fsdp={fsdp} does not divide the {number} device(s) that share the {rows} rows of an"
            f" update: choose {one_of(divisors(devices_used, devices_used))}, or 0"
        )
    return division


def training_flops(model: LanguageModel, length: int) -> float:
    """FLOPs to train on a token in a row of `length`: three times those of the forward pass.

    These are 6 for each weight that multiplies a token in input and body (Kaplan et al. 2020), 12 ·
    layers · length · features in a transformer (Chowdhery et al. 2022, appendix B), and those of
    the output's loss. Composing words is left out, because it depends on their spelling.
    """
    shapes, bands = parameter_shapes(model), band_shapes(model)
    attention = getattr(model.body, "attention_flops", lambda length: 0)(length)
    layers = {name: shapes.get(name, {}) for name in ("input", "body")}
    if model.composes_input:
        layers["input"] = _of_ngrams(model, shapes)
    return 3 * (2 * multiplied(model, layers) + attention + model.output.flops(bands))


def multiplied(model: LanguageModel, params: Mapping) -> int:
    """Number of parameters in matrices that multiply vectors, which lookup tables do not. params:
    arrays or shapes.
    """
    return sum(
        math.prod(a.shape)
        for path, a in jax.tree.leaves_with_path(params)
        if len(a.shape) - is_stacked(path, model) >= 2 and not path[-1].key.startswith(TABLES)
    )


def check_memory(plan: Plan, memory: int) -> None:
    """Raises InputError if parameters, optimizer and word vectors exceed a device's bytes."""
    if (needed_bytes := plan.state_bytes + plan.vector_bytes) > memory:
        raise InputError(
            f"an update needs at least {needed_bytes / 1e9:,.1f} GB a device, and this one has"
            f" {memory / 1e9:,.1f} GB: make the model smaller, raise fsdp, or lower"
            " tokens_per_device or sequence_length"
        )


def choose_fsdp(
    config: Mapping, model: LanguageModel, devices: int, memory: int | None = None
) -> int:
    """Number of devices that share one copy of the parameters in evaluation: the config's `fsdp`,
    or as few as hold them in half of `memory`, the bytes of a device; one if that is None.
    """
    if config["fsdp"]:
        return math.gcd(config["fsdp"], devices)
    shapes = parameter_shapes(model)
    return _fewest(lambda fsdp: _sharded_bytes(model, shapes, devices, fsdp), devices, memory)


def devices_to_score(config: Mapping, devices: int, hosts: int = 1) -> int:
    """Number of devices that evaluate a run: all, or as many as the config's `fsdp` divides."""
    unit = math.lcm(hosts, config["fsdp"] or 1)
    return devices - devices % unit or devices


def rows_to_score(config: Mapping, window: int) -> int:
    """Rows of `window` tokens per device and scoring step, from the config's `tokens_per_device`,
    or 4,096 tokens if that is 0.
    """
    return max(1, (config["tokens_per_device"] or TOKENS) // window)


def describe(plan: Plan, data: Mapping, steps: int = 0) -> str:
    """The plan in a few lines.

    data: the config's group `data`, for the unit of the vocabulary.
    steps: updates of the run, to print its hours, and the numbers of devices that share an update
        without idle devices or empty rows; 0 prints neither.
    """
    parameters, rows = plan.parameters, plan.rows_per_update
    parts = ", ".join(f"{name} {_short(parameters[name])}" for name in ("input", "body", "output"))
    shared = f", parameters sharded over {plan.fsdp}" if plan.fsdp > 1 else ""
    empty = plan.accumulation * plan.rows_per_device * plan.devices - rows
    filled = f", {empty} of them empty" if empty else ""
    ids = data["corpus"] == "ids" or data["tokenizer"]
    units = "units" if data["codes"] else "ids" if ids else "words"
    beside = "" if plan.composes == "none" else ", beside composing words"
    lines = {"parameters": f"{_short(parameters['total'])}  ({parts})"}
    if ngrams := plan.ngrams:
        lines["n-grams"] = (
            f"{ngrams['rows']:,} rows in the input, {_short(ngrams['parameters'])} parameters,"
            f" {_large(ngrams['bytes'], 'GM')}B in all"
        )
    lines |= {
        "vocabulary": f"{plan.vocabulary_size:,} {units}",
        "update": f"{plan.tokens_per_update:,} tokens = {plan.accumulation} x"
        f" {plan.rows_per_device} rows x {plan.devices} device(s){filled}{shared}",
        "work": f"{plan.flops_per_token / 1e6:,.1f} MFLOP a token to train,"
        f" {_large(plan.flops_per_token * plan.tokens_per_update, 'TG')}FLOP an update{beside}",
        "state": f"{_large(plan.state_bytes, 'GM')}B a device: parameters and optimizer",
    }
    if plan.devices < plan.present:
        tokens = plan.tokens_per_update // rows * rows_for_all(rows, plan.present)
        lines["devices"] = (
            f"{rows} rows an update use {plan.devices} of {plan.present} devices; all work with"
            f" tokens_per_update={tokens}"
        )
    if plan.fsdp > 1:
        tables = f"tables of which {plan.fsdp} divides neither size; others stay where they are"
        lines["gathered"] = (
            f"{plan.gathered_bytes / 1e9:,.2f} GB a device at once: a layer of the body,"
            f" projections, and {tables if plan.shard_words else 'all tables'}"
        )
    elif plan.shard_words:
        lines["words"] = "all on each device: shard_words has no effect without fsdp"
    if steps:
        flops = plan.flops_per_token * plan.tokens_per_update * steps
        hours = (
            f"{flops / (SHARE * DEVICES[name].flops * 3600):,.1f} {name.upper()}" for name in SHOWN
        )
        lines["hours"] = (
            f"of one device, bfloat16 at {SHARE:.0%} of its peak (not measured): {', '.join(hours)}"
        )
        counts = one_of(divisors(rows, max(MOST, plan.present)))
        lines["even"] = f"{counts} device(s) share the {rows} rows of an update evenly"
    return "\n".join(f"{name:<13}{text}" for name, text in lines.items())


def _large(number, prefixes):
    """A number such as "95.30 T"; with the second prefix if it is below 0.1 of the first."""
    size = {"T": 1e12, "G": 1e9, "M": 1e6}
    prefix = prefixes[number < 0.1 * size[prefixes[0]]]
    return f"{number / size[prefix]:,.2f} {prefix}"


def _short(number):
    return f"{number / 1e6:,.1f}M" if number >= 5e4 or not number else f"{number / 1e3:,.1f}K"


def _count(shapes):
    return sum(math.prod(a.shape) for a in jax.tree.leaves(shapes))


def _of_ngrams(model, shapes):
    """The parameters of the input's n-grams; {} without."""
    names = () if word_layer(model.input) is model.input else shapes["input"].keys() - {"words"}
    return {name: shapes["input"][name] for name in sorted(names)}


def _sizes_of_ngrams(model, shapes):
    leaves = jax.tree.leaves_with_path(_of_ngrams(model, shapes))
    rows = sum(len(a) for path, a in leaves if path[-1].key.startswith(TABLES))
    parameters = _count([a for _, a in leaves])
    return {"rows": rows, "parameters": parameters, "bytes": 4 * parameters} if leaves else {}


def _fewest(bytes_for: Callable[[int], int], devices: int, memory: int | None) -> int:
    """The smallest divisor of `devices` that needs at most half of the memory; else all devices."""
    choices = [n for n in range(1, devices + 1) if devices % n == 0]
    return next((n for n in choices if memory is None or ROOM * bytes_for(n) <= memory), devices)


def _sharded_bytes(model, tree, devices, fsdp):
    """Bytes of a device's shards of parameters, or of a state with their structure."""
    mesh = abstract_mesh(devices, fsdp)
    specs = parameter_specs(tree, mesh, model)
    sizes = jax.tree.map(
        lambda a, spec: a.size * a.dtype.itemsize // shards(spec, mesh), tree, specs
    )
    return sum(jax.tree.leaves(sizes))
