"""The command that measures one GPU: nothing that goes wrong in a variant stops it, and what
has a result is not run again.
"""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from benchmarks import gpu, gpu_parts
from tests import refuses
from tests.pages import ROOT


def settings(out, **changes):
    """The flags of `benchmarks.gpu`."""
    return SimpleNamespace(
        **{"out": str(out), "data": None, "results": None, "variants": None, "minutes": 5.0}
        | {"steps": ["0"], "tiny": True}
        | changes
    )


def test_variants_that_fail_are_told_and_passed_over(tmp_path, monkeypatch, capfd):
    """Out of memory, a missing package, out of time, and any status; the one after them runs,
    and only they run again.
    """
    scripts = {
        "hungry": "print('RESOURCE_EXHAUSTED: 90 GB'); exit(1)",
        "bare": "import no_such_package",
        "slow": "print('begun', flush=True)\nimport time; time.sleep(60)",
        "broken": "exit(7)",
        "good": (
            "import json, sys; json.dump([1], open(sys.argv[1].removeprefix('--json='), 'w'));"
            " print('1 ms')"
        ),
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    variants = [gpu.Variant(name, [[name]]) for name in scripts]
    monkeypatch.setattr(gpu, "steps", lambda *_: [gpu.Step(5, [each]) for each in variants])
    timed = gpu.run_variant
    monkeypatch.setattr(
        gpu,
        "run_variant",
        lambda variant, out, seconds, on_cpu: timed(
            variant, out, 2 if variant.name == "slow" else 60, on_cpu
        ),
    )
    for _ in range(2):
        gpu.main(settings(tmp_path / "out", steps=[], minutes=6.0, results=str(tmp_path / "two")))
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["gpu.json", "gpu.md"]
    assert "| slow | out of time | 2." in (tmp_path / "two" / "gpu.md").read_text()
    parts = json.loads((tmp_path / "out/gpu.json").read_text())["parts"]
    assert {name: part["ended"] for name, part in parts.items()} == {
        "hungry": "out of memory",
        "bare": "the package no_such_package is missing",
        "slow": "out of time",
        "broken": "status 7",
        "good": "ok",
    }
    assert parts["slow"]["printed"] == "begun\n" and parts["good"]["numbers"] == [1]
    printed = capfd.readouterr().out
    assert printed.count("passed over: ") == 8 and printed.count("1 ms") == 1


def test_order_of_due_steps(tmp_path):
    """The order of half an hour: what was passed over comes last, what has a result not at all; a
    row to train needs its text; a pattern picks variants.
    """
    everything = gpu.steps(tmp_path, "kit", tiny=False)
    names = [variant.name for _, variant in gpu.due(everything, settings(tmp_path, steps=[]), {})]
    assert names[:4] == [
        "check",
        "adp_t, whole",
        "adp_t, nothing recomputed",
        "train penn_treebank:awd_sm, published perplexity 67.21",
    ]
    tried = {"check": {"ended": "ok"}, "adp_t, whole": {"ended": "out of time"}}
    left = gpu.due(everything, settings(tmp_path, steps=["0", "1", "2"]), tried)
    assert [variant.name for _, variant in left] == [*names[2:4], "adp_t, whole"]
    assert not [name for name in _names(tmp_path, None) if "train " in name]
    [(_, only)] = gpu.due(everything, settings(tmp_path, steps=[], variants="wikitext2"), {})
    assert only.name.startswith("train wikitext2:awd_asm, ")
    assert "/kit/wikitext-2" in " ".join(only.commands[0])
    with refuses("--variants=lstm"):
        gpu.due(everything, settings(tmp_path, steps=[], variants="lstm"), {})


def test_a_variant_that_the_end_of_a_command_cuts_off(tmp_path, monkeypatch):
    """It keeps its place for the next command, unless it had all the time that there was."""
    monkeypatch.setattr(
        gpu, "steps", lambda *_: [gpu.Step(5, [gpu.Variant(each, []) for each in "ab"])]
    )
    for ended in (["ok", gpu.LATE], [gpu.LATE, gpu.LATE]):
        results, out = iter(ended), tmp_path / ended[0]
        run = lambda *_, results=results: {"ended": next(results), "seconds": 1, "printed": ""}
        monkeypatch.setattr(gpu, "run_variant", run)
        gpu.main(settings(out, minutes=4.0))
        parts = json.loads((out / "gpu.json").read_text())["parts"]
        assert {name: part["ended"] for name, part in parts.items()} == {"a": ended[0]}
        again = gpu.due(gpu.steps(), settings(out), parts)
        assert [variant.name for _, variant in again] == ["b", "a"][: 1 + (ended[0] != "ok")]


def test_the_line_of_a_profile():
    """The table shows the time of an update, not that of its 40th operation."""
    printed = (
        "peer  ms\nadaptive_jax  119.0  118.2\n    9.10 ms  fusion_1\n    0.05 ms  fusion_40\n"
    )
    assert gpu.result_line(printed) == "adaptive_jax  119.0  118.2"


def _names(out, data):
    return [variant.name for step in gpu.steps(out, data, tiny=False) for variant in step.variants]


def test_a_driver_that_ends_takes_its_variant_along(tmp_path):
    """By SIGTERM and by SIGKILL; a child that lived on would hold the memory of the GPU."""
    (tmp_path / "slow.py").write_text("print('begun', flush=True)\nimport time; time.sleep(60)")
    driver = (
        "import sys; from benchmarks import gpu; gpu.steps = lambda *_: [gpu.Step(5,"
        " [gpu.Variant('slow', [['slow']])])]; from tests.benchmarks.test_gpu import settings;"
        " gpu.main(settings(sys.argv[1]))"
    )
    for number in signal.SIGTERM, signal.SIGKILL:
        process = subprocess.Popen(
            [sys.executable, "-c", driver, tmp_path / "out"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        )
        while process.stdout.readline() != "begun\n":
            pass
        [child] = psutil.Process(process.pid).children()
        process.send_signal(number)
        assert process.wait(20) == {signal.SIGTERM: 143, signal.SIGKILL: -9}[number]
        psutil.wait_procs([child], 20)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        process.stdout.close()


def test_a_row_is_trained_and_scored(text, tmp_path, capfd, monkeypatch):
    """With --data, in one variant: four updates of a small model, then its test perplexity."""
    monkeypatch.setenv("HOME", str(tmp_path))  # whose ~/.cache gets the text
    (tmp_path / "ptb").symlink_to(text)
    changes = {"data": str(tmp_path), "variants": "awd_sm", "steps": ["2"]}
    gpu.main(settings(tmp_path / "out", **changes))
    [part] = json.loads((tmp_path / "out/gpu.json").read_text())["parts"].values()
    assert part["ended"] == "ok", part["printed"]
    table = (tmp_path / "out/gpu.md").read_text()
    assert "published perplexity 67.21 | ok | " in table and "| test: perplexity " in table


def test_checks_and_output(tmp_path):
    """All three run whole on a CPU, and nothing is wrong."""
    parts = "check", "output", "blocks"
    for part in parts:
        gpu_parts.main(part, SimpleNamespace(tiny=True, json=str(tmp_path / part)))
    check, output, blocks = (json.loads((tmp_path / part).read_text()) for part in parts)
    assert {each["verdict"] for each in check if "verdict" in each} == {"right"}
    assert not [each for each in check if "passed_over" in each]
    assert len(blocks) == 2 and all("milliseconds" in each for each in blocks)
    assert [each["name"].split(",")[0] for each in output] == [
        "output layer",
        "band 0",
        "band 1",
        "band 2",
    ]
    assert all(each["milliseconds"] > 0 for each in output)


@pytest.mark.parametrize("wrong", [2.0, float("nan")])
def test_a_wrong_number_ends_with_an_error(monkeypatch, wrong):
    """A part fails with an error if a result is far from the exact one, or NaN behind others."""
    ones = gpu_parts.jnp.ones(3)
    monkeypatch.setitem(
        gpu_parts.PARTS,
        "check",
        lambda found, case: gpu_parts._compare(
            found, "x", [ones, wrong * ones], [ones, ones], "float32"
        ),
    )
    with refuses("check"):
        gpu_parts.main("check", SimpleNamespace(tiny=True, json=None))
