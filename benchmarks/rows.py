"""The eight rows of Baevski & Auli 2019, Table 3, in small: the same corpus, body and updates, other input and output layers.

    python -m benchmarks.rows [--data_path=DIR] [--size=cpu|gpu] [--rows=adp_t,sm] [--workdir=runs/rows]

Trains each row on WikiText-2, scores its test split, and prints perplexity, time and parameters beside the paper's row (which
is a model of 200M parameters on WikiText-103, trained 286,000 updates). Run with all rows, it writes the table into
benchmarks/RESULTS.md, with a plot beside it. `cpu` takes about 20 minutes on 2 cores; `gpu` is larger, and unmeasured. Started
again, it keeps the rows that are finished.
"""

import importlib.util
import json
import os
import platform
import time
from datetime import date
from pathlib import Path

import jax
from absl import flags

from adaptive_jax import command
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.evaluation.scoring import evaluate
from adaptive_jax.files import replacing
from adaptive_jax.training import loop as training
from adaptive_jax.workdir.checkpoints import check_same_run
from configs import wikitext2

RESULTS = Path(__file__).with_name("RESULTS.md")
PAPER = {  # Table 3: validation and test perplexity, hours on 8 V100, millions of parameters
    "sm": (23.87, 24.92, 57, 476.8),
    "bpe": (23.13, 24.25, 30, 270.0),
    "bpe_t": (22.46, 23.45, 30, 235.7),
    "sm_t": (22.63, 23.38, 56, 339.7),
    "asm": (21.23, 22.18, 35, 263.1),
    "cnn": (20.86, 21.79, 70, 266.3),
    "adp": (20.95, 21.74, 34, 291.3),
    "adp_t": (19.79, 20.51, 30, 246.9),
}
SIZES = {
    # Half an epoch: too little to overfit, so little dropout, and a momentum that forgets within 10 updates.
    "cpu": {
        "steps": 500, "tokens_per_update": 2_048, "tokens_per_device": 2_048, "log_every": 50, "data.block": 128,
        "body.layers": 3, "body.features": 128, "body.heads": 4, "body.feed_forward": 512, "body.dropout": 0.1,
        "body.attention_dropout": 0.0, "body.activation_dropout": 0.0, "optimizer.warmup_steps": 50,
        "optimizer.cycle_steps": 450, "optimizer.cycles": 1, "optimizer.learning_rate": 1.0, "optimizer.momentum": 0.9,
        "optimizer.clip_norm": 0.5,
    },
    # About 15 epochs.
    "gpu": {
        "steps": 2_000, "tokens_per_update": 16_384, "tokens_per_device": 16_384, "log_every": 50, "data.block": 256,
        "dtype": "bfloat16", "body.layers": 6, "body.features": 512, "body.heads": 8, "body.feed_forward": 2_048,
        "optimizer.warmup_steps": 200, "optimizer.cycle_steps": 1_800, "optimizer.cycles": 1,
    },
}  # fmt: skip
DATA = flags.DEFINE_string("data_path", "", "Directory with a local copy of WikiText-2; empty: download it.")
SIZE = flags.DEFINE_enum("size", None, list(SIZES), "Size of the models; by default that of the machine.")
ROWS = flags.DEFINE_list("rows", list(PAPER), "Rows to train.")
WORKDIR = flags.DEFINE_string("workdir", "runs/rows", "Directory for the runs.")


def config_of(row: str, size: str, data_path: str) -> dict:
    """The config of a row at a size."""
    config = wikitext2.get_config(row)
    steps, features = SIZES[size]["steps"], SIZES[size]["body.features"]
    # As in configs/wikitext2.py: words of the full softmax are half as wide as the body, those of the narrow input a quarter.
    widths = {
        "sm": {"input.width": features // 2, "output.table.width": features // 2},
        "sm_t": {"input.width": features // 2},
        "asm": {"input.width": features // 4},
    }
    changes = SIZES[size] | widths.get(row, {})
    changes |= {"evaluate_every": steps, "checkpoint_every": steps, "data.path": data_path}
    if size == "cpu" and "tail_dropout" in config["output"]:
        changes["output.tail_dropout"] = 0.0
    config.update_from_flattened_dict(changes)
    return config.to_dict()


def measure(row: str, size: str, workdir: Path, data_path: str) -> dict:
    """Trains a row, or reads what an earlier run of the same config left, and returns its numbers."""
    config = config_of(row, size, data_path)
    check_same_run(workdir, config)
    found = workdir / "row.json"
    if found.exists():
        return json.loads(found.read_text())
    start = time.perf_counter()
    training.train(config, workdir)
    seconds = time.perf_counter() - start
    test = evaluate(workdir, split="test", window=0, context=0, checkpoint="latest", data_path=None)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    curve = [(line["step"], line["train/nll"]) for line in lines if "train/nll" in line]
    speeds = sorted(line["train/words_per_second"] for line in lines if "train/words_per_second" in line)
    numbers = {
        "row": row,
        "validation": next(line["validation/perplexity"] for line in reversed(lines) if "validation/perplexity" in line),
        "test": test["perplexity"],
        "unigram": test["unigram_perplexity"],
        "seconds": seconds,
        "words_per_second": speeds[len(speeds) // 2],
        "parameters": json.loads((workdir / "plan.json").read_text())["parameters"]["total"],
        "curve": curve,
    }
    with replacing(found) as file:
        file.write(json.dumps(numbers).encode())
    return numbers


def table(rows: list[dict], size: str) -> str:
    """The section of RESULTS.md."""
    device = jax.devices()[0]
    where = device.device_kind if device.platform != "cpu" else f"{os.cpu_count()} CPU cores"
    settings = SIZES[size]
    lines = [
        heading(size),
        "",
        f"{date.today()}, {where}, {platform.system()}; python {platform.python_version()}, jax {jax.__version__}.",
        "",
        f"    python -m benchmarks.rows --size={size}",
        "",
        f"WikiText-2, {settings['steps']:,} updates of {settings['tokens_per_update']:,} tokens, "
        f"{settings['body.layers']} blocks of {settings['body.features']}. Perplexity is per word; words/s is the median over "
        "training; seconds are those of training, compilation included; the first row also prepares the words, and the first of "
        "sub-words their units. `bpe` and `bpe_t` begin far behind: by counts alone, units have a perplexity of "
        f"{_unigram(rows, 'bpe')} per word, words of {_unigram(rows, 'sm')}. On the right, as "
        "published, the paper's models: of WikiText-103, with two hundred million parameters and fifty times the text.",
        "",
        "| row | valid | test | seconds | words/s | parameters | paper: valid | test | hours | parameters |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        valid, test, hours, parameters = PAPER[row["row"]]
        lines.append(
            f"| `{row['row']}` | {row['validation']:.1f} | {row['test']:.1f} | {row['seconds']:,.0f} "
            f"| {row['words_per_second']:,.0f} | {row['parameters'] / 1e6:.1f}M | {valid} | {test} | {hours} | {parameters}M |"
        )
    return "\n".join([*lines, ""])


def _unigram(rows, layers):
    return next((f"{row['unigram']:,.0f}" for row in rows if row["row"] == layers), "more")


def heading(size: str) -> str:
    """Of the section of RESULTS.md, which a later run replaces."""
    return f"## The eight rows in small, {size} size"


def plot_file(size: str) -> Path:
    """Where the plot goes."""
    return RESULTS.with_name(f"rows_{size}.png")


def plot(rows: list[dict], size: str) -> None:
    """Training curves, and test perplexity against speed."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for row in rows:
        steps, nll = zip(*row["curve"], strict=True)
        (line,) = left.plot(steps, nll, label=row["row"])
        right.plot(row["words_per_second"], row["test"], "o", color=line.get_color())
        right.annotate(row["row"], (row["words_per_second"], row["test"]), xytext=(5, 4), textcoords="offset points")
    left.set(xlabel="updates", ylabel="training loss, nats a word", title="learning")
    left.legend()
    right.set(xlabel="words a second", ylabel="test perplexity", title="what it costs and gives", xmargin=0.15)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(plot_file(size), dpi=110)


def write_section(path: Path, section: str) -> None:
    """Puts a section into a Markdown file: in the place of the one of the same heading, or at the end."""
    title = section.splitlines()[0]
    parts = path.read_text().split("\n## ")
    kept = [part for part in parts if f"## {part.splitlines()[0]}" != title]
    with replacing(path) as file:
        file.write("\n## ".join([*(part.rstrip("\n") + "\n" for part in kept), section.removeprefix("## ")]).encode())


def main() -> None:
    """Trains what is asked for, then prints and writes the table."""
    for row in ROWS.value:
        check_known(f"--rows={row}", row, PAPER)
    everything = set(ROWS.value) == set(PAPER)
    if everything and not importlib.util.find_spec("matplotlib"):
        raise InputError("with all rows benchmarks.rows draws a plot: pip install -e '.[bench]'")
    size = SIZE.value or ("cpu" if jax.default_backend() == "cpu" else "gpu")
    rows = [measure(row, size, Path(WORKDIR.value) / size / row, DATA.value) for row in ROWS.value]
    text = table(rows, size)
    print(text)
    if everything:
        plot(rows, size)
        write_section(RESULTS, f"{text}\n![curves and speed of the eight rows]({plot_file(size).name})\n")


if __name__ == "__main__":
    command.run(main)
