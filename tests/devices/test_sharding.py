"""One config on any grid of devices: the same updates, and what crosses devices is counted in the compiled program."""

import json
import re

import numpy as np
import pytest

from adaptive_jax.devices import sharding
from adaptive_jax.errors import InputError

# Rows of a table divide by no number of devices, by some or by all, and so do widths: 16x16, 32x8 and 55x4, of one width 103x4.
LAYERS = {
    "adp_t": {
        "input": {"name": "adaptive", "cutoffs": (16, 48), "factor": 2},
        "output": {"name": "adaptive", "tail_dropout": 0.2, "input_dropout": 0.1, "table": {"name": "tied"}}},
    "cnn": {
        "input": {"name": "char_cnn", "highway_layers": 1, "width": 4, "filters": ((1, 6), (3, 8)), "length": 8},
        "output": {"name": "adaptive", "tail_dropout": 0.2, "table": {"name": "own", "cutoffs": (24,), "factor": 2}}},
}
GRIDS = {  # devices, fsdp, batches that make up an update
    "one": (1, 1, 1), "one_in_four": (1, 1, 4), "two": (2, 1, 1), "four_cut_in_two": (4, 2, 2), "eight_in_two": (8, 1, 2),
    "eight_cut": (8, 8, 1)}

PROGRAM = """
import json, sys
import jax, numpy as np, optax
from adaptive_jax.devices import sharding
from adaptive_jax.data.batches.batching import Batch
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.model import build
from adaptive_jax.training.state import initial_state
from adaptive_jax.training.update import make_update

layers, grids, updates, out = json.loads(sys.argv[1])
words = Vocabulary.build({chr(97 + n % 26) * (n % 7) + str(n): 1 for n in range(102)} | {"<eos>": 2})
model = build({"dtype": "float32", "body": {"name": "transformer", "features": 16, "layers": 2, "heads": 2, "feed_forward": 24,
    "dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.1}} | layers, words)
optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.trace(0.9, nesterov=True), optax.scale(-0.3))
result, arrays = {}, {}
for name, (devices, fsdp, parts) in grids.items():
    mesh = sharding.device_mesh(fsdp, jax.devices()[:devices])
    state = initial_state(model, optimizer, 0, mesh)
    update = make_update(model, optimizer, lambda step: 0.3, mesh, seed=7)
    losses = []
    for step in range(updates):
        bits = np.random.default_rng(step)
        ids = (103 * bits.random((16, 13)) ** 2).astype(np.int32)
        segments = np.sort(bits.integers(0, 3, (16, 12)), axis=1).astype(np.int32)
        batch = Batch(ids[:, :-1], ids[:, 1:], bits.integers(0, 2, (16, 12)).astype(np.float32), segments)
        batch = sharding.put_rows(mesh, Batch(*(a.reshape(parts, -1, 12) for a in batch)), axis=1)
        if step == 0:
            update = update.lower(state, batch).compile()
        state, numbers = update(state, batch)
        losses.append([float(numbers[key]) for key in ("loss", "nll", "gradient_norm", "tokens")])
    shares = jax.tree.map(lambda a: a.addressable_shards[0].data.size / a.size, state)
    result[name] = {"losses": losses, "text": update.as_text(), "parameters": sum(a.size for a in jax.tree.leaves(state.params)),
        "shares": {jax.tree_util.keystr(k): v for k, v in jax.tree.leaves_with_path(shares)},
        "sizes": {jax.tree_util.keystr(k): v.size for k, v in jax.tree.leaves_with_path(state)}}
    arrays |= {f"{name}{jax.tree_util.keystr(k)}": np.asarray(v) for k, v in jax.tree.leaves_with_path(state.params)}
np.savez(out + ".npz", **arrays)
json.dump(result, open(out + ".json", "w"))
"""


@pytest.fixture(scope="module")
def on_grids(command, tmp_path_factory):
    """`on_grids("adp_t")`: what each grid's updates gave, as numbers and as arrays; run once for each model."""
    made = {}

    def on_grids(layers):
        if layers not in made:
            grids = GRIDS if layers == "adp_t" else {name: GRIDS[name] for name in ("one", "eight_in_two", "four_cut_in_two")}
            out = tmp_path_factory.mktemp("grids") / layers
            done = command("-c", PROGRAM, json.dumps([LAYERS[layers], grids, 20, str(out)]), devices=8)
            assert done.returncode == 0, done.stderr
            made[layers] = json.loads(out.with_suffix(".json").read_text()), dict(np.load(out.with_suffix(".npz")))
        return made[layers]

    return on_grids


@pytest.mark.parametrize("layers", LAYERS)
def test_every_grid_makes_the_same_updates(on_grids, layers):
    """Twenty updates, dropout everywhere: losses, norms and parameters are those of one device, whatever the layout."""
    results, arrays = on_grids(layers)
    one = np.array(results["one"]["losses"])
    assert abs(one[0, 1] / one[-1, 1] - 1) > 0.02 and len(one) == 20
    names = {key.removeprefix("one") for key in arrays if key.startswith("one[")}
    for grid, result in results.items():
        np.testing.assert_allclose(result["losses"], one, rtol=1e-5, err_msg=grid)
        for name in names:
            np.testing.assert_allclose(arrays[grid + name], arrays["one" + name], rtol=1e-4, atol=1e-5, err_msg=grid + name)


COLLECTIVE = re.compile(r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-\w+)(?:-start)?\(")


def crossing(text):
    """Of a compiled program, what each kind of collective yields: a list of `(computation, elements of each array)`."""
    found, computation = {}, ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.split()[0]
        if match := COLLECTIVE.search(line):
            arrays = re.findall(r"\w+\[([\d,]*)\]", match[1])
            sizes = [int(np.prod([int(n) for n in array.split(",") if n])) for array in arrays]
            found.setdefault(match[2], []).append((computation, sizes))
    return found


@pytest.mark.parametrize("layers", LAYERS)
def test_gradients_cross_once(on_grids, layers):
    """Every device holding all: an update of two batches sums each gradient over devices once, and three scalars; nothing else."""
    result = on_grids(layers)[0]["eight_in_two"]
    found = crossing(result["text"])
    assert set(found) == {"all-reduce"}
    assert all("ENTRY" in computation for computation, _ in found["all-reduce"])
    total = sum(size for _, sizes in found["all-reduce"] for size in sizes)
    assert total == result["parameters"] + 3


def test_what_crosses_when_parameters_are_cut(on_grids):
    """Over eight: tables are gathered once, a block's matrices once in each pass; their gradients are summed onto the parts.

    Whole parameters (vectors, and a table that does not divide) are summed once.
    """
    result = on_grids("adp_t")[0]["eight_cut"]
    found = crossing(result["text"])
    assert set(found) == {"all-reduce", "all-gather", "reduce-scatter"}
    of_params = {name.removeprefix(".params"): share for name, share in result["shares"].items() if name.startswith(".params")}
    sizes = {name: result["sizes"][f".params{name}"] for name in of_params}
    cut = {name: size for name, size in sizes.items() if of_params[name] < 1}
    block = {name: size // 2 for name, size in cut.items() if "blocks" in name}
    others = sum(size for name, size in cut.items() if "blocks" not in name)
    assert all(of_params[name] == 1 / 8 for name in cut) and len(block) == 4 and others
    assert all("bias" in name or "norm" in name or "table_2" in name or "clusters" in name for name in set(sizes) - set(cut))

    def total(kind):
        return sum(size for _, arrays in found[kind] for size in arrays)

    assert total("all-gather") == others + 2 * sum(block.values())
    assert total("reduce-scatter") == (others + sum(block.values())) // 8
    assert total("all-reduce") == sum(sizes.values()) - sum(cut.values()) + 3 + 2 * len(cut)  # and squares, for norms


def test_momentum_lies_where_its_parameter_does(on_grids):
    """Optimizer state is cut as the parameters are, so that eight devices hold little more than an eighth each."""
    result = on_grids("adp_t")[0]["eight_cut"]
    momentum = {name.split(".trace")[-1]: share for name, share in result["shares"].items() if ".trace" in name}
    params = {name.removeprefix(".params"): share for name, share in result["shares"].items() if name.startswith(".params")}
    assert momentum == params


def test_a_grid_that_does_not_divide():
    """One line with the value and what it has to divide."""
    with pytest.raises(InputError, match=r"fsdp=3 does not divide the 1 device\(s\)"):
        sharding.device_mesh(3)


VERY_LARGE = """
import json, jax, jax.numpy as jnp
from jax.sharding import NamedSharding
from adaptive_jax.training import optim
from adaptive_jax.devices import sharding
from adaptive_jax.data.batches.batching import Batch
from adaptive_jax.model import build
from adaptive_jax.plans.costs import plan
from adaptive_jax.training.state import shape_of_state
from adaptive_jax.training.update import make_update
from configs import billion_word
config = billion_word.get_config("very_large").to_dict()
numbers = plan(config, config["data"]["vocabulary_size"], 8, memory=int(16e9))
mesh = sharding.device_mesh(numbers["fsdp"])
model = build(config, config["data"]["vocabulary_size"])
optimizer, rate = optim.from_config(config["optimizer"])
shape = numbers["accumulation"], 8 * numbers["rows_per_device"], config["data"]["block"]
rows = NamedSharding(mesh, sharding.rows_along(1))
batch = Batch(*(jax.ShapeDtypeStruct(shape, dtype, sharding=rows) for dtype in (jnp.int32, jnp.int32, jnp.float32, jnp.int32)))
update = make_update(model, optimizer, rate, mesh, 0).lower(shape_of_state(model, optimizer, mesh), batch)
memory = update.compile(compiler_options={"xla_backend_optimization_level": 0}).memory_analysis()
print(json.dumps(numbers | {"state": memory.argument_size_in_bytes, "compiled": memory.argument_size_in_bytes
    + memory.output_size_in_bytes - memory.alias_size_in_bytes + memory.temp_size_in_bytes}))
"""


@pytest.mark.slow
def test_the_very_large_model_fits_devices_of_16_gb(command):
    """1,026M parameters on eight devices of 16 GB: the plan cuts them as far as needed, and by the compiler's count they fit."""
    done = command("-c", VERY_LARGE, devices=8)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["parameters"]["total"] > 1.02e9 and found["fsdp"] > 1
    assert found["state"] < 1.1 * 8 * found["parameters"]["total"] / found["fsdp"]
    assert found["memory_per_device"]["total"] < found["compiled"] < 16e9
