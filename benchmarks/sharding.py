"""The full softmax's loss and gradients on 4 simulated devices, under plain `jax.jit` and under
`jax.shard_map`.

    python -m benchmarks.sharding [--tokens=1024,4096,8192] [--words=16384] [--width=128]
        [--repeats=9]

The tokens are cut over the devices; the table is whole on each of them, or cut by width over the
same devices (FSDP). Peers take turns:

- `shard_map`: the caller cuts tokens, gathers the table and sums the gradients.
- `Auto` and `Explicit`: arrays on a mesh of such axes, and nothing but `jax.jit`.
- `optax`: all logits, under plain `jax.jit` on Auto axes.

Devices share the processors of one machine, so a device that computes the tokens of others shows in
the time.
"""

import functools
import itertools

import jax
import numpy as np
import optax
from absl import flags
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive_jax.config import commands
from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from benchmarks.timing import interleaved

DEVICES = 4
NAMES = "shard_map", "Auto", "Explicit", "optax"
TABLES = {"whole": P(), "cut by width": P(None, "data")}


def all_logits(hidden, table, targets):
    """The loss of optax."""
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ table.T, targets).mean()


def in_shard_map(mesh, hidden, table, targets):
    """The loss, and the gradients of hidden and table, summed by hand."""

    def local(hidden, table, targets):
        total, (d_hidden, d_table) = with_gradients(
            functools.partial(linear_cross_entropy, reduction="sum")
        )(hidden, table, targets)
        count = DEVICES * targets.size
        total, d_table = jax.lax.psum((total, d_table), "data")
        return total / count, (d_hidden / count, d_table / count)

    specs, results = (P("data"), P(), P("data")), (P(), (P("data"), P()))
    # Without check_vma, gradients stay apart until they are summed above.
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)(
        hidden, table, targets
    )


def with_gradients(loss):
    """`loss`, with the gradients of its first two arguments."""
    return jax.value_and_grad(loss, (0, 1))


def peers(tokens, words, width, spec):
    """A function for each peer that returns loss and gradients."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((tokens, width), np.float32)
    table = rng.standard_normal((words, width), np.float32) * width**-0.5
    targets = rng.integers(0, words, tokens).astype(np.int32)
    made = {}
    for name, kind, loss in (
        ("shard_map", AxisType.Auto, None),
        ("Auto", AxisType.Auto, linear_cross_entropy),
        ("Explicit", AxisType.Explicit, linear_cross_entropy),
        ("optax", AxisType.Auto, all_logits),
    ):
        mesh = jax.make_mesh((DEVICES,), ("data",), (kind,))
        places = [NamedSharding(mesh, spec) for spec in (P("data"), spec, P("data"))]
        placed = jax.device_put((hidden, table, targets), tuple(places))
        step = with_gradients(loss) if loss else functools.partial(in_shard_map, mesh)
        out = NamedSharding(mesh, P()), (places[0], places[1])
        made[name] = functools.partial(jax.jit(step, out_shardings=out), *placed)
    return made


def main():
    """Prints a table."""
    options = flags.FLAGS
    jax.config.update("jax_num_cpu_devices", DEVICES)
    print("| tokens | table | " + " | ".join(f"{name}, ms" for name in NAMES) + " |")
    print("|---:|---|" + "---:|" * len(NAMES))
    sizes = itertools.product(map(int, options.tokens), TABLES.items())
    for tokens, (table, spec) in sizes:
        made = peers(tokens, options.words, options.width, spec)
        runs = {name: functools.partial(_run, step) for name, step in made.items()}
        found = {name: run() for name, run in runs.items()}
        for name, (total, gradients) in found.items():
            np.testing.assert_allclose(total, found["optax"][0], rtol=1e-5, err_msg=name)
            for one, other in zip(gradients, found["optax"][1], strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-7, err_msg=name)
        times = interleaved(runs, options.repeats)
        base = times["shard_map"][0]
        cells = [f"{1e3 * times[n][0]:,.0f} ({times[n][0] / base:.2f})" for n in NAMES]
        print(f"| {tokens:,} | {table} | " + " | ".join(cells) + " |", flush=True)


def _run(step):
    return jax.block_until_ready(step())


if __name__ == "__main__":
    flags.DEFINE_list("tokens", ["1024", "4096", "8192"], "How many tokens are scored.")
    flags.DEFINE_integer("words", 16_384, "Words of the vocabulary.")
    flags.DEFINE_integer("width", 128, "Width of the hidden states.")
    flags.DEFINE_integer("repeats", 9, "Turns of each peer.")
    commands.run(main)
