"""A layer's forward and backward pass: every implementation that runs here, and torch's, in one
run.

    python -m benchmarks.layers attention [--sizes=4x512x16x64,1x3072x16x64] [--repeats=9]
        [--dtype=bfloat16] [--peers=chunked,torch] [--json=FILE]
    python -m benchmarks.layers lstm [--sizes=20x70x400x1150x1150x400]
    python -m benchmarks.layers convolution [--sizes=4x256x6x850x1700]
    python -m benchmarks.layers input [--sizes=8x512x1024x267735x20000x60000]

Sizes begin with rows x tokens of a row. Then follow for

- `attention`: heads x features of a head. Peers are the paths of adaptive_jax.bodies.attention,
  after the bias, as the model calls them, with dropout 0.1 on the weights and without. GFLOP/s
  count what causal attention needs: for every pair of tokens two products forward and four
  backward.
- `lstm`: the width of the input, then of each layer. Peers are `scan` and, on
  NVIDIA GPUs, `cudnn` of adaptive_jax.bodies.lstm, and `loop`, the same with its loop
  differentiated by JAX, which adds to the gradient of the recurrent matrix at every step.
- `convolution`: kernel x inputs x outputs; a gated layer has twice as many outputs as units. Peers
  are `product`, one product of the last k inputs side by side, as adaptive_jax.bodies.gated_conv
  has it; `sum`, a product for each of the k shifts; `xla`, jax.lax.conv_general_dilated.
- `input`: features x words x cutoffs of an adaptive input; tokens follow Zipf's law. Peers are
  `distinct`, every word once in its own band, as adaptive_jax.inputs.distinct has it, and `dense`,
  every token in every band. GFLOP/s count every token in its own band.

`torch`, where it is installed, uses the same device; its outputs are compared with the first
peer's, unless there is dropout. Each peer computes outputs and the gradients of all arguments. They
take turns, so that a busy machine slows all of them alike; times are medians. Memory is the peak
beside arguments and results: as the compiler counts it for JAX, as `benchmarks.timing` measures it
for torch.
"""

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.bodies import attention, lstm
from adaptive_jax.bodies.gated_conv import Convolution
from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.inputs import distinct
from adaptive_jax.numerics.bands import Band, band_sizes, band_widths
from adaptive_jax.numerics.dropout import row_seeds
from adaptive_jax.numerics.products import product
from benchmarks.outputs import machine
from benchmarks.timing import interleaved, launched, launches, torch_device, torch_memory


class Case(NamedTuple):
    """A layer of a size.

    Attributes:
        about: what differs from other cases of the size.
        peers: functions of the arguments by name.
        arguments: a pytree of arrays.
        torch: of tensors like the arguments; outputs as those of the peers.
        flops: of both passes.
        random: whether outputs depend on the implementation.
    """

    about: str
    peers: dict[str, Callable]
    arguments: Any
    torch: Callable
    flops: float
    random: bool = False


def attention_cases(sizes: list[int], dtype: str) -> Iterator[Case]:
    """With dropout and without."""
    rows, time, heads, width = sizes
    keys = jax.random.split(jax.random.key(0))
    shapes = (rows, time, 3 * heads * width), (3 * heads * width,)
    arrays = [jax.random.normal(*each).astype(dtype) for each in zip(keys, shapes, strict=True)]
    seeds = row_seeds(jax.random.key(1), jnp.arange(rows))
    for dropout in 0.1, 0.0:
        pairs = attention.Pairs(dropout=dropout, seeds=seeds if dropout else None)

        def attend(joint, bias, path, pairs=pairs):
            return attention.joint_attention(joint, bias, heads, pairs, path=path)

        def in_torch(joint, bias, dropout=dropout):
            from torch.nn.functional import scaled_dot_product_attention

            # torch takes heads before time; in memory time comes first, as projections compute it.
            parts = (joint + bias).view(rows, time, 3, heads, width).permute(2, 0, 3, 1, 4)
            attended = scaled_dot_product_attention(*parts, dropout_p=dropout, is_causal=True)
            return attended.transpose(1, 2)

        here = functools.partial(attention.supports, pairs=pairs)
        of_row = time, heads, width
        paths = [path for path in attention.PATHS if here(path, of_row, arrays[0].dtype)]
        peers = {path: functools.partial(attend, path=path) for path in paths}
        flops = 6.0 * rows * heads * width * time * (time + 1)
        yield Case(f"dropout {dropout}", peers, arrays, in_torch, flops, random=dropout > 0)


def lstm_cases(sizes: list[int], dtype: str) -> Iterator[Case]:
    """Parameters are drawn as torch draws them."""
    rows, time, *widths = sizes
    random, layers = np.random.default_rng(0), []
    for inputs, width in itertools.pairwise(widths):
        shapes = (inputs, 4 * width), (width, 4 * width), (4 * width,)
        bound = width**-0.5
        layers.append(lstm.Weights(*(random.uniform(-bound, bound, s) for s in shapes)))
    x = random.standard_normal((rows, time, widths[0]))
    arguments = jax.tree.map(lambda a: jnp.asarray(a, dtype), (layers, x))

    def stack(layers, x, layer):
        for weights in layers:
            state = lstm.zero_state(len(x), len(weights.recurrent), x.dtype)
            x, _ = layer(x, weights, state)
        return x

    def in_torch(layers, x):
        import torch

        for weights in layers:
            bias = weights.bias, torch.zeros_like(weights.bias)
            parameters = weights.input.T, weights.recurrent.T, *bias
            zeros = torch.zeros(1, len(x), len(weights.recurrent), device=x.device)
            options = True, 1, 0.0, False, False, True  # biases, layers, …, batch first
            x, *_ = torch.lstm(x, (zeros, zeros), parameters, *options)
        return x

    ways = {"scan": lstm.scan, "loop": _looped}
    if jax.default_backend() == "gpu" and dtype == "float32":
        ways["cudnn"] = lstm.cudnn
    peers = {name: functools.partial(stack, layer=layer) for name, layer in ways.items()}
    matrices = sum(weights.input.size + weights.recurrent.size for weights in layers)
    yield Case("", peers, arguments, in_torch, 6.0 * matrices * rows * time)


def _looped(x, weights, state):
    """A layer as a loop that JAX differentiates; the products of the inputs are one."""

    def step(state, pushed):
        i, f, g, o = jnp.split(pushed + state.hidden @ weights.recurrent, 4, axis=1)
        cell = jax.nn.sigmoid(f) * state.cell + jax.nn.sigmoid(i) * jnp.tanh(g)
        state = lstm.State(jax.nn.sigmoid(o) * jnp.tanh(cell), cell)
        return state, state.hidden

    pushed = jnp.swapaxes(x, 0, 1) @ weights.input + weights.bias[None, None]
    state, hidden = jax.lax.scan(step, state, pushed)
    return jnp.swapaxes(hidden, 0, 1), state


def convolution_cases(sizes: list[int], dtype: str) -> Iterator[Case]:
    """Causal convolutions."""
    rows, time, kernel, inputs, outputs = sizes
    keys = jax.random.split(jax.random.key(0), 3)
    v = jax.random.normal(keys[0], (kernel, inputs, outputs), dtype) / (kernel * inputs) ** 0.5
    bias = jax.random.normal(keys[1], (outputs,), dtype)
    x = jax.random.normal(keys[2], (rows, time, inputs), dtype)

    def one_product(v, bias, x):
        layer, before = Convolution(kernel, outputs, 1.0, x.dtype), x[:, : kernel - 1] * 0
        return layer.apply({"params": {"v": v, "bias": bias}}, x, before)

    def shifts(v, bias, x):
        long = jnp.pad(x, ((0, 0), (kernel - 1, 0), (0, 0)))
        shifted = (product(long[:, at : at + time], matrix) for at, matrix in enumerate(v))
        return sum(shifted) + bias[None, None]

    def xla(v, bias, x):
        names, padding = ("NWC", "WIO", "NWC"), [(kernel - 1, 0)]
        convolve = jax.lax.conv_general_dilated
        return convolve(x, v, (1,), padding, dimension_numbers=names) + bias[None, None]

    def in_torch(v, bias, x):
        from torch.nn import functional

        x = functional.pad(x.transpose(1, 2), (kernel - 1, 0))
        return functional.conv1d(x, v.permute(2, 1, 0), bias).transpose(1, 2)

    peers = {"product": one_product, "sum": shifts, "xla": xla}
    yield Case("", peers, (v, bias, x), in_torch, 6.0 * rows * time * v.size)


def input_cases(sizes: list[int], dtype: str) -> Iterator[Case]:
    """Tables and projections of float32 whatever the dtype, as in training."""
    rows, time, features, words, *cutoffs = sizes
    random, share = np.random.default_rng(0), 1 / np.arange(1, words + 1)
    tokens = random.choice(words, (rows, time), p=share / share.sum())
    counts = band_sizes(words, cutoffs)
    shapes = list(zip(counts, band_widths(features, 4, len(counts)), strict=True))
    keys = jax.random.split(jax.random.key(0), (len(shapes), 2))
    bands = [
        Band(
            jax.random.normal(key[0], shape) * shape[1] ** -0.5,
            jax.random.normal(key[1], (shape[1], features)) * features**-0.5,
        )
        for key, shape in zip(keys, shapes, strict=True)
    ]
    firsts = [0, *itertools.accumulate(counts)]
    ids = jnp.asarray(tokens, jnp.float32)  # an argument with a gradient as the others

    def look_up(bands, ids):
        return distinct.vectors(ids.astype(jnp.int32), bands, dtype)

    def dense(bands, ids):
        ids, vectors = ids.astype(jnp.int32), 0.0
        for first, (table, projection, _) in zip(firsts, bands, strict=False):
            place = jnp.where(ids < first, len(table), ids - first)
            rows = table.at[place].get(mode="fill", fill_value=0.0)
            vectors += product(rows.astype(dtype), projection)
        return vectors

    def in_torch(bands, ids):
        import torch

        ids, vectors, kind = ids.long(), 0, getattr(torch, dtype)
        for first, (table, projection, _) in zip(firsts, bands, strict=False):
            here = (ids >= first) & (ids < first + len(table))
            rows = torch.nn.functional.embedding(ids[here] - first, table)
            own = rows.to(kind) @ projection.to(kind)
            zeros = own.new_zeros(*ids.shape, features)
            vectors = vectors + zeros.masked_scatter(here[..., None], own)
        return vectors

    widths = np.array([width for _, width in shapes])
    flops = 6.0 * features * widths[np.searchsorted(cutoffs, tokens, side="right")].sum()
    yield Case("", {"distinct": look_up, "dense": dense}, (bands, ids), in_torch, flops)


class Layer(NamedTuple):
    """cases: of a size and a dtype. numbers: how many a size has, at least. sizes: the default."""

    cases: Callable[[list[int], str], Iterator[Case]]
    numbers: int
    sizes: tuple[str, ...]


LAYERS = {
    "attention": Layer(attention_cases, 4, ("4x512x16x64", "1x3072x16x64")),
    # AWD-LSTM's
    "lstm": Layer(lstm_cases, 4, ("20x70x400x1150x1150x400", "80x70x400x1150x1150x400")),
    # Of GCNN-14 and of GCNN-8B, the kernels that are wider than 1
    "convolution": Layer(
        convolution_cases,
        5,
        tuple(
            f"4x256x{layer}"
            for layer in (
                "6x850x1700",
                "5x850x1700",
                "4x850x1700",
                "4x1024x4096",
                "5x128x256",
                "5x256x512",
            )
        ),
    ),
    # Of adp_t
    "input": Layer(input_cases, 4, ("8x512x1024x267735x20000x60000",)),
}


def both(peer: Callable, arguments: Any, pull: jax.Array):
    """Outputs, and gradients of all arguments for the gradient `pull` of the outputs."""
    outputs, vjp = jax.vjp(peer, *arguments)
    return outputs, vjp(pull)


def torch_peer(case: Case, pull: jax.Array, device: str) -> Callable:
    """A function that runs torch's layer forward and backward `launches()` times, and returns its
    outputs.
    """
    import torch

    def tensor(array):
        dtype = getattr(torch, array.dtype.name)
        return torch.tensor(np.asarray(array, np.float32), device=device, dtype=dtype)

    arguments = jax.tree.map(lambda a: tensor(a).requires_grad_(), case.arguments)
    leaves, gradient = jax.tree.leaves(arguments), tensor(pull)

    def run():
        for _ in range(launches()):
            outputs = case.torch(*arguments)
            torch.autograd.grad(outputs, leaves, gradient, allow_unused=True)  # of ids
        if device == "cuda":
            torch.cuda.synchronize()
        return outputs.detach()

    return run


def measure(case: Case, names: list[str], repeats: int) -> list[dict]:
    """A row for each peer that runs here: median and least seconds, GFLOP/s and peak bytes."""
    shape = jax.eval_shape(next(iter(case.peers.values())), *case.arguments)
    pull = jax.random.normal(jax.random.key(9), shape.shape, shape.dtype)
    runs, memory = {}, {}
    for name, peer in case.peers.items():
        if names and name not in names:
            continue
        program = jax.jit(functools.partial(both, peer)).lower(case.arguments, pull).compile()
        runs[name] = launched(program, case.arguments, pull)
        memory[name] = program.memory_analysis().temp_size_in_bytes
    if (not names or "torch" in names) and (device := torch_device()):
        run = torch_peer(case, pull, device)
        outputs = np.asarray(run().float().cpu())
        if runs and not case.random:
            ours = np.asarray(next(iter(runs.values()))()[0], np.float32)
            bound = 1e-3 if device == "cpu" and pull.dtype == jnp.float32 else 5e-2
            differ = np.abs(outputs - ours).max() / np.abs(ours).max()
            assert differ < bound, f"torch computes other outputs, by {differ:.1e} of the largest"
        runs["torch"], memory["torch"] = run, torch_memory(run)
    return [
        {
            "peer": name,
            "seconds": median / launches(),
            "fastest": least / launches(),
            "gflops_per_second": 1e-9 * case.flops * launches() / median,
            "peak_bytes": memory[name],
        }
        for name, (median, least) in interleaved(runs, repeats).items()
    ]


def main(name: str, settings) -> None:
    """Prints a line for each size and peer, and writes the JSON."""
    check_known(f"LAYER={name}", name, LAYERS)
    check_at_least(1, **{"--repeats": settings.repeats})
    layer, rows = LAYERS[name], []
    dtype = settings.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    print(f"{machine()}, {dtype}, median of {settings.repeats}")
    print(f"{'size':26} {'':12} {'peer':8} {'ms':>9} {'least':>9} {'GFLOP/s':>9} {'peak MB':>9}")
    for size in settings.sizes or layer.sizes:
        numbers = [int(part) for part in size.split("x") if part.isdecimal() and int(part)]
        if len(numbers) < layer.numbers or len(numbers) != len(size.split("x")):
            raise InputError(f"--sizes={size} must be numbers such as {layer.sizes[0]}")
        for case in layer.cases(numbers, dtype):
            for row in measure(case, settings.peers, settings.repeats):
                rows.append({"size": size, "about": case.about} | row)
                peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:,.1f}"
                print(
                    f"{size:26} {case.about:12} {row['peer']:8} {row['seconds'] * 1e3:9,.1f}"
                    f" {row['fastest'] * 1e3:9,.1f} {row['gflops_per_second']:9,.1f} {peak:>9}",
                    flush=True,
                )
    if settings.json:
        Path(settings.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    flags.DEFINE_list("sizes", [], "Sizes, such as 4x512x16x64; default: those of the papers.")
    flags.DEFINE_list("peers", [], "Only these peers.")
    flags.DEFINE_enum(
        "dtype", None, ["float32", "bfloat16"], "Default: float32 on a CPU, bfloat16 elsewhere."
    )
    flags.DEFINE_integer("repeats", 9, "Timed runs of each peer.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda layer: main(layer, flags.FLAGS), positional=["LAYER"])
