"""Loss and gradient of the output layer: the one-pass banded core against its peers, in one run.

    python -m benchmarks.outputs [--sizes=small,large] [--repeats=15] [--json=FILE]

Peers, each computing the summed loss of 2,048 Zipf-distributed targets and its gradient for hidden states and all weights:

- `banded`: adaptive_jax.outputs.banded.loss, the core of every output layer here.
- `masked dense`: every band evaluated for every token, then masked: the usual way to write an adaptive softmax with
  static shapes. Differentiated by JAX.
- `full softmax`: one table [vocabulary, d], logits of all tokens at once. Differentiated by JAX.
- `torch`: torch.nn.AdaptiveLogSoftmaxWithLoss where torch is installed, on the same device.

Repeats of all peers are interleaved, so that a busy machine slows them alike; times are medians. Memory is the peak above
the arguments and results: the compiler's count for JAX, the growth of the process' peak (CPU) or of the allocator's peak
(GPU) for torch.
"""

import itertools
import json
import platform
import statistics
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from adaptive_jax.outputs import banded

SIZES = {  # width, vocabulary, cutoffs
    "small": (256, 33_278, (2_500, 10_000)),
    "large": (1024, 267_744, (20_000, 60_000)),
}
TOKENS = 2048

SIZE = flags.DEFINE_list("sizes", ["small", "large"], "Which of small and large to run.")
REPEATS = flags.DEFINE_integer("repeats", 15, "Timed runs of each peer.")
SKIP = flags.DEFINE_list("skip", [], "Peers to leave out.")
JSON = flags.DEFINE_string("json", None, "File for the numbers.")


def arguments(width, vocabulary, cutoffs, seed=0):
    """Hidden states `[TOKENS, width]`, Zipf targets, bands and clusters, as numpy arrays."""
    rng = np.random.default_rng(seed)
    shares = 1 / np.arange(1, vocabulary + 1)
    targets = rng.choice(vocabulary, TOKENS, p=shares / shares.sum()).astype(np.int32)

    def normal(*shape):
        return (rng.standard_normal(shape) * width**-0.5).astype(np.float32)

    ends = [0, *cutoffs, vocabulary]
    bands = tuple(
        (normal(after - before, width // 4**i), None if i == 0 else normal(width // 4**i, width))
        for i, (before, after) in enumerate(itertools.pairwise(ends))
    )
    return normal(TOKENS, width) * width**0.5, targets, bands, normal(len(cutoffs), width)


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


def jax_peers(width, vocabulary, cutoffs):
    """Name to (compiled function, arguments)."""
    hidden, targets, bands, clusters = jax.tree.map(jnp.asarray, arguments(width, vocabulary, cutoffs))
    table = jax.random.normal(jax.random.key(0), (vocabulary, width)) * width**-0.5
    weights = jnp.ones(TOKENS)

    def full(hidden, table, targets):
        return -jnp.take_along_axis(jax.nn.log_softmax(hidden @ table.T), targets[:, None], axis=1).sum()

    peers = {
        "banded": (lambda h, b, c, t: banded.loss(h, t, weights, b, c)[0], (hidden, bands, clusters, targets)),
        "masked dense": (lambda h, b, c, t: masked_dense(h, t, b, c), (hidden, bands, clusters, targets)),
        "full softmax": (full, (hidden, table, targets)),
    }
    compiled = {}
    for name, (loss, values) in peers.items():
        if name not in SKIP.value:
            differentiated = jax.value_and_grad(loss, argnums=tuple(range(len(values) - 1)))
            compiled[name] = jax.jit(differentiated).lower(*values).compile(), values
    return compiled


def torch_peer(width, vocabulary, cutoffs):
    """A function that runs torch's layer once, or None without torch."""
    try:
        import torch
    except ImportError:
        return None
    device = "cuda" if jax.default_backend() == "gpu" and torch.cuda.is_available() else "cpu"
    if device == "cpu" and jax.default_backend() == "gpu":
        return None
    hidden, targets, _, _ = arguments(width, vocabulary, cutoffs)
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


def measure(size):
    """Rows of one size: name, median seconds, tokens a second, peak bytes, ratio of its time to that of banded."""
    width, vocabulary, cutoffs = SIZES[size]
    peers = {}
    memory = {}
    for name, (compiled, values) in jax_peers(width, vocabulary, cutoffs).items():
        peers[name] = lambda compiled=compiled, values=values: jax.block_until_ready(compiled(*values))
        memory[name] = compiled.memory_analysis().temp_size_in_bytes
    run_torch = None if "torch" in SKIP.value else torch_peer(width, vocabulary, cutoffs)
    if run_torch:
        run_torch()
        memory["torch"] = torch_memory(run_torch)
        peers["torch"] = run_torch
    seconds = {name: [] for name in peers}
    for run in peers.values():
        run()
    for _ in range(REPEATS.value):
        for name, run in peers.items():
            time.sleep(0.3)  # the threads of the peer before may spin for a while, waiting for more work
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return [
        {
            "size": size,
            "peer": name,
            "seconds": medians[name],
            "fastest": min(seconds[name]),
            "tokens_per_second": TOKENS / medians[name],
            "peak_bytes": memory[name],
            "times_banded": medians[name] / medians["banded"],
        }
        for name in peers
    ]


def main(argv):
    """Prints a table of both sizes and writes the JSON."""
    del argv
    device = jax.devices()[0]
    print(
        f"{device.platform} {device.device_kind}, {platform.machine()}, python {platform.python_version()}, "
        f"jax {jax.__version__}, {TOKENS} tokens, median of {REPEATS.value}"
    )
    rows = []
    print(f"{'size':6} {'peer':13} {'ms':>9} {'tokens/s':>10} {'peak MiB':>9} {'time / banded':>14}")
    for size in SIZE.value:
        for row in measure(size):
            rows.append(row)
            peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.0f}"
            print(
                f"{size:6} {row['peer']:13} {row['seconds'] * 1e3:9.1f} {row['tokens_per_second']:10,.0f} {peak:>9} "
                f"{row['times_banded']:14.2f}",
                flush=True,
            )
    if JSON.value:
        Path(JSON.value).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
