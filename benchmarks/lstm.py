"""Layers of LSTM, forward and backward: every path that runs here, plain differentiation of the
loop, and torch's, in one run.

    python -m benchmarks.lstm [--rows=20,80] [--time=70] [--sizes=400,1150,1150,400] [--repeats=9]
        [--json=FILE]

The layers are those of AWD-LSTM: the first number of --sizes is the width of their input. Each peer
computes the hidden states of all rows and the gradients of input and parameters, without dropout,
from a state of zeros:

- the paths of adaptive_jax.bodies.recurrence;
- `loop`: the same recurrence with its loop differentiated by JAX, which adds to the gradient of the
  recurrent matrix at every step;
- `torch`: one torch.nn.LSTM a layer where torch is installed, on the same device.

The peers take turns, so that a busy machine slows all of them alike; times are medians. GFLOP/s
counts the products alone: two matrices a layer, three products each. `of a product` is the share of
the speed at which one product of as many rows as there are tokens runs, with the largest matrix of
the layers, in the same run. Memory is the peak beside arguments and results, as
`benchmarks.outputs` counts it.
"""

import contextlib
import functools
import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.bodies.recurrence import PATHS, State, Weights, lstm, zero_state
from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_at_least
from benchmarks.outputs import machine, torch_memory
from benchmarks.timing import interleaved, torch_device


def looped(x, weights, state):
    """A layer as a loop that JAX differentiates; the products of the inputs are one."""

    def step(state, pushed):
        i, f, g, o = jnp.split(pushed + state.hidden @ weights.recurrent, 4, axis=1)
        cell = jax.nn.sigmoid(f) * state.cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        state = State(jax.nn.sigmoid(o) * jnp.tanh(cell), cell)
        return state, state.hidden

    state, hidden = jax.lax.scan(step, state, jnp.swapaxes(x, 0, 1) @ weights.input + weights.bias)
    return jnp.swapaxes(hidden, 0, 1), state


def initial(sizes):
    """Parameters of all layers as torch draws them."""
    random = np.random.default_rng(0)

    def uniform(width, *shape):
        return random.uniform(-(width**-0.5), width**-0.5, shape).astype(np.float32)

    return [
        Weights(
            uniform(width, inputs, 4 * width),
            uniform(width, width, 4 * width),
            uniform(width, 4 * width),
        )
        for inputs, width in itertools.pairwise(sizes)
    ]


def jax_peers(layers, x, pull):
    """Compiled functions of `(layers, x, pull)` by name, for the paths that this machine
    supports.
    """

    def both(layer, layers, x, pull):
        def stack(layers, x):
            for weights in layers:
                x, _ = layer(x, weights, zero_state(len(x), len(weights.recurrent)))
            return x

        hidden, vjp = jax.vjp(stack, layers, x)
        return hidden, vjp(pull)

    ways = {path: functools.partial(lstm, path=path) for path in PATHS[1:]} | {
        "loop": looped
    }  # "auto" is one of the others
    compiled = {}
    for name, layer in ways.items():
        with contextlib.suppress(InputError):
            compiled[name] = (
                jax.jit(functools.partial(both, layer)).lower(layers, x, pull).compile()
            )
    return compiled


def torch_peer(layers, x, pull, device):
    """A function that runs torch's layers once, forward and backward, and returns the hidden
    states `[time, rows, width]`.
    """
    import torch

    stack = []
    for weights in layers:
        layer = torch.nn.LSTM(len(weights.input), len(weights.recurrent)).to(device)
        given = weights.input.T, weights.recurrent.T, weights.bias, np.zeros_like(weights.bias)
        with torch.no_grad():
            for parameter, values in zip(layer.parameters(), given, strict=True):
                parameter.copy_(torch.tensor(values))
        stack.append(layer)
    inputs = torch.tensor(np.swapaxes(x, 0, 1).copy(), device=device, requires_grad=True)
    pull = torch.tensor(np.swapaxes(pull, 0, 1).copy(), device=device)

    def run():
        inputs.grad = None
        for layer in stack:
            layer.zero_grad()
        hidden = inputs
        for layer in stack:
            hidden, _ = layer(hidden)
        hidden.backward(pull)
        if device == "cuda":
            torch.cuda.synchronize()
        return hidden.detach()

    return run


def measure(rows, settings, sizes):
    """Measures all peers with so many rows: for each its name, median and least seconds,
    GFLOP/s and peak bytes.
    """
    random, layers = np.random.default_rng(1), initial(sizes)
    x, pull = (
        random.standard_normal((rows, settings.time, width), dtype=np.float32)
        for width in (sizes[0], sizes[-1])
    )
    arguments = jax.tree.map(jnp.asarray, (layers, x, pull))
    peers, memory = {}, {}
    for name, compiled in jax_peers(*arguments).items():
        peers[name] = lambda compiled=compiled: jax.block_until_ready(compiled(*arguments))
        memory[name] = compiled.memory_analysis().temp_size_in_bytes
    if device := torch_device():
        peers["torch"] = torch_peer(layers, x, pull, device)
        differ = np.abs(
            peers["torch"]().cpu().numpy() - np.swapaxes(peers["scan"]()[0], 0, 1)
        ).max()
        assert differ < (1e-4 if device == "cpu" else 1e-2), (
            f"torch computes other hidden states, by {differ}"
        )
        memory["torch"] = torch_memory(peers["torch"])
    largest = max((weights.input for weights in arguments[0]), key=jnp.size)
    many, product = jnp.ones((rows * settings.time, len(largest))), jax.jit(jnp.matmul)
    peers["product"] = lambda: jax.block_until_ready(product(many, largest))
    seconds = interleaved(peers, settings.repeats)
    peak = 2e-9 * many.size * largest.shape[1] / seconds.pop("product")[0]
    matrices = sum(weights.input.size + weights.recurrent.size for weights in layers)
    gflop = 3 * 2e-9 * matrices * rows * settings.time
    found = {
        "rows": rows,
        "time": settings.time,
        "sizes": sizes,
        "gflop": gflop,
        "product_gflops_per_second": peak,
    }
    return [
        found
        | {
            "peer": name,
            "seconds": median,
            "fastest": least,
            "gflops_per_second": gflop / median,
            "peak_bytes": memory[name],
        }
        for name, (median, least) in seconds.items()
    ]


def main(settings):
    """Prints a table of all numbers of rows and writes the JSON."""
    for flag in "rows", "sizes":
        given = getattr(settings, flag)
        if not given or not all(each.isdecimal() and int(each) for each in given):
            raise InputError(
                f"--{flag}={','.join(given)}: give numbers of 1 or more, such as --rows=20,80"
            )
    sizes = tuple(map(int, settings.sizes))
    if len(sizes) < 2:
        raise InputError(
            f"--sizes={sizes[0]}: give the width of the input and of each layer, such as"
            " --sizes=400,1150,400"
        )
    check_at_least(1, **{"--time": settings.time, "--repeats": settings.repeats})
    print(
        f"{machine()}, layers of {'-'.join(settings.sizes)}, {settings.time} steps, median of"
        f" {settings.repeats}"
    )
    print(
        f"{'rows':>5} {'peer':8} {'ms':>9} {'fastest':>9} {'GFLOP/s':>8} {'of a product':>12}"
        f" {'times torch':>11} {'peak MB':>9}"
    )
    found = []
    for rows in map(int, settings.rows):
        measured = measure(rows, settings, sizes)
        torch = next((row["seconds"] for row in measured if row["peer"] == "torch"), None)
        for row in measured:
            found.append(row)
            share = row["gflops_per_second"] / row["product_gflops_per_second"]
            times = "" if torch is None else f"{torch / row['seconds']:.2f}"
            peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.1f}"
            print(
                f"{rows:5} {row['peer']:8} {row['seconds'] * 1e3:9,.1f}"
                f" {row['fastest'] * 1e3:9,.1f} {row['gflops_per_second']:8,.1f} {share:12.0%}"
                f" {times:>11} {peak:>9}",
                flush=True,
            )
    if settings.json:
        Path(settings.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    flags.DEFINE_list("rows", ["20", "80"], "Numbers of rows.")
    flags.DEFINE_integer("time", 70, "Steps of a row.")
    flags.DEFINE_list(
        "sizes", ["400", "1150", "1150", "400"], "Width of the input, then of each layer."
    )
    flags.DEFINE_integer("repeats", 9, "Timed runs of each peer.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda: main(flags.FLAGS))
