"""Everything that benchmarks one GPU, in one command, the most valuable numbers first.

    python -m benchmarks.gpu [--out=DIR] [--minutes=50] [--steps=0,1]

Each variant runs in a process of its own, torch too, which frees the memory of the GPU when it
ends. Every number is printed and written as it comes, to DIR/gpu.json. A variant that fails, runs
out of memory, lacks a package or overruns its time is reported and passed over. The same command
runs the variants that are left, so all of it can be cut into commands of ten minutes:
`--minutes=9`.

    step                                                                    minutes
    0  versions; is attention right, the output layer, the sums into tables       5
    1  an update of wikitext103:adp_t, 64 rows of 512; its profile                8
    2  attention at 512 and 3,072 tokens, beside torch; blocks of its kernels     5
    3  the output layer in bfloat16, 32,768 tokens, each band; beside torch       5
    4  8 to 128 rows; flags of XLA                                                7
    5  adp beside torch and torch.compile                                         7
    6  best, rows of 3,072; a vocabulary of a million words                       4
    7  train.py killed and resumed                                                4

It needs no corpus, and of the project's requirements jax, flax, optax, orbax-checkpoint,
ml_collections and numpy, torch to compare with; step 7 needs all requirements. `--tiny` runs models
of a few thousand parameters, as a test: it takes minutes on a CPU.
"""

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError

SMALL = (
    "--config.data.vocabulary_size=700",
    "--config.batches.sequence_length=16",
    "--config.input.cutoffs=(100,300)",
    "--config.body.layers=2",
    "--config.body.features=32",
    "--config.body.heads=2",
    "--config.body.feed_forward=32",
    "--repeats=1",
    "--updates=1",
)
MILLION = ("--config.data.vocabulary_size=1000000", "--config.input.cutoffs=(20000,60000,260000)")
NO_DROPOUT = tuple(
    f"--config.body.{name}=0.0" for name in ("dropout", "attention_dropout", "activation_dropout")
)
XLA = {
    "without command buffers": "--xla_gpu_enable_command_buffer=",
    "latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "Triton products of any size": "--xla_gpu_triton_gemm_any=true",
}
PASSED_OVER = {  # by what a variant printed: JAX's, torch's, and what our commands make of both
    "RESOURCE_EXHAUSTED|OutOfMemoryError|out of memory": "out of memory",
    r"No module named '([\w.]+)'": r"the package \1 is missing",
}


class Variant(NamedTuple):
    """One process: its name, its command, and further flags of XLA."""

    name: str
    command: list[str]
    xla: str = ""


class Step(NamedTuple):
    """Variants that share so many minutes."""

    minutes: float
    variants: list[Variant]


def steps(out: Path, tiny: bool) -> list[Step]:
    """All steps, the most valuable first."""

    def update(name, *more, row="adp_t", rows=64, peer="adaptive_jax", xla=""):
        size = [f"--rows={2 if tiny else rows}", "--repeats=5", f"--peers={peer}"]
        small = SMALL if tiny else ()
        if tiny and row == "adp":
            small += ("--config.output.table.cutoffs=(100,300)",)
        config = f"--config=configs/wikitext103.py:{row}", "--config.dtype=bfloat16"
        command = ["benchmarks.throughput", *config, *size, *small, *more]
        return Variant(f"{row}, {name}", command, xla)

    def part(name):
        return Variant(name, ["benchmarks.gpu_parts", name, *["--tiny"] * tiny])

    def attention(size, peer):
        how = [f"--sizes={size}", f"--peers={peer}", f"--repeats={1 if tiny else 7}"]
        return Variant(f"attention {peer}, {size}", ["benchmarks.layers", "attention", *how])

    sizes = ("2x12x2x8", "2x20x2x8") if tiny else ("64x512x16x64", "10x3072x16x64")
    paths = "triton", "torch", "chunked"
    return [
        Step(5, [part("check")]),
        Step(
            8,
            [
                update("whole", f"--profile={out / 'profile'}"),
                update("nothing recomputed", "--config.body.remat=none"),
                update("output alone", peer="its output alone"),
                update("no dropout", *NO_DROPOUT),
            ],
        ),
        Step(5, [attention(size, path) for size in sizes for path in paths] + [part("blocks")]),
        Step(5, [part("output"), part("torch_output")]),
        Step(
            7,
            [update(f"{rows} rows", rows=rows) for rows in (8, 32, 128)]
            + [update(name, xla=flag) for name, flag in XLA.items()],
        ),
        Step(
            7,
            [
                update(peer, row="adp", peer=peer)
                for peer in ("adaptive_jax", "torch.compile", "torch")
            ],
        ),
        Step(
            4,
            [
                update("rows of 3072", row="best", rows=8),
                update("a million words", *([] if tiny else MILLION)),
            ],
        ),
        Step(4, [part("restart")]),
    ]


def run_variant(variant: Variant, out: Path, seconds: float) -> dict:
    """Runs a variant for so many seconds at most, and shows its output as it comes.

    Returns how it `ended` ("ok", or why it was passed over), its seconds, command, output and
    numbers.
    """
    file = out / f"{re.sub(r'[^a-z0-9.]+', '_', variant.name.lower())}.json"
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", *variant.command, f"--json={file}"]
    print(f"## {variant.name}\n   {variant.xla} {' '.join(command[1:])}", flush=True)
    torch = any(word.startswith(("--peers=torch", "torch_")) for word in variant.command)
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {variant.xla}".strip(),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false" if torch else "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".92",
        "JAX_COMPILATION_CACHE_DIR": str(out / "programs"),
    }
    start, printed, late = time.monotonic(), [], threading.Event()
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(
        command, **pipes, errors="replace", env=environment, start_new_session=True
    ) as process:

        def stop():
            late.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(max(seconds, 0.1), stop)
        timer.start()
        for line in process.stdout:
            printed.append(line)
            print(line, end="", flush=True)
        status = process.wait()
        timer.cancel()
    ended, text = "ok" if status == 0 else f"status {status}", "".join(printed)
    if status:
        for pattern, reason in reversed(PASSED_OVER.items()):
            if found := re.search(pattern, text):
                ended = found.expand(reason)
        ended = "out of time" if late.is_set() else ended
        print(f"passed over: {ended}", flush=True)
    return {
        "ended": ended,
        "seconds": round(time.monotonic() - start, 1),
        "command": " ".join([variant.xla, *command[1:]]).strip(),
        "printed": text,
        "numbers": json.loads(file.read_text()) if file.exists() else None,
    }


def main(settings) -> None:
    """Runs what has no result yet, and writes the results after each variant."""
    out = Path(settings.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    kept, all_steps = out / "gpu.json", steps(out, settings.tiny)
    for each in settings.steps:
        if not each.isdecimal() or int(each) >= len(all_steps):
            raise InputError(f"--steps={each} must be numbers from 0 to {len(all_steps) - 1}")
    parts = json.loads(kept.read_text())["parts"] if kept.exists() else {}
    end = time.monotonic() + 60 * settings.minutes
    for number in map(int, settings.steps or range(len(all_steps))):
        step = all_steps[number]
        step_end = min(end, time.monotonic() + 60 * step.minutes)
        for variant in step.variants:
            if parts.get(variant.name, {}).get("ended") == "ok":
                continue
            left = step_end - time.monotonic()
            if left < 1:
                print(f"## {variant.name}: no time left in step {number}", flush=True)
                continue
            parts[variant.name] = run_variant(variant, out, left)
            done = {"date": datetime.date.today().isoformat(), "parts": parts}
            kept.write_text(json.dumps(done, indent=2) + "\n")
    print(f"{kept} holds all results")


if __name__ == "__main__":
    flags.DEFINE_string("out", "runs/gpu", "Directory for gpu.json and profile.")
    flags.DEFINE_float("minutes", 50, "Minutes for all of it.")
    flags.DEFINE_list("steps", [], "Numbers of steps, such as 0,1; default: all.")
    flags.DEFINE_bool("tiny", False, "Very small models, as a test.")
    commands.run(lambda: main(flags.FLAGS))
