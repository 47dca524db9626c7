"""The size `llm` of `python -m benchmarks.outputs`: loss and gradients of a full softmax, at the
sizes of sub-word language models.

Peers, each passed over with a line where it is not installed, does not fit into the memory that is
free, or fails:

- `linear_cross_entropy`: this library's.
- `optax`: softmax_cross_entropy_with_integer_labels of all logits at once.
- `scan`: the same for 512 tokens at a time, under jax.checkpoint, which computes logits twice.
- `jax-cce`, `tokamax`: packages for JAX (`pip install jax-cce tokamax`).
- `torch`: torch.nn.functional.cross_entropy of all logits; `apple`: cut-cross-entropy for torch, on
  GPUs alone.

Before they are timed, each computes 8 tokens of width 64, in float32 and in bfloat16, with 4,100
words and with those of the size. The table shows how far loss (in nats) and gradients (relative, in
norm) are from float64 at most, and WRONG beyond `BOUNDS`.
"""

import functools
import importlib
import math
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from benchmarks.timing import first_line, interleaved, torch_device, torch_memory

SIZES = "4096,2048,151936,262144"  # tokens, width, and the words of Qwen 2.5 and Gemma 3
CHUNK = 512
BOUNDS = {
    "float32": (1e-4, 1e-3),
    "bfloat16": (1e-2, 3e-2),
}  # nats of the loss, relative error of a gradient


def arguments(tokens: int, width: int, words: int, dtype: str, seed: int = 0):
    """Hidden states, table and Zipf targets as numpy arrays; logits have variance 1."""
    rng = np.random.default_rng(seed)
    targets = np.minimum(words ** rng.random(tokens), words - 1).astype(np.int32)
    hidden = rng.standard_normal((tokens, width), np.float32)
    table = rng.standard_normal((words, width), np.float32)
    table *= width**-0.5
    return hidden.astype(jnp.dtype(dtype)), table.astype(jnp.dtype(dtype)), targets


def of_all_logits(hidden, table, targets):
    """The mean loss as optax has it."""
    logits = jnp.dot(hidden, table.T, preferred_element_type=jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def of_chunks(hidden, table, targets):
    """The same, scanned over chunks of tokens."""
    chunk = math.gcd(CHUNK, len(targets))

    @jax.checkpoint
    def one(total, part):
        return total + of_all_logits(part[0], table, part[1]) * chunk / len(targets), None

    return jax.lax.scan(
        one, 0.0, (hidden.reshape(-1, chunk, hidden.shape[1]), targets.reshape(-1, chunk))
    )[0]


def jax_cce(hidden, table, targets):
    """jax-cce's mean loss."""
    return importlib.import_module("jax_cce").linear_cross_entropy(hidden, table, targets)


def tokamax(hidden, table, targets):
    """tokamax's mean loss."""
    loss = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss
    return loss(hidden, targets, table.T, reduction="mean")


def torch_loss(hidden, table, targets):
    """torch's mean loss of all logits."""
    import torch

    return torch.nn.functional.cross_entropy((hidden @ table.T).float(), targets)


def apple(hidden, table, targets):
    """The mean loss of Apple's cut-cross-entropy, whose kernels are for GPUs."""
    if hidden.device.type != "cuda":
        raise ImportError("its kernels are for GPUs")
    return importlib.import_module("cut_cross_entropy").linear_cross_entropy(hidden, table, targets)


OURS = {"linear_cross_entropy": linear_cross_entropy}
JAX = OURS | {"optax": of_all_logits, "scan": of_chunks, "jax-cce": jax_cce, "tokamax": tokamax}
TORCH = {"torch": torch_loss, "apple": apple}


def prepared(name: str, values) -> tuple[Callable, int | None]:
    """A function that computes loss and gradients of a peer once, and the bytes it needs beside
    arguments and results.

    Raises:
        ImportError: the peer is not installed, or does not run on this device.
        MemoryError: it does not fit.
    """
    if name in JAX:
        # Arguments of the program: values that a program contains are computed with by the
        # compiler.
        program = jax.jit(jax.value_and_grad(JAX[name], (0, 1))).lower(*values).compile()
        need = program.memory_analysis().temp_size_in_bytes
        _check_free(need + values[1].nbytes)
        return lambda: jax.block_until_ready(program(*values)), need
    device = torch_device()
    if device is None:
        raise ImportError("torch is not installed for this device")
    import torch

    _check_free(3 * 4 * len(values[0]) * len(values[1]) + 2 * values[1].nbytes)
    hidden, table = (
        torch.from_dlpack(jnp.asarray(a)).requires_grad_() for a in values[:2]
    )  # the same memory
    targets = torch.tensor(np.asarray(values[2]), dtype=torch.long, device=device)

    def run():
        loss = TORCH[name](hidden, table, targets)
        return loss.item(), torch.autograd.grad(loss, (hidden, table))

    run()
    peak = torch_memory(run)
    return run, None if peak is None else peak - sum(a.nbytes for a in values[:2])


def _check_free(need):
    if jax.default_backend() != "cpu":
        return
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = 1024 * int(found[1]) if found else math.inf
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
    return (
        values,
        loss,
        (probabilities @ table / len(hidden), probabilities.T @ hidden / len(hidden)),
    )


def errors(name: str, words: int) -> dict[str, tuple[float, float]]:
    """By dtype, how far the loss of a peer is from float64, in nats, and its gradients,
    relative: the most of two vocabularies.
    """
    found = {}
    for dtype in BOUNDS:
        pairs = []
        for size in (4_100, words):
            values, loss, gradients = exact(size, dtype)
            ours, mine = prepared(name, values)[0]()
            mine = [np.asarray(a if name in JAX else a.float().cpu(), np.float64) for a in mine]
            off = [
                np.linalg.norm(a - b) / np.linalg.norm(b)
                for a, b in zip(mine, gradients, strict=True)
            ]
            pairs.append((abs(float(ours) - loss), max(off)))
        found[dtype] = tuple(map(max, zip(*pairs, strict=True)))
    return found


def measure(case, repeats: int, skip=()) -> list[dict]:
    """Prints and returns a row for each peer: errors, median and least seconds, peak bytes.
    case: a `benchmarks.outputs.Case`.
    """
    width, words, _, tokens = case
    values, runs, rows = (
        jax.tree.map(jnp.asarray, arguments(tokens, width, words, "float32")),
        {},
        {},
    )
    print(f"full softmax of {words:,} words, d {width:,}, {tokens:,} tokens, float32")
    for name in [name for name in (*JAX, *TORCH) if name not in skip]:
        try:
            found = errors(name, words)
            run, peak = prepared(name, values)
            run()
        except Exception as error:  # whatever a package of others raises
            print(f"{name} is passed over: {first_line(error)}", flush=True)
            continue
        runs[name] = run
        wrong = any(
            error > bound
            for dtype, pair in found.items()
            for error, bound in zip(pair, BOUNDS[dtype], strict=True)
        )
        rows[name] = {
            "size": "llm",
            "peer": name,
            "words": words,
            "tokens": tokens,
            "width": width,
            "peak_bytes": peak,
            "errors": found,
            "wrong": wrong,
        }
    for name, (median, least) in interleaved(runs, repeats).items():
        row = rows[name]
        row |= {"seconds": median, "fastest": least, "tokens_per_second": tokens / median}
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.0f} MB"
        off = "; ".join(
            f"{dtype} {nats:.0e} nats, {share:.0e}"
            for dtype, (nats, share) in row["errors"].items()
        )
        print(
            f"{name:21} {median:9.3f} s {peak:>10}   off by"
            f" {off}{'   WRONG' if row['wrong'] else ''}",
            flush=True,
        )
    return list(rows.values())
