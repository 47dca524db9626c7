"""One training at a time in a workdir."""

import os
import platform
import subprocess
import sys

import pytest

from adaptive_jax.errors import InputError
from adaptive_jax.workdir.lock import locked

HOLD = """
import sys
from pathlib import Path
from adaptive_jax.workdir.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_workdir_is_held_by_one_process(tmp_path):
    """The second is told the machine and the process of the first; when that is killed, the
    lock goes with it.
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "run"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout.readline() == b"held\n"
    for _ in range(2):  # the one who is refused changes nothing
        says = f"in use by the training of process {holder.pid} on {platform.node()}: "
        with pytest.raises(InputError, match=says), locked(tmp_path / "run"):
            pass
    holder.kill()
    holder.communicate()
    with locked(tmp_path / "run"):
        assert (
            tmp_path / "run" / ".training"
        ).read_text() == f"process {os.getpid()} on {platform.node()}"
    assert not (tmp_path / "run" / ".training").exists()
    with locked(tmp_path / "run"):
        pass


def test_a_workdir_that_cannot_be(tmp_path):
    """A file in its place is an OSError, which the commands tell in one line."""
    (tmp_path / "file").touch()
    with pytest.raises(OSError), locked(tmp_path / "file"):
        pass
