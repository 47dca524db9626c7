"""`train.py --dry_run --target`: what the compiler of a device that is not here counts; and
what is refused.
"""

import importlib.util
import json
import sys

import pytest

from adaptive_jax.errors import InputError
from adaptive_jax.planning.plan import make_plan
from adaptive_jax.planning.targets import topology
from adaptive_jax.training import dry_run, targets
from adaptive_jax.training.targets import plan_for

MISSING = [
    module
    for module in ("jax_plugins", "nvidia", "libtpu")
    if importlib.util.find_spec(module) is None
]
REASON = (
    f"the extra `targets` is not installed: {', '.join(MISSING)} missing"
    if MISSING
    else "needs Python 3.12 or newer"
)
compiles = pytest.mark.skipif(bool(MISSING) or sys.version_info < (3, 12), reason=REASON)
SMALL = {"body.layers": 3, "tokens_per_update": 1024, "tokens_per_device": 512, "dtype": "bfloat16"}


@compiles
@pytest.mark.parametrize(
    "name, kind, fsdp, collectives",
    [
        ("h100:2", "NVIDIA H100", 1, {"all-reduce"}),
        ("v5e:2x2", "TPU v5 lite", 2, {"all-gather", "all-reduce", "reduce-scatter"}),
    ],
)
def test_the_update_of_a_device_that_is_not_here(
    quick_command, flags, tmp_path, name, kind, fsdp, collectives
):
    """plan.json has what is printed: state as large as the arrays, the loops over blocks,
    gradients summed over devices.
    """
    done = quick_command(
        "train.py", *flags(tmp_path / "run", fsdp=fsdp, **SMALL), "--dry_run", f"--target={name}"
    )
    assert (done.returncode, done.stderr) == (0, "")
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    target, numbers = plan["target"], 4 * plan["parameters"]["total"]
    most = 4 if "v5e" in name else 1.2  # with the batch; TPUs pad small arrays to tiles
    assert (
        target["name"] == name and f"target       {name}: {plan['devices']} x {kind}" in done.stdout
    )
    assert (
        plan["memory_per_device"]["state"]
        <= target["state_bytes"]
        < most * plan["memory_per_device"]["state"]
    )
    assert target["temp_bytes"] > numbers / fsdp  # the gradients
    assert f"temporary {target['temp_bytes'] / 1e6:,.3f} MB" in done.stdout
    assert {one["kind"] for one in target["collectives"]} >= collectives
    assert sum(one["bytes"] for one in target["collectives"]) > numbers / fsdp
    loops = [loop["trips"] for loop in target["loops"] if loop["source"].endswith("body/while")]
    assert loops == (
        [3, 3] if "v5e" in name else []
    )  # forward and backward; a GPU trains without a loop over blocks
    assert (
        target["largest"][0]["bytes"] >= target["largest"][-1]["bytes"] > 0 < target["moved_bytes"]
    )
    assert 512 < target["tokens"] < 10**9


@compiles
@pytest.mark.parametrize(
    "name, changes, says",
    [
        ("h100:3", {}, "3 devices cannot share the 64 rows"),
        ("h100", {"data.vocabulary_size": 0}, "set data.vocabulary_size"),
    ],
)
def test_plans_that_do_not_fit_a_target(config, name, changes, says):
    """They are refused before anything is compiled."""
    with pytest.raises(InputError, match=says):
        plan_for(topology(name), config(**SMALL, **changes))


@pytest.mark.parametrize(
    "flag, says",
    [
        (
            ["--target=h100"],
            "--target=h100 compiles for a device that need not be here: add --dry_run",
        ),
        (["--dry_run", "--target=h1000"], "--target=h1000 is no device: give one of a100"),
        *[
            (["--dry_run", "--target=h100"], "--target=h100 needs Python 3.12 or newer")
            for _ in range(sys.version_info < (3, 12))
        ],
    ],
)
def test_what_is_refused(quick_command, flags, tmp_path, flag, says):
    """One line, and nothing is written."""
    done = quick_command("train.py", *flags(tmp_path / "run", **SMALL), *flag)
    assert (
        done.returncode == 2
        and done.stderr.startswith(f"error: {says}")
        and done.stderr.count("\n") == 1
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("temporary, tokens", [(500, 14_400), (150, 57_600), (40, 57_600)])
def test_tokens_that_a_device_can_hold(config, monkeypatch, temporary, tokens):
    """Beside gradients, in proportion to rows; by the planned activations where the compiler
    takes no more than for gradients.
    """
    plan = make_plan(config(**SMALL), 700, 1)._replace(
        memory_per_device={"gradients": 100, "activations": 100},
        rows_per_device=4,
        tokens_per_update=64,
        rows_per_update=4,
    )
    monkeypatch.setattr(
        targets, "report", lambda _: {"temp_bytes": temporary, "state_bytes": 1_900}
    )
    found = targets.counts(targets.Target("gpu", "h100", [None], 92_000), plan, None)
    assert found["tokens"] == tokens and (found["name"], found["devices"]) == ("h100", 1)


def test_a_dry_run_says_what_bfloat16_would_bring(monkeypatch):
    """To a user of float32, where this CPU is that much faster in it; never to one of bfloat16."""
    for least, lines in (0, 1), (float("inf"), 0):
        monkeypatch.setattr(dry_run, "WORTH", least)
        told = dry_run._of_bfloat16({"dtype": "float32"})
        assert len(told) == lines and all(
            "times as fast" in line and "--config.dtype=bfloat16" in line for line in told
        )
        assert dry_run._of_bfloat16({"dtype": "bfloat16"}) == []


def test_a_dry_run_says_what_an_estimate_is(quick_command, flags, tmp_path):
    """Without a target, and which flag counts instead; plan.json has no target."""
    done = quick_command("train.py", *flags(tmp_path / "run", **SMALL), "--dry_run")
    assert (
        done.returncode == 0
        and "estimate     memory" in done.stdout
        and "--target=h100" in done.stdout
    )
    assert "target" not in json.loads((tmp_path / "run" / "plan.json").read_text())
