"""Large pages and two devices on a CPU: what a process starts with, and whose choice counts."""

import json
import os
import subprocess
import sys

import pytest

from adaptive_jax.parallel import processors

TUNED = """
from adaptive_jax.parallel import processors
processors.use_large_pages()
import os
body = {"name": "lstm", "widths": (512, 256)} if %s else {"name": "gcnn"}
two = processors.use_two_devices(
    {"tokens_per_update": %s, "batches": {"sequence_length": 16}, "body": body}
)
import jax
print(os.environ.get("GLIBC_TUNABLES"), two, jax.device_count())
"""


def printed(*arguments, **variables):
    """The output of a process that runs on a CPU whose number of devices nobody chose, but for
    `variables`.
    """
    unset = "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "GLIBC_TUNABLES"
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"JAX_PLATFORMS": "cpu"} | variables
    line = [sys.executable, *arguments]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "wide_lstm, tokens, variables, devices",
    [
        (False, 512, {}, 2),
        (False, 48, {}, 1),
        (True, 512, {}, 1),
        (True, 1024, {}, 2),
        (False, 512, {"XLA_FLAGS": "--xla_force_host_platform_device_count=3"}, 3),
    ],
)
@pytest.mark.skipif(processors.cores() < 2, reason="one core")
def test_devices_and_pages_of_a_process(wide_lstm, tokens, variables, devices):
    """Two devices for an even number of rows, of a wide LSTM for 64 or more; whoever chose the
    number of devices keeps it, and memory as it is.
    """
    large = processors.LARGE_PAGES if processors._large_pages_exist() and not variables else None
    assert (
        printed("-c", TUNED % (wide_lstm, tokens), **variables)
        == f"{large} {devices == 2} {devices}\n"
    )


@pytest.mark.skipif(processors.cores() < 2, reason="one core")
def test_training_says_so_and_can_be_told_not_to(tmp_path):
    """A dry run of train.py has the devices that training would have."""
    train = "train.py", "--config=configs/quickstart.py", "--dry_run"
    assert "two devices" in printed(*train, f"--workdir={tmp_path / 'two'}")
    assert "two devices" not in printed(*train, f"--workdir={tmp_path / 'one'}", "--tune_cpu=false")
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in ("two", "one")]
    assert [plan["devices"] for plan in plans] == [2, 1]


@pytest.mark.parametrize(
    "platforms, device, installed, visible, anew",
    [
        ("", "nvidia0", "nothing", "0", True),
        ("", "nvidia0", "jax_plugins", "0", False),
        ("", "nvidia0", "jax_plugins", "", True),
        ("", "vfio/0", "libtpu", "", False),
        ("", "null", "libtpu", "0", True),
        ("cpu", "nvidia0", "jax_plugins", "0", True),
        ("cuda", "null", "nothing", "0", False),
    ],
)
def test_only_training_on_a_cpu_starts_anew(
    tmp_path, monkeypatch, platforms, device, installed, visible, anew
):
    """Large pages of the host are nothing to GPUs and TPUs. GPUs that are hidden are none: several
    processes on CPUs did not begin their collectives in one order.
    """
    started, file = [], tmp_path / device
    file.parent.mkdir(exist_ok=True)
    file.touch()
    monkeypatch.setattr(processors, "FILES", tmp_path)
    monkeypatch.setattr(processors, "_large_pages_exist", lambda: True)
    monkeypatch.setattr(processors, "_devices_are_chosen", lambda: False)
    monkeypatch.setattr(
        processors.importlib.util, "find_spec", lambda name: name if name == installed else None
    )
    monkeypatch.setattr(os, "execv", lambda *arguments: started.append(arguments))
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    processors.use_large_pages()
    assert bool(started) == anew
