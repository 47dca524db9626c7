"""Attention's forward and backward pass: every path that runs here, and torch's, in one run.

    python -m benchmarks.attention [--times=512,3072] [--rows=4] [--heads=16] [--width=64]
        [--repeats=9] [--json=FILE]

Each peer computes attention and the gradients of queries, keys and values, with dropout 0.1 on the
weights and without:

- the paths of adaptive_jax.bodies.attention;
- `torch`: torch.nn.functional.scaled_dot_product_attention where torch is installed, on the same
  device.

The peers take turns, so that a busy machine slows all of them alike; times are medians. GFLOP/s
counts the work that causal attention needs: for every pair of tokens two products forward and four
backward. Memory is the peak beside arguments and results: as the compiler counts it for JAX, as
`benchmarks.outputs` measures it for torch.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.bodies.attention import PATHS, Pairs, attention
from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.numerics.dropout import row_seeds
from benchmarks.outputs import machine, torch_memory
from benchmarks.timing import interleaved, torch_device

DROPOUTS = 0.1, 0.0
PEERS = (*PATHS[1:], "torch")  # the path "auto" is one of the others


def jax_peers(arrays, dropout, paths):
    """Compiled functions of `arrays` by path, for those of the paths that this machine
    supports; why not, if none does.
    """

    def both(path, queries, keys, values, gradient):
        seeds = row_seeds(jax.random.key(0), jnp.arange(len(queries))) if dropout else None
        attend = functools.partial(attention, pairs=Pairs(dropout=dropout, seeds=seeds), path=path)
        attended, pull = jax.vjp(attend, queries, keys, values)
        return attended, *pull(gradient)

    compiled, refused = {}, []
    for path in paths:
        try:
            compiled[path] = jax.jit(functools.partial(both, path)).lower(*arrays).compile()
        except InputError as error:
            refused.append(f"left out: {error}")
    if not compiled and refused:
        print("\n".join(refused))
    return compiled


def torch_peer(arrays, dropout, device):
    """A function that runs torch's attention once."""
    import torch

    dtype = getattr(torch, arrays[0].dtype.name)
    # torch takes heads before time. In memory time comes first, as a model's projection computes
    # it.
    *inputs, gradient = (
        torch.tensor(np.asarray(x, np.float32), device=device).to(dtype).transpose(1, 2)
        for x in arrays
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

    return run


def measure(length, dropout, settings):
    """Measures all peers at one length: for each its path, median and least seconds, GFLOP/s
    and peak bytes.
    """
    on_cpu = jax.default_backend() == "cpu"
    rows = settings.rows or max((2048 if on_cpu else 32_768) // length, 1)
    shape, dtype = (
        (rows, length, settings.heads, settings.width),
        settings.dtype or ("float32" if on_cpu else "bfloat16"),
    )
    arrays = [jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(4)]
    peers, memory = {}, {}
    for path, compiled in jax_peers(
        arrays, dropout, [peer for peer in settings.peers if peer != "torch"]
    ).items():
        peers[path] = lambda compiled=compiled: jax.block_until_ready(compiled(*arrays))
        memory[path] = compiled.memory_analysis().temp_size_in_bytes
    if "torch" in settings.peers and (device := torch_device()):
        peers["torch"] = torch_peer(arrays, dropout, device)
        peers["torch"]()
        memory["torch"] = torch_memory(peers["torch"])
    gflop = 6e-9 * rows * settings.heads * settings.width * length * (length + 1)
    found = {"time": length, "rows": rows, "dropout": dropout}
    return [
        found
        | {
            "path": path,
            "seconds": median,
            "fastest": least,
            "gflops_per_second": gflop / median,
            "peak_bytes": memory[path],
        }
        for path, (median, least) in interleaved(peers, settings.repeats).items()
    ]


def main(settings):
    """Prints a table of all lengths and writes the JSON."""
    if not all(length.isdecimal() and int(length) for length in settings.times):
        raise InputError(
            f"--times={','.join(settings.times)}: give lengths of 1 or more, such as"
            " --times=512,3072"
        )
    given = {"--heads": settings.heads, "--width": settings.width, "--repeats": settings.repeats}
    check_at_least(1, **given, **{"--rows": settings.rows or 1})
    for peer in settings.peers:
        check_known(f"--peers={peer}", peer, PEERS)
    print(f"{machine()}, {settings.heads} heads of {settings.width}, median of {settings.repeats}")
    print(
        f"{'time':>5} {'rows':>5} {'dropout':>7} {'path':8} {'ms':>9} {'fastest':>9} {'GFLOP/s':>8}"
        f" {'peak MB':>9}"
    )
    found = []
    for length in map(int, settings.times):
        for dropout in DROPOUTS:
            for row in measure(length, dropout, settings):
                found.append(row)
                peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.1f}"
                print(
                    f"{length:5} {row['rows']:5} {dropout:7} {row['path']:8}"
                    f" {row['seconds'] * 1e3:9.1f} {row['fastest'] * 1e3:9.1f}"
                    f" {row['gflops_per_second']:8,.1f} {peak:>9}",
                    flush=True,
                )
    if settings.json:
        Path(settings.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    flags.DEFINE_list("times", ["512", "3072"], "Lengths of rows, in tokens.")
    flags.DEFINE_list("peers", list(PEERS), "Paths, and torch.")
    flags.DEFINE_integer(
        "rows", None, "Rows; by default as many as make 2,048 tokens on a CPU, 32,768 elsewhere."
    )
    flags.DEFINE_integer("heads", 16, "Heads.")
    flags.DEFINE_integer("width", 64, "Features of a head.")
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"], "Default: float32 on a CPU, bfloat16 elsewhere."
    )
    flags.DEFINE_integer("repeats", 9, "Timed runs of each peer.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda: main(flags.FLAGS))
