"""The command that measures one GPU: nothing that goes wrong in a variant stops it, and what
has a result is not run again.
"""

import json
from types import SimpleNamespace

import pytest

from adaptive_jax.errors import InputError
from benchmarks import gpu, gpu_parts


def settings(out, **given):
    """The flags of `benchmarks.gpu`."""
    return SimpleNamespace(
        **{"out": str(out), "minutes": 5.0, "steps": ["0"], "tiny": True} | given
    )


def test_variants_that_fail_are_told_and_passed_over(tmp_path, monkeypatch, capfd):
    """Out of memory, a missing package, out of time, and any status; the one after them runs,
    and only they run again.
    """
    scripts = {
        "hungry": "print('RESOURCE_EXHAUSTED: 90 GB'); exit(1)",
        "told": (
            "from absl import flags\nfrom adaptive_jax.config import commands\n"
            "flags.DEFINE_string('json',"
            " None, '')\ndef main():\n    raise RuntimeError('RESOURCE_EXHAUSTED: 90"
            " GB')\ncommands.run(main)"
        ),
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
    variants = [gpu.Variant(name, [name]) for name in scripts]
    monkeypatch.setattr(gpu, "steps", lambda out, tiny: [gpu.Step(5, [each]) for each in variants])
    timed = gpu.run_variant
    monkeypatch.setattr(
        gpu,
        "run_variant",
        lambda variant, out, seconds: timed(variant, out, 2 if variant.name == "slow" else 60),
    )
    for _ in range(2):
        gpu.main(settings(tmp_path / "out", steps=[]))
    parts = json.loads((tmp_path / "out/gpu.json").read_text())["parts"]
    assert {name: part["ended"] for name, part in parts.items()} == {
        "hungry": "out of memory",
        "told": "out of memory",
        "bare": "the package no_such_package is missing",
        "slow": "out of time",
        "broken": "status 7",
        "good": "ok",
    }
    assert parts["slow"]["printed"] == "begun\n" and parts["good"]["numbers"] == [1]
    printed = capfd.readouterr().out
    assert printed.count("passed over: ") == 10 and printed.count("1 ms") == 1


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


def test_a_wrong_number_ends_with_an_error(monkeypatch):
    """A result that is far from the exact one is told, and the part fails."""
    monkeypatch.setitem(
        gpu_parts.PARTS,
        "check",
        lambda found, case: gpu_parts._compare(
            found, "x", [2.0 * gpu_parts.jnp.ones(3)], [gpu_parts.jnp.ones(3)], "float32"
        ),
    )
    with pytest.raises(InputError, match="check found wrong numbers"):
        gpu_parts.main("check", SimpleNamespace(tiny=True, json=None))
