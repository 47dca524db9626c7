"""Exports a trained model for other programs.

    python -m adaptive_jax export --workdir=runs/quickstart --output=exported
    python -m adaptive_jax export --workdir=runs/quickstart --output=scorer --format=stablehlo

safetensors: the parameters with the config and the words, for programs that compute the model
    themselves. It is a workdir, too: evaluate.py and every other command that opens a trained run
    reads it.
stablehlo: a program that scores tokens, for anything that runs StableHLO, such as
jax.export.deserialize; its arrays; the words.

--output is a new directory. docs/interop.md describes the files.
"""

from typing import Annotated, NamedTuple

from adaptive_jax.config import commands
from adaptive_jax.config.flags import define_options, options
from adaptive_jax.config.options import Option
from adaptive_jax.errors import InputError

OF_PROGRAM = Option(within="[1, 2147483647]", only=("format", "stablehlo"))
STOPPED = "stopped: nothing was written; the same command exports anew"


class Export(NamedTuple):
    """Flags of the command.

    Attributes:
        output: New directory to write.
        format: What to write.
        checkpoint: best (by validation), latest, or a step.
        rows: Of --format=stablehlo: rows that the program scores at once.
        window: Of --format=stablehlo: tokens of a row; default: as in training.
    """

    output: str = ""
    format: Annotated[str, Option(among=("safetensors", "stablehlo"))] = "safetensors"
    checkpoint: str = "best"
    rows: Annotated[int, OF_PROGRAM] = 1
    window: Annotated[int | None, OF_PROGRAM] = None


def define_flags() -> None:
    """Defines the flags of the command."""
    define_options(Export, commands.Workdir, commands.Allow, commands.Hosts)


def main():
    """Runs the command."""
    # After the flags: --help and their errors should not wait for jax.
    from adaptive_jax.interop.export import export
    from adaptive_jax.interop.stablehlo import Shape
    from adaptive_jax.parallel import hosts

    chosen = options(Export)
    if not chosen.output:
        raise InputError("--output is missing: pass --output=DIRECTORY")
    shape = Shape(chosen.rows, chosen.window) if chosen.format == "stablehlo" else None
    workdir = commands.workdir()
    hosts.initialize(*options(commands.Hosts))
    with hosts.fail_together():
        export(workdir, chosen.output, chosen.checkpoint, shape)
