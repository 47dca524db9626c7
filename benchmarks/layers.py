"""A layer's forward and backward pass: every implementation that runs here, and torch's, in one
run.

    python -m benchmarks.layers attention [--sizes=4x512x16x64,1x3072x16x64] [--repeats=9]
        [--dtype=bfloat16] [--peers=chunked,torch] [--json=FILE]
    python -m benchmarks.layers lstm [--sizes=20x70x400x1150x1150x400]

Sizes begin with rows x tokens of a row. Then follow for

- `attention`: heads x features of a head. Peers are the paths of adaptive_jax.bodies.attention,
  after the bias, as the model calls them, with dropout 0.1 on the weights and without. GFLOP/s
  count what causal attention needs: for every pair of tokens two products forward and four
  backward.
- `lstm`: the width of the input, then of each layer. The peer is `lstm` of
  adaptive_jax.bodies.lstm.

`torch`, where it is installed, uses the same device; its outputs are compared with the first
peer's, unless there is dropout. Each peer computes outputs and the gradients of all arguments. They
take turns, so that a busy machine slows all of them alike; times are medians. Memory is the peak
beside arguments and results: as the compiler counts it for JAX, as `benchmarks.timing` measures it
for torch.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.bodies import attention, lstm
from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.numerics.dropout import row_seeds
from benchmarks.timing import (
    exact_products,
    launched,
    launches,
    machine,
    timed,
    torch_device,
    torch_memory,
    write_json,
)


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

        fits = attention.kernels_fit((time, heads, width), arrays[0].dtype)
        paths = ["triton", "chunked"] if fits else ["chunked"]
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

    def stack(layers, x):
        for weights in layers:
            zeros = jnp.zeros((len(x), len(weights.recurrent)), x.dtype)
            state = lstm.State(zeros, zeros.astype(jnp.float32))
            x, _ = lstm.lstm(x, weights, state)
        return x

    def in_torch(layers, x):
        import torch

        for weights in layers:
            bias = weights.bias, torch.zeros_like(weights.bias)
            matrices = [matrix.T for matrix in (weights.input, weights.recurrent)]
            if x.is_cuda:  # cuDNN takes no transposed view
                matrices = [matrix.contiguous() for matrix in matrices]
            parameters = *matrices, *bias
            zeros = torch.zeros(1, len(x), len(weights.recurrent), dtype=x.dtype, device=x.device)
            options = True, 1, 0.0, True, False, True  # biases, layers, …, training, …, batch first
            x, *_ = torch.lstm(x, (zeros, zeros), parameters, *options)
        return x

    matrices = sum(weights.input.size + weights.recurrent.size for weights in layers)
    yield Case("", {"lstm": stack}, arguments, in_torch, 6.0 * matrices * rows * time)


class Layer(NamedTuple):
    """cases: of a size and a dtype. numbers: how many a size may have. sizes: the default.
    dtype: the default on accelerators.
    """

    cases: Callable[[list[int], str], Iterator[Case]]
    numbers: range
    sizes: tuple[str, ...]
    dtype: str


AWD_LSTM = "20x70x400x1150x1150x400", "80x70x400x1150x1150x400"
LAYERS = {
    "attention": Layer(attention_cases, range(4, 5), ("4x512x16x64", "1x3072x16x64"), "bfloat16"),
    "lstm": Layer(lstm_cases, range(4, 100), AWD_LSTM, "float32"),
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

    torch.backends.cudnn.allow_tf32 = False  # as `exact_products`
    arguments = jax.tree.map(lambda a: tensor(a).requires_grad_(), case.arguments)
    leaves, gradient = jax.tree.leaves(arguments), tensor(pull)

    def run():
        for _ in range(launches()):
            outputs = case.torch(*arguments)
            torch.autograd.grad(outputs, leaves, gradient)
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
        with exact_products(pull.dtype):
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
    rows = timed(runs, repeats, calls=launches())
    for row in rows:
        row["gflops_per_second"] = 1e-9 * case.flops / row["seconds"]
        row["peak_bytes"] = memory[row["peer"]]
    return rows


def main(name: str, settings) -> None:
    """Prints a line for each size and peer, and writes the JSON."""
    check_known(f"LAYER={name}", name, LAYERS)
    check_at_least(1, **{"--repeats": settings.repeats})
    layer, rows = LAYERS[name], []
    dtype = settings.dtype or ("float32" if jax.default_backend() == "cpu" else layer.dtype)
    print(f"{machine()}, {dtype}, median of {settings.repeats}")
    print(f"{'size':26} {'':12} {'peer':8} {'ms':>9} {'least':>9} {'GFLOP/s':>9} {'peak MB':>9}")
    for size in settings.sizes or layer.sizes:
        numbers = [int(part) for part in size.split("x") if part.isdecimal() and int(part)]
        if len(numbers) not in layer.numbers or len(numbers) != len(size.split("x")):
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
    if not rows:
        raise InputError(f"none of --peers={','.join(settings.peers)} runs here")
    write_json(settings.json, rows)


if __name__ == "__main__":
    flags.DEFINE_list("sizes", [], "Sizes, such as 4x512x16x64; default: those of the papers.")
    flags.DEFINE_list("peers", [], "Only these peers.")
    flags.DEFINE_enum(
        "dtype",
        None,
        ["float32", "bfloat16"],
        "Default: float32; of attention bfloat16 where there is a GPU or TPU.",
    )
    flags.DEFINE_integer("repeats", 9, "Timed runs of each peer.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda layer: main(layer, flags.FLAGS), positional=["LAYER"])
