"""Inputs with n-grams against inputs of words alone, at equal time and with equal parameters.

    python -m benchmarks.ngrams CORPUS --time [--path=DIR] [--workdir=runs/ngrams]
    python -m benchmarks.ngrams CORPUS [--path=DIR] [--seeds=0,1,2] [--workdir=runs/ngrams]
    python -m benchmarks.ngrams --draw

CORPUS is penn_treebank, wikitext2 or europarl. `--time` measures the seconds of an update of each
model, in turn, on a machine that does nothing else. Then every model with n-grams makes as many
updates as fit into the time that the words alone take for theirs, at most as many. Models of words
alone that have as many parameters make all updates, however long that takes: with wide words for
all, and where these have fewer, with a wider body, too. The same command resumes, and keeps the
runs that are finished; of several at once each takes other seeds. `--draw` writes the table and the
figure of what is there to benchmarks/ngrams.json, .png and, in Markdown, the terminal.
"""

import itertools
import json
import math
import statistics
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config.keys import complete
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.ngrams import count_for, counted_settings, write
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.runs.settings import write_json
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.frequency import in_bins
from adaptive_jax.training.loop import train
from benchmarks import figures
from benchmarks.lines import one_cycle
from benchmarks.paper_tables import TRANSFORMER_CPU
from benchmarks.throughput import our_update
from benchmarks.timing import machine, timed, whole_numbers
from configs import europarl, papers, penn_treebank, wikitext2

UPDATES = 600  # 1.3 epochs of the Penn Treebank, 0.6 of WikiText-2, 0.02 of Europarl


@dataclass(frozen=True)
class Corpus:
    """A config file, the rows of the banded table of each order, and the number of times that a run
    is scored on the validation split.
    """

    file: ModuleType
    rows: int
    validations: int = 5


CORPORA = {
    "penn_treebank": Corpus(penn_treebank, rows=30_000),
    "wikitext2": Corpus(wikitext2, rows=60_000),
    "europarl": Corpus(europarl, rows=260_000, validations=2),  # whose split is 270 updates long
}
WORDS, WIDER = "words alone", "a wider body"
EDGES = 10, 100, 1_000, 10_000  # largest frequencies of bins of words
CONTEXTS = 1, 10, 100  # and of bins of the pairs of words that stand before them
NUMBERS = Path(__file__).with_suffix(".json")


def tables(rows: int) -> dict[str, dict]:
    """Settings of n-grams by kind, whose tables have as many parameters to within 2 %."""
    banded = papers.banded(rows)
    sizes = np.diff([0, *banded["row_cutoffs"], rows, rows + banded["hashed_rows"]])
    equal = {"rows": int(sizes @ (64, 32, 16, 8) // 32), "row_width": 32}
    return {
        "hashed n-grams": {"kind": "hashed"} | equal,
        "counted n-grams": {"kind": "counted"} | equal,
        "banded n-grams": banded,
    }


def configs_of(corpus: str, path: str) -> dict[str, dict]:
    """The config of each model of a corpus, by name."""
    file, every = CORPORA[corpus].file, UPDATES // CORPORA[corpus].validations
    settings = TRANSFORMER_CPU | one_cycle(UPDATES, every, tokens=2_048, warmup=50)
    settings |= {"data.path": path, "output.tail_dropout": 0.0, "log_every": 100}
    settings |= {"dtype": "float32"}
    words = file.LAYERS["adp_t"]
    layers = {WORDS: words, "no narrow words": words | {"input.factor": 1}}
    for kind, each in tables(CORPORA[corpus].rows).items():
        layers[kind] = papers.with_ngrams(words, **each)
    configs = {name: complete(file.SETTINGS, layers[name], settings) for name in layers}
    most = parameters(configs["banded n-grams"])
    if parameters(configs["no narrow words"]) > 0.98 * most:
        return configs
    for features in range(settings["body.features"], 4_096, 8):
        wide = {"body.features": features, "body.feed_forward": 4 * features}
        config = complete(file.SETTINGS, words, settings | wide)
        if parameters(config) >= most:
            break
    return configs | {WIDER: config}


def parameters(config: dict) -> int:
    """The number of parameters of a config's model."""
    shapes = parameter_shapes(build(config, config["data"]["vocabulary_size"]))
    return sum(shape.size for shape in jax.tree.leaves(shapes))


def measure_seconds(corpus: str, settings) -> None:
    """Writes the seconds of an update of each model to WORKDIR/CORPUS.json."""
    home, peers = Path(settings.workdir), {}
    home.mkdir(parents=True, exist_ok=True)
    for name, config in configs_of(corpus, settings.path).items():
        text = load(config["data"])
        if counted_settings(config):
            counts = home / f"{corpus}.npz"
            write(counts, text.vocabulary, count_for(config, text.vocabulary, text.ids["train"]))
            config["input"]["counts"] = str(counts)
        length = config["batches"]["sequence_length"]
        rows = config["tokens_per_update"] // length
        peers[name], _ = our_update(config, rows, text.vocabulary, text.ids["train"])
    seconds = {row["peer"]: row["seconds"] for row in timed(peers, settings.repeats, runs=2)}
    print(*(f"{1e3 * each:8.1f} ms  {name}" for name, each in seconds.items()), sep="\n")
    write_json(home / f"{corpus}.json", {"machine": machine(), "seconds": seconds})


def measure(config: dict, workdir: Path) -> dict:
    """Trains a model, or resumes its run, and scores the test split. Returns its numbers."""
    train(config, workdir)
    perplexity = evaluate(workdir, Request(split="test"))["perplexity"]
    [losses] = (workdir / "eval").glob("test*.npy")
    text, nll = load(config["data"], splits=("train", "test")), np.load(losses)
    logged = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {
        "test": perplexity,
        "steps": config["steps"],
        "parameters": parameters(config),
        "validation": [(e["step"], e["validation/nll"]) for e in logged if "validation/nll" in e],
        "word": means(nll, text.vocabulary.counts[text.ids["test"]], EDGES),
        "context": means(nll, counts_of_pairs(text.ids["train"], text.ids["test"]), CONTEXTS),
    }


def counts_of_pairs(train_ids: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Counts in the train split of the pair of words before each word of a text, int64 `[tokens]`;
    0 for the first two.
    """
    keys, counts = np.unique(_pairs(train_ids), return_counts=True)
    wanted = _pairs(ids)[:-1]
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.concatenate([[0, 0], np.where(keys[at] == wanted, counts[at], 0)])


def _pairs(ids):
    return np.asarray(ids[:-1], np.int64) << 32 | np.asarray(ids[1:], np.int64)


def means(nll: np.ndarray, counts: np.ndarray, edges) -> dict[str, tuple[int, float]]:
    """Words and their mean loss in nats by bins of `counts`; edges: as `in_bins` takes them."""
    bins = {}
    for least, most, inside in in_bins(counts, edges):
        inside &= ~np.isnan(nll)
        if inside.any():
            name = f"{least:,}" + ("" if least == most else f"-{most:,}" if most else "+")
            bins[name] = int(inside.sum()), float(nll[inside].mean())
    return bins


def train_all(corpus: str, settings) -> None:
    """Trains and scores what is not there yet of a corpus."""
    home = Path(settings.workdir)
    times = home / f"{corpus}.json"
    if not times.exists():
        raise InputError(f"{times} does not exist: run the same command with --time first")
    seconds = json.loads(times.read_text())["seconds"]
    seeds = whole_numbers("--seeds", settings.seeds, least=0)
    runs = itertools.product(seeds, configs_of(corpus, settings.path).items())
    for seed, (name, config) in sorted(runs, key=lambda run: run[1][0] == WIDER):  # the slow ones
        workdir = home / corpus / f"{name.replace(' ', '_')}-{seed}"
        if (workdir / "row.json").exists():
            continue
        steps = config["steps"]
        if "n-grams" in name:
            steps = min(steps, round(steps * seconds[WORDS] / seconds[name]))
        schedule = config["schedule"] | {"cycle_steps": steps - config["schedule"]["warmup_steps"]}
        config = config | {"seed": seed, "steps": steps, "schedule": schedule}
        print(f"{corpus}, {name}, seed {seed}:", flush=True)
        write_json(workdir / "row.json", measure(config, workdir))
        jax.clear_caches()


def draw(settings) -> None:
    """Prints the tables in Markdown, and writes numbers and figure of all finished runs."""
    dots, numbers = [], {}
    for corpus in CORPORA:
        runs, times = defaultdict(list), Path(settings.workdir) / f"{corpus}.json"
        for path in sorted((Path(settings.workdir) / corpus).glob("*/row.json")):
            runs[path.parent.name.rpartition("-")[0].replace("_", " ")].append(
                json.loads(path.read_text())
            )
        if not runs:
            continue
        timing = json.loads(times.read_text())
        names = [name for name in timing["seconds"] if name in runs]
        numbers[corpus] = {name: runs[name] for name in names} | {"machine": timing["machine"]}
        print(f"\n{corpus}: {timing['machine']}\n\n{table(runs, timing['seconds'], names)}")
        for measure in "word", "context":
            print(f"\n{by_bins(runs, names, measure)}")
        for name in names:
            curves = np.mean([[nll for _, nll in run["validation"]] for run in runs[name]], axis=0)
            steps = [step for step, _ in runs[name][0]["validation"]]
            dots.append(
                {
                    "corpus": corpus,
                    "row": name,
                    "value": statistics.mean(run["test"] for run in runs[name]),
                    "paper": None,
                    "losses": [
                        (step * timing["seconds"][name], float(nll))
                        for step, nll in zip(steps, curves, strict=True)
                    ],
                }
            )
    figure = {"kind": "table", "title": "Inputs with and without n-grams, means over seeds"}
    figure |= {"measure": "test perplexity", "by": "seconds of training"}
    figures.write(NUMBERS, figure | {"rows": dots, "runs": numbers})


def table(runs: dict, seconds: dict, names: list[str]) -> str:
    """A row for each model: mean over the seeds, the least and the largest."""
    lines = ["| input | parameters | ms an update | updates | seconds | test perplexity | seeds |"]
    lines.append("|---" + "|---:" * 6 + "|")
    for name in names:
        tests, first = [run["test"] for run in runs[name]], runs[name][0]
        lines.append(
            f"| {name} | {first['parameters'] / 1e6:.2f}M | {1e3 * seconds[name]:.0f} |"
            f" {first['steps']:,} | {first['steps'] * seconds[name]:.0f} |"
            f" {statistics.mean(tests):.1f} ({min(tests):.1f} to {max(tests):.1f}) |"
            f" {len(tests)} |"
        )
    return "\n".join(lines)


def by_bins(runs: dict, names: list[str], measure: str) -> str:
    """Perplexities by the frequency of the word, or of the pair of words before it."""
    bins = runs[names[0]][0][measure]
    total = sum(words for words, _ in bins.values())
    head = [f"{name} ({words / total:.0%})" for name, (words, _) in bins.items()]
    lines = [f"| times in training, of the {measure} (share) | {' | '.join(head)} |"]
    lines.append("|---" + "|---:" * len(head) + "|")
    for name in names:
        cells = [
            math.exp(statistics.mean(run[measure][each][1] for run in runs[name])) for each in bins
        ]
        lines.append(f"| {name} | {' | '.join(f'{cell:,.1f}' for cell in cells)} |")
    return "\n".join(lines)


def main(corpus: str, settings) -> None:
    """Measures, trains or draws, as the flags say."""
    if settings.draw:
        return draw(settings)
    check_known(f"CORPUS={corpus}", corpus, CORPORA)
    return (measure_seconds if settings.time else train_all)(corpus, settings)


if __name__ == "__main__":
    flags.DEFINE_bool("time", False, "Measure the seconds of an update of each model.")
    flags.DEFINE_bool("draw", False, "Write the tables and the figure.")
    flags.DEFINE_string("path", "", "Directory of the corpus; empty: download.")
    flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds to train.")
    flags.DEFINE_integer("repeats", 9, "Timed runs of each model.")
    flags.DEFINE_string("workdir", "runs/ngrams", "Directory for the runs.")
    commands.run(lambda corpus="": main(corpus, flags.FLAGS), positional=["[CORPUS]"])
