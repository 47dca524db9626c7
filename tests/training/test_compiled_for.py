"""`train.py --dry_run --target`: what the compiler of a device that is not here counts; and
what is refused.
"""

import importlib.util
import json
import sys
from pathlib import Path

import jax
import pytest

from adaptive_jax.planning import targets
from adaptive_jax.planning.plan import make_plan
from adaptive_jax.training import compiled as module
from adaptive_jax.training.compiled import (
    USABLE_MEMORY,
    compile_for,
    compile_update,
    counts,
    describe,
    memory_of,
    plan_update,
)
from adaptive_jax.training.dry_run import dry_run
from adaptive_jax.training.sparse import parts_of
from tests import refuses

PACKAGES = "jax_plugins", "nvidia", "libtpu"
MISSING = [module for module in PACKAGES if importlib.util.find_spec(module) is None]
REASON = (
    f"the extra `targets` is not installed: {', '.join(MISSING)} missing"
    if MISSING
    else "needs Python 3.12 or newer"
)
compiles = pytest.mark.skipif(bool(MISSING) or sys.version_info < (3, 12), reason=REASON)


def parts_for(config):
    return parts_of(config, config["data"]["vocabulary_size"])


SMALL = {"body.layers": 3, "tokens_per_update": 1024, "tokens_per_device": 512, "dtype": "bfloat16"}


@compiles
@pytest.mark.parametrize(
    "name, kind, fsdp", [("h100:2", "NVIDIA H100", 1), ("v5e:2x2", "TPU v5 lite", 2)]
)
def test_the_update_of_a_device_that_is_not_here(quick_command, flags, tmp_path, name, kind, fsdp):
    """plan.json has what is printed: state as large as the arrays, and the gradients beside it."""
    done = quick_command(
        "train.py", *flags(tmp_path / "run", fsdp=fsdp, **SMALL), "--dry_run", f"--target={name}"
    )
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    target, numbers = plan["target"], 4 * plan["parameters"]["total"]
    most = 4 if "v5e" in name else 1.2  # with the batch; TPUs pad small arrays to tiles
    assert target["name"] == name
    assert f"target       {name}: {plan['devices']} x {kind}" in done.stdout
    assert plan["state_bytes"] <= target["state_bytes"] < most * plan["state_bytes"]
    assert target["temp_bytes"] > numbers / fsdp  # the gradients
    assert f"temporary {target['temp_bytes'] / 1e6:,.3f} MB" in done.stdout


STREAMS = {"batches.layout": "streams", "body.features": 32, "body.widths": (40, 32)}
LAYERS = {
    "gcnn": {
        "body.name": "gated_conv",
        "body.features": 32,
        "body.blocks": ((1, 5, 48), (2, 1, 24, 3, 24, 1, 48)),
        "dtype": "bfloat16",
    },
    "lstm": STREAMS | {"body.name": "awd_lstm"},
    "groc": STREAMS
    | {
        "body.name": "lstm",
        "dtype": "bfloat16",
        "input.name": "groc",
        "input.width": 4,
        "input.filters": ((1, 6), (3, 8)),
        "input.strides": (1, 2),
        "input.lexicon": str(Path(__file__).parents[1] / "fixtures" / "lexicon.jsonl"),
        "output.name": "softmax",
        "output.table.name": "mapped",
        "output.table.bias": "predicted",
    },
}


@compiles
@pytest.mark.parametrize("name", ["h100", "v5e:2x2"])
@pytest.mark.parametrize("layers", LAYERS)
def test_layers_of_every_kind_are_compiled(with_layers, layers, name):
    """One layer of each kind: a kernel that a device's compiler refuses would show only there."""
    config = with_layers(LAYERS[layers])
    target, plan, program = compile_for(name, config, parts_for(config))
    counted = counts(target, program)
    assert counted["temp_bytes"] > 4 * plan.parameters["total"]
    assert target.name in describe(target, counted)


CROSSING = """
import json, sys
import jax
from adaptive_jax.model.language_model import parameter_shapes
from adaptive_jax.training.compiled import compile_for
from adaptive_jax.training.sparse import parts_of
from benchmarks.collectives import collectives

config = json.load(open(sys.argv[1]))
parts = parts_of(config, config["data"]["vocabulary_size"])
_, _, compiled = compile_for(sys.argv[2], config, parts)
sizes = [a.size for a in jax.tree.leaves(parameter_shapes(parts.model))]
print(json.dumps({"parameters": sum(sizes), "crossing": collectives(compiled)}))
"""


@compiles
@pytest.mark.parametrize("name", ["h100:8", "v5e:4x2"])
def test_bytes_that_cross_eight_devices(quick_command, config, tmp_path, name):
    """Every gradient once, in float32, and three sums of losses. Twice as many bytes would show
    that gradients of microbatches or of the loop over blocks cross one by one.
    """
    held = config(**SMALL | {"tokens_per_device": 128})
    (tmp_path / "config.json").write_text(json.dumps(held))
    done = quick_command("-c", CROSSING, tmp_path / "config.json", name)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert [one["kind"] for one in printed["crossing"]] == ["all-reduce"]
    assert printed["crossing"][0]["bytes"] == 4 * (printed["parameters"] + 3)


@compiles
def test_a_target_needs_the_size_of_the_vocabulary(config, tmp_path):
    """No corpus is read for a target."""
    with refuses("data.vocabulary_size"):
        dry_run(config(**SMALL | {"data.vocabulary_size": 0}), tmp_path / "run", "h100")


@pytest.mark.parametrize(
    "message, cure",
    [
        ("NOT_FOUND: no config\nfor a fusion", "another version"),
        ("RESOURCE_EXHAUSTED: of 8 GB", "too little memory"),
        ("RESOURCE_EXHAUSTED: Shared memory size limit", "another version"),
        ("INTERNAL: memory space 3 is unknown", "another version"),
    ],
)
def test_errors_of_a_compiler(config, monkeypatch, message, cure):
    """One line with its own words, for a device that is not here."""

    def fails(*_):
        raise jax.errors.JaxRuntimeError(message)

    target = targets.Target("h100", jax.devices()[:1], 10**9, {})
    monkeypatch.setattr(module, "topology", lambda name: target)
    monkeypatch.setattr(module, "compile_update", fails)
    with refuses("--target=h100", cure, " ".join(message.split())):
        compile_for("h100", config(**SMALL), parts_for(config(**SMALL)))


@pytest.mark.parametrize(
    "flag, says",
    [
        (["--target=h100"], "--target=h100 compiles for a device that need not be here: add --dry"),
        (["--dry_run", "--target=h1000"], "--target=h1000 must be one of a100"),
    ],
)
def test_refused_targets(quick_command, flags, tmp_path, flag, says):
    """One line, and nothing is written."""
    done = quick_command("train.py", *flags(tmp_path / "run", **SMALL), *flag)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {says}") and done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_microbatches_as_large_as_memory_holds(config):
    """tokens_per_device=0: the fewest microbatches whose compiled update fits; 4,096 tokens where
    memory is not known; an error where one row does not fit.
    """
    devices = jax.devices()[:1]
    held = config(tokens_per_update=256, tokens_per_device=64)
    length = held["batches"]["sequence_length"]
    parts = parts_of(held, 122)
    plan = make_plan(held, parts, 1)
    needed = sum(memory_of(compile_update(held, plan, parts, devices)))
    free = held | {"tokens_per_device": 0}
    assert plan_update(free, parts, devices, None)[0].accumulation == 1
    chosen, compiled = plan_update(free, parts, devices, int(needed / USABLE_MEMORY) + 1)
    assert chosen == plan and sum(memory_of(compiled)) == needed
    all_at_once, _ = plan_update(free, parts, devices, int(1e10))
    assert (all_at_once.accumulation, all_at_once.rows_per_device) == (1, 256 // length)
    with refuses("one row", f"{length} tokens"):
        plan_update(free, parts, devices, 100_000)


@pytest.mark.parametrize("full", [False, True], ids=["counted", "too large to compile"])
def test_microbatches_between_two_sizes(config, monkeypatch, full):
    """Half the rows are tried where memory holds more than half and less than all: such runs were
    refused. A prime number of rows is filled up, not read one row at a time.
    """

    def compiles(config, plan, *_):
        if full and plan.rows_per_device > 10:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: too large")
        return plan.rows_per_device

    monkeypatch.setattr(module, "compile_update", compiles)
    monkeypatch.setattr(module, "memory_of", lambda rows: (1_000_000, 1_000_000 * rows))
    for rows, fit in (3, 1), (8, 4), (9, 3), (16, 8), (19, 7), (128, 8):
        free = config(tokens_per_update=rows * 16, tokens_per_device=0)
        free["batches"]["sequence_length"] = 16
        memory = int((2.5 + (fit if rows < 128 else 10)) * 1_000_000 / USABLE_MEMORY)
        plan, compiled = plan_update(free, parts_of(free, 122), jax.devices()[:1], memory)
        assert plan.rows_per_device == compiled == fit, rows


def test_a_dry_run_says_which_flag_counts_memory(quick_command, flags, tmp_path):
    """Without a target; plan.json has none, and nothing where the vocabulary is not known."""
    done = quick_command("train.py", *flags(tmp_path / "run", **SMALL), "--dry_run")
    assert (done.returncode, done.stderr) == (0, "") and "--target=h100" in done.stdout
    assert "target" not in json.loads((tmp_path / "run" / "plan.json").read_text())
    unknown = flags(tmp_path / "none", **SMALL, **{"data.vocabulary_size": 0})
    done = quick_command("train.py", *unknown, "--dry_run")
    assert done.returncode == 0 and "data.vocabulary_size, which is 0" in done.stdout
    assert not (tmp_path / "none").exists()
