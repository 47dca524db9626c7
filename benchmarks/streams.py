"""Two ways to train on windows whose lengths are drawn: rounded to a few lengths, or padded to one
and masked.

    python -m benchmarks.streams [--config=configs/wikitext2.py:awd_small] [--repeats=5]

Rounding compiles a program for every length that comes up. Masking compiles one, of the sequence
length plus four deviations, and computes all of it in every update. The programs take turns; times
are medians. An update costs as much as its window is long, so the mean of the rounded lengths'
times, by how often they come up, is the time of an update by rounding.
"""

import itertools
import time

import jax
import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config import flags as config_flags
from adaptive_jax.config.keys import resolve
from adaptive_jax.data.batches.streams import DEVIATION, draw
from adaptive_jax.errors import check_at_least
from adaptive_jax.model.language_model import build
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import sharding
from adaptive_jax.training.state import initial_state, shape_of_state
from adaptive_jax.training.update import make_update
from benchmarks.outputs import machine
from benchmarks.timing import interleaved
from configs import wikitext2

DRAWS = 100_000
OFTEN = 0.01  # of the updates: lengths that come up less often are not timed


def shares(base: int) -> dict[int, float]:
    """How often each rounded length comes up, ascending by length."""
    lengths, counts = np.unique(draw(base, np.random.Philox(0), DRAWS), return_counts=True)
    return dict(zip(lengths.tolist(), (counts / DRAWS).tolist(), strict=True))


def compiled_update(config: dict, time_: int):
    """A function that makes an update with windows of `time_` tokens, and the seconds that
    compiling it took.
    """
    words, rows = (
        config["data"]["vocabulary_size"],
        config["tokens_per_update"] // config["batches"]["sequence_length"],
    )
    model, optimizer, mesh = build(config, words), optim.from_config(config), sharding.device_mesh()
    ids = np.random.default_rng(0).integers(0, words, (1, rows, time_ + 1), dtype=np.int32)
    row_ids = np.arange(rows, dtype=np.int32)[None]
    weights, reset = np.ones((1, rows, time_), np.float32), np.zeros((1, rows), bool)
    batch = Batch(ids[..., :-1], ids[..., 1:], weights, row_ids, reset=reset)
    batch = sharding.put_batch(mesh, batch, axis=1)
    state = [initial_state(model, optimizer, 0, mesh, (1, rows))]
    update = make_update(
        model, optimizer, mesh, 0, shape_of_state(model, optimizer, mesh, (1, rows))
    )
    start = time.perf_counter()
    program = update.lower(state[0], {}, batch).compile()
    seconds = time.perf_counter() - start

    def run():
        state[0], metrics = program(state[0], {}, batch)
        return float(metrics["loss"])

    return run, seconds


def measure(config: dict, repeats: int) -> dict:
    """Seconds of an update and of compiling, by rounding and by masking."""
    base = config["batches"]["sequence_length"]
    often = {length: share for length, share in shares(base).items() if share >= OFTEN}
    longest = base + 4 * DEVIATION
    runs = {length: compiled_update(config, length) for length in {*often, longest}}
    seconds = {
        length: median
        for length, (median, _) in interleaved(
            {n: run for n, (run, _) in runs.items()}, repeats
        ).items()
    }
    compiling = {length: each for length, (_, each) in runs.items()}
    rounded = sum(share * seconds[length] for length, share in often.items()) / sum(often.values())
    return {
        "lengths": often,
        "longest": longest,
        "programs": len(shares(base)),
        "seconds": seconds,
        "rounded": rounded,
        "masked": seconds[longest],
        "compiling": {
            "rounded": sum(compiling[length] for length in often),
            "masked": compiling[longest],
        },
    }


def main(settings) -> None:
    """Prints both ways."""
    check_at_least(1, repeats=settings.repeats)
    jax.config.update("jax_enable_compilation_cache", False)
    config = (
        config_flags.config()[0] if settings.config else resolve(wikitext2.get_config("awd_small"))
    )
    result = measure(config, settings.repeats)
    print(
        f"{machine()}; windows of about {config['batches']['sequence_length']} tokens; median of"
        f" {settings.repeats}"
    )
    for length, share in itertools.chain(result["lengths"].items(), [(result["longest"], None)]):
        how = "masked" if share is None else f"{share:6.1%}"
        print(f"{length:5} tokens  {how:>7}  {result['seconds'][length] * 1e3:8.1f} ms")
    saved = result["masked"] - result["rounded"]
    more = result["compiling"]["rounded"] - result["compiling"]["masked"]
    print(
        f"an update: rounded {result['rounded'] * 1e3:.1f} ms, masked {result['masked'] * 1e3:.1f}"
        f" ms, {result['masked'] / result['rounded']:.2f} times; compiling: rounded"
        f" {result['compiling']['rounded']:.1f} s, masked {result['compiling']['masked']:.1f} s"
        + (f", which {more / saved:,.0f} updates make up for" if saved > 0 else "")
    )


if __name__ == "__main__":
    config_flags.define("Config file and row, with layout streams")
    flags.DEFINE_integer("repeats", 5, "Timed runs of each program.")
    commands.run(lambda: main(flags.FLAGS))
