"""Everything that benchmarks one GPU, in one command of less than nine minutes.

    python -m benchmarks.gpu [--out=DIR]

It runs these parts one after the other, each in a process of its own, which frees the memory of the GPU when it ends:

- `benchmarks.throughput`: `wikitext103:adp_t` with rows of 512 tokens as published, with its parts and a profile; `adp` against
  the same model in PyTorch; `best` with rows of 3,072;
- `benchmarks.attention`: every path at 512 and 3,072 tokens, against torch;
- `benchmarks.outputs`: the output layer with a vocabulary of 267,744 words, against its peers.

It writes DIR/gpu.json with all numbers, DIR/gpu.md with the tables, and DIR/profile, a profile for Perfetto or TensorBoard. It
needs only jax, flax, optax, orbax-checkpoint, ml_collections and numpy of the project's requirements, torch to compare with, and
no corpus. A part that would run past `--minutes` is stopped and reported as cut off; the results of earlier parts stay.

`--tiny` runs models of a few thousand parameters, as a test: it takes minutes on a CPU.
"""

import datetime
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from absl import flags

from adaptive_jax import command

SMALL = (
    "--config.data.vocabulary_size=700", "--config.batches.sequence_length=16", "--config.input.cutoffs=(100,300)",
    "--config.body.layers=2", "--config.body.features=32", "--config.body.heads=2", "--config.body.feed_forward=32",
    "--repeats=1", "--updates=1",
)  # fmt: skip


def commands(directory: Path, tiny: bool) -> dict:
    """The command of each part by name, the most important first."""

    def throughput(row, rows, *more):
        small = SMALL + ("--config.output.table.cutoffs=(100,300)",) * (row == "adp") if tiny else ()
        return ["benchmarks.throughput", f"--config=configs/wikitext103.py:{row}", f"--rows={2 if tiny else rows}", *more, *small]

    attention = ["--times=12,20", "--heads=2", "--width=8", "--rows=2", "--repeats=1"] if tiny else []
    outputs = ["--sizes=small", "--repeats=1", "--skip=masked dense,full softmax"] if tiny else ["--sizes=large", "--repeats=7"]
    return {
        "adp_t, rows of 512": throughput("adp_t", 64, "--parts", f"--profile={directory / 'profile'}"),
        "adp, rows of 512": throughput("adp", 64),
        "best, rows of 3072": throughput("best", 8, "--parts"),
        "attention": ["benchmarks.attention", *attention],
        "output layer": ["benchmarks.outputs", *outputs],
    }


def run_part(name: str, command: list[str], directory: Path, seconds: float) -> dict:
    """Runs a part and shows its output as it comes. Returns its status, seconds, command, output and numbers."""
    file = directory / f"{name.split(',')[0].replace(' ', '_')}.json"
    start, printed = time.monotonic(), []
    whole = [sys.executable, "-m", *command, f"--json={file}"]
    print(f"## {name}\n   {' '.join(whole[1:])}", flush=True)
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_CPP_MIN_LOG_LEVEL": "2"}
    limited = ["timeout", f"{max(seconds, 1):.0f}", *whole]
    with subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        for line in process.stdout:
            printed.append(line)
            print(line, end="", flush=True)
    return {
        "status": process.returncode,
        "seconds": round(time.monotonic() - start, 1),
        "command": " ".join(whole[1:]),
        "printed": "".join(printed),
        "numbers": json.loads(file.read_text()) if file.exists() else None,
    }


def table(parts: dict) -> str:
    """The parts as Markdown: for each its command and what it printed."""
    lines = []
    for name, part in parts.items():
        ended = {0: "", 124: ", cut off"}.get(part["status"], f", failed with status {part['status']}")
        lines += [f"### {name} ({part['seconds']:.0f} s{ended})", "", f"    python {part['command']}", ""]
        lines += ["    " + line for line in part["printed"].splitlines()[-60:]] + [""]
    return "\n".join(lines)


def main():
    """Runs all parts and writes the results after each of them."""
    directory = Path(flags.FLAGS.out).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    end, parts = time.monotonic() + 60 * flags.FLAGS.minutes, {}
    for name, line in commands(directory, flags.FLAGS.tiny).items():
        parts[name] = run_part(name, line, directory, end - time.monotonic())
        done = {"date": datetime.date.today().isoformat(), "command": "python -m benchmarks.gpu", "parts": parts}
        (directory / "gpu.json").write_text(json.dumps(done, indent=2) + "\n")
        (directory / "gpu.md").write_text(table(parts) + "\n")
    print(f"{directory / 'gpu.json'} and gpu.md hold all results")
    if any(part["status"] for part in parts.values()):
        sys.exit(1)


if __name__ == "__main__":
    flags.DEFINE_string("out", os.environ.get("OUT", "gpu"), "Directory for gpu.json, gpu.md and profile.")
    flags.DEFINE_float("minutes", 8.7, "Minutes for all parts together.")
    flags.DEFINE_bool("tiny", False, "Very small models, as a test.")
    command.run(main)
