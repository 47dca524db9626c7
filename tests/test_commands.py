"""train.py and evaluate.py as a user meets them: plans, help, one clear line for bad input, and
interruptions.
"""

import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import pytest

from adaptive_jax.data.corpora.load import load
from adaptive_jax.model.language_model import build, init_params
from adaptive_jax.runs.checkpoints import steps_in
from adaptive_jax.training.dry_run import dry_run
from adaptive_jax.training.loop import train
from tests import refuses


def files(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def the_error(done):
    """The one line that a command printed about bad input."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert re.fullmatch(r"error: .+\n", done.stderr), done.stderr
    assert "Traceback" not in done.stdout
    return done.stderr.removeprefix("error: ").rstrip("\n")


def test_a_dry_run_needs_no_corpus(quick_command, flags, config, tmp_path):
    """It prints the plan, writes it alone, and counts the parameters that the model really has."""
    changes = {
        "data.path": "/nowhere",
        "body.layers": 2,
        "tokens_per_update": 1024,
        "tokens_per_device": 256,
    }
    done = quick_command("train.py", *flags(tmp_path / "run", **changes), "--dry_run")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["plan.json"]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    params = jax.eval_shape(lambda: init_params(build(config(**changes), 122), 0))
    assert plan["parameters"]["total"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert "1,024 tokens = 4 x 16 rows x 1 device(s)" in done.stdout and "122 words" in done.stdout
    assert "data.path=/nowhere does not exist here" in done.stdout


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"input.cutoffs": (20, 122)}, ["122", "cutoff", "leave at least one word"]),
        ({"tokens_per_update": 500}, ["tokens_per_update=500", "sequence_length=16", "take 496"]),
        ({"tokens_per_device": 8}, ["tokens_per_device=8", "take 16 or more"]),
        ({"seed": 2**40}, ["seed", "got 1099511627776"]),
        ({"schedule.min_learning_rate": 0.5}, ["schedule.min_learning_rate", "0.3", "got 0.5"]),
        ({"schedule.warmup_steps": 241}, ["schedule.warmup_steps", "240", "got 241"]),
        ({"schedule.shrink": 1.5}, ["schedule.shrink", "got 1.5"]),
        ({"schedule.cycles": 40}, ["schedule.cycles", "got 40"]),
        (
            {"schedule.cycles": 30, "schedule.cycle_steps": 9},
            ["schedule.cycles=30", "2,147,483,647"],
        ),
    ],
)
def test_a_wrong_setting(config, tmp_path, changes, says):
    """An InputError, which the commands print as above, before anything is written."""
    run = tmp_path / "run"
    for command in dry_run, train:
        with refuses(*says):
            command(config(**changes), run)
    assert not run.exists()


PERMISSIONS = """
import os
from adaptive_jax.config import commands
def main(path):
    if os.getuid() == 0:
        os.setuid(65534)  # root may read everything
    open(path, "rb")
commands.run(main, ["PATH"])
"""


def test_unreadable_files(quick_command):
    """One line names the file and the reason."""
    # Not tmp_path, below a directory that only its owner may enter.
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "secret").touch(0o000)
        place.chmod(0o555)
        line = the_error(quick_command("-c", PERMISSIONS, place / "secret"))
        place.chmod(0o755)
    assert re.match("cannot use .*secret: Permission denied; ", line), line


def test_the_workdir_of_another_config(config, trained):
    """Each setting that differs is named with both values, those that may change are not, and
    the run stays as it was.
    """
    before = files(trained)
    other = config(**{"body.layers": 2, "seed": 7, "steps": 500, "log_every": 1})
    for command in train, dry_run:
        with refuses("body.layers was 1 and is now 2; seed was 0 and is now 7.") as error:
            command(other, trained)
        assert "steps" not in str(error.value)
    assert files(trained) == before


def test_a_full_disk(quick_command, config, flags, small_disk):
    """A checkpoint that does not fit, the first or the second, is an error in one line; what was
    saved before is there, and the same command resumes the run once there is room.
    """
    load(config()["data"])  # now cached, elsewhere
    changes, run = {"checkpoint_every": 2, "evaluate_every": 2}, small_disk / "run"

    def resize(size):
        subprocess.run(["mount", "-o", f"remount,size={size}", small_disk], check=True)

    def check_full(steps):
        message = the_error(quick_command("train.py", *flags(run, **changes, steps=steps)))
        assert message.startswith(f"cannot write {small_disk}"), message
        assert "No space left on device" in message

    check_full(2)
    resize("5m")
    train(config(**changes, steps=2), run)
    # Less than it needs, which is known only while it is written; it may be some pages smaller
    # than the first one, as its arrays are compressed.
    first = [path for path in run.glob("checkpoints/2/**/*") if path.is_file()]
    needed = 512 * sum(path.stat().st_blocks for path in first)
    resize(shutil.disk_usage(small_disk).used + needed * 7 // 10)
    check_full(4)
    assert steps_in(run / "checkpoints") == [2]
    resize("5m")
    train(config(**changes, steps=4), run)
    assert steps_in(run / "checkpoints") == [4, 2]
