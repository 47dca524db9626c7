"""The bytes that an update moves between a device's cores and its memory, counted in the program
that the compiler makes for a device that need not be here.

    python -m benchmarks.traffic [--target=h100] [--rows=64] [--text=FILE]
    python -m benchmarks.traffic --target=v5e:2x2 --rows=8
    python -m benchmarks.traffic --config=configs/billion_word.py:gcnn_14b --rows=8

The default is `configs/wikitext103.py:adp_t` in bfloat16, in one batch of so many rows on each
device. Every instruction counts what it reads and writes, matrix products their operands and
results; of an array that is sliced, the slice. What a TPU keeps beside its cores is not in memory.
A loop whose trips only the device knows counts as one trip. Nothing is timed, and without the
device the compiler cannot choose the kernels of products, see docs/hosts.md.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs

import math
import re
from collections import Counter
from pathlib import Path

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config import flags as config_flags
from adaptive_jax.config.keys import resolve
from adaptive_jax.errors import check_at_least
from adaptive_jax.planning.targets import topology
from adaptive_jax.training.compiled import compile_for, memory_of
from adaptive_jax.training.sparse import parts_of
from benchmarks.collectives import (
    ARRAY,
    CALLERS,
    COLLECTIVES,
    Instruction,
    Program,
    exchanged,
    size,
)
from configs import wikitext103

# Instructions that neither read nor write memory, and those whose work is counted where it happens.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "add-dependency",
    "partition-id",
    "replica-id",
    "opt-barrier",
    "iota",
}
SLICES = "dynamic-slice", "slice", "gather"  # they read of their first operand what they return
WRITES = "dynamic-update-slice", "scatter"  # they change a part of their first operand
PRODUCTS = "dot", "convolution", "ragged-dot", "scaled-dot"
LAID_OUT = re.compile(r"[a-z]\w*\[[\d,<=]*\](?:\{[^}]*\})?")  # an array with its layout
ON_CHIP = re.compile(r"[a-z]\w*\[[\d,<=]*\]\{[^}]*S\([1-9]\d*\)[^}]*\}")
KINDS = "products", "kernels", "copies and slices", "all else", "collectives"


def in_memory(shape: str) -> int:
    """Bytes of the arrays of a shape that lie in the device's memory: `bf16[8,16]{1,0:S(1)}` lies
    beside a TPU's cores.
    """
    return size(ON_CHIP.sub("", shape))


def moved(text: str) -> dict[str, int]:
    """Bytes that one run of a program reads and writes in memory, by `KINDS`."""
    program, totals = Program(text), dict.fromkeys(KINDS, 0)
    for one, times in program.runs():
        totals[_kind(one, program)] += times * traffic(one, program)
    return totals


def traffic(one: Instruction, program: Program) -> int:
    """Bytes that an instruction reads and writes in memory; 0 for those that run others, which
    count where they are.
    """
    if one.opcode in FREE or one.opcode in CALLERS or one.opcode.endswith(("-done", "-update")):
        return 0
    if one.opcode.startswith("custom-call") and "AllocateBuffer" in one.rest:
        return 0
    opcode, made = one.opcode.removesuffix("-start"), one.shape
    if opcode in COLLECTIVES:
        return 2 * exchanged(one, program)
    given = [program.by_name[name].shape for name in one.inputs if name in program.by_name]
    if opcode != one.opcode:  # it returns its operands, what it makes, and a token
        arrays = _parts(made)
        made = arrays[0] if opcode == "copy" else " ".join(arrays[len(given) : -1])
    if _calls_product(one):
        made = _parts(made)[0]  # what follows is room to compute in
    if opcode == "fusion":
        return _of_fusion(program.computations[one.called[0]], given, made)
    if opcode in SLICES:
        return in_memory(made) + size(made) * _lies(given[0])
    if opcode in WRITES:
        return 2 * in_memory(given[-1 if opcode == "scatter" else 1])
    return in_memory(made) + sum(map(in_memory, given))


def _of_fusion(inner, given, made):
    """Bytes of a fusion of the instructions `inner`: of its operands what its results need, and of
    an array that it writes into the part that changes.
    """
    by_name = {one.name: one for one in inner}
    results = _results(inner[-1], by_name)
    needed = Counter({result.name: _elements(result.shape) for result in results})
    for user in reversed(inner):
        mine, whole = needed[user.name], _elements(user.shape)
        for place, name in enumerate(user.inputs if mine else ()):
            each = _elements(by_name[name].shape)
            if user.opcode in SLICES and place == 0:
                more = mine
            elif user.opcode in WRITES:
                more = each if place else 0
            else:
                more = each * mine / whole if each >= whole else mine
            needed[name] = min(each, needed[name] + more)
    total = 0
    for one in inner:
        if one.opcode == "parameter":
            shape = given[int(one.operands)]
            total += round(in_memory(shape) * needed[one.name] / max(1, _elements(shape)))
    arrays = iter(_parts(made))
    for result in results:
        shape = " ".join(next(arrays) for _ in _parts(result.shape))
        if result.opcode in WRITES:
            part = by_name[result.inputs[-1 if result.opcode == "scatter" else 1]].shape
            total += size(part) * _lies(shape)
        else:
            total += in_memory(shape)
    return total


def _results(root, by_name):
    """The instructions whose results a fusion returns."""
    if root.opcode not in ("bitcast", "tuple"):
        return [root]
    return [result for name in root.inputs for result in _results(by_name[name], by_name)]


def _parts(shape):
    """The arrays of a shape, which may be a tuple of tuples, in order."""
    return [match[0] for match in LAID_OUT.finditer(shape)]


def _lies(shape):
    """True if an array lies in memory."""
    return bool(in_memory(shape))


def _elements(shape):
    return sum(
        math.prod(int(n) for n in sizes.split(",") if n) for _, sizes in ARRAY.findall(shape)
    )


def _calls_product(one):
    return one.opcode == "custom-call" and bool(
        re.search(r"target=\"[^\"]*(gemm|matmul)", one.rest)
    )


def _kind(one, program):
    opcode = one.opcode.removesuffix("-start")
    if opcode in COLLECTIVES:
        return "collectives"
    if opcode == "custom-call":
        return "products" if _calls_product(one) else "kernels"
    inside = program.computations[one.called[0]] if opcode == "fusion" else [one]
    if any(each.opcode in PRODUCTS for each in inside):
        return "products"
    return "copies and slices" if opcode in ("copy", "slice", "dynamic-slice") else "all else"


def main(settings) -> None:
    """Prints the counts; writes the program's text."""
    check_at_least(1, **{"--rows": settings.rows})
    config = resolve(wikitext103.get_config("adp_t")) | {"dtype": "bfloat16"}
    if config_flags.has_config():
        config = config_flags.config()[0]
    tokens = settings.rows * config["batches"]["sequence_length"]
    everywhere = tokens * len(topology(settings.target).devices)
    config = config | {"tokens_per_update": everywhere, "tokens_per_device": tokens}
    parts = parts_of(config, config["data"]["vocabulary_size"])
    target, _, compiled = compile_for(settings.target, config, parts)
    state, temporary = memory_of(compiled)
    counts = moved(text := compiled.as_text())
    print(f"{target.devices[0].device_kind}, {tokens:,} tokens a device\n")
    print("| counted by the compiler, for one device | GB |\n|---|---:|")
    print(f"| temporary memory | {temporary / 1e9:.2f} |\n| state and batch | {state / 1e9:.2f} |")
    for kind, count in (counts | {"all of these": sum(counts.values())}).items():
        print(f"| moved by {kind} | {count / 1e9:.1f} |")
    if settings.text:
        Path(settings.text).write_text(text)


if __name__ == "__main__":
    config_flags.define("Config file and row, instead of wikitext103:adp_t in bfloat16")
    flags.DEFINE_string("target", "h100", "The device, as --target of train.py.")
    flags.DEFINE_integer("rows", 64, "Rows of a batch on each device.")
    flags.DEFINE_string("text", None, "File for the compiled program, to read.")
    commands.run(lambda: main(flags.FLAGS))
