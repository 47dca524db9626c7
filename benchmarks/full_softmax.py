"""A full softmax at the sizes of sub-word models: linear_cross_entropy and its peers in one run.

    python -m benchmarks.full_softmax [--tokens=1024] [--widths=512,2048]
        [--words=32000,131072,262144] [--dtypes=float32,bfloat16] [--repeats=3] [--skip=PEER,...]
        [--json=FILE]
    python -m benchmarks.full_softmax --target=h100 [--grid] [--sizes=128256x2048x8192,...]
        [--chunk=TOKENS] [--table=float32] [--skip=PEER,...] [--json=FILE]

The second compiles for an H100, an H200 or a TPU v5e, v5p or v6e, which need not be here, and
counts: see benchmarks/counted_softmax.py. It takes the extra `targets`, in an environment of its
own.

Peers, each passed over with a line where it is not installed, does not fit into the memory that is
free, or fails:

- `linear_cross_entropy`: this library's.
- `optax`: softmax_cross_entropy_with_integer_labels of all logits at once.
- `optax chunked`: the same for 512 tokens at a time, under jax.checkpoint, which computes logits
  twice.
- `jax-cce`, `tokamax`, `tokamax chunked`: packages for JAX (`pip install jax-cce tokamax`, tokamax
  with Python 3.12). tokamax's default makes all logits on CPUs and GPUs; `chunked` is its
  implementation "chunked_xla".
- `torch`: torch.nn.functional.cross_entropy of all logits; `apple` and `liger`: cut-cross-entropy
  and liger-kernel for torch, on GPUs alone.

For each dtype, width and vocabulary it prints a line for each peer, beneath `TITLE`:

- seconds: median and least of loss and gradients of hidden states and table; peers take turns.
- `temp MB`: what that needs beside its arguments and results.
- `/ ours`: the ratio of its median to that of `linear_cross_entropy`.
- `nats`, `gradient`: how far loss and gradients (relative, in norm) are from float64, for 8 tokens
  of width 64 and the words of the size; WRONG beyond `BOUNDS`.
"""

import functools
import importlib
import itertools
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# torch needs memory of the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from benchmarks.timing import (
    exact_products,
    first_line,
    machine,
    timed,
    torch_device,
    torch_memory,
    whole_numbers,
    write_json,
)

CHUNK = 512
# Nats of the loss, relative error of a gradient
BOUNDS = {"float32": (1e-4, 1e-3), "bfloat16": (1e-2, 3e-2)}


class Size(NamedTuple):
    """A loss: words and width of the table, number of tokens."""

    words: int
    width: int
    tokens: int


def arguments(tokens: int, width: int, words: int, dtype: str):
    """Hidden states, table and Zipf targets as numpy arrays; logits have variance 1."""
    rng = np.random.default_rng(0)
    targets = np.minimum(words ** rng.random(tokens), words - 1).astype(np.int32)
    hidden = rng.standard_normal((tokens, width), np.float32)
    table = rng.standard_normal((words, width), np.float32)
    table *= width**-0.5
    return hidden.astype(jnp.dtype(dtype)), table.astype(jnp.dtype(dtype)), targets


def of_all_logits(hidden, table, targets):
    """The mean loss as optax has it."""
    table = table.astype(hidden.dtype)
    logits = jnp.dot(hidden, table.T, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def of_chunks(hidden, table, targets):
    """The same, scanned over chunks of tokens."""
    table, chunk = table.astype(hidden.dtype), math.gcd(CHUNK, len(targets))

    @jax.checkpoint
    def one(total, part):
        return total + of_all_logits(part[0], table, part[1]) * chunk / len(targets), None

    return jax.lax.scan(
        one, 0.0, (hidden.reshape(-1, chunk, hidden.shape[1]), targets.reshape(-1, chunk))
    )[0]


def jax_cce(hidden, table, targets):
    """jax-cce's mean loss."""
    loss = importlib.import_module("jax_cce").linear_cross_entropy
    return loss(hidden, table.astype(hidden.dtype), targets)


def tokamax(hidden, table, targets, implementation=None):
    """tokamax's mean loss; None: the implementation that it chooses."""
    loss = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss
    table = table.T.astype(hidden.dtype)
    return loss(hidden, targets, table, reduction="mean", implementation=implementation)


def torch_loss(hidden, table, targets):
    """torch's mean loss of all logits."""
    import torch

    logits = hidden @ table.to(hidden.dtype).T
    return torch.nn.functional.cross_entropy(logits.float(), targets)


def apple(hidden, table, targets):
    """The mean loss of Apple's cut-cross-entropy."""
    _check_gpu(hidden)
    loss = importlib.import_module("cut_cross_entropy").linear_cross_entropy
    return loss(hidden, table.to(hidden.dtype), targets)


def liger(hidden, table, targets):
    """The mean loss of LinkedIn's Liger kernels."""
    _check_gpu(hidden)
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    loss = module.LigerFusedLinearCrossEntropyFunction.apply
    return loss(hidden, table.to(hidden.dtype), targets)[0]


def _check_gpu(tensor):
    if tensor.device.type != "cuda":
        raise ImportError("its kernels are for GPUs")


OURS = "linear_cross_entropy"
JAX = {
    OURS: linear_cross_entropy,
    "optax": of_all_logits,
    "optax chunked": of_chunks,
    "jax-cce": jax_cce,
    "tokamax": tokamax,
    "tokamax chunked": functools.partial(tokamax, implementation="chunked_xla"),
}
TORCH = {"torch": torch_loss, "apple": apple, "liger": liger}


def prepared(name: str, values) -> tuple[Callable, int | None]:
    """`prepared_jax` or `prepared_torch` of a peer."""
    if name in JAX:
        return prepared_jax(JAX[name], values)
    return prepared_torch(TORCH[name], values)


def prepared_jax(loss: Callable, values) -> tuple[Callable, int]:
    """A function that computes loss and gradients once and waits for them, and the bytes that this
    needs beside arguments and results.

    Raises:
        ImportError: a package is not installed, or does not run on this device.
        MemoryError: it does not fit.
    """
    # Arguments of the program: values that a program contains are computed with by the compiler.
    with exact_products(values[0].dtype):
        program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*values).compile()
    need = program.memory_analysis().temp_size_in_bytes
    _check_free(need + values[1].nbytes)
    return lambda: jax.block_until_ready(program(*values)), need


def prepared_torch(loss: Callable, values) -> tuple[Callable, int | None]:
    """The same for a loss of torch; no bytes where the system does not count them."""
    hidden, table, targets = _torch_arguments(values)
    import torch

    def run():
        result = loss(hidden, table, targets)
        gradients = torch.autograd.grad(result, (hidden, table))
        if hidden.is_cuda:
            torch.cuda.synchronize()
        return result.item(), gradients

    run()
    peak = torch_memory(run)
    return run, None if peak is None else max(0, peak - sum(a.nbytes for a in values[:2]))


def _torch_arguments(values):
    """The same memory as tensors of torch."""
    device = torch_device()
    if device is None:
        raise ImportError("torch is not installed for this device")
    import torch

    _check_free(3 * 4 * len(values[0]) * len(values[1]) + 2 * values[1].nbytes)
    hidden, table = (torch.from_dlpack(jnp.asarray(a)).requires_grad_() for a in values[:2])
    return hidden, table, torch.tensor(np.asarray(values[2]), dtype=torch.long, device=device)


def _check_free(need):
    if jax.default_backend() != "cpu":
        return
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = 1024 * int(match[1]) if match else math.inf
    if need > 0.9 * free:
        raise MemoryError(f"it needs {need / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free")


@functools.cache
def exact(words: int, dtype: str):
    """Arguments of 8 tokens, and their loss and gradients in float64."""
    values = arguments(8, 64, words, dtype)
    hidden, table = (np.asarray(array, np.float64) for array in values[:2])
    logits = hidden @ table.T
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    places = np.arange(len(hidden)), values[2]
    loss = -np.log(probabilities[places]).mean()
    probabilities[places] -= 1
    gradients = probabilities @ table / len(hidden), probabilities.T @ hidden / len(hidden)
    return values, loss, gradients


def errors(name: str, words: int, dtype: str) -> tuple[float, float]:
    """Errors of a peer against float64: of the loss, in nats, and of the gradients, relative."""
    values, loss, gradients = exact(words, dtype)
    ours, mine = prepared(name, values)[0]()
    mine = [np.asarray(a if name in JAX else a.float().cpu(), np.float64) for a in mine]
    off = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(mine, gradients, strict=True)]
    return abs(float(ours) - loss), float(np.max(off))  # NaN if any is


TITLE = (
    f"{'peer':21} {'seconds':>9} {'least':>9} {'/ ours':>7} {'temp MB':>8} {'nats':>7}"
    f" {'gradient':>8}"
)


def line(row: dict) -> str:
    """A row for the eye, beneath `TITLE`."""
    temp = "" if row["temp_bytes"] is None else f"{row['temp_bytes'] / 1e6:,.0f}"
    ratio = "" if row["times_ours"] is None else f"{row['times_ours']:.2f}"
    nats, gradient = row["errors"]
    wrong = "   WRONG" if row["wrong"] else ""
    return (
        f"{row['peer']:21} {row['seconds']:9.3f} {row['fastest']:9.3f} {ratio:>7} {temp:>8}"
        f" {nats:7.0e} {gradient:8.0e}{wrong}"
    )


def measure(tokens: int, width: int, words: int, dtype: str, repeats: int, skip=()) -> list[dict]:
    """Prints and returns a row for each peer."""
    values = jax.tree.map(jnp.asarray, arguments(tokens, width, words, dtype))
    print(f"\n{words:,} words, d {width:,}, {tokens:,} tokens, {dtype}\n{TITLE}")
    size = {"words": words, "tokens": tokens, "width": width, "dtype": dtype}
    runs, about = {}, {}
    for name in [name for name in (*JAX, *TORCH) if name not in skip]:
        try:
            measured = errors(name, words, dtype)
            run, temp = prepared(name, values)
            run()
        except Exception as error:  # whatever a package of others raises
            print(f"{name} is passed over: {first_line(error)}", flush=True)
            continue
        runs[name] = run
        wrong = not all(
            error <= bound for error, bound in zip(measured, BOUNDS[dtype], strict=True)
        )
        about[name] = size | {"temp_bytes": temp, "errors": measured, "wrong": wrong}
    rows = timed(runs, repeats)
    ours = next((row["seconds"] for row in rows if row["peer"] == OURS), None)
    for row in rows:
        row |= about[row["peer"]] | {"times_ours": ours and row["seconds"] / ours}
        print(line(row), flush=True)
    return rows


def main(settings):
    """Prints a table for each size and writes the JSON."""
    for name in settings.skip:
        check_known(f"--skip={name}", name, [*JAX, *TORCH])
    if settings.target:
        if OURS in settings.skip:
            raise InputError(f"--skip={OURS} does not fit --target, which holds it to bounds")
        from benchmarks import counted_softmax

        peers = {name: loss for name, loss in JAX.items() if name not in settings.skip}
        return counted_softmax.main(settings, peers)
    check_at_least(1, repeats=settings.repeats, tokens=settings.tokens)
    for dtype in settings.dtypes:
        check_known(f"--dtypes={dtype}", dtype, BOUNDS)
    print(f"{machine()}, median of {settings.repeats}")
    rows = []
    sizes = (whole_numbers(f"--{key}", getattr(settings, key)) for key in ("widths", "words"))
    for dtype, width, words in itertools.product(settings.dtypes, *sizes):
        size = settings.tokens, width, words
        rows += measure(*size, dtype, settings.repeats, settings.skip)
    write_json(settings.json, rows)


if __name__ == "__main__":
    from adaptive_jax.config import commands  # the peers above do without its packages

    flags.DEFINE_integer("tokens", 1024, "Tokens of a run.")
    flags.DEFINE_list("widths", ["512", "2048"], "Widths of hidden states and table.")
    flags.DEFINE_list("words", ["32000", "131072", "262144"], "Numbers of words.")
    flags.DEFINE_list("dtypes", list(BOUNDS), "Of hidden states, table and products.")
    flags.DEFINE_integer("repeats", 3, "Timed runs of each peer.")
    flags.DEFINE_list("skip", [], "Peers to leave out.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    flags.DEFINE_string("target", None, "Compile for this device and count: h100, h200, v5e, ...")
    flags.DEFINE_bool("grid", False, "With --target: a grid of sizes, its worst cell and bounds.")
    flags.DEFINE_list("sizes", [], "With --target: WORDSxWIDTHxTOKENS, instead of the default.")
    flags.DEFINE_integer("chunk", None, "With --target: tokens of a chunk; default: as planned.")
    flags.DEFINE_enum("table", "float32", list(BOUNDS), "With --target: the table's dtype.")
    commands.run(lambda: main(flags.FLAGS))
