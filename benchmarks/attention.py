"""Attention's forward and backward pass by every path that runs here, against torch's, in one run.

    python -m benchmarks.attention [--times=512,3072] [--rows=4] [--heads=16] [--width=64] [--repeats=9] [--json=FILE]

Peers, each computing attention and the gradients of queries, keys and values, with dropout 0.1 on the weights and without:

- the paths of adaptive_jax.bodies.attention;
- `torch`: torch.nn.functional.scaled_dot_product_attention where torch is installed, on the same device.

Repeats of all peers are interleaved, so that a busy machine slows them alike; times are medians. GFLOP/s counts what causal
attention has to do, two products of every pair of tokens forward and four backward, and none of what a path does beyond it.
Memory is the peak above arguments and results: the compiler's count for JAX, the allocator's for torch on a GPU.
"""

import functools
import json
import platform
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from adaptive_jax.bodies.attention import PATHS, attention
from adaptive_jax.dropout import row_seeds
from adaptive_jax.errors import InputError
from benchmarks.timing import interleaved

TIMES = flags.DEFINE_list("times", ["512", "3072"], "Lengths of rows, in tokens.")
ROWS = flags.DEFINE_integer("rows", None, "Rows; by default as many as make 2,048 tokens on a CPU, 32,768 elsewhere.")
HEADS = flags.DEFINE_integer("heads", 16, "Heads.")
WIDTH = flags.DEFINE_integer("width", 64, "Features of a head.")
DTYPE = flags.DEFINE_enum("dtype", None, ["float32", "bfloat16"], "Default: float32 on a CPU, bfloat16 elsewhere.")
REPEATS = flags.DEFINE_integer("repeats", 9, "Timed runs of each peer.")
JSON = flags.DEFINE_string("json", None, "File for the numbers.")
DROPOUTS = 0.1, 0.0


def tensors(shape, dtype):
    """Queries, keys, values and a gradient `[rows, time, heads, width]`."""
    return [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(4)]


def jax_peers(arrays, dropout):
    """Path to compiled function of `arrays`; paths that cannot do it here are left out."""

    def both(path, queries, keys, values, gradient):
        seeds = row_seeds(jax.random.key(0), jnp.arange(len(queries))) if dropout else None
        attend = functools.partial(attention, dropout=dropout, seeds=seeds, path=path)
        attended, pull = jax.vjp(attend, queries, keys, values)
        return attended, *pull(gradient)

    compiled = {}
    for path in PATHS:
        if path != "auto":  # one of the others
            try:
                compiled[path] = jax.jit(functools.partial(both, path)).lower(*arrays).compile()
            except InputError:
                continue
    return compiled


def torch_peer(arrays, dropout):
    """A function that runs torch's attention once and a function for its peak bytes, or None without torch on this device."""
    try:
        import torch
    except ImportError:
        return None
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        return None
    dtype = getattr(torch, arrays[0].dtype.name)
    # Heads before time, as torch asks for it, but of what a model has: one product's result, time first.
    *inputs, gradient = (
        torch.tensor(np.asarray(x, np.float32), device=device).to(dtype).transpose(1, 2) for x in arrays
    )
    for each in inputs:
        each.requires_grad_(True)

    def run():
        for each in inputs:
            each.grad = None
        attend = torch.nn.functional.scaled_dot_product_attention
        attend(*inputs, dropout_p=dropout, is_causal=True).backward(gradient)
        if device == "cuda":
            torch.cuda.synchronize()

    def memory():
        if device == "cpu":
            return None
        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    return run, memory


def measure(length, dropout):
    """Rows of one length: path, median seconds, operations a second, peak bytes."""
    on_cpu = jax.default_backend() == "cpu"
    rows = ROWS.value or max((2048 if on_cpu else 32_768) // length, 1)
    arrays = tensors((rows, length, HEADS.value, WIDTH.value), DTYPE.value or ("float32" if on_cpu else "bfloat16"))
    peers, memory = {}, {}
    for path, compiled in jax_peers(arrays, dropout).items():
        peers[path] = lambda compiled=compiled: jax.block_until_ready(compiled(*arrays))
        memory[path] = compiled.memory_analysis().temp_size_in_bytes
    torch = torch_peer(arrays, dropout)
    if torch:
        peers["torch"], memory["torch"] = torch[0], torch[1]()
    work = 12 * rows * HEADS.value * WIDTH.value * length * (length + 1) / 2
    return [
        {
            "time": length,
            "rows": rows,
            "dropout": dropout,
            "path": name,
            "seconds": median,
            "fastest": least,
            "gflops_per_second": work / median / 1e9,
            "peak_bytes": memory[name],
        }
        for name, (median, least) in interleaved(peers, REPEATS.value).items()
    ]


def main(argv):
    """Prints a table of all lengths and writes the JSON."""
    del argv
    device = jax.devices()[0]
    print(
        f"{device.platform} {device.device_kind}, {platform.machine()}, python {platform.python_version()}, "
        f"jax {jax.__version__}, {HEADS.value} heads of {WIDTH.value}, median of {REPEATS.value}"
    )
    rows = []
    print(f"{'time':>5} {'rows':>5} {'dropout':>7} {'path':8} {'ms':>9} {'fastest':>9} {'GFLOP/s':>8} {'peak MiB':>9}")
    for length in map(int, TIMES.value):
        for dropout in DROPOUTS:
            for row in measure(length, dropout):
                rows.append(row)
                peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:,.1f}"
                print(
                    f"{length:5} {row['rows']:5} {dropout:7} {row['path']:8} {row['seconds'] * 1e3:9.1f} "
                    f"{row['fastest'] * 1e3:9.1f} {row['gflops_per_second']:8,.1f} {peak:>9}",
                    flush=True,
                )
    if JSON.value:
        Path(JSON.value).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
