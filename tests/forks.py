"""Runs scripts quickly: imports what they import once, then forks for each line of stdin, and
prints its exit status.

A line is `{"argv": ["train.py", "--help"], "cwd": ..., "env": {...}, "directory": ...}`, where argv
may also begin with "-m", MODULE or "-c", CODE; the directory has the file in, which is stdin, and
gets the files out and err. A script is killed when the directory gets a file kill, and after LIMIT
seconds: its status is -9. With `"apart": true` the next line does not wait for it: 0 is printed at
once, and the directory gets the files pid and, when it has ended, status. JAX must not have started
when a process is forked: nothing here may use a device.
"""

import gc
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 300
MEMORY = 8 << 30  # bytes that a script may take
# None of these defines flags or starts JAX.
MODULES = (
    "adaptive_jax.training.loop",
    "adaptive_jax.scores.evaluate",
    "adaptive_jax.planning.cutoffs",
    "adaptive_jax.interop.torch_files",
    "sacremoses",
)


def child(job):
    """Becomes the script."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    for number, name in (1, "out"), (2, "err"):
        file = os.open(os.path.join(job["directory"], name), os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    os.dup2(os.open(os.path.join(job["directory"], "in"), os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", closefd=False),
        os.fdopen(2, "w", buffering=1, closefd=False),
    )
    os.environ.update(job["env"])
    script, *sys.argv[1:] = job["argv"]
    code = None
    if script in ("-m", "-c"):
        code = sys.argv[1] if script == "-c" else None
        script, *sys.argv[1:] = sys.argv[1:]
    sys.path[0] = str(ROOT if script.endswith(".py") else job["cwd"])
    os.chdir(job["cwd"])
    try:
        if code is not None:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
        elif script.endswith(".py"):
            sys.argv[0] = script
            runpy.run_path(str(ROOT / script), run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return 1 if isinstance(end.code, str) else int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def wait(pid, directory):
    """The exit status of a process that has LIMIT seconds, or until there is a file
    `directory/kill`.
    """
    end, kill = time.monotonic() + LIMIT, Path(directory, "kill")
    while time.monotonic() < end and not kill.exists():
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def begin(job):
    """Forks the script; the id of its process."""
    sys.stdout.flush()
    if pid := os.fork():
        return pid
    status = 1
    try:
        status = child(job)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def keep(job):
    """Forks a process that begins the script, waits for it and writes the two files."""
    if os.fork():
        return 0

    def write(name, number):
        part = Path(job["directory"], f"{name}.part")
        part.write_text(str(number))
        part.rename(part.with_suffix(""))

    try:
        pid = begin(job)
        write("pid", pid)
        write("status", wait(pid, job["directory"]))
    finally:
        os._exit(0)


def main():
    """Serves until stdin ends."""
    sys.path[:0] = [str(ROOT)]
    for module in MODULES:
        importlib.import_module(module)
    gc.set_threshold(100_000, 50, 50)  # as in tests/conftest.py
    gc.freeze()  # what is imported is not looked through again
    warnings.filterwarnings(
        "ignore", message="os.fork"
    )  # no thread has started that a child would miss
    for line in sys.stdin:
        job = json.loads(line)
        done = keep(job) if job.get("apart") else wait(begin(job), job["directory"])
        print(done, flush=True)


if __name__ == "__main__":
    main()
