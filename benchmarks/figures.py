"""Figures 3, 5 and 6 of Dauphin et al. 2017 in small: activations, and what weight normalisation
and clipping do.

    python -m benchmarks.figures [--figures=activations,training] [--data_path=DIR] [--steps=600]
        [--workdir=runs/figures]

Each run trains a network of 4 convolutions of width 4 on the Penn Treebank, by Nesterov's momentum
of 0.99 at a constant rate.

- `activations` (Figures 3 and 5): glu, gtu, relu, tanh, linear and bilinear, with weight
  normalisation and clipping at 0.1. The gated ones and bilinear compute two maps for each unit, so
  the others have more units, and all nearly as many parameters.
- `training` (Figure 6): glu with both, without clipping, and without weight normalisation. As in
  the paper, each has the rate that suits it best: of 1, 0.1 and 0.01.

It prints a table and, with both figures, writes it into benchmarks/RESULTS.md and draws the curves.
The 15 runs take about 15 minutes on 2 cores. When started again, it keeps the runs that are
finished. The paper trains for 100 hours on a thousand times the text.
"""

import importlib.util
import json
import math
import os
import platform
import time
from datetime import date
from pathlib import Path

import jax
from absl import flags

from adaptive_jax.config import commands, rows
from adaptive_jax.config.keys import resolve
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.training.divergence import Diverged
from adaptive_jax.training.loop import train
from adaptive_jax.workdir.settings import check_same_run, write_json
from benchmarks.tables import RESULTS, write_section
from configs import papers

UNITS, ONE_MAP_UNITS = 128, 184  # of activations with two maps for each unit, and with one
ACTIVATIONS = {
    "glu": UNITS,
    "gtu": UNITS,
    "relu": ONE_MAP_UNITS,
    "tanh": ONE_MAP_UNITS,
    "linear": ONE_MAP_UNITS,
    "bilinear": UNITS,
}
TRAINING = {
    "both": {},
    "no clipping": {"optimizer.clip_norm": None},
    "no weight norm": {"body.weight_norm": False},
}
RATES = (1.0, 0.1, 0.01)
FIGURES = {
    "activations": {
        name: {"body.activation": name, "body.blocks": ((4, 4, units),)}
        for name, units in ACTIVATIONS.items()
    },
    "training": {
        f"{name}, {rate:g}": changes | {"optimizer.learning_rate": rate}
        for name, changes in TRAINING.items()
        for rate in RATES
    },
}
SETTINGS = {
    "data.corpus": "penn_treebank",
    "data.vocabulary_size": 10_000,
    "batches.sequence_length": 128,
    "tokens_per_update": 1_024,
    "tokens_per_device": 1_024,
    "log_every": 50,
    "checkpoint_every": 0,
    "metrics.tensorboard": False,
    "body.name": "gated_conv",
    "body.features": UNITS,
    "body.blocks": ((4, 4, UNITS),),
    "body.output_width": UNITS,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
}
LAYERS = papers.layers(cutoffs=(2_000,), width=UNITS, narrow=UNITS)


def config_of(figure: str, run: str, steps: int, data_path: str) -> dict:
    """The config of a run."""
    sizes = {"steps": steps, "evaluate_every": max(1, steps // 10), "data.path": data_path}
    return resolve(
        rows.config_of(
            "run",
            __file__,
            {"run": rows.Row("adp_t", FIGURES[figure][run])},
            LAYERS,
            SETTINGS | sizes,
        )
    )


def measure(config: dict, workdir: Path) -> dict:
    """Trains a run, or reads its numbers. One that diverges has no perplexity, and the curve up
    to there.
    """
    check_same_run(workdir, config)
    result = workdir / "run.json"
    if result.exists():
        return json.loads(result.read_text())
    start, diverged = time.perf_counter(), False
    try:
        train(config, workdir)
    except Diverged:
        diverged = True
    seconds = time.perf_counter() - start
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    curve = [
        (line["step"], line["validation/perplexity"])
        for line in lines
        if "validation/perplexity" in line
    ]
    numbers = {
        "validation": None if diverged else curve[-1][1],
        "seconds": seconds,
        "parameters": json.loads((workdir / "plan.json").read_text())["parameters"]["total"],
        "curve": curve,
    }
    write_json(result, numbers)
    return numbers


def best_rates(runs: dict[str, dict]) -> dict[str, dict]:
    """Of the runs of `training`, the one with the best rate for each way to train."""
    found = {}
    for name in TRAINING:
        rate = min(RATES, key=lambda rate: runs[f"{name}, {rate:g}"]["validation"] or math.inf)
        found[f"{name}, {rate:g}"] = runs[f"{name}, {rate:g}"]
    return found


def table(runs: dict[str, dict]) -> str:
    """Validation perplexity, time and size of runs."""
    lines = ["| run | validation perplexity | seconds | parameters |", "|---|---:|---:|---:|"]
    for name, run in runs.items():
        perplexity = f"{run['validation']:.1f}" if run["validation"] else "diverged"
        lines.append(
            f"| {name} | {perplexity} | {run['seconds']:.0f} | {run['parameters'] / 1e6:.2f}M |"
        )
    return "\n".join(lines)


def section(found: dict[str, dict], steps: int) -> str:
    """The section of RESULTS.md."""
    device = jax.devices()[0]
    where = device.device_kind if device.platform != "cpu" else f"{os.cpu_count()} CPU cores"
    words = steps * SETTINGS["tokens_per_update"]
    versions = f"python {platform.python_version()}, jax {jax.__version__}"
    return f"""## Gated convolutions: activations, weight normalisation and clipping, in small

{date.today()}, {where}, {platform.system()}; {versions}.

    python -m benchmarks.figures --steps={steps}

Penn Treebank; {steps:,} updates, {words / 1e6:.1f}M words; one run of each. Figures 3 and 5 of the
paper: activations.

{table(found["activations"])}

Figure 6: weight normalisation and clipping, each way with three rates.

{table(found["training"])}

![validation perplexity of six activations, and of three ways to train](figures.png)
"""


def plot(found: dict[str, dict], path: Path) -> None:
    """Draws validation perplexity against updates."""
    from matplotlib.figure import Figure

    figure = Figure((11, 4.2), layout="constrained")
    titles = "activations (Figures 3 and 5)", "weight norm and clipping (Figure 6)"
    parts = found["activations"], best_rates(found["training"])
    for axes, title, runs in zip(figure.subplots(1, 2), titles, parts, strict=True):
        for name, run in runs.items():
            axes.plot(*zip(*run["curve"] or [(0, math.nan)], strict=True), marker=".", label=name)
        axes.set(xlabel="updates", ylabel="validation perplexity", title=title, yscale="log")
        axes.legend()
        axes.grid(alpha=0.3, which="both")
    figure.savefig(path, dpi=110)


def main(settings) -> None:
    """Trains the runs, then prints and writes the tables."""
    for figure in settings.figures:
        check_known(f"--figures={figure}", figure, FIGURES)
    check_at_least(1, **{"--steps": settings.steps})
    everything = set(settings.figures) == set(FIGURES)
    if everything and not importlib.util.find_spec("matplotlib"):
        raise InputError(
            "with both figures benchmarks.figures draws a plot: pip install -r"
            " requirements-bench.txt"
        )
    found = {}
    for figure in settings.figures:
        found[figure] = {}
        for run in FIGURES[figure]:
            config = config_of(figure, run, settings.steps, settings.data_path)
            workdir = Path(settings.workdir) / figure / run.replace(", ", "_").replace(" ", "_")
            found[figure][run] = measure(config, workdir)
        print(table(found[figure]), flush=True)
    if everything:
        plot(found, RESULTS.with_name("figures.png"))
        write_section(RESULTS, section(found, settings.steps))


if __name__ == "__main__":
    flags.DEFINE_list("figures", list(FIGURES), "Figures to make.")
    flags.DEFINE_string(
        "data_path", "", "Directory with a local copy of the Penn Treebank; empty: download it."
    )
    flags.DEFINE_integer("steps", 600, "Updates of a run.")
    flags.DEFINE_string("workdir", "runs/figures", "Directory for the runs.")
    commands.run(lambda: main(flags.FLAGS))
