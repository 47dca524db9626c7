"""Runs programs one after another in a process of eight CPU devices, where JAX starts once.

A line of stdin is `{"code": ..., "argv": [...], "directory": ...}`: the directory gets the files
out and err, and stdout gets the exit status. A program puts back what it patches.
"""

import contextlib
import gc
import json
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
gc.set_threshold(100_000, 50, 50)  # as in tests/conftest.py
for line in sys.stdin:
    job, status = json.loads(line), 0
    with (
        Path(job["directory"], "out").open("w") as out,
        Path(job["directory"], "err").open("w") as err,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        sys.argv = ["-c", *job["argv"]]
        try:
            exec(compile(job["code"], "<string>", "exec"), {"__name__": "__main__"})
        except BaseException:
            status = 1
            traceback.print_exc()
    print(status, flush=True)
