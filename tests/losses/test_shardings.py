"""The loss under plain `jax.jit`, or none, on meshes of simulated devices: right, and each device
computes its own tokens alone.
"""

import json
import re

import pytest

COLLECTIVES = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
CELLS = """
import json, sys
from tests.losses import shardings
cells = shardings.EVERY if sys.argv[1] == "every" else shardings.pairwise()
want = shardings.expected()
print(json.dumps({" / ".join(cell): shardings.difference(cell, want) for cell in cells}))
"""
PROGRAMS = """
import itertools, json
from tests.losses import shardings
pairs = itertools.product(shardings.KINDS, shardings.TABLES)
print(json.dumps({" / ".join(pair): shardings.program(*pair) for pair in pairs}))
"""
MANY = """
import itertools, json
import jax, jax.numpy as jnp, numpy as np
from tests.losses import shardings
from tests.losses.shardings import apart, arrange, arrays, loss, mapped, with_gradients

def reported(*arrays):
    names = "nll", "predicted", "entropy"
    each, report = loss(*arrays, reduction="none", reports=names)
    return jnp.sum(each) + jnp.sum(report.entropy), (each, report.predicted.astype(jnp.float32))

shardings.WORDS = 512
shardings.TOKENS["rows over both"] = shardings.P(("data", "model"))
both = jax.jit(jax.value_and_grad(reported, (0, 1, 2), has_aux=True))
right = jax.tree.map(np.asarray, both(*arrays()))
want, found = shardings.expected(), {}
ways = [("2 x 2", tokens, "words") for tokens in ("data and model", "rows over both")]
ways += [("4", "data", table) for table in ("words", "width")]
for kind, way in itertools.product(shardings.KINDS, ways):
    _, placed = arrange(kind, *way)
    program = jax.jit(with_gradients(loss)).lower(*placed).compile()
    found[f"{kind}, {way}"] = apart(program(*placed), want), program.as_text()
    found[f"{kind}, {way}, each"] = apart(both(*placed), right), ""
_, placed = arrange("Auto", "2 x 2", "data and model", "words")
found["vmap"] = apart(jax.jit(with_gradients(mapped))(*placed), want), ""
print(json.dumps(found))
"""
OTHERS = """
import functools, json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from tests.losses.shardings import apart, arrange, arrays, expected, loss, with_gradients

want, found = expected(), {}
for kind in "Explicit", "Auto":
    mesh, placed = arrange(kind, "2 x 2", "data", "replicated")

    def each(*arrays):
        return jnp.sum(loss(*arrays, reduction="none"))

    found[f"{kind}, none"] = apart(jax.jit(with_gradients(each))(*placed), want)
    found[f"{kind}, eager without a mesh"] = apart(loss(*placed), want[0])

    # Arrays at hand without a mesh of their own, which in_shardings alone puts on one.
    specs = [array.sharding for array in placed]
    found[f"{kind}, in_shardings"] = apart(
        jax.jit(with_gradients(loss), in_shardings=specs)(*arrays()), want
    )

    # vmap over the table, too: each has a table of its own.
    tables = jnp.stack([placed[1], placed[1]])
    mapped = jax.vmap(jax.vmap(loss, (0, None, None, 0, 0)), (None, 0, None, None, None))
    found[f"{kind}, mapped tables"] = apart(
        jax.jit(mapped)(placed[0], tables, *placed[2:]).sum(1), np.stack([want[0]] * 2)
    )

    @jax.jit
    def in_part(*arrays):
        specs = P("data"), P(), P(), P("data"), P("data")
        local = lambda *arrays: jax.lax.psum(loss(*arrays), "data")
        return jax.shard_map(
            local, mesh=mesh, in_specs=specs, out_specs=P(), axis_names={"data"}
        )(*arrays)

    try:
        in_part(*placed)
    except ValueError as error:
        found[f"{kind}, in part"] = str(error)

# Reports, and soft targets.
hidden, table, bias, weights, targets = arrays()
soft = np.random.default_rng(1).dirichlet(np.ones(3), targets.shape).astype(np.float32)
several = (targets[..., None] + np.arange(3, dtype=np.int32)) % len(table)

def reported(soft, hidden, table, bias, weights, targets, probs=None):
    names = "nll", "z_loss", "predicted", "logsumexp", "entropy", "top_k"
    total, report = loss(
        hidden, table, bias, weights, targets, z_loss=0.1, top_k=4, target_probs=probs,
        reports=names if soft else (*names, "correct"),
    )
    return total, jax.tree.map(lambda a: a.astype(jnp.float32), report)

for kind in "Explicit", "Auto":
    for rows in "replicated", "words":
        mesh, placed = arrange(kind, "2 x 2", "data", rows)
        on = lambda array: jax.device_put(array, placed[4].sharding)
        for name, given, there in (
            ("reports", arrays(), placed),
            ("soft", (*arrays()[:4], several, soft), (*placed[:4], on(several), on(soft))),
        ):
            form = functools.partial(reported, name == "soft")
            step = jax.jit(jax.value_and_grad(form, (0, 1, 2), has_aux=True))
            right = jax.tree.map(np.asarray, step(*given))
            found[f"{kind}, {name}, {rows}"] = apart(step(*there), right)

def accumulated(hidden, table, bias, weights, targets):
    def step(total, part):
        return total + loss(part[0], table, bias, *part[1:]), None

    microbatches = [a.reshape(2, -1, *a.shape[1:]) for a in (hidden, weights, targets)]
    return jax.lax.scan(step, 0.0, microbatches)[0]

# 4 devices cut 8 rows; of 2 microbatches of 4 rows, their axis cuts both dimensions.
for table in "replicated", "words":
    _, placed = arrange("Auto", "4", "data", table)
    found[f"microbatches, {table}"] = apart(jax.jit(with_gradients(accumulated))(*placed), want)

# 5 steps of time do not cut evenly over 2 devices; products keep the precision of their context.
mesh, placed = arrange("Auto", "2 x 2", "data and model", "replicated")
short = lambda loss: lambda h, t, b, w, y: loss(h[:, 1:], t, b, w[:, 1:], y[:, 1:])
both = [jax.jit(with_gradients(short(loss)))(*given) for given in (placed, arrays())]
found["uneven"] = apart(*jax.tree.map(np.asarray, both))
text = {}
for precision in "highest", None:
    with jax.default_matmul_precision(precision):
        lowered = jax.jit(loss).lower(*placed)
    text[precision] = lowered.compile().as_text().count("operand_precision={highest,highest}")
found["precise"] = text["highest"] > 0 == text[None]

# Arrays without axes: settings, and all tokens where there is one.
def with_settings(z_loss, soft_cap, *arrays):
    return loss(*arrays, z_loss=z_loss, soft_cap=soft_cap)

for kind in "Explicit", "Auto":
    mesh, placed = arrange(kind, "2 x 2", "data", "replicated")
    settings = jnp.float32(0.1), jnp.float32(3.0)
    step = jax.jit(jax.value_and_grad(with_settings, (2, 3, 4)))
    right = jax.tree.map(np.asarray, step(*settings, *arrays()))
    found[f"{kind}, settings"] = apart(step(*settings, *placed), right)
    hidden, table, bias, _, targets = arrays()
    token = hidden[0, 0], table, bias, np.float32(1.5), targets[0, 0]
    there = [jax.device_put(array, NamedSharding(mesh, P())) for array in token]
    found[f"{kind}, one token"] = apart(jax.jit(loss)(*there), np.asarray(loss(*token)))
print(json.dumps(found))
"""

OWN = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from adaptive_jax import linear_cross_entropy

rng, found = np.random.default_rng(0), {}
hidden, table = (rng.standard_normal((n, 4)).astype("f") for n in (16, 12))
targets = np.where(np.arange(16) % 5, np.arange(16) % 12, -100).astype(np.int32)
targets[8:11] = -100
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
def far(a, b):
    return float(np.max([jnp.abs(x - y).max() for x, y in zip(*map(jax.tree.leaves, (a, b)))]))

def sharded(cut, factor, **options):
    def loss(hidden, table, targets):
        how = options | {"axis_name": "data" if cut else None}
        own = linear_cross_entropy(hidden, table, targets, **how)
        return jax.lax.pmean(own * (1 + factor * jax.lax.axis_index("data")), "data")

    specs = P("data"), P("data") if cut else P(), P("data")
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())
    return jax.jit(jax.value_and_grad(mapped, (0, 1)))(hidden, table, targets)

for reduction in "mean", "sum":
    both = [sharded(cut, 0, reduction=reduction) for cut in (True, False)]
    found[reduction] = far(*both)
(value, (d_hidden, d_table)), (wanted, (d_wanted, _)) = (
    sharded(cut, 1, reduction="sum") for cut in (True, False))
found["unlike"] = far((value, d_hidden), (wanted, d_wanted)) + float(not jnp.isnan(d_table).all())

def by_words(hidden, table, targets, numbers):
    loss = lambda *a: linear_cross_entropy(*a[:3], axis_name="data", words=10, label_smoothing=0.1,
                                           z_loss=a[3])
    specs = P(), P("data"), P(), P()
    return jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=P())(
        hidden, table, targets, numbers)

known = np.where(targets > 9, 9, targets)
with jax.numpy_dtype_promotion("strict"):
    one = jax.jit(by_words)(hidden, table, known, jnp.float32(0.1))
found["array of z_loss"] = far(
    one, linear_cross_entropy(hidden, table[:10], known, label_smoothing=0.1, z_loss=0.1))
print(json.dumps(found))
"""


def numbers(eight, code, *arguments):
    return json.loads(eight(code, *arguments))


def check(differences, count):
    assert len(differences) >= count
    assert {cell: far for cell, far in differences.items() if not far < 1e-6} == {}


def test_pairs_of_shardings(eight):
    """Every two of mesh, devices, tokens, table and call, against all logits in float64. Without
    it, tokens on Explicit axes end in an error of JAX.
    """
    check(numbers(eight, CELLS, "pairs"), 21)


@pytest.mark.slow
def test_every_sharding(eight):
    """All arrangements that docs/losses.md speaks of."""
    check(numbers(eight, CELLS, "every"), 378)


def test_each_device_computes_its_own_tokens(eight):
    """No array of all tokens in the program of one of 4 devices, and only tables, their gradients
    and sums cross devices. Without it, a job loses data parallelism and nothing says so.
    """
    for pair, text in numbers(eight, PROGRAMS).items():
        assert not re.search(r"\[(8,6|48)[,\]]", text), pair
        moved = re.findall(f"= (.*?) (?:{COLLECTIVES})(?:-start)?\\(", text)
        assert moved, pair
        shapes = {shape for line in moved for shape in re.findall(r"\[([\d,]*)\]", line)}
        replicated = {"", "28,12", "28"}  # loss; table and bias
        assert shapes <= replicated | {"28,3", "7,12", "7", "12,28"}, (pair, shapes)


def test_tables_of_many_words_stay(eight):
    """A table cut over an axis that cuts tokens, too, where hidden states are fewer: they cross
    devices, and no device has the whole table or its gradient, but all words of its own columns
    where they are cut by width. Without it, everybody's sharded parameters are gathered for the
    loss.
    """
    found = numbers(eight, MANY)
    check({name: far for name, (far, _) in found.items()}, 17)
    for name, (_, text) in found.items():
        assert not re.search(r"\[512,12\]|\[12,512\]", text), name


def test_other_calls_of_shardings(eight):
    """Calls that are not in the table: reports and soft targets, losses of each token, arrays put
    on a mesh by in_shardings, a table for each element of vmap, tokens that do not cut evenly,
    precision that a context asks for, and the line that refuses a mesh that is Manual in part.
    """
    found = numbers(eight, OTHERS)
    for kind in "Explicit", "Auto":
        line = found.pop(f"{kind}, in part")
        assert line.startswith("axes of the mesh around this loss must have one type, got data:")
        assert "\n" not in line
    assert found.pop("precise")
    check(found, 21)


def test_scales_of_each_device(eight):
    """Where one axis cuts words and tokens, a mean of each device's own tokens: without it, the
    gradient of the table was a sum of other means; it is NaN where devices scale their losses by
    different numbers. Settings that are arrays, and strict promotion with rows of padding.
    """
    check(numbers(eight, OWN), 4)


EAGER = """
import jax, jax.numpy as jnp
from adaptive_jax import linear_cross_entropy
hidden, table, targets = jnp.arange(12.0).reshape(3, 4), jnp.eye(5, 4), jnp.arange(3)
slope = jax.grad(linear_cross_entropy)
with jax.disable_jit():
    eager = slope(hidden, table, targets)
assert jnp.allclose(eager, jax.jit(slope)(hidden, table, targets)) and eager.any()
"""


def test_disable_jit_on_eight_devices(eight):
    """A debugger's switch ended in a traceback of JAX where there are several devices."""
    eight(EAGER)
