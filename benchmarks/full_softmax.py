"""A full softmax at the sizes of sub-word models: linear_cross_entropy and its peers in one run.

    python -m benchmarks.full_softmax [--tokens=1024] [--widths=512,2048]
        [--words=32000,131072,262144] [--dtypes=float32,bfloat16] [--repeats=3] [--skip=PEER,...]
        [--json=FILE]

Peers, each passed over with a line where it is not installed, does not fit into the memory that is
free, or fails:

- `linear_cross_entropy`: this library's.
- `optax`: softmax_cross_entropy_with_integer_labels of all logits at once.
- `optax chunked`: the same for 512 tokens at a time, under jax.checkpoint, which computes logits
  twice.
- `jax-cce`, `tokamax`, `tokamax chunked`: packages for JAX (`pip install jax-cce tokamax`, tokamax
  with Python 3.12). tokamax's default makes all logits on CPUs and GPUs; `chunked` is its
  implementation "chunked_xla".
- `torch`: torch.nn.functional.cross_entropy of all logits; `apple`: cut-cross-entropy for torch, on
  GPUs alone.

For each dtype, width and vocabulary it prints a line for each peer, beneath `TITLE`:

- seconds: median and least of loss and gradients of hidden states and table; peers take turns.
- `temp MB`: what that needs beside its arguments and results.
- `step MB`: the whole of one AdamW update of the table, donated: table, moments, hidden states,
  gradients and temporaries. Moments have the dtype of the table.
- `nats`, `gradient`: how far loss and gradients (relative, in norm) are from float64, for 8 tokens
  of width 64 and the words of the size; WRONG beyond `BOUNDS`, also where that holds only for
  `UNEVEN` words, which no block divides.

Then a line compares `linear_cross_entropy` with the peers that are not wrong.
"""

import functools
import importlib
import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import check_at_least, check_known
from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from benchmarks.outputs import machine
from benchmarks.timing import first_line, interleaved, torch_device, torch_memory

CHUNK = 512
UNEVEN = 4_100
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


def tokamax(hidden, table, targets, implementation=None):
    """tokamax's mean loss; None: the implementation that it chooses."""
    loss = importlib.import_module("tokamax").linear_softmax_cross_entropy_loss
    return loss(hidden, targets, table.T, reduction="mean", implementation=implementation)


def torch_loss(hidden, table, targets):
    """torch's mean loss of all logits."""
    import torch

    return torch.nn.functional.cross_entropy((hidden @ table.T).float(), targets)


def apple(hidden, table, targets):
    """The mean loss of Apple's cut-cross-entropy, whose kernels are for GPUs."""
    if hidden.device.type != "cuda":
        raise ImportError("its kernels are for GPUs")
    return importlib.import_module("cut_cross_entropy").linear_cross_entropy(hidden, table, targets)


OURS = "linear_cross_entropy"
JAX = {
    OURS: linear_cross_entropy,
    "optax": of_all_logits,
    "optax chunked": of_chunks,
    "jax-cce": jax_cce,
    "tokamax": tokamax,
    "tokamax chunked": functools.partial(tokamax, implementation="chunked_xla"),
}
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
    import torch

    hidden, table, targets = _torch_arguments(values)

    def run():
        loss = TORCH[name](hidden, table, targets)
        return loss.item(), torch.autograd.grad(loss, (hidden, table))

    run()
    peak = torch_memory(run)
    return run, None if peak is None else max(0, peak - sum(a.nbytes for a in values[:2]))


def step_bytes(name: str, values) -> int | None:
    """Bytes of one donated AdamW update of the table: all that is alive at its peak, by the
    compiler for JAX, which runs nothing. None where torch cannot count it.
    """
    if name in JAX:
        optimizer = optax.adamw(1e-3)

        def step(table, state, hidden, targets):
            loss, grads = jax.value_and_grad(JAX[name], (0, 1))(hidden, table, targets)
            updates, state = optimizer.update(grads[1], state, table)
            return optax.apply_updates(table, updates), state, loss, grads[0]

        hidden, table, targets = (jax.ShapeDtypeStruct(a.shape, a.dtype) for a in values)
        state = jax.eval_shape(optimizer.init, table)
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(table, state, hidden, targets)
        memory = lowered.compile().memory_analysis()
        results = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes
    import torch

    hidden, table, targets = _torch_arguments(values, more=4)
    table = table.detach().clone().requires_grad_()  # an update is in place
    optimizer = torch.optim.AdamW([table], 1e-3, fused=True)

    def run():
        TORCH[name](hidden, table, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        hidden.grad = None

    run()
    peak = torch_memory(run)
    return None if peak is None else peak + values[0].nbytes + 3 * values[1].nbytes


def _torch_arguments(values, more: int = 2):
    """The same memory as tensors of torch. more: copies of the table that are to fit."""
    device = torch_device()
    if device is None:
        raise ImportError("torch is not installed for this device")
    import torch

    _check_free(3 * 4 * len(values[0]) * len(values[1]) + more * values[1].nbytes)
    hidden, table = (torch.from_dlpack(jnp.asarray(a)).requires_grad_() for a in values[:2])
    return hidden, table, torch.tensor(np.asarray(values[2]), dtype=torch.long, device=device)


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


@functools.cache
def errors(name: str, words: int, dtype: str) -> tuple[float, float]:
    """How far the loss of a peer is from float64, in nats, and its gradients, relative."""
    values, loss, gradients = exact(words, dtype)
    ours, mine = prepared(name, values)[0]()
    mine = [np.asarray(a if name in JAX else a.float().cpu(), np.float64) for a in mine]
    off = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(mine, gradients, strict=True)]
    return abs(float(ours) - loss), max(off)


def wrong(found: tuple[float, float], dtype: str) -> bool:
    """Whether errors are beyond `BOUNDS`."""
    return not all(error <= bound for error, bound in zip(found, BOUNDS[dtype], strict=True))


TITLE = (
    f"{'peer':21} {'seconds':>9} {'least':>9} {'temp MB':>8} {'step MB':>8} {'nats':>7}"
    f" {'gradient':>8}"
)


def line(row: dict) -> str:
    """A row for the eye, beneath `TITLE`."""
    size = "".join(
        f"{'' if row[key] is None else f'{row[key] / 1e6:,.0f}':>9}"
        for key in ("temp_bytes", "step_bytes")
    )
    nats, gradient = row["errors"][str(row["words"])]
    at = ", ".join(
        f"WRONG with {int(words):,} words: {row['errors'][words][0]:.4f} nats"
        for words in row["wrong"]
    )
    return (
        f"{row['peer']:21} {row['seconds']:9.3f} {row['fastest']:9.3f}{size} {nats:7.0e}"
        f" {gradient:8.0e}   {at}"
    ).rstrip()


def verdict(rows: list[dict]) -> str:
    """How `linear_cross_entropy` stands beside the peers that are not wrong."""
    by_name = {row["peer"]: row for row in rows if not row["wrong"]}
    ours = by_name.pop(OURS, None)
    if ours is None or not by_name:
        return "nothing to compare with"
    fastest = min(by_name.values(), key=lambda row: row["seconds"])
    better = [
        name
        for name, row in by_name.items()
        if row["seconds"] < ours["seconds"]
        and row["temp_bytes"] is not None
        and row["temp_bytes"] < ours["temp_bytes"]
    ]
    return (
        f"{OURS} takes {ours['seconds'] / fastest['seconds']:.2f} of the time of the fastest exact"
        f" peer, {fastest['peer']}; better in both time and temporaries:"
        f" {', '.join(better) or 'none'}"
    )


def measure(tokens: int, width: int, words: int, dtype: str, repeats: int, skip=()) -> list[dict]:
    """Prints and returns a row for each peer."""
    values = jax.tree.map(jnp.asarray, arguments(tokens, width, words, dtype))
    print(f"\n{words:,} words, d {width:,}, {tokens:,} tokens, {dtype}\n{TITLE}")
    runs, rows = {}, {}
    for name in [name for name in (*JAX, *TORCH) if name not in skip]:
        try:
            found = {str(size): errors(name, size, dtype) for size in (UNEVEN, words)}
            run, temp = prepared(name, values)
            run()
            step = step_bytes(name, values)
        except Exception as error:  # whatever a package of others raises
            print(f"{name} is passed over: {first_line(error)}", flush=True)
            continue
        runs[name] = run
        rows[name] = {
            "peer": name,
            "words": words,
            "tokens": tokens,
            "width": width,
            "dtype": dtype,
            "temp_bytes": temp,
            "step_bytes": step,
            "errors": found,
            "wrong": [size for size, pair in found.items() if wrong(pair, dtype)],
        }
    for name, (median, least) in interleaved(runs, repeats).items():
        rows[name] |= {"seconds": median, "fastest": least}
        print(line(rows[name]), flush=True)
    print(verdict(list(rows.values())), flush=True)
    return list(rows.values())


def main(settings):
    """Prints a table for each size and writes the JSON."""
    check_at_least(1, repeats=settings.repeats, tokens=settings.tokens)
    for dtype in settings.dtypes:
        check_known(f"--dtypes={dtype}", dtype, BOUNDS)
    for name in settings.skip:
        check_known(f"--skip={name}", name, [*JAX, *TORCH])
    print(f"{machine()}, median of {settings.repeats}")
    rows = []
    for dtype, width, words in itertools.product(settings.dtypes, settings.widths, settings.words):
        size = settings.tokens, int(width), int(words)
        rows += measure(*size, dtype, settings.repeats, settings.skip)
    if settings.json:
        Path(settings.json).write_text(json.dumps(rows, indent=2) + "\n")


def _define() -> flags.FlagValues:
    flags.DEFINE_integer("tokens", 1024, "Tokens of a run.")
    flags.DEFINE_list("widths", ["512", "2048"], "Widths of hidden states and table.")
    flags.DEFINE_list("words", ["32000", "131072", "262144"], "Numbers of words.")
    flags.DEFINE_list("dtypes", list(BOUNDS), "Of hidden states, table and products.")
    flags.DEFINE_integer("repeats", 3, "Timed runs of each peer.")
    flags.DEFINE_list("skip", [], "Peers to leave out.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    return flags.FLAGS


if __name__ == "__main__":
    defined = _define()
    commands.run(lambda: main(defined))
