"""Table 4 of Dauphin et al. 2017: tokens a second that models of equal perplexity read.

    python -m benchmarks.responsiveness [--rows=lstm_2048,gcnn_9,gcnn_8b] [--sequences=750]
        [--length=20] [--tokens=15000] [--repeats=3] [--json=FILE]

Throughput is that of many sequences at a time, 750 of 20 tokens; responsiveness that of one text of
15,000 tokens, which convolutions read at once and an LSTM one after the other. Rows are those of
configs/billion_word.py with random parameters, in float32, and score the next of 793,471 words;
weight normalisation is computed beforehand, as is usual after training. Words are random.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config.keys import resolve
from adaptive_jax.errors import check_at_least, check_known
from adaptive_jax.model.language_model import build, init_params
from adaptive_jax.numerics.batch import Batch
from benchmarks.throughput import zipf
from benchmarks.timing import machine, timed, write_json
from configs import billion_word

PAPER = {  # tokens a second: throughput on a CPU and on a GPU, responsiveness on a GPU
    "lstm_2048": (169, 45_622, 2_282),
    "gcnn_9": (121, 29_116, 29_116),
    "gcnn_8b": (179, 45_878, 45_878),
}


def config_of(row: str) -> dict:
    """The config of a row of configs/billion_word.py as it reads after training."""
    config = resolve(billion_word.get_config(row)) | {"dtype": "float32"}
    if "weight_norm" in config["body"]:
        config["body"]["weight_norm"] = False
    return config


def speeds(config: dict, shapes: dict[str, tuple[int, int]], repeats: int) -> dict[str, float]:
    """Tokens a second of scoring a batch of each shape, (sequences, tokens), by name."""
    model = build(config, config["data"]["vocabulary_size"])
    params = jax.jit(functools.partial(init_params, model))(0)

    def score(model, batch):
        return model.nll(model.hidden(batch)[0], batch.targets)

    rates = {}
    for name, (sequences, length) in shapes.items():
        ids = zipf(config, sequences, length + 1)
        batch = Batch(ids[:, :-1], ids[:, 1:], np.ones((sequences, length)), np.arange(sequences))
        arguments = {"params": params}, jax.tree.map(jnp.asarray, batch)
        compiled = jax.jit(functools.partial(model.apply, method=score)).lower(*arguments).compile()
        run = functools.partial(compiled, *arguments)
        [row] = timed({name: lambda run=run: jax.block_until_ready(run())}, repeats)
        rates[name] = sequences * length / row["seconds"]
    return rates


def table(rates: dict[str, dict[str, float]]) -> str:
    """Tokens a second, and ratios to the first row: ours, the paper's on a CPU and on a GPU."""
    lines = ["| row | measure | tokens/s | ratio | paper, CPU | paper, GPU |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    first = next(iter(rates))
    for at, measure in enumerate(("throughput", "responsiveness")):
        for name, row in rates.items():
            ratios = [row[measure] / rates[first][measure]]
            for column in (0 if at == 0 else None, at + 1):
                published = column is not None and name in PAPER and first in PAPER
                ratios.append(PAPER[name][column] / PAPER[first][column] if published else None)
            cells = [f"`{name}`", measure, f"{row[measure]:,.1f}"]
            cells += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(settings) -> None:
    """Times the rows, prints the table and writes the JSON."""
    for name in settings.rows:
        check_known(f"--rows={name}", name, billion_word.ROWS)
    counts = {name: getattr(settings, name) for name in COUNTS}
    check_at_least(1, **{f"--{name}": count for name, count in counts.items()})
    shapes = {
        "throughput": (settings.sequences, settings.length),
        "responsiveness": (1, settings.tokens),
    }
    rates = {row: speeds(config_of(row), shapes, settings.repeats) for row in settings.rows}
    print(f"{machine()}; {counts}\n\n{table(rates)}")
    write_json(settings.json, {"machine": machine(), **counts, "tokens_per_second": rates})


COUNTS = {  # flags of whole numbers: default and meaning
    "sequences": (750, "Sequences that are read at a time."),
    "length": (20, "Tokens of each of them."),
    "tokens": (15_000, "Tokens of the one text."),
    "repeats": (3, "Timed runs, of which the median counts."),
}

if __name__ == "__main__":
    flags.DEFINE_list("rows", [*PAPER], "Rows of configs/billion_word.py; ratios are to the first.")
    for name, (default, meaning) in COUNTS.items():
        flags.DEFINE_integer(name, default, meaning)
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda: main(flags.FLAGS))
