"""The full softmax on the GPU of this machine in a few minutes, the most valuable numbers first.

    python -m benchmarks.loss_on_device [--minutes=5] [--json=FILE] [--table=bfloat16]
    python -m benchmarks.loss_on_device --scale=64      tiny sizes, a trial on a CPU

It needs jax, numpy, optax and torch alone. Each step is a process of its own, as JAX and torch do
not return memory to each other:

    0  optax, linear_cross_entropy, and the same with about 2 n and n tokens to a chunk, where
       n = 4 x peak / bandwidth: 8,192 tokens, 128,256 words x 4,096 and 262,144 x 2,048; and 512
       tokens, 262,144 x 4,096
    1  torch's cross_entropy of all logits, cut-cross-entropy and Liger, where installed: 8,192
       tokens
    2  as 0: 4,096 tokens, 128,256 x 4,096, and 32,768 tokens, 128,256 x 2,560
    3  as 1, for the sizes of 2

A line for each peer, printed and added to --json (a JSON object a line) at once: median and least
milliseconds of loss and both gradients, bytes beside arguments and results, and errors of the
gradients of hidden states and table, relative in norm to float32 ones; or why it is passed over.
Hidden states are bfloat16.
"""

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from adaptive_jax.numerics import devices
from benchmarks import full_softmax
from benchmarks.full_softmax import Size
from benchmarks.timing import first_line, machine

LEAST_TOKENS = 1024  # n of a device that is not listed; at most an eighth of the tokens there
LEAST = 15  # seconds that a step needs: none starts with fewer
SECONDS = 0.5  # of timed runs of a peer


class Step(NamedTuple):
    """Sizes that peers of JAX, or of torch, compute in one process."""

    torch: bool
    sizes: list[Size]


FIRST = [Size(128_256, 4096, 8192), Size(262_144, 2048, 8192)]
SECOND = [Size(128_256, 4096, 4096), Size(128_256, 2560, 32_768)]
STEPS = [
    Step(False, [*FIRST, Size(262_144, 4096, 512)]),
    Step(True, FIRST),
    Step(False, SECOND),
    Step(True, SECOND),
]


def arguments(size: Size, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Hidden states, table and Zipf targets, made on the device; logits have variance 1."""
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (size.tokens, size.width), jnp.bfloat16)
    table = jax.random.normal(keys[1], (size.words, size.width), dtype) * size.width**-0.5
    targets = size.words ** jax.random.uniform(keys[2], (size.tokens,))
    return hidden, table.astype(dtype), jnp.minimum(targets, size.words - 1).astype(jnp.int32)


def float32_gradients(values) -> tuple[jax.Array, jax.Array]:
    """Gradients of the hidden states and the table in float32."""
    exact = [value.astype(jnp.float32) for value in values[:2]]
    return full_softmax.prepared_jax(full_softmax.of_chunks, (*exact, values[2]))[0]()[1]


@jax.jit
def relative_error(gradient, exact) -> jax.Array:
    """Norm of the difference over the norm of the exact gradient."""
    difference = gradient.astype(jnp.float32) - exact
    return jnp.linalg.norm(difference) / jnp.linalg.norm(exact)


def jax_peers(tokens: int) -> dict[str, Callable]:
    """Losses of JAX for so many tokens, the most important first."""
    peers = {"optax": full_softmax.of_all_logits, "linear_cross_entropy": linear_cross_entropy}
    device = devices.find(jax.devices()[0].device_kind)
    least = 4 * device.flops / device.bandwidth if device else min(LEAST_TOKENS, tokens / 8)
    for target in (2 * least, least):
        chunk = tokens >> max(0, round(math.log2(tokens / target)))
        if chunk < tokens:
            peers[f"chunk={chunk}"] = functools.partial(linear_cross_entropy, chunk=chunk)
    return peers


def measured(prepare: Callable, loss: Callable, values, exact) -> dict:
    """Times, memory and errors of a peer; no errors without exact gradients."""
    run, temporary = prepare(loss, values)
    gradients = [jnp.from_dlpack(gradient) for gradient in run()[1]]
    errors = [float(relative_error(*pair)) for pair in zip(gradients, exact or [], strict=False)]
    del gradients
    times, end = [], time.perf_counter() + SECONDS
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 30):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return {
        "milliseconds": statistics.median(times),
        "fastest": min(times),
        "temporary": temporary,
        "errors": errors,
    }


def rows(step: Step, dtype: str, end: float) -> Iterator[dict]:
    """A row for each size and peer, until `end` by `time.monotonic`."""
    prepare = full_softmax.prepared_torch if step.torch else full_softmax.prepared_jax
    for size in step.sizes:
        peers = full_softmax.TORCH if step.torch else jax_peers(size.tokens)
        about = size._asdict() | {"table": dtype}
        values = exact = None  # the last size's are freed first
        values = arguments(size, dtype)
        for name, loss in {"float32": None, **peers}.items():
            row = about | {"peer": name}
            if time.monotonic() > end:
                yield row | {"passed_over": "out of time"}
                continue
            try:
                if loss is None:
                    exact = float32_gradients(values)
                    continue
                row |= measured(prepare, loss, values, exact)
            except Exception as error:  # whatever a package of others raises
                row["passed_over"] = first_line(error)
            if "torch" in sys.modules:
                sys.modules["torch"].cuda.empty_cache()
            yield row


def line(row: dict) -> str:
    """A row for the eye."""
    start = f"{row['words']:8,} x {row['width']:5,} {row['tokens']:7,} {row['peer']:21}"
    if "passed_over" in row:
        return f"{start} passed over: {row['passed_over']}"
    temporary = "" if row["temporary"] is None else f"{row['temporary'] / 1e9:.2f}"
    errors = " ".join(f"{error:.0e}" for error in row["errors"]) or "unknown"
    return (
        f"{start} {row['milliseconds']:9.2f} ms, least {row['fastest']:9.2f}, {temporary:>6} GB,"
        f" errors {errors}"
    )


def scaled(step: Step, scale: int) -> Step:
    """The step with all sizes divided."""
    return step._replace(
        sizes=[Size(*(max(8, number // scale) for number in size)) for size in step.sizes]
    )


def run_step(settings, end: float) -> None:
    """Runs a step in this process, and prints and writes its rows."""
    print(f"## step {settings.step}: {machine()}", flush=True)
    about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    for row in rows(scaled(STEPS[settings.step], settings.scale), settings.table, end):
        print(line(row), flush=True)
        if settings.json:
            with open(settings.json, "a") as file:
                file.write(json.dumps(row | about) + "\n")


def run_all(settings, end: float) -> None:
    """Runs every step in a process of its own."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path("runs/programs").absolute()))
    for step in range(len(STEPS)):
        left = end - time.monotonic()
        if left < LEAST:
            print(f"## step {step}: no time left", flush=True)
            continue
        flags = [f"--step={step}", f"--minutes={left / 60 - 0.05}", f"--table={settings.table}"]
        flags += [f"--scale={settings.scale}", *[f"--json={settings.json}"] * bool(settings.json)]
        command = [sys.executable, "-m", "benchmarks.loss_on_device", *flags]
        try:
            status = subprocess.run(command, timeout=left, check=False).returncode
        except subprocess.TimeoutExpired:
            status = "out of time"
        if status:
            print(f"## step {step} ended early: {status}", flush=True)


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message):
        """Ends the process."""
        self.exit(2, f"error: {message}\n")


def main(words: list[str] | None = None) -> None:
    """Runs one step, or all of them."""
    start = time.monotonic()
    parser = Parser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog=""
    )
    parser.add_argument("--minutes", type=float, default=5, help="for the whole command")
    parser.add_argument("--json", help="file to which rows are added, a JSON object a line")
    parser.add_argument("--table", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--scale", type=int, default=1, help="divides all sizes")
    parser.add_argument("--step", type=int, choices=range(len(STEPS)), help="one step alone")
    settings = parser.parse_args(words)
    if settings.scale < 1:
        parser.error(f"--scale={settings.scale} must be 1 or more")
    if settings.step is None:
        return run_all(settings, start + 60 * settings.minutes)
    if settings.scale == 1 and jax.default_backend() == "cpu":
        parser.error("JAX finds no GPU: try it on a CPU with --scale=64")
    run_step(settings, start + 60 * settings.minutes)


if __name__ == "__main__":
    main()
