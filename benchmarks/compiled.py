"""Counts of an update compiled for a device that is not here: memory, the largest arrays, and what
crosses devices.

    python -m benchmarks.compiled [--target=h100] [--rows=64] [--json=FILE]
    python -m benchmarks.compiled --config=configs/wikitext103.py:adp --target=v5e:2x2 \\
        --config.dtype=bfloat16

The default is `configs/wikitext103.py:adp_t` in bfloat16, 64 rows of 512 tokens in one batch.
Nothing is timed. docs/hosts.md says what must be installed; the compiler takes minutes.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"  # nothing runs

import json
from pathlib import Path

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config import flags as config_flags
from adaptive_jax.config.keys import resolve
from adaptive_jax.errors import check_at_least
from adaptive_jax.planning.targets import topology
from adaptive_jax.training.compiled import compile_for
from benchmarks.programs import report
from configs import wikitext103

GIB = 2**30


def published() -> dict:
    """The config of `adp_t` in bfloat16."""
    return resolve(wikitext103.get_config("adp_t")) | {"dtype": "bfloat16"}


def counts(config: dict, rows: int, name: str) -> dict:
    """Everything that is printed, of an update of `rows` rows on each device in one batch."""
    tokens = rows * config["batches"]["sequence_length"]
    devices = len(topology(name).devices)
    config = config | {"tokens_per_update": tokens * devices, "tokens_per_device": tokens}
    target, _, compiled = compile_for(name, config)
    about = {"target": target.devices[0].device_kind, "tokens": tokens, "text": compiled.as_text()}
    return report(compiled) | about


def main(settings) -> None:
    """Prints the counts and the largest arrays; writes the JSON."""
    check_at_least(1, **{"--rows": settings.rows})
    found = counts(
        config_flags.config()[0] if settings.config else published(),
        settings.rows,
        settings.target,
    )
    text = found.pop("text")
    print(f"{found['target']}, {found['tokens']:,} tokens a device\n")
    print("| counted by the compiler, for one device | |\n|---|---:|")
    print(f"| temporary memory, GiB | {found['temp_bytes'] / GIB:.2f} |")
    print(f"| state and batch, GiB | {found['state_bytes'] / GIB:.2f} |")
    for one in found["collectives"]:
        print(f"| {one['kind']}, {one['count']} times, GB | {one['bytes'] / 1e9:.2f} |")
    print("\nlargest arrays")
    for one in found["largest"]:
        print(
            f"{one['bytes'] / GIB:9.3f} GiB {one['count']:3} x {one['shape']:32}"
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
    flags.DEFINE_string("json", None, "File for the numbers.")
    flags.DEFINE_string("text", None, "File for the compiled program, to read.")
    commands.run(lambda: main(flags.FLAGS))
