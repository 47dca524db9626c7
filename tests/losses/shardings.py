"""The loss in every arrangement of arrays on a mesh and under every transformation, against optax.

`python -m tests.losses.shardings`, on 4 simulated devices, prints the table of docs/losses.md.
"""

import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive_jax import linear_cross_entropy

BATCH, TIME, WIDTH, WORDS = 8, 6, 12, 28
MESHES = {"Explicit": AxisType.Explicit, "Auto": AxisType.Auto}
DEVICES = {"1": (1, 1), "4": (4, 1), "2x2": (2, 2)}
TOKENS = {"replicated": P(), "data": P("data"), "data and model": P("data", "model")}
TABLES = {"replicated": P(), "width": P(None, "model"), "words": P("model")}
CALLS = "jit", "grad", "scan", "remat", "vmap", "shard_map", "eager"


def arrays():
    """hidden, table, bias, weights and targets."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((BATCH, TIME, WIDTH), np.float32)
    table, bias = rng.standard_normal((WORDS, WIDTH), np.float32), np.linspace(-1, 1, WORDS)
    weights = rng.integers(0, 3, (BATCH, TIME)).astype(np.float32)
    targets = rng.integers(0, WORDS, (BATCH, TIME)).astype(np.int32)
    return hidden, table / 2, bias.astype(np.float32), weights, targets


def dense(hidden, table, bias, weights, targets):
    logits = hidden @ table.T + bias
    each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return jnp.sum(weights * each)


def loss(hidden, table, bias, weights, targets, **options):
    return linear_cross_entropy(
        hidden, table, targets, bias=bias, weights=weights, reduction="sum", **options
    )


def calls(mesh, tokens, table):
    """The sum of losses of these arrays, computed under each transformation."""

    def scanned(hidden, table, bias, weights, targets):
        def step(sum_, share):
            return sum_ + loss(hidden, table, bias, share * weights, targets), None

        return jax.lax.scan(step, 0.0, jnp.array([0.25, 0.75]))[0]

    def mapped(*arrays):
        return jax.vmap(loss, (0, None, None, 0, 0))(*arrays).sum()

    axes = [axis for axis in tokens if axis]
    inside = P() if table == P(None, "model") or "model" in axes else table
    options = {"axis_name": "model"} if inside else {}

    def local(*arrays):
        return jax.lax.psum(loss(*arrays, **options), axes) if axes else loss(*arrays, **options)

    def sharded(hidden, table, bias, weights, targets):
        if mesh.axis_types[0] == AxisType.Explicit:
            table, bias = (jax.sharding.reshard(a, NamedSharding(mesh, inside)) for a in (table, bias))
        specs = tokens, inside, inside, tokens, tokens
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(
            hidden, table, bias, weights, targets
        )

    return {
        "grad": loss,
        "scan": scanned,
        "remat": jax.checkpoint(loss),
        "vmap": mapped,
        "shard_map": sharded,
    }


def results(function):
    return jax.value_and_grad(function, (0, 1, 2, 3))


def apart(got, want):
    """The largest difference, relative to the largest number of its array."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(
        float(np.abs(np.asarray(a) - b).max() / np.abs(b).max()) for a, b in pairs
    )


def arrange(kind, devices, tokens, table):
    """A mesh, the arrays on it, and the function of each call."""
    shape = DEVICES[devices]
    mesh = jax.make_mesh(
        shape,
        ("data", "model"),
        axis_types=(MESHES[kind],) * 2,
        devices=jax.devices()[: shape[0] * shape[1]],
    )
    tokens, table = TOKENS[tokens], TABLES[table]
    bias = table if table == P("model") else P()
    specs = tokens, table, bias, tokens, tokens
    placed = [
        jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays(), specs, strict=True)
    ]
    return mesh, placed, calls(mesh, tokens, table)


def cells(arrangement, want):
    """How far each call's loss and gradients are from `want`, or its error, in this arrangement."""
    mesh, placed, functions = arrange(*arrangement)

    def under_jit(*arrays):
        return loss(*arrays), {name: results(f)(*arrays) for name, f in functions.items()}

    found = {}
    alone, by_call = jax.jit(under_jit)(*placed)
    found["jit"] = apart(alone, want[0])
    found |= {name: apart(got, want) for name, got in by_call.items()}
    found["eager, loss"] = apart(loss(*placed), want[0])
    with jax.set_mesh(mesh):
        found["eager"] = apart(results(loss)(*placed), want)
    return found


def expected():
    with jax.enable_x64(True):
        wide = [a if a.dtype == np.int32 else a.astype(np.float64) for a in arrays()]
        return jax.tree.map(np.asarray, results(dense)(*wide))


def every():
    return [*itertools.product(MESHES, DEVICES, TOKENS, TABLES)]


def main(chosen=None):
    want, table = expected(), {}
    for arrangement in every() if chosen is None else chosen:
        table[" ".join(arrangement)] = cells(arrangement, want)
    return table


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
