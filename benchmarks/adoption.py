"""nanodo's model with its own loss, and with linear_cross_entropy in its place.

    git clone https://github.com/google-deepmind/nanodo
    pip install grain
    python -m benchmarks.adoption --source=nanodo [--vocabularies=4096,131072] [--repeats=5]

Model, loss, batches and shardings are imported from the checkout: a tiny transformer whose tied
table is cut by width over a mesh of 8 simulated CPU devices, or whole on each (`fsdp_enabled` of
nanodo). Tokens are cut by rows, under plain `jax.jit`, as nanodo's trainer has it. Only the loss
differs: nanodo's makes all logits and gives them to optax; the other reads the hidden states that
the model multiplies with its table.

For each vocabulary and layout it prints a line for each loss:

- `loss`: the mean of the tokens that are not padding, in nats.
- `gradients`: the largest difference from nanodo's, relative to the largest entry of each array.
- `ms`: median of the time of loss and gradients. Simulated devices share the cores of one machine,
  so this is the work of all devices together: shares that every device computes anew show.
- `temp MB`: temporary memory of one device, counted by the compiler.
- collectives of the compiled program: how many run in one call, and the bytes of one device. Those
  in a loop whose trips depend on the data count once.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from adaptive_jax.training.compiled import memory_of
from benchmarks.collectives import collectives
from benchmarks.timing import machine, timed, write_json

DEVICES = 8
ROWS, LENGTH = 16, 64
SHAPE = {"D": 64, "H": 4, "L": LENGTH, "N": 2, "F": 256}  # nanodo's names
OTHERS, OURS = "nanodo's loss", "linear_cross_entropy"


class Nanodo(NamedTuple):
    """The modules of a checkout."""

    data: ModuleType
    loss: ModuleType
    model: ModuleType


def modules(source: str | None) -> Nanodo:
    """nanodo's modules from a checkout.

    Raises:
        InputError: the directory is no checkout, or a package that nanodo imports is missing.
    """
    if source is None or not Path(source, "nanodo", "model.py").exists():
        raise InputError(
            f"--source must be a checkout of nanodo, got {source}: git clone"
            " https://github.com/google-deepmind/nanodo, then --source=nanodo"
        )
    sys.path.insert(0, str(Path(source).absolute()))
    try:
        return Nanodo(*(importlib.import_module(f"nanodo.{name}") for name in Nanodo._fields))
    except ModuleNotFoundError as error:
        package = str(error.name).split(".")[0]
        raise InputError(
            f"nanodo imports {error.name}, which is not installed: pip install {package}"
        ) from error


def hidden_states(next_method, args, kwargs, context):
    """An interceptor of flax: `Embed.attend` gives what it was to multiply with the table."""
    if isinstance(context.module, nn.Embed) and context.method_name == "attend":
        return args[0]
    return next_method(*args, **kwargs)


def in_its_place(nanodo: Nanodo, batch, apply_fn):
    """A loss with the arguments of nanodo's own, that makes no logits."""

    def loss_fn(params):
        tokens, targets, weights = nanodo.data.get_in_out(batch)
        with nn.intercept_methods(hidden_states):
            hidden = apply_fn({"params": params}, tokens)
        table = nn.unbox(params)["embed"]["embedding"]
        return linear_cross_entropy(hidden, table, targets, weights=weights)

    return loss_fn


def its_own(nanodo: Nanodo, batch, apply_fn):
    """nanodo's loss."""
    loss_fn = nanodo.loss.get_default_loss_fn(batch, apply_fn, {})
    return lambda params: loss_fn(params)[0]


def programs(nanodo: Nanodo, words: int, by_width: bool, mesh: Mesh):
    """Name to the compiled program of loss and gradients, and its arguments."""
    config = nanodo.model.DoConfig(V=words, fsdp_enabled=by_width, **SHAPE)
    model = nanodo.model.TransformerDo(config)
    rng = np.random.default_rng(0)
    # A twelfth is nanodo's padding, id 0.
    batch = np.where(rng.random((ROWS, LENGTH)) < 1 / 12, 0, rng.integers(1, words, (ROWS, LENGTH)))
    batch = jax.device_put(batch.astype(np.int32), NamedSharding(mesh, P()))

    def init():
        return model.init(jax.random.key(0), batch[:1])["params"]

    shardings = nn.get_sharding(jax.eval_shape(init), mesh)
    params = jax.jit(init, out_shardings=shardings)()

    def compiled(loss):
        def step(params, batch):
            batch = jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, P("data")))
            return jax.value_and_grad(loss(nanodo, batch, model.apply))(params)

        out = NamedSharding(mesh, P()), shardings
        return jax.jit(step, out_shardings=out).lower(params, batch).compile()

    return {OTHERS: compiled(its_own), OURS: compiled(in_its_place)}, (params, batch)


def largest_difference(expected, found) -> float:
    """Of two trees of arrays, each relative to the largest entry of the expected array."""

    def one(a, b):
        return float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(a)).max())

    return max(map(one, jax.tree.leaves(expected), jax.tree.leaves(found)))


def measure(nanodo: Nanodo, words: int, by_width: bool, mesh: Mesh, repeats: int) -> list[dict]:
    """A row for each loss."""
    compiled, arguments = programs(nanodo, words, by_width, mesh)
    results = {name: program(*arguments) for name, program in compiled.items()}
    runs = {
        name: lambda program=program: jax.block_until_ready(program(*arguments))
        for name, program in compiled.items()
    }
    rows = timed(runs, repeats)
    for row in rows:
        name = row["peer"]
        row |= {
            "words": words,
            "table": "by width" if by_width else "replicated",
            "loss": float(results[name][0]),
            "gradients": largest_difference(results[OTHERS][1], results[name][1]),
            "temp_bytes": memory_of(compiled[name]).temporary,
            "collectives": collectives(compiled[name]),
        }
    return rows


def line(row: dict) -> str:
    """A row for the eye, beneath `TITLE`."""
    moved = ", ".join(
        f"{one['count']} {one['kind']} ({one['bytes'] / 1e6:,.1f} MB)" for one in row["collectives"]
    )
    return (
        f"{row['words']:>8,} {row['table']:10} {row['peer']:21} {row['loss']:9.6f}"
        f" {row['gradients']:9.0e} {row['seconds'] * 1e3:7.0f} {row['temp_bytes'] / 1e6:8,.1f}"
        f"   {moved}"
    )


TITLE = (
    f"{'words':>8} {'table':10} {'loss of':21} {'loss':>9} {'gradients':>9} {'ms':>7}"
    f" {'temp MB':>8}   collectives"
)


def main(settings):
    """Prints the table and writes the JSON."""
    check_at_least(1, repeats=settings.repeats)
    nanodo = modules(settings.source)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    print(f"{machine()}, {len(jax.devices())} devices, {ROWS * LENGTH:,} tokens, {SHAPE}")
    print(TITLE)
    rows = []
    for words in map(int, settings.vocabularies):
        for by_width in (True, False):
            for row in measure(nanodo, words, by_width, mesh, settings.repeats):
                print(line(row), flush=True)
                rows.append(row)
    write_json(settings.json, rows)


if __name__ == "__main__":
    flags.DEFINE_string("source", None, "A checkout of github.com/google-deepmind/nanodo.")
    flags.DEFINE_list("vocabularies", ["4096", "131072"], "Numbers of words.")
    flags.DEFINE_integer("repeats", 5, "Timed runs of each loss.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda: main(flags.FLAGS))
