"""Models of other trainers with their own loss, and with linear_cross_entropy in its place.

    git clone https://github.com/google-deepmind/nanodo
    pip install grain
    python -m benchmarks.adoption --source=nanodo [--vocabularies=4096,131072] [--repeats=5]
    python -m benchmarks.adoption --trainer=maxtext --source=maxtext [--layouts='fsdp 8']
    python -m benchmarks.adoption --trainer=levanter --source=levanter
    python -m benchmarks.adoption --trainer=levanter --source=levanter --target=h100:8

A trainer's model, loss and shardings are imported from its checkout, and run in small on a mesh of
8 simulated CPU devices, under plain `jax.jit`, as the trainer has them. Only the loss differs: the
trainer's own, or one that reads the hidden states which the model multiplies with its table.
`benchmarks/trainers/` has the changed lines. What a trainer imports and is not installed is named
in the error, one package at a time; levanter needs `pip install --pre haliax`.

For each layout of parameters and tokens and each vocabulary it prints a line for each loss:

- `loss`: the mean of the tokens that are not padding, in nats.
- `gradients`: the largest difference from those of the trainer's first loss, relative to the
  largest entry of each array.
- `ms`: median of the time of loss and gradients; `--repeats=0` leaves it out. Simulated devices
  share the cores of one machine, so this is the work of all devices together: shares that every
  device computes anew show.
- `temp MB`: memory of one device beside its arguments, gradients included, counted by the compiler.
- collectives of the compiled program: how many run in one call, and the bytes of one device. Those
  in a loop whose trips depend on the data count once.

With `--target`, loss and gradients are compiled for 8 GPUs that need not be here, at `LARGE`,
products in bfloat16, and nothing runs. `ms` is then the time by `benchmarks.roofline` of all but
collectives, and linear_cross_entropy gets neither weights nor an ignore_index, so that the trips of
its loops are known. It needs the extra `targets` in the trainer's environment.
"""

import functools
import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from adaptive_jax.planning.targets import topology
from adaptive_jax.training.compiled import memory_of
from benchmarks import roofline
from benchmarks.collectives import COLLECTIVES, collectives
from benchmarks.timing import launched, machine, timed, whole_numbers, write_json
from benchmarks.trainers import Size

DEVICES = 8
LARGE = Size(128_256, width=2048, heads=16, rows=32, length=2048, dtype="bfloat16")
# Repository, and the folder of a checkout that holds the package.
TRAINERS = {
    "nanodo": ("google-deepmind/nanodo", ""),
    "maxtext": ("AI-Hypercomputer/maxtext", "src"),
    "levanter": ("stanford-crfm/levanter", "src"),
}


def trainer_module(trainer: str, source: str | None) -> ModuleType:
    """The module of `benchmarks.trainers` for a trainer, whose checkout it imports.

    Raises:
        InputError: the directory is no checkout, or a package that the trainer imports is missing.
    """
    repository, folder = TRAINERS[trainer]
    if source is None or not Path(source, folder, trainer).is_dir():
        raise InputError(
            f"--source must be a checkout of {trainer}, got {source}: git clone"
            f" https://github.com/{repository}, then --source={trainer}"
        )
    sys.path.insert(0, str(Path(source, folder).absolute()))
    try:
        return importlib.import_module(f"benchmarks.trainers.{trainer}")
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        raise InputError(
            f"{trainer} imports {error.name}, which is not installed: pip install {package}"
        ) from error


def largest_difference(expected, actual) -> float:
    """Of two trees of arrays, each relative to the largest entry of the expected array."""

    def one(a, b):
        return float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(a)).max())

    return max(jax.tree.leaves(jax.tree.map(one, expected, actual)))


def allocated(make, shardings):
    """Arrays of a function, on the devices of their shardings."""
    return jax.jit(make, out_shardings=shardings)()


def described(make, shardings):
    """Shapes of a function's arrays, for devices that need not be here."""
    shapes = jax.eval_shape(make)
    return jax.tree.map(
        lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
        shapes,
        jax.tree.broadcast(shardings, shapes),
    )


def measure(trainer: ModuleType, layout: str, words: int, repeats: int) -> list[dict]:
    """A row for each loss."""
    programs = {
        name: (lowered.compile(), arguments)
        for name, (lowered, arguments) in trainer.programs(
            layout, Size(words), jax.devices(), allocated
        ).items()
    }
    results = {name: program(*arguments) for name, (program, arguments) in programs.items()}
    rows = [{"peer": name, "seconds": None} for name in programs]
    if repeats:
        rows = timed(
            {name: launched(one, *args) for name, (one, args) in programs.items()}, repeats
        )
    _, expected = next(iter(results.values()))
    for row in rows:
        program, _ = programs[row["peer"]]
        loss, gradients = results[row["peer"]]
        row |= {
            "loss": float(loss),
            "gradients": largest_difference(expected, gradients),
        }
        row |= counts(program, layout, words)
    return rows


def counts(program: jax.stages.Compiled, layout: str, words: int) -> dict:
    """The compiler's counts of a program, as a part of a row."""
    return {
        "words": words,
        "layout": layout,
        "temp_bytes": memory_of(program).temporary,
        "collectives": collectives(program),
    }


def of_all_tokens(*arrays, weights=None, **settings):
    """linear_cross_entropy with loops whose trips are known when it is compiled."""
    return linear_cross_entropy(*arrays, ignore_index=None, **settings)


def count(trainer: ModuleType, layout: str, target: str) -> list[dict]:
    """A row for each loss, compiled for devices that need not be here."""
    devices, rates, rows = topology(target), roofline.rates_of(target), []
    for name, (lowered, _) in trainer.programs(layout, LARGE, devices.devices, described).items():
        program = lowered.compile(compiler_options=devices.options)
        seconds = sum(
            kernel.seconds(rates)
            for kernel in roofline.kernels(program.as_text())
            if kernel.instruction.opcode.removesuffix("-start") not in COLLECTIVES
        )
        row = {"peer": name, "seconds": seconds, "loss": None, "gradients": None}
        rows.append(row | counts(program, layout, LARGE.words))
    return rows


def line(row: dict) -> str:
    """A row for the eye, beneath `TITLE`."""
    moved = ", ".join(
        f"{one['count']} {one['kind']} ({one['bytes'] / 1e6:,.1f} MB)" for one in row["collectives"]
    )
    ms = "" if row["seconds"] is None else f"{row['seconds'] * 1e3:.1f}"
    result = "" if row["loss"] is None else f"{row['loss']:10.7f} {row['gradients']:9.0e}"
    return (
        f"{row['words']:>8,} {row['layout']:16} {row['peer']:20} {result:20}"
        f" {ms:>7} {row['temp_bytes'] / 1e6:8,.1f}   {moved}"
    )


TITLE = (
    f"{'words':>8} {'layout':16} {'loss of':20} {'loss':>10} {'gradients':>9} {'ms':>7}"
    f" {'temp MB':>8}   collectives"
)


def main(settings):
    """Prints the table and writes the JSON."""
    check_at_least(0, repeats=settings.repeats)
    # Before a trainer's modules, which may start JAX.
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    trainer = trainer_module(settings.trainer, settings.source)
    loss = of_all_tokens if settings.target else linear_cross_entropy
    trainer.linear_cross_entropy = functools.partial(loss, chunk=settings.chunk)
    layouts = settings.layouts or [*trainer.LAYOUTS]
    for layout in layouts:
        if layout not in trainer.LAYOUTS:
            raise InputError(f"--layouts must be of {[*trainer.LAYOUTS]}, got {layout!r}")
    print(f"{settings.target or machine()}, {DEVICES} devices, {settings.trainer}")
    print(TITLE)
    if settings.target:
        batches = (count(trainer, layout, settings.target) for layout in layouts)
    else:
        batches = (
            measure(trainer, layout, words, settings.repeats)
            for words in whole_numbers("--vocabularies", settings.vocabularies)
            for layout in layouts
        )
    rows = []
    for row in itertools.chain.from_iterable(batches):
        print(line(row), flush=True)
        rows.append(row)
    write_json(settings.json, rows)


if __name__ == "__main__":
    flags.DEFINE_enum("trainer", "nanodo", [*TRAINERS], "Whose model and loss.")
    flags.DEFINE_string("source", None, "A checkout of the trainer's repository.")
    flags.DEFINE_list("vocabularies", ["4096", "131072"], "Numbers of words.")
    flags.DEFINE_multi_string("layouts", None, "Meshes and shardings; all of the trainer's.")
    flags.DEFINE_string("target", None, "Compile for these devices and count: h100:8.")
    flags.DEFINE_integer("chunk", None, "Tokens of a chunk of linear_cross_entropy.")
    flags.DEFINE_integer("repeats", 5, "Timed runs of each loss; 0: counts alone.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda: main(flags.FLAGS))
