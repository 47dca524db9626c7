"""Parts of `benchmarks.gpu` beside the other benchmarks: correctness, the output layer band by
band, and a run that is killed.

    python -m benchmarks.gpu_parts PART [--tiny] [--json=FILE]

- `check`: versions; every path of attention and the output layer in bfloat16 and float32, against
  plain float32; gradients of a word table, whose sum into repeated rows is slow in some versions of
  XLA.
- `output`: loss and gradient of the output layer of `wikitext103:adp_t`, 32,768 Zipf-distributed
  targets in bfloat16; then each band alone, over the tokens that it gets.
- `blocks`: the kernels of attention's path `triton` at 512 and 3,072 tokens, cut in six ways, with
  dropout 0.1.
- `torch_output`: torch.nn.AdaptiveLogSoftmaxWithLoss over the same targets, in TF32, under autocast
  to bfloat16, which torch 2.13 refuses, and with parameters, too, in bfloat16.
- `restart`: train.py is killed and resumed; its losses are those of a run that was not. On a GPU up
  to rounding, because sums into rows of a table there come in any order.

Every number is printed as it comes.
"""

import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.bodies.attention import Pairs
from adaptive_jax.bodies.flash import Blocks, flash
from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.losses import banded
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.dropout import row_seeds
from benchmarks import layers
from benchmarks.outputs import Case, arguments, banded_loss, masked_dense, torch_peer
from benchmarks.timing import first_line, launched, launches, timed, torch_device, write_json

CASE = Case(1024, 267_744, (20_000, 60_000), 32_768)
TINY = Case(64, 700, (100, 300), 256)
# Of products in TF32, and in bfloat16, relative to the largest value
ROUNDING = {"float32": 2e-2, "bfloat16": 6e-2}
CLOSE = 1e-2  # nats between losses of a run and of the same run resumed, after 100 updates
REPEATS = 7
CUTS = {  # of the forward and of the backward kernel
    "128 x 64, 4 warps": (Blocks(128, 64, 4), Blocks(64, 64, 4)),
    "64 x 64, 4 warps": (Blocks(64, 64, 4), Blocks(64, 64, 4)),
    "128 x 64, 8 warps": (Blocks(128, 64, 8), Blocks(64, 64, 8)),
    "128 x 64, 3 stages": (Blocks(128, 64, 4, 3), Blocks(64, 64, 4, 3)),
    "128 x 128": (Blocks(128, 128, 8), Blocks(128, 64, 8)),
    "64 x 32": (Blocks(64, 32, 4), Blocks(64, 32, 4)),
}


def note(results: list, name: str, **numbers) -> None:
    """Prints a line and keeps its numbers."""
    shown = ", ".join(
        f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in numbers.items()
    )
    print(f"{name:40} {shown}", flush=True)
    results.append({"name": name} | numbers)


def check(results: list, case: Case) -> None:
    """Versions, and how far results are from plain float32, relative to the largest value:
    `off`.
    """
    packages = "jax", "jaxlib", "flax", "optax", "numpy"
    versions = {package: importlib.metadata.version(package) for package in packages}
    note(results, jax.devices()[0].device_kind, python=platform.python_version(), **versions)
    _check_attention(results, "bfloat16")
    _check_output(results, case)
    words, table = jnp.asarray(arguments(case)[1]), jnp.zeros((case.vocabulary, 64))
    more = jnp.ones((len(words), 64))
    add = jax.jit(lambda table, ids, more: table.at[ids].add(more))
    orders = {"as they come": words, "all different": jnp.arange(len(words)) % case.vocabulary}
    for name, ids in orders.items():
        _timed(results, f"{len(ids):,} rows added to a table, {name}", add, table, ids, more)
    _check_attention(results, "float32")  # last: Triton may take a minute to compile such a kernel


def _check_attention(results, dtype):
    size = [2, 128, 4, 64]
    pull = jax.random.normal(jax.random.key(9), size)
    pairs = (layers.attention_cases(size, each) for each in ("float32", dtype))
    for exact_case, case in zip(*pairs, strict=True):
        with jax.default_matmul_precision("highest"):
            plain = jax.jit(functools.partial(layers.both, exact_case.peers["chunked"]))
            exact = plain(exact_case.arguments, pull)
        for path, peer in case.peers.items():
            name = f"attention {path}, {dtype}, {case.about}"
            run = jax.jit(functools.partial(layers.both, peer))
            try:
                _compare(results, name, run(case.arguments, pull.astype(dtype)), exact, dtype)
            except Exception as error:  # a kernel may fail in any way
                note(results, name, passed_over=first_line(error))


def _check_output(results, case):
    case = case._replace(tokens=min(case.tokens, 2048))
    hidden, targets, bands, clusters = jax.tree.map(jnp.asarray, arguments(case))
    given = bands, clusters, targets
    with jax.default_matmul_precision("highest"):
        exact = _gradients(masked_dense)(hidden, *given)
    for dtype in "float32", "bfloat16":
        result = _gradients(banded_loss)(hidden.astype(dtype), *given)
        _compare(results, f"output layer, {dtype}", result, exact, dtype)


def _gradients(loss):
    """The loss with its gradients of hidden states, bands and clusters."""
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def _compare(results, name, result, exact, dtype):
    arrays = (
        [np.asarray(a, np.float32) for a in jax.tree.leaves(tree)] for tree in (result, exact)
    )
    far = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(*arrays, strict=True)]
    off = float(np.max(far))  # NaN if any is
    note(results, name, off=off, verdict="right" if off < ROUNDING[dtype] else "WRONG")


def output(results: list, case: Case) -> None:
    """Milliseconds of the whole layer and of each band."""
    hidden, targets, bands, clusters = jax.tree.map(jnp.asarray, arguments(case))
    hidden, loss = hidden.astype(jnp.bfloat16), _gradients(banded_loss)
    _timed(results, "output layer", loss, hidden, bands, clusters, targets)

    # A tail is computed by other programs than the head, which has no words of its own then.
    empty, cluster = (Band(jnp.zeros((rows, case.width))) for rows in (0, 1))

    def of_band(hidden, band, targets):
        tail = band.projection is not None
        softmax = ([empty, band], cluster) if tail else ([band],)
        return banded.loss(hidden, targets, jnp.ones(len(targets)), *softmax)[0]

    starts = (0, *case.cutoffs)
    for i, band in enumerate(bands):
        # Every token visits the head, where those of the tails stand for its first word.
        here = np.arange(len(targets))
        if i:
            here = np.flatnonzero(np.digitize(np.asarray(targets), case.cutoffs) == i)
        columns = targets[here] - starts[i]
        columns = jnp.where(columns < len(band.table), columns, 0)
        name = f"band {i}, {len(band.table):,} words, {len(here):,} tokens"
        loss = jax.jit(jax.value_and_grad(of_band, (0, 1)))
        _timed(results, name, loss, hidden[here], band, columns)


def blocks(results: list, case: Case) -> None:
    """Milliseconds of forward and backward pass, for each cut."""
    sizes, heads, cuts = ((64, 512), (8, 3072)), (16, 64), CUTS
    if case == TINY:
        sizes, heads, cuts = ((1, 128),), (1, 16), dict(list(CUTS.items())[:2])
    for rows, length in sizes:
        joint = jax.random.normal(jax.random.key(0), (rows, length, 3, *heads), jnp.bfloat16)
        seeds = row_seeds(jax.random.key(1), jnp.arange(rows))
        for name, cut in cuts.items():

            def loss(joint, cut=cut, seeds=seeds):
                attended = flash(joint, Pairs(dropout=0.1, seeds=seeds), blocks=cut)
                return attended.astype(jnp.float32).sum()

            try:
                _timed(
                    results, f"{length} tokens, {name}", jax.jit(jax.value_and_grad(loss)), joint
                )
            except Exception as error:  # a block may need more shared memory than there is
                note(results, f"{length} tokens, {name}", passed_over=first_line(error))


def _timed(results, name, loss, *values):
    compiled = loss.lower(*values).compile()
    [row] = timed({name: launched(compiled, *values)}, REPEATS, calls=launches())
    note(
        results,
        name,
        milliseconds=1e3 * row["seconds"],
        least=1e3 * row["fastest"],
        peak_MB=compiled.memory_analysis().temp_size_in_bytes / 1e6,
    )


def torch_output(results: list, case: Case) -> None:
    """Milliseconds of torch's layer."""
    if torch_device() is None:
        raise InputError("torch is not installed for this device: pip install torch")
    import torch

    torch.set_float32_matmul_precision("high")
    ways = {
        "TF32": ("float32", False),
        "autocast to bfloat16": ("float32", True),
        "all bfloat16": ("bfloat16", False),
    }
    for name, (dtype, autocast) in ways.items():
        try:
            [row] = timed({name: torch_peer(case, dtype, autocast)}, REPEATS)
            times = {"milliseconds": 1e3 * row["seconds"], "least": 1e3 * row["fastest"]}
            note(results, f"torch, {name}", **times)
        except RuntimeError as error:  # the layer does not support autocast in all versions
            note(results, f"torch, {name}", passed_over=first_line(error))


def restart(results: list, _: Case) -> None:
    """Trains a small model twice: once in one go, once killed and resumed."""
    rng, losses = np.random.default_rng(0), {}
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory)
        for split in "train", "valid", "test":
            np.save(here / f"{split}.npy", rng.zipf(1.3, 24_000) % 500)
        settings = {
            "data.corpus": "ids",
            "data.threshold": 1,
            "data.tokeniser": "none",
            "data.lower": False,
            "data.path": here,
            "input.cutoffs": "(50,200)",
            "steps": 100,
            "checkpoint_every": 20,
            "evaluate_every": 100,
        }
        train = [sys.executable, "train.py", "--config=configs/quickstart.py"]
        train += [f"--cache_dir={here / 'cache'}"]
        train += [f"--config.{key}={value}" for key, value in settings.items()]
        for name in "whole", "killed":
            run, log = here / name, here / f"{name}.log"
            command = [*train, f"--workdir={run}"]
            with log.open("ab") as file:
                if name == "killed":
                    process = subprocess.Popen(command, stdout=file, stderr=file)
                    # Of two digits: one that is being written has a longer name.
                    while process.poll() is None and not list(run.glob("checkpoints/[2-9]?")):
                        time.sleep(0.1)
                    process.kill()
                    process.wait()
                status = subprocess.run(command, stdout=file, stderr=file).returncode
            if status:
                last = " ".join(log.read_text(errors="replace").splitlines()[-1:])
                raise InputError(f"train.py ended with status {status}: {last[:150]}")
            if name == "killed" and "continuing" not in log.read_text(errors="replace"):
                raise InputError("train.py was killed after a checkpoint, and began anew")
            logged = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
            losses[name] = {e["step"]: e["train/nll"] for e in logged if "train/nll" in e}
    far = max(abs(losses["whole"][step] - loss) for step, loss in losses["killed"].items())
    verdict = "right" if far <= (0 if jax.default_backend() == "cpu" else CLOSE) else "WRONG"
    last = max(losses["killed"])
    note(results, "killed and resumed", updates=last, largest_difference=far, verdict=verdict)


PARTS = {
    "check": check,
    "blocks": blocks,
    "output": output,
    "torch_output": torch_output,
    "restart": restart,
}


def main(part: str, settings) -> None:
    """Runs a part, prints its numbers and writes the JSON, also where it fails halfway."""
    check_known(f"PART={part}", part, PARTS)
    results: list[dict] = []
    try:
        PARTS[part](results, TINY if settings.tiny else CASE)
    finally:
        write_json(settings.json, results)
    if any(each.get("verdict") == "WRONG" for each in results):
        raise InputError(f"{part} found wrong numbers, see above")


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    flags.DEFINE_bool("tiny", False, "Very small sizes, as a test.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda part: main(part, flags.FLAGS), positional=["PART"])
