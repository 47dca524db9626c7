"""Counts of an update compiled for a device that is not here: memory, traffic, loops and the work
of the output's head.

    python -m benchmarks.compiled [--target=h100] [--rows=64] [--json=FILE]
    python -m benchmarks.compiled --config=configs/wikitext103.py:adp --target=v5e:2x2 \\
        --config.dtype=bfloat16

The default is `configs/wikitext103.py:adp_t` in bfloat16, 64 rows of 512 tokens in one batch.
Nothing is timed. docs/hosts.md says what must be installed; the compiler takes minutes.

Bytes of a layer are those that its forward and its backward pass read and write, outside matrix
products: the sum over one trip of the body's two loops, or, where blocks are unrolled, all of the
body's bytes over the number of layers. A kernel that computes attention whole is no matrix product;
its arguments and results count.

On a device, XLA times its own kernels for a product and those of NVIDIA's library, which also add
biases and read slices of larger arrays, and takes the fastest. Without one it takes its own for
every product; with `--cublas`, the library's.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs

import json
from pathlib import Path

import jax
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config import flags as config_flags
from adaptive_jax.config.keys import resolve
from adaptive_jax.errors import check_at_least
from adaptive_jax.model.language_model import build, variable_shapes
from adaptive_jax.planning.targets import topology
from adaptive_jax.training.compiled import compile_for
from benchmarks.programs import Program, read, report
from configs import wikitext103

GIB = 2**30
BODY = "hidden/body/"  # what the compiler calls the work of the body
BLOCKS = f"{BODY}while"  # and the loop over blocks
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
PADDING = 256  # columns that a compiler may add to the head's words and clusters


def published() -> dict:
    """The config of `adp_t` in bfloat16."""
    return resolve(wikitext103.get_config("adp_t")) | {"dtype": "bfloat16"}


def of_layers(loops: list[dict], layers: int) -> list[dict]:
    """The loops over a body's blocks, forward and backward, of one batch; loops inside them are
    counted there.
    """
    return [
        loop
        for loop in loops
        if loop["trips"] == layers and loop["runs"] == 1 and loop["source"].endswith(BLOCKS)
    ]


def head_rows(program: Program, words: int, width: int) -> int:
    """Rows of logits that a run computes in the head's products, the rows of an incomplete chunk
    included.

    Products are told by their sizes, so no other layer may be about as wide as the head has words.
    """
    columns = range(words, words + PADDING)
    products = [
        (m, n, times)
        for m, n, k, times in program.products()
        if k == width and (m in columns or n in columns)
    ]
    return sum((m if n in columns else n) * times for m, n, times in products)


def counts(config: dict, rows: int, name: str, cublas: bool = False) -> dict:
    """Everything that is printed, of an update of `rows` rows on each device in one batch; see
    the module for `cublas`.
    """
    tokens = rows * config["batches"]["sequence_length"]
    config = config | {
        "tokens_per_update": tokens * len(topology(name).devices),
        "tokens_per_device": tokens,
    }
    target, plan, compiled = compile_for(name, config, CUBLAS if cublas else None)
    found, program = report(compiled), Program(*read(text := compiled.as_text()))
    loops = of_layers(found["loops"], layers := config["body"].get("layers", 0))
    model = build(config, plan.vocabulary_size)
    table = jax.eval_shape(
        lambda v: model.apply(v, method=lambda m: m.output.bands()), variable_shapes(model)
    )[0].table
    return found | {
        "target": target.devices[0].device_kind,
        "tokens": tokens,
        "layer_bytes": (
            sum(loop["moved_bytes"] for loop in loops)
            or (layers and program.moved_by(BODY) // layers)
        ),
        "hoisted": max((loop["hoisted"] for loop in loops), default=0),
        "head_rows": head_rows(program, *table.shape),
        "text": text,
    }


def main(settings) -> None:
    """Prints the counts, and the largest arrays and loops; writes the JSON."""
    check_at_least(1, **{"--rows": settings.rows})
    found = counts(
        config_flags.config()[0] if settings.config else published(),
        settings.rows,
        settings.target,
        settings.cublas,
    )
    text = found.pop("text")
    print(f"{found['target']}, {found['tokens']:,} tokens a device\n")
    print("| counted by the compiler, for one device | |\n|---|---:|")
    print(f"| temporary memory, GiB | {found['temp_bytes'] / GIB:.2f} |")
    print(f"| state and batch, GiB | {found['state_bytes'] / GIB:.2f} |")
    if found["layer_bytes"]:  # 0 where the body has no layers
        print(f"| moved outside products, GB a layer | {found['layer_bytes'] / 1e9:.2f} |")
    print(f"| moved outside products, GB an update | {found['moved_bytes'] / 1e9:.1f} |")
    print(f"| largest array that every layer reads whole, MiB | {found['hoisted'] / 2**20:.2f} |")
    print(f"| rows that the head computes | {found['head_rows']:,} |")
    for one in found["collectives"]:
        print(f"| {one['kind']}, {one['count']} times, GB | {one['bytes'] / 1e9:.2f} |")
    print("\nlargest arrays")
    for one in found["largest"]:
        print(
            f"{one['bytes'] / GIB:9.3f} GiB {one['count']:3} x {one['shape']:32}"
            f" {one['source'][-90:]}"
        )
    print("\nloops: trips, GB a trip, MiB read whole")
    for one in found["loops"][:10]:
        moved, hoisted = one["moved_bytes"] / 1e9, one["hoisted"] / 2**20
        print(
            f"{one['runs']:3} x {one['trips']!s:5} {moved:9.3f} {hoisted:9.2f}"
            f" {one['source'][-90:]}"
        )
    if settings.json:
        Path(settings.json).write_text(json.dumps(found, indent=2) + "\n")
    if settings.text:
        Path(settings.text).write_text(text)


if __name__ == "__main__":
    config_flags.define("Config file and row, instead of wikitext103:adp_t in bfloat16")
    flags.DEFINE_string("target", "h100", "The device, as --target of train.py.")
    flags.DEFINE_integer("rows", 64, "Rows of a batch on each device.")
    flags.DEFINE_bool("cublas", False, "Take cuBLAS for all products of a GPU.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    flags.DEFINE_string("text", None, "File for the compiled program, to read.")
    commands.run(lambda: main(flags.FLAGS))
