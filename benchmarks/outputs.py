"""Loss and gradient of the output layer: the one-pass banded core against its peers, in one run.

    python -m benchmarks.outputs [--sizes=small,large] [--repeats=15] [--json=FILE]

Peers, each computing the summed loss of Zipf-distributed targets and its gradient for hidden states and all weights:

- `banded`: adaptive_jax.outputs.banded.loss, the core of every output layer here.
- `masked dense`: every band evaluated for every token, then masked: the usual way to write an adaptive softmax with
  static shapes. Differentiated by JAX.
- `full softmax`: one table [vocabulary, d], logits of all tokens at once. Differentiated by JAX.
- `torch`: torch.nn.AdaptiveLogSoftmaxWithLoss where torch is installed, on the same device.
- `product`: a large float32 matrix product, the speed that the machine has at that moment. A last line counts the work that the
  targets ask for, and says at what share of that speed `banded` does it.

Repeats of all peers are interleaved, so that a busy machine slows them alike; times are medians. Memory is the peak above
the arguments and results: the compiler's count for JAX, the growth of the process' peak (CPU) or of the allocator's peak
(GPU) for torch.
"""

import itertools
import json
import platform
import threading
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax import command
from adaptive_jax.errors import check_at_least, check_known
from adaptive_jax.outputs import banded
from benchmarks.timing import interleaved


class Case(NamedTuple):
    """Width of the hidden states, words, first words of the tails, and how many tokens are scored."""

    width: int
    vocabulary: int
    cutoffs: tuple[int, ...]
    tokens: int = 2048


SIZES = {
    "small": Case(256, 33_278, (2_500, 10_000)),
    "large": Case(1024, 267_744, (20_000, 60_000)),
}
PRODUCT = {"small": 2048, "large": 4096}  # rows and columns of the matrices of `product`, which is to take about as long as banded


def arguments(case, seed=0):
    """Hidden states `[tokens, width]`, Zipf targets, bands and clusters, as numpy arrays."""
    width, vocabulary, cutoffs, tokens = case
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, vocabulary + 1)
    targets = rng.choice(vocabulary, tokens, p=shares / shares.sum()).astype(np.int32)

    def normal(*shape):
        return (rng.standard_normal(shape) * width**-0.5).astype(np.float32)

    ends = [0, *cutoffs, vocabulary]
    bands = tuple(
        (normal(after - before, width // 4**i), None if i == 0 else normal(width // 4**i, width))
        for i, (before, after) in enumerate(itertools.pairwise(ends))
    )
    return normal(tokens, width) * width**0.5, targets, bands, normal(len(cutoffs), width)


def masked_dense(hidden, targets, bands, clusters):
    """The summed loss, every band evaluated for every token."""
    first, loss = 0, 0.0
    for i, (table, projection) in enumerate(bands):
        words = len(table)
        inside = (targets >= first) & (targets < first + words)
        place = jnp.where(inside, targets - first, 0)
        if i == 0:
            logits = jnp.concatenate([hidden @ table.T, hidden @ clusters.T], axis=1)
            starts = jnp.cumsum(jnp.array([len(t) for t, _ in bands]))[:-1]
            column = jnp.where(inside, targets, words - 1 + jnp.searchsorted(starts, targets, side="right"))
            loss -= jnp.take_along_axis(jax.nn.log_softmax(logits), column[:, None], axis=1).sum()
        else:
            log_probs = jax.nn.log_softmax((hidden @ projection.T) @ table.T)
            loss -= jnp.sum(jnp.where(inside, jnp.take_along_axis(log_probs, place[:, None], axis=1)[:, 0], 0.0))
        first += words
    return loss


def gflop(case):
    """Work that the targets ask of an adaptive softmax, forward and backward: six times each product of a token and a word."""
    _, targets, bands, clusters = arguments(case)
    tails = np.diff([*case.cutoffs, case.vocabulary])
    visits = np.histogram(targets, [*case.cutoffs, case.vocabulary])[0]
    work = case.tokens * case.width * (case.cutoffs[0] + len(clusters))
    work += sum(int(n) * len(p) * (int(words) + case.width) for n, words, (_, p) in zip(visits, tails, bands[1:], strict=True))
    return 6e-9 * work


def jax_peers(case, skip=()):
    """Name to (compiled function, arguments)."""
    hidden, targets, bands, clusters = jax.tree.map(jnp.asarray, arguments(case))
    weights = jnp.ones(case.tokens)

    def full(hidden, table, targets):
        return -jnp.take_along_axis(jax.nn.log_softmax(hidden @ table.T), targets[:, None], axis=1).sum()

    peers = {
        "banded": (lambda h, b, c, t: banded.loss(h, t, weights, b, c)[0], (hidden, bands, clusters, targets)),
        "masked dense": (lambda h, b, c, t: masked_dense(h, t, b, c), (hidden, bands, clusters, targets)),
    }
    if "full softmax" not in skip:
        table = jax.random.normal(jax.random.key(0), (case.vocabulary, case.width)) * case.width**-0.5
        peers["full softmax"] = full, (hidden, table, targets)
    compiled = {}
    for name, (loss, values) in peers.items():
        if name not in skip:
            differentiated = jax.value_and_grad(loss, argnums=tuple(range(len(values) - 1)))
            compiled[name] = jax.jit(differentiated).lower(*values).compile(), values
    return compiled


def torch_peer(case):
    """A function that runs torch's layer once, or None without torch."""
    try:
        import torch
    except ImportError:
        return None
    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    if device == "cpu" and jax.default_backend() == "gpu":
        return None
    hidden, targets, _, _ = arguments(case)
    width, vocabulary, cutoffs, _ = case
    layer = torch.nn.AdaptiveLogSoftmaxWithLoss(width, vocabulary, list(cutoffs), div_value=4.0).to(device)
    hidden = torch.tensor(hidden, device=device, requires_grad=True)
    targets = torch.tensor(targets, dtype=torch.long, device=device)

    def run():
        layer.zero_grad()
        hidden.grad = None
        (-layer(hidden, targets).output.sum()).backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def torch_memory(run):
    """Peak bytes of one run above what an earlier run left, gradients among it; sampled from /proc on a CPU."""
    import torch

    if torch.cuda.is_available() and jax.default_backend() == "gpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    status = Path("/proc/self/statm")
    if not status.exists():
        return None

    def resident():
        return int(status.read_text().split()[1]) * 4096

    peak, done = [resident()], threading.Event()

    def watch():
        while not done.is_set():
            peak.append(resident())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    before = resident()
    thread.start()
    run()
    done.set()
    thread.join()
    return max(peak) - before


def product_peer(n):
    """A function that multiplies two float32 matrices `[n, n]`."""
    square = jnp.ones((n, n))
    product = jax.jit(jnp.matmul).lower(square, square).compile()
    return lambda: product(square, square).block_until_ready()


def measure(case, repeats, skip=(), beside=None):
    """A row for each peer: name, median and least seconds, tokens a second, peak bytes, ratio of its time to that of banded.

    beside: functions by name that run between the peers, to compare with; they have neither tokens nor a peak.
    """
    peers, memory = {}, {}
    for name, (compiled, values) in jax_peers(case, skip).items():
        peers[name] = lambda compiled=compiled, values=values: jax.block_until_ready(compiled(*values))
        memory[name] = compiled.memory_analysis().temp_size_in_bytes
    run_torch = None if "torch" in skip else torch_peer(case)
    if run_torch:
        run_torch()
        memory["torch"] = torch_memory(run_torch)
        peers["torch"] = run_torch
    beside = {name: run for name, run in (beside or {}).items() if name not in skip}
    peers |= beside
    times = interleaved(peers, repeats)
    return [
        {
            "peer": name,
            "seconds": median,
            "fastest": least,
            "tokens_per_second": None if name in beside else case.tokens / median,
            "peak_bytes": memory.get(name),
            "times_banded": median / times["banded"][0],
        }
        for name, (median, least) in times.items()
    ]


def line(label, row):
    """A row for the eye, beneath `TITLE`."""
    speed, peak = row["tokens_per_second"], row["peak_bytes"]
    speed = "" if speed is None else f"{speed:,.0f}"
    peak = "" if peak is None else f"{peak / 2**20:,.0f}"
    return (
        f"{label:9} {row['peer']:13} {row['seconds'] * 1e3:9.1f} {row['fastest'] * 1e3:9.1f} {speed:>10} {peak:>9} "
        f"{row['times_banded']:14.2f}"
    )


TITLE = f"{'size':9} {'peer':13} {'ms':>9} {'least ms':>9} {'tokens/s':>10} {'peak MiB':>9} {'time / banded':>14}"


def machine():
    """What runs here, in a line."""
    device = jax.devices()[0]
    return (
        f"{device.platform} {device.device_kind}, {platform.machine()}, python {platform.python_version()}, "
        f"jax {jax.__version__}"
    )


def main(settings):
    """Prints a table of both sizes and writes the JSON."""
    check_at_least(1, repeats=settings.repeats)
    for size in settings.sizes:
        check_known(f"--sizes={size}", size, SIZES)
    print(f"{machine()}, median of {settings.repeats}")
    print(TITLE)
    rows = []
    for size in settings.sizes:
        case, work = SIZES[size], gflop(SIZES[size])
        found = measure(case, settings.repeats, settings.skip, {"product": product_peer(PRODUCT[size])})
        for row in found:
            print(line(size, row), flush=True)
        rows += [{"size": size} | row for row in found]
        seconds = {row["peer"]: row["seconds"] for row in found}
        if "product" in seconds:
            speed, top = work / seconds["banded"], 2e-9 * PRODUCT[size] ** 3 / seconds["product"]
            rows[-1] |= {"gflop": work, "banded_gflops": speed, "product_gflops": top}
            print(f"{size:9} {work:,.1f} GFLOP: banded {speed:,.0f} GFLOP/s, {speed / top:.0%} of the product's {top:,.0f}")
    if settings.json:
        Path(settings.json).write_text(json.dumps(rows, indent=2) + "\n")


def _define() -> flags.FlagValues:
    flags.DEFINE_list("sizes", list(SIZES), "Which of small and large to run.")
    flags.DEFINE_integer("repeats", 15, "Timed runs of each peer.")
    flags.DEFINE_list("skip", [], "Peers to leave out, of all but banded.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    return flags.FLAGS


if __name__ == "__main__":
    defined = _define()
    command.run(lambda: main(defined))
