"""What crosses devices, and in which dtype, in programs for 8 devices; and that it is what the
update needs.
"""

import importlib.util
import json
import re
import sys

import pytest

from tests.parallel.test_sharding import crossing

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec
from adaptive_jax.model import gradients
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.parallel import sharding
from adaptive_jax.model.language_model import build
from adaptive_jax.optimizers.optim import nag
from adaptive_jax.optimizers.schedules import constant, scheduled
from adaptive_jax.training.state import initial_state, shape_of_state
from adaptive_jax.training.update import Extras, make_update

optimizer = scheduled(
    lambda rate: nag(rate, momentum=0.9, clip_norm=0.5), constant(0.3, warmup_steps=0)
)
layers = {
    "dtype": "float32",
    "input": {"name": "adaptive", "cutoffs": (16, 48), "factor": 2},
    "output": {"name": "adaptive", "tail_dropout": 0.2, "table": {"name": "tied"}},
    "body": {
        "name": "transformer",
        "features": 16,
        "layers": 3,
        "heads": 2,
        "feed_forward": 24,
        "dropout": 0.1,
        "attention_dropout": 0.2,
        "attention": "plain",
        "remat": "elementwise",
    },
}
model = build(layers, 103)

platform = gradients.platform

def updates(backend, devices, fsdp, sums, runs):
    gradients.platform = lambda: (
        backend
    )  # accelerators sum the gradients of a block as soon as they have them
    mesh = sharding.device_mesh(fsdp, jax.devices()[:devices])
    def batch(step):
        ids = (103 * np.random.default_rng(step).random((16, 9)) ** 2).astype(np.int32)
        whole = Batch(
            ids[:, :-1], ids[:, 1:], np.ones((16, 8), np.float32), np.arange(16, dtype=np.int32)
        )
        return sharding.put_batch(mesh, jax.tree.map(lambda a: a[None], whole), axis=1)
    shapes = shape_of_state(model, optimizer, mesh)
    lowered = make_update(model, optimizer, mesh, 7, shapes, Extras(sums=sums)).lower(
        shapes, {}, batch(0)
    )
    sizes = {jax.tree_util.keystr(k): v.size for k, v in jax.tree.leaves_with_path(shapes.params)}
    result = {"lowered": lowered.as_text(), "sizes": sizes, "losses": []}
    if runs:
        update, state = lowered.compile(), initial_state(model, optimizer, 0, mesh)
        result["compiled"] = update.as_text()
        for step in range(runs):
            state, metrics = update(state, {}, batch(step))
            result["losses"].append(
                [float(metrics[key]) for key in ("loss", "gradient_norm", "tokens")]
            )
    return result

def sums_of_eight():
    mesh, rows = sharding.device_mesh(), PartitionSpec(sharding.BATCH_AXES)
    values = np.random.default_rng(0).standard_normal((8, 500, 3)).astype(np.float32)
    def add(a):
        tree = {"matrix": a[0], "vector": a[0, :, 0], "blocks": {"bias": a[0]}}
        return sharding.sum_over_devices(
            mesh, tree, jax.tree.map(lambda _: PartitionSpec(), tree), "bfloat16"
        )
    found = jax.jit(
        jax.shard_map(add, mesh=mesh, in_specs=rows, out_specs=PartitionSpec(), check_vma=False)
    )(values)
    exact, bound = values.sum(0, np.float64), 8 * 2.0**-8 * abs(values).sum(0, np.float64)
    off = abs(np.asarray(found["matrix"], np.float64) - exact)
    others = [abs(found["vector"] - exact[:, 0]).max(), abs(found["blocks"]["bias"] - exact).max()]
    return {
        "above": int((off > bound).sum()),
        "off": float(np.median(off)),
        "others": list(map(float, others)),
    }

def tracked(fsdp, sum_=sharding._sum):
    given, sharding._sum = (jax.shard_map, sharding._sum), sum_
    jax.shard_map = lambda *args, **how: given[0](*args, **how | {"check_vma": True})
    try:
        return len(updates("cpu", 8, fsdp, "float32", 0)["lowered"])
    except ValueError as error:
        return str(error)
    finally:
        jax.shard_map, sharding._sum = given

json.dump(
    {
        "tracked": [tracked(1), tracked(4)],
        "forgotten": tracked(1, lambda a, axes, dtype: a),
        "eight": sums_of_eight(),
        "one": updates("cpu", 1, 1, "float32", 3),
        "blocks": updates("gpu", 8, 1, "float32", 3),
        "blocks_cut": updates("gpu", 8, 4, "float32", 3),
        "rounded": updates("gpu", 8, 1, "bfloat16", 0),
        "rounded_cut": updates("cpu", 8, 4, "bfloat16", 0),
    },
    open(sys.argv[1], "w"),
)
gradients.platform = platform
"""


@pytest.fixture(scope="module")
def results(eight, tmp_path_factory):
    """What the program writes."""
    out = tmp_path_factory.mktemp("collectives") / "results.json"
    done = eight(PROGRAM, out)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text())


def test_what_is_returned_as_replicated_is(results):
    """JAX proves it of parameters whole and sharded where it tracks what varies over devices,
    and notices a forgotten sum.
    """
    assert all(isinstance(length, int) and length > 10_000 for length in results["tracked"]), (
        results["tracked"]
    )
    assert (
        "body']['blocks']" in results["forgotten"]
        and "inferred to be possibly varying" in results["forgotten"]
    )


def test_sums_in_bfloat16_are_bounded(results):
    """Each summand and each partial sum of 8 is rounded to 8 bits at most; vectors are not
    rounded, those of blocks neither.
    """
    assert results["eight"]["above"] == 0
    assert results["eight"]["off"] > 2**-10
    assert max(results["eight"]["others"]) < 1e-5


@pytest.mark.parametrize("grid", ["blocks", "blocks_cut"])
def test_gradients_of_blocks_cross_in_the_backward_pass(results, grid):
    """Losses are those of one device. All gradients of a block are summed within the loop over
    blocks, the others after it.
    """
    one, found = results["one"], results[grid]
    assert one["losses"][0][0] - one["losses"][-1][0] > 0.05
    for ours, theirs in zip(found["losses"], one["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    if grid == "blocks":
        sums = crossing(found["compiled"])["all-reduce"]
        in_loop = sum(sum(sizes) for computation, sizes in sums if "ENTRY" not in computation)
        blocks = sum(size for name, size in found["sizes"].items() if "blocks" in name)
        assert in_loop == blocks // 3
        assert (
            sum(sum(sizes) for _, sizes in sums) - in_loop
            == sum(found["sizes"].values()) - blocks + 3
        )


@pytest.mark.parametrize(
    "grid, kinds", [("rounded", {"all_reduce"}), ("rounded_cut", {"all_reduce", "reduce_scatter"})]
)
def test_matrices_cross_in_bfloat16(results, grid, kinds):
    """Half the bytes for every matrix, and for nothing else: vectors and the three sums of the
    losses stay float32.

    Read in the program as lowered: a CPU adds bfloat16 in float32, so its compiler casts before the
        sum.
    """
    program = results[grid]["lowered"]
    found = re.findall(
        r'"stablehlo.(reduce_scatter|all_reduce)".*?-> tensor<((?:\d+x)*)(\w+)>', program, re.DOTALL
    )
    assert {kind for kind, _, _ in found} == kinds
    for kind, shape, dtype in found:
        vector = shape.count("x") < 2 or re.fullmatch(
            r"3x\d+x", shape
        )  # or those of three blocks, one behind the other
        assert dtype == ("f32" if vector else "bf16"), (kind, shape, dtype)


COMPILED = """
import json, sys
import jax
from adaptive_jax.config.keys import resolve
from benchmarks.programs import report
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.training.compiled import compile_for
from configs import quickstart
config = quickstart.get_config()
config.update_from_flattened_dict(json.loads(sys.argv[1]))
config = resolve(config)
shapes = jax.tree.leaves_with_path(
    parameter_shapes(build(config, config["data"]["vocabulary_size"]))
)
vectors = sum(a.size for path, a in shapes if a.ndim - ("blocks" in jax.tree_util.keystr(path)) < 2)
json.dump(
    {
        "all": sum(a.size for _, a in shapes),
        "vectors": vectors,
        "collectives": report(compile_for(sys.argv[3], config)[2])["collectives"],
    },
    open(sys.argv[2], "w"),
)
"""
MISSING = sys.version_info < (3, 12) or not all(
    importlib.util.find_spec(name) for name in ("jax_plugins", "nvidia", "libtpu")
)


@pytest.mark.skipif(MISSING, reason="needs Python 3.12 and the extra `targets`")
@pytest.mark.parametrize("target", ["h100:8", "v5e:4x2"])
def test_bytes_that_cross_eight_devices(quick_command, settings, tmp_path, target):
    """In the update compiled for them: every gradient once, matrices with two bytes a number,
    and three sums of losses.
    """
    changes = settings(
        **{
            "dtype": "bfloat16",
            "gradient_sums": "bfloat16",
            "body.layers": 2,
            "batches.sequence_length": 64,
        }
    )
    done = quick_command(
        "-c",
        COMPILED,
        json.dumps(changes | {"tokens_per_device": 64}),
        tmp_path / "found.json",
        target,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [one["kind"] for one in found["collectives"]] == ["all-reduce"]
    assert found["collectives"][0]["bytes"] == 2 * (found["all"] - found["vectors"]) + 4 * (
        found["vectors"] + 3
    )
