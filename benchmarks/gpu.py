"""Everything that benchmarks one GPU, in one command, the most valuable numbers first.

    python -m benchmarks.gpu [--out=DIR] [--minutes=50] [--steps=0,1]

Each variant runs in a process of its own, torch too, which frees the memory of the GPU when it
ends. Every number is printed and written as it comes, to DIR/gpu.json and DIR/gpu.md. A variant
that fails, runs out of memory, lacks a package or overruns its time is told and passed over. The
same command goes on with the variants that are left, so all of it can be cut into commands of ten
minutes: `--minutes=9`.

    step                                                                    minutes
    0  versions; is attention right, the output layer, the sums into tables       5
    1  an update of wikitext103:adp_t, 64 rows of 512; its profile                8
    2  attention at 512 and 3,072 tokens, beside torch; blocks of its kernels     5
    3  the output layer in bfloat16, 32,768 tokens, each band; beside torch       5
    4  8 to 128 rows; flags of XLA                                                7
    5  adp beside torch and torch.compile                                         7
    6  best, rows of 3,072; a vocabulary of a million words                       4
    7  train.py killed and resumed                                                4

It needs jax, flax, optax, orbax-checkpoint, ml_collections and numpy of the project's requirements,
torch to compare with, and no corpus; step 7 needs all requirements. `--tiny` runs models of a few
thousand parameters, as a test: it takes minutes on a CPU.
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
XLA = {
    "without command buffers": "--xla_gpu_enable_command_buffer=",
    "latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "Triton products of any size": "--xla_gpu_triton_gemm_any=true",
}
MISSING = re.compile(r"No module named '([\w.]+)'")


class Variant(NamedTuple):
    """One process: its name, its command, and further flags of XLA."""

    name: str
    command: list[str]
    xla: str = ""


class Step(NamedTuple):
    """Variants that share so many minutes."""

    title: str
    minutes: float
    variants: list[Variant]


def steps(out: Path, tiny: bool) -> list[Step]:
    """All steps, the most valuable first."""

    def update(name, row, rows, *more, peer="adaptive_jax", xla=""):
        small = (
            SMALL + ("--config.output.table.cutoffs=(100,300)",) * (row == "adp") if tiny else ()
        )
        line = [
            "benchmarks.throughput",
            f"--config=configs/wikitext103.py:{row}",
            f"--rows={2 if tiny else rows}",
            "--repeats=5",
        ]
        return Variant(
            name, [*line, f"--peers={peer}", "--config.dtype=bfloat16", *small, *more], xla
        )

    def part(name):
        return Variant(name, ["benchmarks.gpu_parts", name, *["--tiny"] * tiny])

    def attention(length, peer):
        size = ["--heads=2", "--width=8", "--rows=2", "--repeats=1"] if tiny else ["--repeats=7"]
        line = ["benchmarks.attention", f"--times={length}", f"--peers={peer}", *size]
        return Variant(f"attention {peer}, {length} tokens", line)

    lengths = (12, 20) if tiny else (512, 3072)
    return [
        Step("check", 5, [part("check")]),
        Step(
            "an update of adp_t, 64 rows of 512",
            8,
            [
                update("adp_t", "adp_t", 64, f"--profile={out / 'profile'}"),
                update("adp_t, blocks in a loop", "adp_t", 64, "--config.body.unroll=none"),
                update("adp_t, tails in chunks", "adp_t", 64, "--config.output.tails=chunks"),
                update("adp_t, attention chunked", "adp_t", 64, "--config.body.attention=chunked"),
                update("adp_t, nothing recomputed", "adp_t", 64, "--config.body.remat=none"),
                update("adp_t, output alone", "adp_t", 64, peer="its output alone"),
                update(
                    "adp_t, no dropout",
                    "adp_t",
                    64,
                    *[
                        f"--config.body.{name}=0.0"
                        for name in ("dropout", "attention_dropout", "activation_dropout")
                    ],
                ),
            ],
        ),
        Step(
            "attention",
            5,
            [
                attention(length, peer)
                for length in lengths
                for peer in ("triton", "torch", "chunked", "cudnn")
            ]
            + [part("blocks")],
        ),
        Step("output layer", 5, [part("output"), part("torch_output")]),
        Step(
            "rows and flags",
            7,
            [update(f"adp_t, {rows} rows", "adp_t", rows) for rows in (8, 32, 128)]
            + [update(f"adp_t, {name}", "adp_t", 64, xla=flag) for name, flag in XLA.items()],
        ),
        Step(
            "adp beside torch",
            7,
            [
                update(f"adp, {peer}", "adp", 64, peer=peer)
                for peer in ("adaptive_jax", "torch.compile", "torch")
            ],
        ),
        Step(
            "best and a million words",
            4,
            [
                update("best, rows of 3072", "best", 8),
                update("adp_t, a million words", "adp_t", 64, *([] if tiny else MILLION)),
            ],
        ),
        Step("restart", 4, [part("restart")]),
    ]


def run_variant(variant: Variant, out: Path, seconds: float) -> dict:
    """Runs a variant for so many seconds at most, and shows its output as it comes.

    Returns how it `ended` ("ok", or why it was passed over), its seconds, command, output and
    numbers.
    """
    file = out / f"{re.sub(r'[^a-z0-9.]+', '_', variant.name.lower())}.json"
    file.unlink(missing_ok=True)
    whole = [sys.executable, "-m", *variant.command, f"--json={file}"]
    print(f"## {variant.name}\n   {variant.xla} {' '.join(whole[1:])}", flush=True)
    torch = any(word.startswith(("--peers=torch", "torch_")) for word in variant.command)
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {variant.xla}".strip(),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false" if torch else "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".92",
        "JAX_COMPILATION_CACHE_DIR": str(out / "programs"),
    }
    start, printed = time.monotonic(), []
    with subprocess.Popen(
        whole,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    ) as process:
        late = threading.Event()

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
    text = "".join(printed)
    ended = "ok" if status == 0 else _reason(text, status, late.is_set())
    if ended != "ok":
        print(f"passed over: {ended}", flush=True)
    return {
        "ended": ended,
        "seconds": round(time.monotonic() - start, 1),
        "command": " ".join([variant.xla, *whole[1:]]).strip(),
        "printed": text,
        "numbers": json.loads(file.read_text()) if file.exists() else None,
    }


def _reason(text, status, late):
    if late:
        return "out of time"
    if re.search(
        "RESOURCE_EXHAUSTED|OutOfMemoryError|out of memory", text
    ):  # JAX's, torch's, and what our commands make of both
        return "out of memory"
    if missing := MISSING.search(text):
        return f"the package {missing[1]} is missing"
    return f"status {status}"


def table(parts: dict) -> str:
    """What each variant printed, as Markdown."""
    lines = []
    for name, part in parts.items():
        ended = "" if part["ended"] == "ok" else f", {part['ended']}"
        lines += [
            f"### {name} ({part['seconds']:.0f} s{ended})",
            "",
            f"    python {part['command']}",
            "",
        ]
        lines += ["    " + line for line in part["printed"].splitlines()[-60:]] + [""]
    return "\n".join(lines)


def chosen(given: list[str], count: int) -> list[int]:
    """The steps that --steps names.

    Raises:
        InputError: no number of a step.
    """
    for each in given:
        if not each.isdecimal() or int(each) >= count:
            raise InputError(
                f"--steps={','.join(given)}: give numbers from 0 to {count - 1}, such as"
                " --steps=0,1"
            )
    return [int(each) for each in given] or list(range(count))


def main(settings) -> None:
    """Runs what has no result yet, and writes the results after each variant."""
    out = Path(settings.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    kept, all_steps = out / "gpu.json", steps(out, settings.tiny)
    parts = json.loads(kept.read_text())["parts"] if kept.exists() else {}
    end = time.monotonic() + 60 * settings.minutes
    for number in chosen(settings.steps, len(all_steps)):
        step = all_steps[number]
        step_end = time.monotonic() + 60 * step.minutes
        for variant in step.variants:
            if parts.get(variant.name, {}).get("ended") == "ok":
                continue
            left = min(end, step_end) - time.monotonic()
            if left < 1:
                print(f"## {variant.name}: no time left in step {number}, {step.title}", flush=True)
                continue
            parts[variant.name] = run_variant(variant, out, left)
            done = {
                "date": datetime.date.today().isoformat(),
                "command": "python -m benchmarks.gpu",
                "parts": parts,
            }
            kept.write_text(json.dumps(done, indent=2) + "\n")
            (out / "gpu.md").write_text(table(parts) + "\n")
    print(f"{kept} and gpu.md hold all results")


if __name__ == "__main__":
    flags.DEFINE_string("out", "runs/gpu", "Directory for gpu.json, gpu.md and profile.")
    flags.DEFINE_float("minutes", 50, "Minutes for all of it.")
    flags.DEFINE_list("steps", [], "Numbers of steps, such as 0,1; default: all.")
    flags.DEFINE_bool("tiny", False, "Very small models, as a test.")
    commands.run(lambda: main(flags.FLAGS))
