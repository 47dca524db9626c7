"""Exports a trained model for other programs.

    python -m adaptive_jax export --workdir=runs/quickstart --output=exported
    python -m adaptive_jax export --workdir=runs/quickstart --output=scorer --format=stablehlo

safetensors: the parameters with the config and the words, for programs that compute the model
    themselves. It is a workdir, too: evaluate.py and every other command that opens a trained run
    reads it.
stablehlo: a program that scores tokens, for anything that runs StableHLO, such as
jax.export.deserialize; its arrays; the words.

--output is a new directory. docs/interop.md describes the
files.
"""

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError

OUTPUT = flags.DEFINE_string("output", None, "New directory to write.")
FORMAT = flags.DEFINE_enum("format", "safetensors", ["safetensors", "stablehlo"], "What to write.")
CHECKPOINT = commands.define_checkpoint()
ROWS = flags.DEFINE_integer(
    "rows", 1, "Of --format=stablehlo: rows that the program scores at once."
)
WINDOW = flags.DEFINE_integer(
    "window", None, "Of --format=stablehlo: tokens of a row. Default: as in training."
)
commands.define_workdir("Directory of a run that train.py made.")
flags.adopt_module_key_flags(commands)  # --help shows them
STOPPED = "stopped: nothing was written; the same command exports anew"


def main():
    """Exports what the flags say."""
    from adaptive_jax.interop.export import Shape, export

    # After the flags: --help and their errors should not wait for jax.
    from adaptive_jax.parallel import hosts

    if not OUTPUT.value:
        raise InputError("--output is missing: pass --output=DIRECTORY")
    for flag in ROWS, WINDOW:
        if flag.present and FORMAT.value == "safetensors":
            raise InputError(
                f"--{flag.name} has no effect with --format=safetensors: leave it out, or use"
                " --format=stablehlo"
            )
    shape = Shape(ROWS.value, WINDOW.value) if FORMAT.value == "stablehlo" else None
    workdir, host = commands.workdir()
    hosts.initialize(*host)
    with hosts.fail_together():
        export(workdir, OUTPUT.value, CHECKPOINT.value, shape)
