"""Loss and gradient of the output layer: the one-pass banded core against its peers, in one run.

    python -m benchmarks.outputs [--sizes=small,large] [--repeats=15] [--json=FILE]
    python -m benchmarks.outputs --sizes=growth [--tokens=2048] [--plot=FILE.png]

Each peer computes the summed loss of Zipf-distributed targets and its gradient for hidden states
and all weights:

- `banded`: adaptive_jax.losses.banded.loss, the core of every output layer here.
- `bfloat16`: `banded` with products in bfloat16; weights and their gradients are float32.
- `masked dense`: every band evaluated for every token, then masked: the usual way to write an
  adaptive softmax with static shapes. Differentiated by JAX.
- `full softmax`: one table [vocabulary, d], logits of all tokens at once. Differentiated by JAX.
- hierarchical and differentiated softmaxes, and losses of sampled candidates, as they train.
- `torch`: torch.nn.AdaptiveLogSoftmaxWithLoss where torch is installed, on the same device.
- `product`: a large float32 matrix product, the speed of the machine at that moment. The last line
  counts the work that the targets need, and says at what share of that speed `banded` does it.

Peers take turns, so that a busy machine slows all of them alike; times are medians. Memory is the
peak above the arguments and results: the compiler's count for JAX, the growth of the process' peak
(CPU) or of the allocator's peak (GPU) for torch.

The size `growth` takes vocabularies of 33 thousand words to a million, at width 256. All adaptive
peers have the same cutoffs: the head has 10,000 words, the smallest size that Baevski & Auli (2019,
Table 8) found no worse, and each tail ends at four times as many words as the one before. Every
token visits the head, so all work would grow with the vocabulary if the head did. `smallest`, which
is adaptive_jax at the smallest size, runs beside the peers of every size, and growth is measured in
its time, because the speed of a busy machine changes within minutes. A peer that computes logits of
all tokens and words is left out where these, with their gradients, would need more than 8 GB or a
minute.
"""

import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.losses import banded
from adaptive_jax.numerics.bands import Band, softmax_flops
from adaptive_jax.outputs.differentiated import Differentiated
from adaptive_jax.outputs.sampled import NCE, Sampled
from adaptive_jax.outputs.softmax import Hierarchical
from adaptive_jax.outputs.tables import OwnTable
from adaptive_jax.planning.cutoffs import Workload, equal_products
from benchmarks import figures
from benchmarks.timing import (
    exact_products,
    machine,
    timed,
    torch_device,
    torch_memory,
    whole_numbers,
    write_json,
)


class Case(NamedTuple):
    """Width of the hidden states, words, first words of the tails, and how many tokens are
    scored.
    """

    width: int
    vocabulary: int
    cutoffs: tuple[int, ...]
    tokens: int = 2048


SIZES = {
    "small": Case(256, 33_278, (2_500, 10_000)),
    "large": Case(1024, 267_744, (20_000, 60_000)),
}
# Rows and columns of the matrices of `product`, which is to take about as long as banded
PRODUCT = {"small": 2048, "large": 4096}
FACTOR = 4  # by which the vectors of each band are shorter than those of the band before
VOCABULARIES = [267_735 * 2**k // 8 for k in range(6)]  # that of WikiText-103 is the fourth
WIDTH, HEAD, TAIL = 256, 10_000, 4  # of `growth`
DENSE = "masked dense", "full softmax"
LABELS = {
    "banded": "adaptive_jax",
    "masked dense": "adaptive softmax with a mask",
    "torch": "torch, adaptive softmax",
}
BYTES, FLOP = 8e9, 60 * 100e9  # in a minute, at the speed of a small machine


def arguments(case):
    """Hidden states `[tokens, width]`, Zipf targets, bands and clusters, as numpy arrays."""
    width, vocabulary, cutoffs, tokens = case
    rng = np.random.default_rng(0)
    shares = 1 / np.arange(1, vocabulary + 1)
    targets = rng.choice(vocabulary, tokens, p=shares / shares.sum()).astype(np.int32)

    def normal(*shape):
        return (rng.standard_normal(shape) * width**-0.5).astype(np.float32)

    shapes = [
        (after - before, width // FACTOR**i)
        for i, (before, after) in enumerate(itertools.pairwise((0, *cutoffs, vocabulary)))
    ]
    bands = [
        Band(normal(*shape), normal(shape[1], width) if i else None)
        for i, shape in enumerate(shapes)
    ]
    return normal(tokens, width) * width**0.5, targets, bands, Band(normal(len(cutoffs), width))


def masked_dense(hidden, bands, clusters, targets):
    """The summed loss, every band evaluated for every token."""
    first, loss = 0, 0.0
    for i, (table, projection, _) in enumerate(bands):
        words = len(table)
        inside = (targets >= first) & (targets < first + words)
        place = jnp.where(inside, targets - first, 0)
        if i == 0:
            logits = jnp.concatenate([hidden @ table.T, hidden @ clusters.table.T], axis=1)
            starts = jnp.cumsum(jnp.array([len(band.table) for band in bands]))[:-1]
            column = jnp.where(
                inside, targets, words - 1 + jnp.searchsorted(starts, targets, side="right")
            )
            loss -= jnp.take_along_axis(jax.nn.log_softmax(logits), column[:, None], axis=1).sum()
        else:
            log_probs = jax.nn.log_softmax((hidden @ projection.T) @ table.T)
            loss -= jnp.sum(
                jnp.where(inside, jnp.take_along_axis(log_probs, place[:, None], axis=1)[:, 0], 0.0)
            )
        first += words
    return loss


def full_softmax(hidden, table, targets):
    """The summed loss of all logits at once."""
    log_probs = jax.nn.log_softmax(hidden @ table.T)
    return -jnp.take_along_axis(log_probs, targets[:, None], axis=1).sum()


def banded_loss(hidden, bands, clusters, targets):
    """The summed loss of the core of this library."""
    return banded.loss(hidden, targets, jnp.ones(len(targets)), bands, clusters)[0]


def in_bfloat16(hidden, bands, clusters, targets):
    """The same with products in bfloat16."""
    return banded_loss(hidden.astype(jnp.bfloat16), bands, clusters, targets)


def layers(width: int, vocabulary: int, cutoffs: tuple[int, ...]) -> dict:
    """The other output layers by name, for hidden states of `width`."""
    full, samples = OwnTable(vocabulary, width), 8_192 if vocabulary > 100_000 else 1_024
    equal = equal_products(vocabulary, 3, Workload(width, FACTOR))
    # So that three slices fit the hidden states
    first = width * FACTOR**2 // (FACTOR**2 + FACTOR + 1)
    return {
        "hierarchical 3 clusters": Hierarchical(OwnTable(vocabulary, width, equal, FACTOR)),
        "hierarchical sqrt(V) classes": Hierarchical(full),
        f"sampled {samples}": Sampled(full, samples),
        f"nce {samples}": NCE(full, samples),
        "D-softmax": Differentiated(
            OwnTable(vocabulary, width, cutoffs, FACTOR, first, projected=False)
        ),
        "D-softmax*": Differentiated(OwnTable(vocabulary, width, cutoffs, FACTOR)),
    }


def of_layer(layer, hidden: jax.Array, table: jax.Array) -> tuple[Callable, dict]:
    """The summed training loss of an output layer, and its parameters: `table`, to save memory,
    where it has one band.
    """

    def loss(hidden, params, targets):
        given = {"train": True, "rngs": {"dropout": jax.random.key(0)}, "method": "loss"}
        return layer.apply({"params": params}, hidden, targets, **given).total

    def init():
        return layer.init(jax.random.key(0), hidden[:1], method="log_probs")["params"]

    shapes = jax.eval_shape(init)
    if shapes["table"].keys() != {"table_0"}:
        return loss, jax.jit(init)()
    params = {"table": {"table_0": table}}
    if "clusters" in shapes:
        params["clusters"] = table[: shapes["clusters"].shape[0]]
    return loss, params


def jax_peers(case, skip=(), more=False):
    """Name to (compiled function of loss and gradients, its arguments).

    more: whether `in_bfloat16` and the other output layers are among them.
    """
    hidden, targets, bands, clusters = jax.tree.map(jnp.asarray, arguments(case))
    of_bands = hidden, bands, clusters, targets
    peers = {"banded": (banded_loss, of_bands), "masked dense": (masked_dense, of_bands)}
    table = jnp.zeros(())
    if more or "full softmax" not in skip:
        table = jax.random.normal(jax.random.key(0), (case.vocabulary, case.width))
        table *= case.width**-0.5
    peers["full softmax"] = full_softmax, (hidden, table, targets)
    if more:
        peers["bfloat16"] = in_bfloat16, of_bands
        for name, layer in layers(*case[:3]).items():
            if name not in skip:
                loss, params = of_layer(layer, hidden, table)
                peers[name] = loss, (hidden, params, targets)
    compiled = {}
    for name, (loss, values) in peers.items():
        if name not in skip:
            differentiated = jax.value_and_grad(loss, argnums=tuple(range(len(values) - 1)))
            with exact_products("bfloat16" if name == "bfloat16" else "float32"):
                compiled[name] = jax.jit(differentiated).lower(*values).compile(), values
    return compiled


def torch_peer(case, dtype="float32", autocast=False):
    """A function that runs torch's layer once, or None without torch on JAX's device.

    dtype: of hidden states and parameters. autocast: whether it computes in bfloat16 by autocast.
    """
    device = torch_device()
    if device is None:
        return None
    import torch

    hidden, targets, *_ = arguments(case)
    layer = torch.nn.AdaptiveLogSoftmaxWithLoss(
        case.width, case.vocabulary, list(case.cutoffs), div_value=float(FACTOR)
    ).to(device, getattr(torch, dtype))
    hidden = torch.tensor(hidden, device=device, dtype=getattr(torch, dtype), requires_grad=True)
    targets = torch.tensor(targets, dtype=torch.long, device=device)

    def run():
        layer.zero_grad()
        hidden.grad = None
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = -layer(hidden, targets).output.sum()
        loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def product_peer(n):
    """A function that multiplies two float32 matrices `[n, n]`."""
    square = jnp.ones((n, n))
    with exact_products("float32"):
        product = jax.jit(jnp.matmul).lower(square, square).compile()
    return lambda: product(square, square).block_until_ready()


def measure(case, repeats, skip=(), beside=None, more=False):
    """A row for each peer: name, median and least seconds, tokens a second, peak bytes, ratio of
    its time to that of banded.

    beside: functions by name that run between the peers, to compare with; they have neither tokens
        nor a peak. more: see `jax_peers`.
    """
    peers, memory = {}, {}
    for name, (compiled, values) in jax_peers(case, skip, more).items():
        peers[name] = lambda compiled=compiled, values=values: jax.block_until_ready(
            compiled(*values)
        )
        memory[name] = compiled.memory_analysis().temp_size_in_bytes
    run_torch = None if "torch" in skip else torch_peer(case)
    if run_torch:
        run_torch()
        memory["torch"] = torch_memory(run_torch)
        peers["torch"] = run_torch
    beside = {name: run for name, run in (beside or {}).items() if name not in skip}
    rows = timed(peers | beside, repeats)
    for row in rows:
        of_tokens = row["peer"] in peers
        row["peak_bytes"] = memory.get(row["peer"])
        row["tokens_per_second"] = case.tokens / row["seconds"] if of_tokens else None
        row["times_banded"] = row["seconds"] / rows[0]["seconds"]
    return rows


def line(label, row):
    """A row for the eye, beneath `TITLE`."""
    speed, peak = row["tokens_per_second"], row["peak_bytes"]
    speed = "" if speed is None else f"{speed:,.0f}"
    peak = "" if peak is None else f"{peak / 1e6:,.0f}"
    milliseconds = f"{row['seconds'] * 1e3:9.1f} {row['fastest'] * 1e3:9.1f}"
    return (
        f"{label:9} {row['peer']:29} {milliseconds} {speed:>10} {peak:>9}"
        f" {row['times_banded']:14.2f}"
    )


TITLE = (
    f"{'size':9} {'peer':29} {'ms':>9} {'least ms':>9} {'tokens/s':>10} {'peak MB':>9}"
    f" {'time / banded':>14}"
)


def peers_at(size, settings):
    """Prints and returns a row for each peer at a size, and tells how far the core is from the
    speed of the machine.
    """
    case, beside = SIZES[size], {"product": product_peer(PRODUCT[size])}
    rows = measure(case, settings.repeats, settings.skip, beside, more=True)
    for row in rows:
        print(line(size, row), flush=True)
    rows = [{"size": size} | row for row in rows]
    seconds = {row["peer"]: row["seconds"] for row in rows}
    if "product" in seconds:
        _, targets, bands, _ = arguments(case)
        work = gflop(case, targets, bands)
        speed, top = work / seconds["banded"], 2e-9 * PRODUCT[size] ** 3 / seconds["product"]
        rows[-1] |= {"gflop": work, "banded_gflops": speed, "product_gflops": top}
        print(
            f"{size:9} {work:,.1f} GFLOP: banded {speed:,.0f} GFLOP/s, {speed / top:.0%} of the"
            f" product's {top:,.0f}"
        )
    return rows


def gflop(case, targets, bands):
    """Work of an adaptive softmax that sees these targets, forward and backward."""
    visits = np.histogram(targets, [0, *case.cutoffs, case.vocabulary])[0]
    return 3e-9 * softmax_flops(bands, [case.tokens, *visits[1:]])


def cutoffs_of(vocabulary: int) -> tuple[int, ...]:
    """10,000, 40,000, 160,000 and so on, below the vocabulary size; four fifths of a vocabulary
    of less than 12,500 words.
    """
    cutoffs = [min(HEAD, vocabulary * 4 // 5)]
    while cutoffs[-1] * TAIL < vocabulary:
        cutoffs.append(cutoffs[-1] * TAIL)
    return tuple(cutoffs)


def too_large(vocabulary: int, tokens: int) -> list[str]:
    """Peers to leave out: those that hold logits of all tokens and words, three times (JAX) in
    float32.
    """
    logits = vocabulary * tokens
    return list(DENSE) if 3 * 4 * logits > BYTES or 6 * logits * WIDTH > FLOP else []


def growth(settings) -> list[dict]:
    """Prints and returns a row for each vocabulary and peer."""
    tokens, rows, times = settings.tokens, [], {}
    words = list(map(int, settings.vocabularies))
    cases = [Case(WIDTH, each, cutoffs_of(each), tokens) for each in words]
    [(compiled, values)] = jax_peers(cases[0], DENSE).values()
    beside = {"smallest": lambda: jax.block_until_ready(compiled(*values))}
    for case in cases:
        skip = [*settings.skip, *too_large(case.vocabulary, tokens)]
        measured = measure(case, settings.repeats, skip, beside)
        for row in measured:
            print(line(f"{case.vocabulary:,}", row), flush=True)
            ratio = row["seconds"] / measured[-1]["seconds"]
            times.setdefault(row["peer"], []).append(f"{ratio:.2f}")
            rows.append(case._asdict() | row | {"times_smallest": ratio})
    del times["smallest"]
    for peer, each in times.items():
        print(f"{peer}: {', '.join(each)} times the time of banded at {words[0]:,} words")
    if settings.plot:
        place = machine().split(",")[0]
        title = f"Output layer, loss and gradient: {place}, {tokens:,} tokens, d {WIDTH}"
        drawn = [
            {
                "vocabulary": row["vocabulary"],
                "peer": LABELS.get(row["peer"], row["peer"]),
                "times_smallest": row["times_smallest"],
                "megabytes": row["peak_bytes"] and row["peak_bytes"] / 1e6,
            }
            for row in rows
            if row["peer"] != "smallest"
        ]
        figure = {"kind": "growth", "title": title, "rows": drawn}
        figures.write(Path(settings.plot).with_suffix(".json"), figure)
    return rows


def check(settings) -> None:
    """Finds what is wrong with the flags before anything runs. Raises InputError."""
    check_at_least(1, repeats=settings.repeats, tokens=settings.tokens)
    whole_numbers("--vocabularies", settings.vocabularies, least=10)
    for name in {"banded", "smallest"} & {*settings.skip}:
        raise InputError(f"--skip={name}: the others are compared with it, leave it out")
    for size in settings.sizes:
        check_known(f"--sizes={size}", size, [*SIZES, "growth"])
    if settings.plot and not importlib.util.find_spec("matplotlib"):
        raise InputError("--plot needs matplotlib: pip install -r requirements-bench.txt")


def main(settings):
    """Prints a table of the sizes and writes the JSON."""
    check(settings)
    print(f"{machine()}, median of {settings.repeats}")
    print(TITLE)
    rows = []
    for size in settings.sizes:
        rows += growth(settings) if size == "growth" else peers_at(size, settings)
    write_json(settings.json, rows)


if __name__ == "__main__":
    flags.DEFINE_list("sizes", list(SIZES), "Which of small, large and growth.")
    flags.DEFINE_integer("repeats", 15, "Timed runs of each peer.")
    flags.DEFINE_list("vocabularies", VOCABULARIES, "Of the size growth, in words.")
    flags.DEFINE_integer("tokens", 2048, "Of the size growth.")
    flags.DEFINE_string(
        "plot", None, "File for a plot of the size growth, .png; its numbers go to .json."
    )
    flags.DEFINE_list("skip", [], "Peers to leave out, of all but banded.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda: main(flags.FLAGS))
