"""Everything that benchmarks one GPU, in one command, the most valuable numbers first.

    python -m benchmarks.gpu [--out=DIR] [--data=DIR] [--minutes=9.5] [--steps=0,1]
        [--variants=REGEX] [--results=DIR]

Each variant runs in a process of its own, torch too, which frees the memory of the GPU when it
ends. Every number is printed and written as it comes, to OUT/gpu.json and, as a table, to
OUT/gpu.md; --results gets a copy of both. A variant that fails, runs out of memory, lacks a package
or overruns its time is reported and passed over. The same command runs the variants that are left,
those that were passed over last, so half an hour is three times the same command of ten minutes.

    step                                                              minutes a variant, at most
    0  versions; is attention right, the output layer, the sums into tables              4
    1  an update of wikitext103:adp_t, 64 rows of 512, with its profile; nothing         4
       recomputed
    2  penn_treebank:awd_sm trained and scored on the test split, with --data            9
    3  adp beside torch and torch.compile                                                3
    4  attention at 512 and 3,072 tokens and layers of AWD-LSTM, beside torch            2
    5  train.py killed and resumed                                                       3
    6  penn_treebank:groc_tied, groc_adaptive and wikitext2:awd_asm trained, with --data  9
    7  the output layer in bfloat16, 32,768 tokens, each band; beside torch; a full      3
       softmax of 131,072 and 262,144 words beside optax and others
    8  adp_t without dropout, its output alone, 8 to 128 rows; flags of XLA              3
    9  best, rows of 3,072; a vocabulary of a million words; blocks of attention         3

--data names a directory with the folders ptb and wikitext-2. A row trains for 7.5 minutes at most,
and is scored then; a variant that the end of a command cuts off comes first in the next command.
`make gpu-kit` packs both texts and the packages that a machine with JAX and torch may lack.
`--tiny` runs models of a few thousand parameters, as a test: it takes minutes on a CPU.
"""

import contextlib
import ctypes
import datetime
import importlib
import json
import os
import re
import shutil
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
TINY_TRAINING = (
    "--config.steps=4",
    "--config.evaluate_every=2",
    "--config.checkpoint_every=2",
    "--config.tokens_per_update=140",
    "--config.tokens_per_device=140",
    "--config.body.features=20",
    "--config.body.widths=(20,20)",
)
MILLION = ("--config.data.vocabulary_size=1000000", "--config.input.cutoffs=(20000,60000,260000)")
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
    """Commands that run one after the other, each in a process of its own.

    Attributes:
        name: shown in the table of results.
        commands: modules and their flags.
        xla: further flags of XLA.
        takes_json: whether commands take --json, the file for their numbers.
    """

    name: str
    commands: list[list[str]]
    xla: str = ""
    takes_json: bool = True


class Step(NamedTuple):
    """Variants that may take so many minutes each."""

    minutes: float
    variants: list[Variant]


TEXTS = {"penn_treebank": "ptb", "wikitext2": "wikitext-2"}  # folders of --data
HOURS = 0.125  # of training a row, of its 9 minutes: then it is scored, wherever it is
LATE = "out of time"
LEAST = 45  # seconds that a variant needs, at least: none starts with fewer


def steps(out: Path, data: str | None, tiny: bool) -> list[Step]:
    """All steps, the most valuable first."""

    def update(name, *more, row="adp_t", rows=64, peer="adaptive_jax", xla=""):
        size = [f"--rows={2 if tiny else rows}", "--repeats=5", f"--peers={peer}"]
        small = SMALL if tiny else ()
        if tiny and row == "adp":
            small += ("--config.output.table.cutoffs=(100,300)",)
        config = f"--config=configs/wikitext103.py:{row}", "--config.dtype=bfloat16"
        command = ["benchmarks.throughput", *config, *size, *small, *more]
        return Variant(f"{row}, {name}", [command], xla)

    def part(name):
        return Variant(name, [["benchmarks.gpu_parts", name, *["--tiny"] * tiny]])

    def trained(file, row):
        if not data:
            return []
        paper = importlib.import_module(f"configs.{file}").ROWS[row].paper
        workdir = f"--workdir={out / f'{file}-{row}'}"
        train = ["adaptive_jax", "train", f"--config=configs/{file}.py:{row}", workdir]
        train += [f"--config.data.path={Path(data).absolute() / TEXTS[file]}"]
        train += [f"--hours={HOURS}", "--config.metrics.tensorboard=False", *TINY_TRAINING * tiny]
        evaluate = ["adaptive_jax", "evaluate", workdir, "--split=test"]
        name = f"train {file}:{row}, published perplexity {paper.test}"
        return [Variant(name, [train, evaluate], takes_json=False)]

    def attention(size, peer):
        how = [f"--sizes={size}", f"--peers={peer}", f"--repeats={1 if tiny else 7}"]
        return Variant(f"attention {peer}, {size}", [["benchmarks.layers", "attention", *how]])

    lstm = ["--sizes=2x5x4x6x4", "--repeats=1"] if tiny else []
    sizes = ("2x12x2x8", "2x20x2x8") if tiny else ("64x512x16x64", "10x3072x16x64")
    paths = "triton", "torch", "chunked"
    return [
        Step(4, [part("check")]),
        Step(
            4,
            [
                update("whole", f"--profile={out / 'profile'}"),
                update("nothing recomputed", "--config.body.remat=none"),
            ],
        ),
        Step(9, trained("penn_treebank", "awd_sm")),
        Step(
            3,
            [
                update(peer, row="adp", peer=peer)
                for peer in ("adaptive_jax", "torch.compile", "torch")
            ],
        ),
        Step(
            2,
            [
                *(attention(size, path) for size in sizes for path in paths),
                Variant("layers of AWD-LSTM", [["benchmarks.layers", "lstm", *lstm]]),
            ],
        ),
        Step(3, [part("restart")]),
        Step(
            9,
            [
                *trained("penn_treebank", "groc_tied"),
                *trained("penn_treebank", "groc_adaptive"),
                *trained("wikitext2", "awd_asm"),
            ],
        ),
        Step(3, [part("output"), part("torch_output"), full_softmax(tiny)]),
        Step(
            3,
            [
                update("no dropout", peer="without dropout"),
                update("output alone", peer="its output alone"),
                *(update(f"{rows} rows", rows=rows) for rows in (8, 32, 128)),
                *(update(name, xla=flag) for name, flag in XLA.items()),
            ],
        ),
        Step(
            3,
            [
                update("rows of 3072", row="best", rows=8),
                update("a million words", *([] if tiny else MILLION)),
                part("blocks"),
            ],
        ),
    ]


def full_softmax(tiny: bool) -> Variant:
    """A full softmax of two large vocabularies beside other packages."""
    words, sizes = "131072,262144", ["--tokens=8192", "--widths=2048"]
    if tiny:
        words, sizes = "700", ["--tokens=64", "--widths=16"]
    command = ["benchmarks.full_softmax", f"--words={words}", *sizes, "--dtypes=bfloat16"]
    return Variant(f"full softmax, {words} words", [command])


def _dies_with_its_parent():
    """Called in the child before it starts: on Linux, it is killed when this process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run_variant(variant: Variant, out: Path, seconds: float, on_cpu: bool) -> dict:
    """Runs a variant for so many seconds at most, and shows its output as it comes.

    on_cpu: whether it may run without a GPU.

    Returns how it `ended` ("ok", or why it was passed over), its seconds, commands, output and
    numbers.
    """
    file = out / f"{re.sub(r'[^a-z0-9.]+', '_', variant.name.lower())}.json"
    file.unlink(missing_ok=True)
    words = [word for command in variant.commands for word in command]
    torch = any(word.startswith(("--peers=torch", "torch_", "benchmarks.full")) for word in words)
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {variant.xla}".strip(),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false" if torch else "true",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".92",
        "JAX_COMPILATION_CACHE_DIR": str(out / "programs"),
    }
    if not on_cpu:  # where CUDA does not start, JAX would go on without it
        environment.setdefault("JAX_PLATFORMS", "cuda,cpu")
    start, printed, ended, shown = time.monotonic(), [], "ok", []
    print(f"## {variant.name}", flush=True)
    for command in variant.commands:
        command = ["-m", *command, *[f"--json={file}"] * variant.takes_json]
        shown.append(f"{variant.xla} {' '.join(command)}".strip())
        print(f"   {shown[-1]}", flush=True)
        left = start + seconds - time.monotonic()
        ended = run_process([sys.executable, *command], environment, left, printed)
        if ended != "ok":
            print(f"passed over: {ended}", flush=True)
            break
    return {
        "ended": ended,
        "seconds": round(time.monotonic() - start, 1),
        "command": "; ".join(shown),
        "printed": "".join(printed),
        "numbers": json.loads(file.read_text()) if file.exists() else None,
    }


def run_process(command: list[str], environment: dict, seconds: float, printed: list[str]) -> str:
    """Runs a command, shows its lines and adds them to `printed`; "ok", or why it failed."""
    late = threading.Event()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
        preexec_fn=_dies_with_its_parent,
    ) as process:

        def kill():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        def stop():
            late.set()
            kill()

        timer = threading.Timer(max(seconds, 0.1), stop)
        timer.start()
        try:
            for line in process.stdout:
                printed.append(line)
                print(line, end="", flush=True)
            status = process.wait()
        finally:  # a variant that outlives this process would keep the memory of the GPU
            timer.cancel()
            kill()
    if status == 0:
        return "ok"
    if late.is_set():
        return LATE
    for pattern, reason in PASSED_OVER.items():
        if match := re.search(pattern, "".join(printed)):
            return match.expand(reason)
    return f"status {status}"


def due(all_steps: list[Step], settings, parts: dict) -> list[tuple[float, Variant]]:
    """The variants without a result and their minutes, in order; those that were tried last.

    Raises:
        InputError: a step that does not exist, or a pattern that no variant has.
    """
    for each in settings.steps:
        if not each.isdecimal() or int(each) >= len(all_steps):
            raise InputError(f"--steps={each} must be numbers from 0 to {len(all_steps) - 1}")
    chosen = [all_steps[int(each)] for each in settings.steps] or all_steps
    planned = [(step.minutes, variant) for step in chosen for variant in step.variants]
    if settings.variants:
        planned = [each for each in planned if re.search(settings.variants, each[1].name)]
        if not planned:
            raise InputError(f"--variants={settings.variants} must be part of a variant's name")
    left = [each for each in planned if parts.get(each[1].name, {}).get("ended") != "ok"]
    return sorted(left, key=lambda each: each[1].name in parts)


def write(out: Path, results: str | None, parts: dict) -> None:
    """Writes gpu.json, and gpu.md with a line that each variant printed."""
    done = {"date": datetime.date.today().isoformat(), "parts": parts}
    (out / "gpu.json").write_text(json.dumps(done, indent=2) + "\n")
    lines = ["| variant | ended | seconds | result |", "|---|---|---:|---|"]
    for name, part in parts.items():
        result = result_line(part["printed"]).replace("|", "/")
        lines.append(f"| {name} | {part['ended']} | {part['seconds']} | {result[:200]} |")
    (out / "gpu.md").write_text("\n".join(lines) + "\n")
    if results:
        Path(results).mkdir(parents=True, exist_ok=True)
        for name in "gpu.json", "gpu.md":
            shutil.copy(out / name, results)


def result_line(printed: str) -> str:
    """The line with the test perplexity, or the last one that is no operation of a profile."""
    lines = printed.strip().splitlines() or [""]
    lines = [line for line in lines if not re.match(r" *[\d.]+ ms  ", line)] or lines
    return next((line for line in lines if line.startswith("test: perplexity")), lines[-1])


def main(settings) -> None:
    """Runs what has no result yet, and writes the results after each variant."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the variant that runs ends, too
    out = Path(settings.out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    kept = out / "gpu.json"
    parts = json.loads(kept.read_text())["parts"] if kept.exists() else {}
    end, begun = time.monotonic() + 60 * settings.minutes, False
    for minutes, variant in due(steps(out, settings.data, settings.tiny), settings, parts):
        left = end - time.monotonic()
        if left < LEAST:
            print(f"## {variant.name}: no time left: run the same command to continue", flush=True)
            break
        part = run_variant(variant, out, min(left, 60 * minutes), settings.tiny)
        before = parts.pop(variant.name, None)
        # One that this command had little time for goes on first in the next command.
        if begun and part["ended"] == LATE and left < 60 * minutes and before is None:
            print(f"{variant.name}: run the same command to continue", flush=True)
            break
        begun, parts[variant.name] = True, part
        write(out, settings.results, parts)
    print(f"{kept} holds all results")


if __name__ == "__main__":
    flags.DEFINE_string("out", "runs/gpu", "Directory for gpu.json, gpu.md, profile and runs.")
    flags.DEFINE_string("results", None, "Directory for copies of gpu.json and gpu.md.")
    flags.DEFINE_string("data", None, "Directory with ptb and wikitext-2, to train on.")
    flags.DEFINE_float("minutes", 9.5, "Minutes for this command.")
    flags.DEFINE_string("variants", None, "Only variants whose names match this pattern.")
    flags.DEFINE_list("steps", [], "Numbers of steps, such as 0,1; default: all.")
    flags.DEFINE_bool("tiny", False, "Very small models, as a test.")
    commands.run(lambda: main(flags.FLAGS))
