"""The eight rows of Baevski & Auli 2019, Table 3, in small: one corpus, body and schedule, eight pairs of input and output layers.

    python -m benchmarks.rows [--data_path=DIR] [--size=cpu|gpu] [--rows=adp_t,sm] [--workdir=runs/rows]

It trains each row on WikiText-2, scores the test split, and prints perplexity, time and parameters beside the paper's numbers for
that row, which are of a model of 200M parameters or more, trained on WikiText-103 for 286,000 updates. With all rows it also writes
the table into benchmarks/RESULTS.md and draws a plot. `cpu` takes about 20 minutes on 2 cores; `gpu` is larger and has not been
measured. When started again, it keeps the rows that are finished.
"""

import importlib.util
import json
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import jax
from absl import flags

from adaptive_jax import command
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.evaluation.evaluate import Request, evaluate
from adaptive_jax.files import replacing
from adaptive_jax.training.loop import train
from adaptive_jax.workdir.settings import check_same_run, write_json
from configs import base, wikitext2, wikitext103

RESULTS = Path(__file__).with_name("RESULTS.md")
PAPER = {name: row.paper for name, row in wikitext103.ROWS.items() if row.paper.table == "Table 3"}
SIZES = {
    # Half an epoch is too little to overfit, so dropout is low, and momentum forgets within 10 updates.
    "cpu": {
        "steps": 500, "tokens_per_update": 2_048, "tokens_per_device": 2_048, "batches.sequence_length": 128,
        "body.layers": 3, "body.features": 128, "body.heads": 4, "body.feed_forward": 512, "body.dropout": 0.1,
        "body.attention_dropout": 0.0, "body.activation_dropout": 0.0, "schedule.warmup_steps": 50,
        "schedule.cycle_steps": 450, "schedule.cycles": 1, "optimizer.learning_rate": 1.0, "optimizer.momentum": 0.9,
        "optimizer.clip_norm": 0.5,
    },
    # About 15 epochs.
    "gpu": {
        "steps": 2_000, "tokens_per_update": 16_384, "tokens_per_device": 16_384, "dtype": "bfloat16",
        "body.features": 512, "body.feed_forward": 2_048, "schedule.warmup_steps": 200, "schedule.cycle_steps": 1_800,
        "schedule.cycles": 1,
    },
}  # fmt: skip


def config_of(row: str, size: str, data_path: str) -> dict:
    """The config of a row at a size."""
    steps, features = SIZES[size]["steps"], SIZES[size]["body.features"]
    settings = wikitext2.SETTINGS | SIZES[size] | {"evaluate_every": steps, "checkpoint_every": steps, "data.path": data_path}
    cutoffs, tail_dropout = wikitext2.LAYERS["adp"]["input.cutoffs"], {"cpu": 0.0, "gpu": 0.2}[size]
    # As in configs/wikitext2.py: words of the full softmax are half as wide as the body, those of the narrow input a quarter.
    layers = base.layers(cutoffs, features // 2, features // 4, tail_dropout, wikitext2.CHARACTERS)
    return base.config_of(row, __file__, wikitext2.ROWS, layers, settings).to_dict()


def measure(row: str, size: str, workdir: Path, data_path: str) -> dict:
    """Trains a row, or reads the result of an earlier run of the same config. Returns its numbers."""
    config = config_of(row, size, data_path)
    check_same_run(workdir, config)
    result = workdir / "row.json"
    if result.exists():
        return json.loads(result.read_text())
    start = time.perf_counter()
    train(config, workdir)
    seconds = time.perf_counter() - start
    test = evaluate(workdir, Request(split="test", checkpoint="latest"))
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]

    def logged(name):
        return [(line["step"], line[name]) for line in lines if name in line]

    numbers = {
        "row": row,
        "validation": logged("validation/perplexity")[-1][1],
        "test": test["perplexity"],
        "unigram": test["unigram_perplexity"],
        "seconds": seconds,
        "words_per_second": statistics.median_high(speed for _, speed in logged("train/words_per_second")),
        "parameters": json.loads((workdir / "plan.json").read_text())["parameters"]["total"],
        "curve": logged("train/nll"),
    }
    write_json(result, numbers)
    return numbers


def table(rows: list[dict], size: str) -> str:
    """The section of RESULTS.md."""
    device, config = jax.devices()[0], config_of("adp_t", size, "")
    body = config["body"]
    where = device.device_kind if device.platform != "cpu" else f"{os.cpu_count()} CPU cores"
    unigram = {"bpe": "?", "sm": "?"} | {row["row"]: f"{row['unigram']:,.0f}" for row in rows}
    lines = [
        f"""## The eight rows in small, {size} size

{date.today()}, {where}, {platform.system()}; python {platform.python_version()}, jax {jax.__version__}.

    python -m benchmarks.rows --size={size}

WikiText-2; {config["steps"]:,} updates of {config["tokens_per_update"]:,} tokens; {body["layers"]} blocks of {body["features"]}.
Perplexity is per word, and words/s is the median over training. Seconds are the time of training with compilation; those of the
first row include preparing the words, and those of the first row of sub-words learning the units. By counts alone, sub-word units
have a perplexity of {unigram["bpe"]} per word, and words one of {unigram["sm"]}, so `bpe` and `bpe_t` start far behind. The columns
on the right are the paper's: models of 200 million parameters or more, trained on WikiText-103, which has fifty times the text.

| row | valid | test | seconds | words/s | parameters | paper: valid | test | hours | parameters |
|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"""
    ]
    for row in rows:
        paper = PAPER[row["row"]]
        lines.append(
            f"| `{row['row']}` | {row['validation']:.1f} | {row['test']:.1f} | {row['seconds']:,.0f} "
            f"| {row['words_per_second']:,.0f} | {row['parameters'] / 1e6:.1f}M "
            f"| {paper.valid} | {paper.test} | {paper.hours} | {paper.parameters:.1f}M |"
        )
    return "\n".join([*lines, ""])


def plot(rows: list[dict], path: Path) -> None:
    """Draws training curves, and test perplexity against speed."""
    from matplotlib.figure import Figure

    figure = Figure((11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in rows:
        (line,) = left.plot(*zip(*row["curve"], strict=True), label=row["row"])
        at = row["words_per_second"], row["test"]
        right.plot(*at, "o", color=line.get_color())
        right.annotate(row["row"], at, xytext=(5, 4), textcoords="offset points")
    left.set(xlabel="updates", ylabel="training loss, nats a word", title="learning")
    left.legend()
    right.set(xlabel="words a second", ylabel="test perplexity", title="perplexity against speed", xmargin=0.15)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def write_section(path: Path, section: str) -> None:
    """Puts a section into a Markdown file: in place of the one with the same heading, or at the end."""
    parts = [part.rstrip("\n") + "\n" for part in path.read_text().split("\n## ")]
    section = section.removeprefix("## ")
    headings = [part.splitlines()[0] for part in parts]
    at = headings.index(section.splitlines()[0]) if section.splitlines()[0] in headings else len(parts)
    parts[at : at + 1] = [section]
    with replacing(path) as file:
        file.write("\n## ".join(parts).encode())


def main(settings) -> None:
    """Trains the rows, then prints and writes the table."""
    for row in settings.rows:
        check_known(f"--rows={row}", row, PAPER)
    everything = set(settings.rows) == set(PAPER)
    if everything and not importlib.util.find_spec("matplotlib"):
        raise InputError("with all rows benchmarks.rows draws a plot: pip install -r requirements-bench.txt")
    size = settings.size or ("cpu" if jax.default_backend() == "cpu" else "gpu")
    rows = [measure(row, size, Path(settings.workdir) / size / row, settings.data_path) for row in settings.rows]
    text = table(rows, size)
    print(text)
    if everything:
        image = RESULTS.with_name(f"rows_{size}.png")
        plot(rows, image)
        write_section(RESULTS, f"{text}\n![training curves, and perplexity against speed]({image.name})\n")


if __name__ == "__main__":
    flags.DEFINE_string("data_path", "", "Directory with a local copy of WikiText-2; empty: download it.")
    flags.DEFINE_enum("size", None, list(SIZES), "Size of the models; the default depends on the machine.")
    flags.DEFINE_list("rows", list(PAPER), "Rows to train.")
    flags.DEFINE_string("workdir", "runs/rows", "Directory for the runs.")
    command.run(lambda: main(flags.FLAGS))
