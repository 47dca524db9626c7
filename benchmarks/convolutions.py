"""Causal convolutions, forward and backward: the one product of adaptive_jax, and other ways to
compute the same, in one run.

    python -m benchmarks.convolutions [--layers=6x850x1700,5x256x512] [--rows=4] [--time=256]
        [--repeats=9] [--json=FILE]

A layer is kernel x inputs x outputs; a layer that is gated has twice as many outputs as units.
Peers:

- `product`: adaptive_jax.bodies.convolution, one product of the last k inputs side by side;
- `sum`: a product for each of the k shifts, summed;
- `xla`: jax.lax.conv_general_dilated;
- `torch`: torch.nn.functional.conv1d where torch is installed, on the same device.

The peers take turns, so that a busy machine slows all of them alike; times are medians. GFLOP/s
counts three products of the layer's matrix with all tokens for forward and backward together.
Memory is the peak beside arguments and results, as the compiler counts it.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.bodies.convolution import Convolution
from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.numerics.products import product
from benchmarks.outputs import machine
from benchmarks.timing import interleaved, torch_device

# Of GCNN-14 and of GCNN-8B, the kernels that are wider than 1.
LAYERS = "6x850x1700", "5x850x1700", "4x850x1700", "4x1024x4096", "5x128x256", "5x256x512"


def padded(x, kernel):
    """`x [rows, time, width]` after `kernel - 1` zeros."""
    return jnp.pad(x, ((0, 0), (kernel - 1, 0), (0, 0)))


def one_product(v, bias, x):
    """The convolution as this project's body computes it."""
    layer = Convolution(len(v), v.shape[2], 1.0, x.dtype)
    return layer.apply(
        {"params": {"v": v, "bias": bias}}, x, jnp.zeros((len(x), len(v) - 1, x.shape[2]), x.dtype)
    )


def sum_of_products(v, bias, x):
    """A product for each shift."""
    long = padded(x, len(v))
    return (
        sum(product(long[:, shift : shift + x.shape[1]], matrix) for shift, matrix in enumerate(v))
        + bias
    )


def xla(v, bias, x):
    """XLA's own convolution."""
    return (
        jax.lax.conv_general_dilated(
            x, v, (1,), [(len(v) - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC")
        )
        + bias
    )


PEERS = {"product": one_product, "sum": sum_of_products, "xla": xla}


def both(peer):
    """A function of the arguments and a gradient of the outputs: outputs and gradients of all
    arguments.
    """

    def run(arguments, gradient):
        outputs, pull = jax.vjp(peer, *arguments)
        return outputs, pull(gradient)

    return run


def torch_peers(arguments, gradient, device):
    """Functions that run torch's convolution once: forward, and forward and backward."""
    import torch

    v, bias, x = (torch.tensor(np.asarray(a), device=device) for a in arguments)
    weights, inputs = (
        v.permute(2, 1, 0).contiguous().requires_grad_(True),
        x.transpose(1, 2).contiguous().requires_grad_(True),
    )
    bias.requires_grad_(True)
    gradient = torch.tensor(np.asarray(gradient), device=device).transpose(1, 2).contiguous()

    def forward():
        return torch.nn.functional.conv1d(
            torch.nn.functional.pad(inputs, (v.shape[0] - 1, 0)), weights, bias
        )

    def quiet():
        with torch.no_grad():
            forward()

    def train():
        weights.grad = inputs.grad = bias.grad = None
        forward().backward(gradient)

    return quiet, train


def measure(layer, settings):
    """Measures all peers on one layer: for each the median and least seconds of both passes,
    and peak bytes.
    """
    kernel, inputs, outputs = map(int, layer.split("x"))
    keys, shape = jax.random.split(jax.random.key(0), 4), (settings.rows, settings.time)
    v = jax.random.normal(keys[0], (kernel, inputs, outputs)) / (kernel * inputs) ** 0.5
    arguments = (
        v,
        jax.random.normal(keys[1], (outputs,)),
        jax.random.normal(keys[2], (*shape, inputs)),
    )
    gradient = jax.random.normal(keys[3], (*shape, outputs))
    forward, train, memory = {}, {}, {}
    for name, peer in PEERS.items():
        alone = jax.jit(peer).lower(*arguments).compile()
        together = jax.jit(both(peer)).lower(arguments, gradient).compile()
        forward[name] = lambda alone=alone: jax.block_until_ready(alone(*arguments))
        train[name] = lambda together=together: jax.block_until_ready(together(arguments, gradient))
        memory[name] = together.memory_analysis().temp_size_in_bytes
    if device := torch_device():
        forward["torch"], train["torch"] = torch_peers(arguments, gradient, device)
    of_forward, of_train = (
        interleaved(forward, settings.repeats),
        interleaved(train, settings.repeats),
    )
    gflop = 2e-9 * settings.rows * settings.time * kernel * inputs * outputs
    return [
        {
            "layer": layer,
            "peer": name,
            "forward": of_forward[name],
            "both": of_train[name],
            "peak_bytes": memory.get(name),
            "gflops_per_second": 3 * gflop / of_train[name][0],
        }
        for name in of_train
    ]


def main(settings):
    """Prints a table of all layers and writes the JSON."""
    for layer in settings.layers:
        if len(layer.split("x")) != 3 or not all(
            part.isdecimal() and int(part) for part in layer.split("x")
        ):
            raise InputError(
                f"--layers={layer}: give kernel x inputs x outputs, such as --layers=6x850x1700"
            )
    check_at_least(
        1, **{"--rows": settings.rows, "--time": settings.time, "--repeats": settings.repeats}
    )
    print(
        f"{machine()}, {settings.rows} rows of {settings.time} tokens, median (least) ms of"
        f" {settings.repeats}"
    )
    print(f"{'layer':>12} {'peer':8} {'forward':>15} {'both':>17} {'GFLOP/s':>8} {'peak MB':>8}")
    found = []
    for layer in settings.layers:
        for row in measure(layer, settings):
            found.append(row)
            times = [
                "{:7.1f} ({:.1f})".format(*(1e3 * seconds for seconds in row[part]))
                for part in ("forward", "both")
            ]
            peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.1f}"
            print(
                f"{layer:>12} {row['peer']:8} {times[0]:>15} {times[1]:>17}"
                f" {row['gflops_per_second']:8,.0f} {peak:>8}",
                flush=True,
            )
    if settings.json:
        Path(settings.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    flags.DEFINE_list("layers", list(LAYERS), "Layers, each as kernel x inputs x outputs.")
    flags.DEFINE_integer("rows", 4, "Rows.")
    flags.DEFINE_integer("time", 256, "Tokens of a row.")
    flags.DEFINE_integer("repeats", 9, "Timed runs of each peer.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda: main(flags.FLAGS))
