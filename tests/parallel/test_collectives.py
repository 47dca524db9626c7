"""What crosses devices, and in which dtype, in programs for 8 devices; and that it is what the
update needs.
"""

import json

import numpy as np
import pytest

from tests.parallel.test_sharding import crossing

PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from adaptive_jax.model import gradients
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.parallel import sharding
from adaptive_jax.model.language_model import build
from adaptive_jax.optimizers.optim import nag
from adaptive_jax.optimizers.schedules import constant, scheduled
from adaptive_jax.training.state import initial_state, shape_of_state
from adaptive_jax.training.update import make_update

optimizer = scheduled(
    lambda rate: nag(rate, momentum=0.9, clip_norm=0.5), constant(0.3, warmup_steps=0)
)
layers = {
    "dtype": "float32",
    "shard_words": False,
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
        "remat": "elementwise",
    },
}
model = build(layers, 103)
bodies = {
    "gcnn": {"name": "gated_conv", "features": 16, "blocks": ((1, 3, 14), (2, 2, 16))},
    "awd": {"name": "awd_lstm", "features": 16, "widths": (7, 16), "dropout": 0.1},
}
others = {name: build(layers | {"body": body}, 103) for name, body in bodies.items()}

platform, firsts = gradients.platform, {}

def first_state(model, mesh, shapes):
    if model not in firsts:  # to compile the start of a model for another mesh takes a second
        firsts[model] = jax.device_get(initial_state(model, optimizer, 0, mesh))
    return jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), firsts[model], shapes)

def updates(backend, devices, fsdp, runs, model=model):
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
    traced = make_update(model, optimizer, mesh, 7, shapes).trace(shapes, {}, batch(0))
    if not runs:
        return len(str(traced.jaxpr))
    sizes = {jax.tree_util.keystr(k): v.size for k, v in jax.tree.leaves_with_path(shapes.params)}
    update, state = traced.lower().compile(), first_state(model, mesh, shapes)
    result = {"compiled": update.as_text(), "sizes": sizes, "losses": []}
    for step in range(runs):
        state, metrics = update(state, {}, batch(step))
        result["losses"].append(
            [float(metrics[key]) for key in ("loss", "gradient_norm", "tokens")]
        )
    return result

def tracked(fsdp, sum_=sharding._sum):
    given, sharding._sum = (jax.shard_map, sharding._sum), sum_
    jax.shard_map = lambda *args, **how: given[0](*args, **how | {"check_vma": True})
    try:
        return updates("cpu", 8, fsdp, 0)
    except ValueError as error:
        return str(error)
    finally:
        jax.shard_map, sharding._sum = given

json.dump(
    {
        "tracked": [tracked(1), tracked(4)],
        "forgotten": tracked(1, lambda a, axes: a),
        "one": updates("cpu", 1, 1, 3),
        "blocks": updates("gpu", 8, 1, 3),
        "blocks_cut": updates("gpu", 8, 4, 3),
    }
    | {f"one_{name}": updates("cpu", 1, 1, 3, other) for name, other in others.items()}
    | {f"cut_{name}": updates("gpu", 8, 4, 3, other) for name, other in others.items()},
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


@pytest.mark.parametrize("body", ["gcnn", "awd"])
def test_layers_of_other_bodies_sum_their_gradients_too(results, body):
    """With the sums of every layer in the backward pass, losses and norms are those of one
    device.
    """
    one, found = (np.array(results[f"{grid}_{body}"]["losses"]) for grid in ("one", "cut"))
    assert one[0, 0] - one[-1, 0] > 0.02
    np.testing.assert_allclose(found, one, rtol=1e-5)


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
