"""Ctrl-C as a terminal sends it, to all processes of a command at once, while it prepares a
corpus in several.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def line(tmp_path_factory):
    """The command line that prepares a corpus large enough for several processes: 20 MB, three
    shards of it in the train split.
    """
    text = tmp_path_factory.mktemp("text")
    part = "".join(f"the w{i * 7919 % 50_000} saw w{i % 977} .\n" for i in range(50_000)).encode()
    (text / "train.txt").write_bytes(part * 20)
    for split in "valid", "test":
        (text / f"{split}.txt").write_bytes(part[:2_000])
    return [
        sys.executable,
        "-m",
        "adaptive_jax",
        "prepare",
        "--config=configs/quickstart.py",
        "--config.data.corpus=text_files",
        f"--config.data.path={text}",
    ]


def shards(cache):
    return {path: path.stat().st_mtime_ns for path in cache.rglob("train/[!.]*.npz")}


def until(done, process):
    """Waits until a process is so far."""
    while process.poll() is None and not done():
        time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_line_and_no_process(line, number, tmp_path):
    """While the processes start and while they work: nothing runs on, and the same command
    makes only what is missing.
    """
    cache, kept = tmp_path / "cache", {}
    line = [*line, f"--config.data.cache={cache}"]
    for moment in "start", "work":
        with subprocess.Popen(
            line, cwd=ROOT, start_new_session=True, text=True, stderr=subprocess.PIPE
        ) as process:
            workers = psutil.Process(process.pid).children
            until(
                lambda workers=workers: len(workers()) > 1, process
            )  # the first is multiprocessing's own
            if moment == "work":
                until(lambda: shards(cache), process)
            begun = workers(recursive=True)
            os.killpg(process.pid, number)
            _, err = process.communicate(timeout=30)
        assert process.returncode == 130, err
        assert err == "stopped: the same command resumes the preparation\n"
        assert not psutil.wait_procs(begun, timeout=10)[1]
        assert shards(cache).items() >= kept.items()
        kept = shards(cache)
    assert kept
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens train 6,000,000" in done.stdout
    assert len(shards(cache)) == 3 and shards(cache).items() >= kept.items()
    assert not list(cache.rglob(".*.npz.*"))  # nothing half-written
