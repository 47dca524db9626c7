"""One config on any grid of devices: the same updates, and what crosses devices is counted in
the compiled program.
"""

import functools
import json
import re
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from adaptive_jax.model.language_model import build
from adaptive_jax.parallel import sharding
from tests import refuses

# Rows of a table divide by no number of devices, by some or by all, and so do widths: 16x16, 32x8
# and 55x4, of one width 103x4.
LAYERS = {
    "adp_t": {
        "input": {"name": "adaptive", "cutoffs": (16, 48), "factor": 2},
        "body": (
            {"name": "transformer", "features": 16, "layers": 2, "heads": 2, "feed_forward": 24}
            | {"dropout": 0.1, "attention_dropout": 0.2, "activation_dropout": 0.1}
        ),
        "output": (
            {"name": "adaptive", "tail_dropout": 0.2, "input_dropout": 0.1}
            | {"table": {"name": "tied"}}
        ),
    },
    "cnn": {
        "input": (
            {"name": "char_cnn", "highway_layers": 1, "width": 4, "length": 8}
            | {"filters": ((1, 6), (3, 8))}
        ),
        # It compiles fast.
        "body": {"name": "gated_conv", "features": 16, "blocks": ((1, 2, 16),), "dropout": 0.1},
        "output": (
            {"name": "adaptive", "tail_dropout": 0.2}
            | {"table": {"name": "own", "cutoffs": (24,), "factor": 2}}
        ),
    },
}
# Matrices of whose axes 8 divides none: 14 x 28 lies in 2 x 4 parts, 7 x 28 in 4, 7 x 7 in 1.
LAYERS["gcnn"] = LAYERS["adp_t"] | {
    "body": (
        {"name": "gated_conv", "features": 16, "form": "fairseq", "output_width": 16}
        | {"blocks": ((1, 3, 14), (2, 2, 14, 1, 14)), "dropout": 0.1}
    ),
}
LAYERS["awd"] = LAYERS["adp_t"] | {
    "body": {"name": "awd_lstm", "features": 16, "widths": (7, 16), "weight_drop": 0.3},
}
# What is gathered in turn: first a quarter, where a matrix lies in 2 x 4 parts.
IN_TURN = {
    "gcnn": ["1x16x14", "3x14x7", "3x14x28", "1x14x16", "1x14x16", "3x14x7", "3x14x28", "1x16x14"],
    "awd": ["16x28", "7x28", "7x64", "16x64", "7x64", "16x64", "16x28", "7x28"],
}
IN_LOOPS = {"gcnn": 2 * ["2x14x7", "2x14x28", "1x14x7", "1x14x28"], "awd": []}
# No table is gathered: that of width 4 goes from device to device by parts.
LAYERS["words"] = LAYERS["adp_t"] | {"body": LAYERS["cnn"]["body"], "shard_words": True}
BIAS_AND_NORM = {"bias": True, "weight_norm": True}
LAYERS["own_words"] = LAYERS["words"] | {
    "input": {"name": "lookup", "width": 10, "word_dropout": 0.1},
    "output": (
        {"name": "adaptive", "tail_dropout": 0.2, "label_smoothing": 0.1, "z_loss": 1e-3}
        | {"table": {"name": "own", "cutoffs": (16, 48), "factor": 2} | BIAS_AND_NORM}
    ),
}
# Ten bands of one width in one parameter, none a multiple of four; a head of the output's own.
LAYERS["many_words"] = LAYERS["words"] | {
    "input": {"name": "adaptive", "cutoffs": tuple(range(11, 103, 10)), "factor": 1},
    "output": {"name": "adaptive", "table": {"name": "tied", "own_head": True, "bias": True}},
}
LAYERS["composed"] = LAYERS["cnn"] | {"output": {"name": "softmax", "table": {"name": "tied"}}}
LAYERS["remat"] = LAYERS["adp_t"] | {
    "body": LAYERS["adp_t"]["body"] | {"layers": 3, "remat": "elementwise"},
}
# Devices, fsdp, microbatches of an update. Those of "accelerators" sum the gradients of a block as
# soon as they have them.
GRIDS = {
    "adp_t": {
        "one": (1, 1, 1),
        "eight_in_two": (8, 1, 2),
        "eight_cut": (8, 8, 1),
    },
    "cnn": {"one": (1, 1, 1), "eight_in_two": (8, 1, 2), "four_cut_in_two": (4, 2, 2)},
    "words": {"one": (1, 1, 1), "eight_in_pairs": (8, 2, 2), "eight_cut": (8, 8, 1)},
    "own_words": {"one": (1, 1, 1), "eight_in_fours": (8, 4, 1)},
    "many_words": {"one": (1, 1, 1), "eight_in_fours": (8, 4, 1)},
    "composed": {"one": (1, 1, 1), "four_cut_in_two": (4, 2, 2)},
    "gcnn": {"one": (1, 1, 1), "eight_cut": (8, 8, 1), "accelerators_cut": (8, 4, 1)},
    "awd": {"one": (1, 1, 1), "eight_cut": (8, 8, 1), "accelerators_cut": (8, 4, 1)},
    "remat": {"one": (1, 1, 1), "accelerators": (8, 1, 1), "accelerators_cut": (8, 4, 1)},
}

PROGRAM = """
import json, pathlib, sys
import jax, numpy as np
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.parallel import sharding
from adaptive_jax.model import gradients
from adaptive_jax.model.language_model import build
from adaptive_jax.optimizers.optim import nag
from adaptive_jax.optimizers.schedules import constant, scheduled
from adaptive_jax.training.state import initial_state, shape_of_state
from adaptive_jax.training.update import make_update

layers, grids, updates, out = json.loads(sys.argv[1])
words = Vocabulary.build(
    {chr(97 + n % 26) * (n % 7) + str(n): 1 for n in range(102)} | {"<eos>": 2}
)
optimizer = scheduled(
    lambda rate: nag(rate, momentum=0.9, clip_norm=0.5), constant(0.3, warmup_steps=0)
)

def lowered(dtype, devices, fsdp, parts):
    model = build({"dtype": dtype, "shard_words": False} | layers, len(words))
    mesh = sharding.device_mesh(fsdp, jax.devices()[:devices])
    spelled = jax.device_put(lexicon(words, model.lexicon_spec()), sharding.replicated(mesh))
    def batch(step):
        bits = np.random.default_rng(step)
        ids = (103 * bits.random((16, 13)) ** 2).astype(np.int32)
        segments = np.sort(bits.integers(0, 3, (16, 12)), axis=1).astype(np.int32)
        weights = bits.integers(0, 2, (16, 12)).astype(np.float32)
        whole = Batch(ids[:, :-1], ids[:, 1:], weights, np.arange(16, dtype=np.int32), segments)
        return sharding.put_batch(
            mesh, jax.tree.map(lambda a: a.reshape(parts, -1, *a.shape[1:]), whole), axis=1
        )
    shapes = shape_of_state(model, optimizer, mesh)
    update = make_update(model, optimizer, mesh, 7, shapes).lower(shapes, spelled, batch(0))
    return update, (model, mesh, shapes), lambda step: (spelled, batch(step))

def tracked(fsdp, sum_=sharding._sum):
    given, sharding._sum = (jax.shard_map, sharding._sum), sum_
    jax.shard_map = lambda *args, **how: given[0](*args, **how | {"check_vma": True})
    try:
        return len(lowered("float32", 8, fsdp, 1)[0].as_text())
    except ValueError as error:
        return str(error)
    finally:
        jax.shard_map, sharding._sum = given

result, arrays, first, platform = {}, {}, None, gradients.platform
if "remat" in layers["body"]:
    result["tracked"] = [tracked(1), tracked(4)]
    result["forgotten"] = tracked(1, lambda a, axes: a)
elif layers["body"]["name"] == "transformer":  # the one whose blocks are looked at in bfloat16
    result["bfloat16"] = lowered("bfloat16", 8, 8, 1)[0].as_text()
for name, grid in grids.items():
    gradients.platform = (lambda: "gpu") if name.startswith("accelerators") else platform
    update, (model, mesh, shapes), given = lowered("float32", *grid)
    if first is None or (name, layers["body"]["name"]) == ("eight_cut", "transformer"):
        state = initial_state(model, optimizer, 0, shapes)
        first = first or jax.tree.map(np.asarray, state)
    else:  # quicker than to compile the start anew
        state = jax.tree.map(lambda a, shape: jax.device_put(a, shape.sharding), first, shapes)
    lowered_text, update, losses = update.as_text(), update.compile(), []
    for step in range(updates):
        state, metrics = update(state, *given(step))
        losses.append([float(metrics[key]) for key in ("loss", "nll", "gradient_norm", "tokens")])
    shares = jax.tree.map(lambda a: a.addressable_shards[0].data.size / a.size, state)
    result[name] = {
        "losses": losses,
        "text": update.as_text(),
        "lowered": lowered_text,
        "parameters": sum(a.size for a in jax.tree.leaves(state.params)),
        "shares": {jax.tree_util.keystr(k): v for k, v in jax.tree.leaves_with_path(shares)},
        "sizes": {jax.tree_util.keystr(k): v.size for k, v in jax.tree.leaves_with_path(state)},
    }
    arrays |= {
        f"{name}{jax.tree_util.keystr(k)}": np.asarray(v)
        for k, v in jax.tree.leaves_with_path(state.params)
    }
gradients.platform = platform
np.savez(out + ".npz", **arrays)
pathlib.Path(out + ".json").write_text(json.dumps(result))
"""


@pytest.fixture(scope="module")
def on_grids(eight, tmp_path_factory):
    """`on_grids("adp_t")`: what the updates on each grid gave, as numbers and as arrays; run
    once for each model.
    """

    @functools.cache
    def on_grids(layers):
        out = tmp_path_factory.mktemp("grids") / layers
        eight(PROGRAM, json.dumps([LAYERS[layers], GRIDS[layers], 6, str(out)]))
        return json.loads(out.with_suffix(".json").read_text()), dict(
            np.load(out.with_suffix(".npz"))
        )

    return on_grids


MODELS = ["adp_t", pytest.param("cnn", marks=pytest.mark.slow), "composed", "gcnn", "awd"]
MODELS += ["words", "own_words", "many_words", "remat"]


@pytest.mark.parametrize("layers", MODELS)
def test_every_grid_makes_the_same_updates(on_grids, layers):
    """Six updates with dropout everywhere: losses, norms and parameters are those of one
    device, whatever the layout.
    """
    results, arrays = on_grids(layers)
    one = np.array(results["one"]["losses"])
    assert abs(one[0, 1] / one[-1, 1] - 1) > 0.02 and len(one) == 6
    names = [key.removeprefix("one") for key in arrays if key.startswith("one[")]
    assert names
    for grid in set(GRIDS[layers]) - {"one"}:
        np.testing.assert_allclose(results[grid]["losses"], one, rtol=1e-5, err_msg=grid)
        for name in names:
            np.testing.assert_allclose(
                arrays[grid + name], arrays["one" + name], rtol=1e-4, atol=1e-5, err_msg=grid + name
            )


COLLECTIVE = re.compile(
    r"= (\(.*?\)|\S+) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-\w+)(?:-start)?\("
)


def crossing(text):
    """The results of each kind of collective in a compiled program: a list of `(computation,
    elements of each array)`.
    """
    collectives, computation = {}, ""
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            computation = line.split()[0]
        if match := COLLECTIVE.search(line):
            arrays = re.findall(r"\w+\[([\d,]*)\]", match[1])
            sizes = [int(np.prod([int(n) for n in array.split(",") if n])) for array in arrays]
            collectives.setdefault(match[2], []).append((computation, sizes))
    return collectives


@pytest.mark.parametrize("layers", MODELS[:2])
def test_gradients_cross_once(on_grids, layers):
    """Where parameters are replicated, an update of two microbatches sums each gradient once,
    three scalars, nothing else.
    """
    result = on_grids(layers)[0]["eight_in_two"]
    collectives = crossing(result["text"])
    assert set(collectives) == {"all-reduce"}
    assert all("ENTRY" in computation for computation, _ in collectives["all-reduce"])
    total = sum(size for _, sizes in collectives["all-reduce"] for size in sizes)
    assert total == result["parameters"] + 3


def test_gradients_of_blocks_cross_in_the_backward_pass(on_grids):
    """All gradients of a block are summed within the loop over blocks, the others after it."""
    result = on_grids("remat")[0]["accelerators"]
    sums = crossing(result["text"])["all-reduce"]
    total = sum(sum(sizes) for _, sizes in sums)
    in_loop = sum(sum(sizes) for computation, sizes in sums if "ENTRY" not in computation)
    blocks = sum(
        size
        for name, size in result["sizes"].items()
        if name.startswith(".params['body']['blocks'")
    )
    assert in_loop == blocks // 3 > 0
    assert total - in_loop == result["parameters"] - blocks + 3


def test_results_that_are_replicated(on_grids):
    """JAX proves it, for parameters whole and sharded, where it tracks values that vary over
    devices, and notices a forgotten sum.
    """
    results, _ = on_grids("remat")
    tracked, forgotten = results["tracked"], results["forgotten"]
    assert all(isinstance(length, int) and length > 10_000 for length in tracked), tracked
    assert "body']['blocks']" in forgotten and "inferred to be possibly varying" in forgotten


def test_collectives_of_sharded_parameters(on_grids):
    """Over eight: tables are gathered once, a block's matrices once in each pass; their gradients
    are summed into the shards.

    Replicated parameters are summed once, and the gradient of a table in four parts over pairs.
    """
    result = on_grids("adp_t")[0]["eight_cut"]
    collectives = crossing(result["text"])
    assert set(collectives) == {"all-reduce", "all-gather", "reduce-scatter"}
    of_params = {
        name.removeprefix(".params"): share
        for name, share in result["shares"].items()
        if name.startswith(".params")
    }
    sizes = {name: result["sizes"][f".params{name}"] for name in of_params}
    cut = {name: size for name, size in sizes.items() if of_params[name] < 1}
    block = {name: size // 2 for name, size in cut.items() if "blocks" in name}
    others = sum(size for name, size in cut.items() if "blocks" not in name)
    quarter = "['input']['table_2']"  # 55 x 4
    assert all(of_params[name] == (1 / 4 if name == quarter else 1 / 8) for name in cut)
    assert len(block) == 4 and others and of_params[quarter] == 1 / 4
    assert all("bias" in name or "norm" in name for name in set(sizes) - set(cut))

    def total(kind):
        return sum(size for _, arrays in collectives[kind] for size in arrays)

    replicated = sum(sizes.values()) - sum(cut.values())
    assert total("all-gather") == others + 2 * sum(block.values())
    assert total("reduce-scatter") == (others + sum(block.values()) + sizes[quarter]) // 8
    # and squares, for norms
    assert total("all-reduce") == replicated + sizes[quarter] // 4 + 3 + 2 * len(cut)


@pytest.mark.parametrize("layers", ["gcnn", "awd"])
def test_layers_of_every_body_are_gathered_in_both_passes(on_grids, layers):
    """One after another, and in the backward pass from the last to the first.

    Checked in the program as lowered, where loops stand at the end: a CPU's compiler merges the
    gathers of both passes outside of loops.
    """
    result = on_grids(layers)[0]["eight_cut"]
    gathered = re.findall(r"all_gather.*-> tensor<([\dx]+)xf32>", result["lowered"])
    tables = ["16x16", "8x16", "4x16", "16x16", "32x8", "55x4", "2x16"]
    assert gathered == tables + IN_TURN[layers] + IN_LOOPS[layers]


def test_words_over_devices_gather_no_table(on_grids):
    """With `shard_words`, tokens are gathered instead: ids, vectors' gradients and hidden states.
    The table of 55 words, cut by width, becomes one cut by words; gradients are summed over copies.
    """
    program = on_grids("words")[0]["eight_in_pairs"]["lowered"]

    def results(kind):
        return re.findall(rf'"stablehlo.{kind}.*?-> tensor<([\dx]*)x\w+>', program, re.DOTALL)

    projections_and_clusters = ["16x16", "8x16", "4x16", "2x16"]
    tokens = ["2x12", "2x12x16"]
    assert {*results("all_gather")} == {*projections_and_clusters, *tokens, "2x12x2", "2x16x32"}
    assert results("all_to_all") == ["28x4", "56x2"]
    of_tables = ["8x16", "16x8", "55x2"]
    assert {*of_tables} < {*results("all_reduce")}
    assert not {"16x16", "32x8", "55x4"} & {*results("all_reduce"), *results("reduce_scatter")}


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"output": {"name": "hierarchical", "table": {"name": "tied"}}}, "output.name='adaptive'"),
        ({"output": {"name": "sampled", "table": {"name": "own"}}}, "output.name='adaptive'"),
        ({"input": LAYERS["cnn"]["input"]}, "input.name='adaptive'"),
        (
            {"input": {"name": "lookup"}}
            | {"output": {"name": "softmax", "table": {"name": "mapped"}}},
            "output.table.name='own'",
        ),
        (
            {"input": {"name": "lookup"}}
            | {"output": {"name": "adaptive", "table": {"name": "tied", "cutoffs": (16,)}}},
            "'tied' without cutoffs",
        ),
        ({"input": {"name": "ngrams", "words": LAYERS["cnn"]["input"]}}, "input.words.name="),
    ],
)
def test_layers_that_need_whole_tables_are_refused(changes, name):
    """Else they would read the rows of one device as if they were all."""
    with refuses("config.shard_words=True", name):
        build({"dtype": "float32"} | LAYERS["words"] | changes, 103)


@pytest.mark.parametrize(
    "shape, fsdp, spec",
    [
        ((24, 7), 8, [sharding.FSDP]),
        ((7, 24), 8, [None, sharding.FSDP]),
        ((5, 850, 1700), 8, [None, sharding.OUTER, sharding.INNER]),
        ((4, 807, 1614), 8, [sharding.INNER, None, sharding.OUTER]),
        ((9, 300), 8, [None, sharding.INNER]),
        ((9, 14), 8, [None, sharding.OUTER]),
        ((9, 14), 2, [None, sharding.FSDP]),
        ((9, 7), 8, []),
        ((9, 7), 7, [None, sharding.FSDP]),
        ((64,), 8, []),
        ((64, 64), 1, []),
    ],
)
def test_a_matrix_is_cut_along_one_axis_or_two(shape, fsdp, spec):
    """Along the first that all devices divide, else along two, else over some of the devices."""
    mesh, model = sharding.abstract_mesh(fsdp, fsdp), SimpleNamespace(body=None)
    array = jax.ShapeDtypeStruct(shape, jnp.float32)
    specs = sharding.parameter_specs({"a": array}, mesh, model)["a"]
    assert specs == PartitionSpec(*spec)


def test_tables_that_are_computed_with_are_gathered_in_float32():
    """In bfloat16 the vectors of a mapped table were those of a rounded one, on a few devices."""
    for name, dtypes in (("own", {("input", "table"): jnp.bfloat16}), ("mapped", {})):
        config = LAYERS["words"] | {"dtype": "bfloat16", "shard_words": False}
        config["input"] = {"name": "lookup"}
        config["output"] = {"name": "softmax", "table": {"name": name}}
        result = sharding._table_dtypes(build(config, 103))
        assert dtypes.items() <= result.items() and (name == "own" or not result)


def test_momentum_lies_where_its_parameter_does(on_grids):
    """Optimizer state is sharded as the parameters are, so that eight devices hold little more
    than an eighth each.
    """
    result = on_grids("adp_t")[0]["eight_cut"]
    momentum = {
        name.split(".trace")[-1]: share
        for name, share in result["shares"].items()
        if ".trace" in name
    }
    params = {
        name.removeprefix(".params"): share
        for name, share in result["shares"].items()
        if name.startswith(".params")
    }
    assert momentum == params


def test_matrices_are_gathered_in_the_compute_dtype(on_grids):
    """A bfloat16 model moves half the bytes of its blocks, in both passes, and of its tables, and
    sums all gradients over devices in float32. Projections of bands are gathered in float32.

    Checked in the program as lowered: a CPU computes bfloat16 in float32, so its compiler casts
        before a gather.
    """
    program = on_grids("adp_t")[0]["bfloat16"]
    gathered = re.findall(r"all_gather.*-> tensor<(\d+x\d+)x(\w+)>", program)
    blocks, tables = ["16x16", "16x24", "16x48", "24x16"], ["16x16", "32x8", "55x4"]
    halves = [shape for shape, dtype in gathered if dtype == "bf16"]
    assert sorted(halves) == sorted(2 * blocks + tables)
    projections = sorted(shape for shape, dtype in gathered if dtype == "f32")
    assert projections == ["16x16", "2x16", "4x16", "8x16"]
    # The region of a sum follows its line; the result's type ends it.
    sums = re.findall(
        r'"stablehlo.(?:reduce_scatter|all_reduce)".*?-> tensor<(?:\d+x)*(\w+)>', program, re.DOTALL
    )
    assert len(sums) > len(blocks) and set(sums) == {"f32"}


def test_sums_over_hosts_are_exact(monkeypatch):
    """The words of a long log interval exceed 32 bits, to which jax cuts whatever hosts send
    each other.
    """
    monkeypatch.setattr(
        sharding.multihost_utils,
        "process_allgather",
        lambda array: np.asarray(jnp.stack([array, array])),
    )
    for count in 3_000_000_000, 2**40 + 3, 2**31 - 1, 7, True, False:
        assert sharding.sum_over_hosts(count) == 2 * count


def test_devices_of_a_slice_and_of_a_host_are_neighbours():
    """However JAX lists and numbers devices: slices first, then hosts, so that those which
    share parameters are close.
    """

    @dataclass(frozen=True)
    class Device:
        slice_index: int
        process_index: int
        id: int

    listed = [
        Device(s, p, 10 * p + i) for i in range(2) for p, s in ((3, 0), (0, 1), (2, 0), (1, 1))
    ]
    grid = sharding.device_mesh(4, listed).devices.reshape(2, 4)
    assert [[(d.slice_index, d.id) for d in row] for row in grid] == [
        [(0, 20), (0, 21), (0, 30), (0, 31)],
        [(1, 0), (1, 1), (1, 10), (1, 11)],
    ]


def test_a_grid_that_does_not_divide():
    """One line with the value and what it has to divide."""
    with refuses("fsdp=3", "1"):
        sharding.device_mesh(3)


VERY_LARGE = """
import json, jax
from adaptive_jax.config.keys import resolve
from adaptive_jax.training.compiled import compile_update, memory_of
from adaptive_jax.planning.plan import make_plan
from adaptive_jax.training.sparse import parts_of
from configs import billion_word
config = resolve(billion_word.get_config("very_large")) | {"tokens_per_device": 2_048}
parts = parts_of(config, config["data"]["vocabulary_size"])
plan = make_plan(config, parts, 8, memory=int(16e9))
memory = memory_of(compile_update(config, plan, parts, jax.devices()))
print(json.dumps(plan._asdict() | {"state": memory.state, "compiled": sum(memory)}))
"""


@pytest.mark.slow
def test_the_very_large_model_fits_devices_of_16_gb(eight):
    """1,026M parameters on eight devices of 16 GB: the plan shards them as far as needed, and
    by the compiler's count they fit.
    """
    plan = json.loads(eight(VERY_LARGE))
    assert plan["parameters"]["total"] > 1.02e9 and plan["fsdp"] > 1
    assert plan["state"] < 1.1 * 8 * plan["parameters"]["total"] / plan["fsdp"]
    assert plan["state_bytes"] < plan["compiled"] < 16e9
