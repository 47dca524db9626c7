"""The loss for every arrangement of arrays on a mesh and every way to call it, against all logits:
what docs/losses.md says of meshes.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive_jax import linear_cross_entropy

BATCH, TIME, WIDTH, WORDS = 8, 6, 12, 28
KINDS = {"Explicit": AxisType.Explicit, "Auto": AxisType.Auto}
DEVICES = {"1": (1, 1), "4": (4, 1), "2 x 2": (2, 2)}
TOKENS = {"replicated": P(), "data": P("data"), "data and model": P("data", "model")}
TABLES = "replicated", "width", "words"
CALLS = "jit", "grad", "scan", "remat", "vmap", "shard_map", "eager"
FACTORS = KINDS, DEVICES, TOKENS, TABLES, CALLS
EVERY = [*itertools.product(*FACTORS)]


def pairwise():
    """Few cells in which every two values of two factors meet."""

    def pairs(cell):
        return {*itertools.combinations(enumerate(cell), 2)}

    waiting, chosen = set().union(*map(pairs, EVERY)), []
    while waiting:
        chosen.append(max(EVERY, key=lambda cell: len(waiting & pairs(cell))))
        waiting -= pairs(chosen[-1])
    return chosen


def arrays():
    """hidden, table, bias, weights and targets."""
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((BATCH, TIME, WIDTH), np.float32)
    table = rng.standard_normal((WORDS, WIDTH), np.float32) / 2
    bias = np.linspace(-1, 1, WORDS, dtype=np.float32)
    weights = rng.integers(0, 3, (BATCH, TIME)).astype(np.float32)
    return hidden, table, bias, weights, rng.integers(0, WORDS, (BATCH, TIME)).astype(np.int32)


def losses_of(logits, targets):
    """Nats `[...]` of logits `[..., words]`."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def dense(hidden, table, bias, weights, targets):
    logits = hidden @ table.T + bias
    return jnp.sum(counted(weights) * losses_of(logits, targets))


def counted(weights):
    """The weights; those that are 0 without a gradient."""
    return jnp.where(weights != 0, weights, 0.0)


def loss(hidden, table, bias, weights, targets, **options):
    options = {"bias": bias, "weights": counted(weights), "reduction": "sum"} | options
    return linear_cross_entropy(hidden, table, targets, **options)


def with_gradients(function):
    return jax.value_and_grad(function, (0, 1, 2, 3))


def expected():
    """Loss and gradients in float64."""
    with jax.enable_x64(True):
        wide = [a if a.dtype == np.int32 else a.astype(np.float64) for a in arrays()]
        return jax.tree.map(np.asarray, with_gradients(dense)(*wide))


def arrange(kind, devices, tokens, table):
    """A mesh, and the arrays on it. On 4 devices the axis of the tokens cuts the table, too."""
    shape, tokens = DEVICES[devices], TOKENS[tokens]
    mesh = jax.make_mesh(
        shape, ("data", "model"), (KINDS[kind],) * 2, devices=jax.devices()[: np.prod(shape)]
    )
    axis = "data" if devices == "4" else "model"
    rows = P(axis) if table == "words" else P()
    specs = tokens, P(None, axis) if table == "width" else rows, rows, tokens, tokens
    pairs = zip(arrays(), specs, strict=True)
    return mesh, [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in pairs]


def scanned(hidden, table, bias, weights, targets):
    def step(total, share):
        return total + loss(hidden, table, bias, share * weights, targets), None

    return jax.lax.scan(step, 0.0, jnp.array([0.25, 0.75]))[0]


def mapped(*arrays):
    return jax.vmap(loss, (0, None, None, 0, 0))(*arrays).sum()


def in_shard_map(mesh, placed):
    """The loss in `jax.shard_map`, which cuts words too where their axis does not cut tokens."""
    tokens, table = (array.sharding.spec for array in placed[:2])
    axes = tuple(filter(None, tokens))
    words = table[0] if table and table[0] not in axes else None

    def local(*arrays):
        return jax.lax.psum(loss(*arrays, axis_name=words), axes)

    specs = tokens, P(words), P(words), tokens, tokens

    def run(*arrays):
        if mesh.axis_types[0] == AxisType.Explicit:
            arrays = jax.sharding.reshard(arrays, tuple(NamedSharding(mesh, s) for s in specs))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(*arrays)

    return run


def apart(got, want):
    """The largest difference, relative to the largest number of its array."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    far = [np.abs(np.asarray(a) - b).max() / (np.abs(b).max() or 1) for a, b in pairs]
    return float(np.max(far))  # `max` would drop NaN


def difference(cell, want):
    """The largest distance of a cell's loss from `want` and, but under "jit", of its gradients."""
    *arrangement, call = cell
    mesh, placed = arrange(*arrangement)
    if call == "jit":
        return apart(jax.jit(loss)(*placed), want[0])
    if call == "eager":
        with jax.set_mesh(mesh):
            return apart(with_gradients(loss)(*placed), want)
    if call == "vmap" and _unmappable(placed):
        # JAX refuses that of every function; the caller gathers the table.
        with pytest.raises(ValueError, match="Unmapped values passed to vmap cannot be sharded"):
            jax.eval_shape(mapped, *placed)
        replicated = NamedSharding(mesh, P())
        placed[1:3] = jax.sharding.reshard(placed[1:3], [replicated] * 2)
    forms = {"grad": loss, "scan": scanned, "remat": jax.checkpoint(loss), "vmap": mapped}
    function = in_shard_map(mesh, placed) if call == "shard_map" else forms[call]
    return apart(jax.jit(with_gradients(function))(*placed), want)


def _unmappable(placed):
    """True if the axis that vmap maps is cut over an Explicit axis that cuts the table, too."""
    hidden, table = (jax.typeof(array).sharding.spec for array in placed[:2])
    return hidden[0] is not None and hidden[0] in table


def program(kind, table):
    """The program of one of 4 devices for loss and gradients, tokens being cut over all."""
    _, placed = arrange(kind, "4", "data", table)
    return jax.jit(with_gradients(loss)).lower(*placed).compile().as_text()
