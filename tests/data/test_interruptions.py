"""Ctrl-C as a terminal sends it, to all processes of a command at once, while it prepares a
corpus in several.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from tests.conftest import until

ROOT = Path(__file__).parents[2]


def parts(cache):
    return {path: path.stat().st_mtime_ns for path in cache.rglob("train/[!.]*.npz")}


def test_one_line_and_no_process(tmp_path, own_cache):
    """Ctrl-C while the processes start and SIGTERM while they work: nothing runs on, and the same
    command makes only what is missing.
    """
    text, cache = tmp_path / "text", own_cache
    text.mkdir()
    part = "".join(f"the w{i * 7919 % 50_000} saw w{i % 977} .\n" for i in range(50_000)).encode()
    (text / "train.txt").write_bytes(part * 17)  # 17 MB, of three shards
    for split in "valid", "test":
        (text / f"{split}.txt").write_bytes(part[:2_000])
    line = [sys.executable, "-m", "adaptive_jax", "prepare", "--config=configs/quickstart.py"]
    data = {"corpus": "text_files", "path": text, "tokeniser": "none", "lower": False}
    line += [f"--config.data.{key}={value}" for key, value in data.items()]
    for number, has_begun in (signal.SIGINT, lambda: True), (signal.SIGTERM, lambda: parts(cache)):
        with subprocess.Popen(
            line, cwd=ROOT, start_new_session=True, text=True, stderr=subprocess.PIPE
        ) as process:
            workers = psutil.Process(process.pid).children
            # The first process is multiprocessing's own.
            until(lambda workers=workers: len(workers()) > 1, process)
            until(has_begun, process)
            begun = workers(recursive=True)
            os.killpg(process.pid, number)
            _, err = process.communicate(timeout=30)
        assert process.returncode == 130, err
        # Where processes start, Python's own tracebacks may stand beside it.
        assert "stopped: the same command resumes the preparation\n" in err
        assert number == signal.SIGINT or err.count("\n") == 1, err
        assert not psutil.wait_procs(begun, timeout=10)[1]
    kept = parts(cache)
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tokens train 5,100,000" in done.stdout
    assert len(parts(cache)) == 3 and parts(cache).items() >= kept.items() and kept
    assert not list(cache.rglob(".*.npz.*"))  # nothing half-written
