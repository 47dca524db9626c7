"""The sizes `live` and `rows10m` of `python -m benchmarks.outputs`.

- `live`: loss and gradients where 100, 50 and 15 % of the tokens have a weight, and the plain call
  without weights. Time in CPU seconds too, which a busy machine disturbs less.
- `rows10m`: a step of 10 million rows of width 64, exact and, beside it, sampled. It needs some 8
  GB, and minutes on a CPU: 8.4e13 FLOP with 16,384 tokens. `--rows10m=TOKENS,WIDTH,ROWS` gives
  another size. A line is printed for each peer as it ends.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.losses.cross_entropy import linear_cross_entropy
from adaptive_jax.outputs.sampled import Sampled
from adaptive_jax.outputs.tables import OwnTable
from benchmarks.timing import interleaved

ROWS10M = "16384,64,10000000"  # tokens, width, rows
LIVE = 1.0, 0.5, 0.15
SAMPLES = 8_192


def arrays(tokens: int, width: int, words: int):
    """Hidden states, table and Zipf targets; the table is made on the device."""
    bits = np.random.default_rng(0)
    targets = np.minimum(words ** bits.random(tokens), words - 1).astype(np.int32)
    hidden = bits.standard_normal((tokens, width), np.float32)
    table = jax.random.normal(jax.random.key(0), (words, width)) * width**-0.5
    return jnp.asarray(hidden), table, jnp.asarray(targets)


def live(repeats: int, tokens: int = 2048, width: int = 256, words: int = 32_768) -> list[dict]:
    """Prints and returns a row for each share of tokens that have a weight."""
    values = arrays(tokens, width, words)
    place = np.random.default_rng(1).permutation(tokens)
    masks = {"no weights": None} | {
        f"{share:.0%} live": jnp.asarray(place < share * tokens, jnp.float32) for share in LIVE
    }

    def loss(hidden, table, targets, weights):
        return linear_cross_entropy(hidden, table, targets, weights=weights)

    step, cpu, runs = jax.jit(jax.value_and_grad(loss, (0, 1))), {}, {}
    for name, mask in masks.items():

        def run(name=name, mask=mask):
            began = time.process_time()
            jax.block_until_ready(step(*values, mask))
            cpu.setdefault(name, []).append(time.process_time() - began)

        runs[name] = run
    times, rows = interleaved(runs, repeats), []
    print(f"{words:,} words, d {width}, {tokens:,} tokens, some of weight 0")
    for name, (median, least) in times.items():
        own = float(np.median(cpu[name][1:]))
        rows.append(
            {"size": "live", "peer": name, "seconds": median, "fastest": least, "cpu_seconds": own}
        )
        print(f"{name:12} {median * 1e3:9.1f} ms {own:9.3f} s of CPU", flush=True)
    return rows


def rows10m(repeats: int, tokens: int, width: int, words: int) -> list[dict]:
    """Prints and returns a row for each peer, as it ends."""
    hidden, table, targets = arrays(tokens, width, words)
    layer, rows = Sampled(OwnTable(words, width), min(SAMPLES, words)), []

    def sampled(hidden, table):
        params, rngs = {"table": {"table_0": table}}, {"dropout": jax.random.key(0)}
        given = {"params": params}, hidden, targets
        return layer.apply(*given, train=True, rngs=rngs, method="loss").total / tokens

    def exact(hidden, table):
        return linear_cross_entropy(hidden, table, targets)

    print(f"{words:,} rows, d {width}, {tokens:,} tokens", flush=True)
    for name, loss in (f"sampled {layer.samples}", sampled), ("linear_cross_entropy", exact):
        step = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(hidden, table).compile()
        temporary, wall, cpu = step.memory_analysis().temp_size_in_bytes, [], []
        for _ in range(repeats):
            began = time.perf_counter(), time.process_time()
            value, gradients = jax.block_until_ready(step(hidden, table))
            wall.append(time.perf_counter() - began[0])
            cpu.append(time.process_time() - began[1])
            del gradients
        row = {"size": "rows10m", "peer": name, "seconds": float(np.median(wall))}
        row |= {"cpu_seconds": float(np.median(cpu)), "peak_bytes": temporary, "loss": float(value)}
        rows.append(row)
        print(
            f"{name:22} loss {row['loss']:.4f}, {row['seconds']:.1f} s, {row['cpu_seconds']:.1f} s"
            f" of CPU, {temporary / 1e6:,.0f} MB beside table and gradient",
            flush=True,
        )
    return rows
