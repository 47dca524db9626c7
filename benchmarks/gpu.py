"""All that there is to measure on one GPU, in one command of less than nine minutes.

    python -m benchmarks.gpu [--out=DIR]

runs, one after the other, each in a process of its own so that the memory of the GPU is free again,

- `benchmarks.throughput`: `wikitext103:adp_t` in blocks of 512 as published, with its parts and a profile; `adp` against the same
  model in PyTorch; blocks of 3072 (`best`);
- `benchmarks.attention`: every path at 512 and 3072 tokens, against torch's;
- `benchmarks.outputs`: the output layer at vocabulary 267,744, against its peers;

and writes DIR/gpu.json, with all numbers, DIR/gpu.md, the tables, and DIR/profile, a profile for Perfetto or TensorBoard. Of the
project's requirements only jax, flax, optax, orbax-checkpoint, ml_collections and numpy are needed, no corpus, and torch where it
is to be compared with. A part that would end after `--minutes` is cut off and says so; what came before it stays.

`--tiny` runs all of it with models of a few thousand parameters, to see that it runs: on a CPU, in minutes.
"""

import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from absl import app, flags

OUT = flags.DEFINE_string("out", os.environ.get("OUT", "gpu"), "Directory for gpu.json, gpu.md and profile.")
MINUTES = flags.DEFINE_float("minutes", 8.7, "Minutes for all of it.")
TINY = flags.DEFINE_bool("tiny", False, "Very small models, to see that it runs.")

SMALL = (
    "--config.data.vocabulary_size=700", "--config.data.block=16", "--config.input.cutoffs=(100,300)", "--config.body.layers=2",
    "--config.body.features=32", "--config.body.heads=2", "--config.body.feed_forward=32", "--repeats=1", "--updates=1",
)  # fmt: skip


def commands(directory: Path, tiny: bool) -> dict:
    """Name of each part to its command, dearest questions first."""

    def throughput(row, rows, *more):
        small = SMALL + ("--config.output.table.cutoffs=(100,300)",) * (row == "adp") if tiny else ()
        return ["benchmarks.throughput", f"--config=configs/wikitext103.py:{row}", f"--rows={2 if tiny else rows}", *more, *small]

    attention = ["--times=12,20", "--heads=2", "--width=8", "--rows=2", "--repeats=1"] if tiny else []
    outputs = ["--sizes=small", "--repeats=1", "--skip=masked dense,full softmax"] if tiny else ["--sizes=large", "--repeats=7"]
    return {
        "adp_t, blocks of 512": throughput("adp_t", 64, "--parts", f"--profile={directory / 'profile'}"),
        "adp, blocks of 512": throughput("adp", 64),
        "best, blocks of 3072": throughput("best", 8, "--parts"),
        "attention": ["benchmarks.attention", *attention],
        "output layer": ["benchmarks.outputs", *outputs],
    }


def run_part(name: str, command: list[str], directory: Path, seconds: float) -> dict:
    """Runs a part, shows its output as it comes, and returns its status, seconds, what it printed and its numbers."""
    file = directory / f"{name.split(',')[0].replace(' ', '_')}.json"
    start, printed = time.monotonic(), []
    whole = [sys.executable, "-m", *command, f"--json={file}"]
    print(f"## {name}\n   {' '.join(whole[1:])}", flush=True)
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    with subprocess.Popen(
        ["timeout", f"{max(seconds, 1):.0f}", *whole], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        for line in process.stdout:
            printed.append(line)
            print(line, end="", flush=True)
    numbers = json.loads(file.read_text()) if file.exists() else None
    return {"status": process.returncode, "seconds": round(time.monotonic() - start, 1), "command": " ".join(whole[1:]),
            "printed": "".join(printed), "numbers": numbers}  # fmt: skip


def table(parts: dict) -> str:
    """The parts as Markdown: what each printed under its command."""
    lines = []
    for name, part in parts.items():
        ended = {0: "", 124: ", cut off"}.get(part["status"], f", failed with status {part['status']}")
        lines += [f"### {name} ({part['seconds']:.0f} s{ended})", "", f"    python {part['command']}", ""]
        lines += ["    " + line for line in part["printed"].splitlines()[-60:]] + [""]
    return "\n".join(lines)


def main(argv):
    """Runs all parts and writes what they gave after each."""
    del argv
    directory = Path(OUT.value).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    end, parts = time.monotonic() + 60 * MINUTES.value, {}
    for name, command in commands(directory, TINY.value).items():
        parts[name] = run_part(name, command, directory, end - time.monotonic())
        done = {"date": datetime.date.today().isoformat(), "command": "python -m benchmarks.gpu", "parts": parts}
        (directory / "gpu.json").write_text(json.dumps(done, indent=2) + "\n")
        (directory / "gpu.md").write_text(table(parts) + "\n")
    print(f"{directory / 'gpu.json'} and gpu.md hold all of it")
    if any(part["status"] for part in parts.values()):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
