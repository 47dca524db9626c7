"""Ways to score a text with small trained models: more context, a cache, neighbours, and parameters
that learn from the text.

`python -m benchmarks.tables methods` trains the models, chooses the options of each way on the
first words of the validation split, and scores the first words of the test split. A way that is
finished is kept in `methods.json` of its model's workdir.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.config.keys import complete, resolve
from adaptive_jax.data.corpora.load import load
from adaptive_jax.evaluation.evaluate import Request, evaluate
from adaptive_jax.files import replacing
from adaptive_jax.training.loop import train
from adaptive_jax.workdir.settings import read_words, write_json
from benchmarks.lines import Line, config_of
from benchmarks.paper_tables import TABLES
from configs import penn_treebank, quickstart

WORDS = {"cpu": 10_000, "full": 0}  # of each split that are scored; 0: all
# Words of the train split, for each that is scored, that are neighbours; all where all words are
# scored
ENTRIES = 10
WARM = 2_500  # words that are scored first, to compile the programs
REPEATS = 3  # times that the test text is scored
FILES = {"train": "train.txt", "validation": "valid.txt", "test": "test.txt"}
COLUMNS = "way to score | chosen | valid | test | seconds | words/s"


class Way(NamedTuple):
    """A way to score.

    Attributes:
        label: in the table.
        method: a name of `adaptive_jax.evaluation.methods.METHODS`.
        options: its options.
        grids: options with several values, all of which are tried at once.
        tried: options of which one value after the other is tried.
        context: share of the window that is given and not scored.
    """

    label: str
    method: str = "plain"
    options: Mapping[str, object] = {}
    grids: Mapping[str, tuple[float, ...]] = {}
    tried: Mapping[str, tuple[float, ...]] = {}
    context: float = 0.0

    def candidates(self) -> list[dict]:
        """Options to try on the validation split."""
        given = dict(self.options) | dict(self.grids)
        return [given | {key: value} for key, values in self.tried.items() for value in values] or [
            given
        ]


WEIGHTS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
PLAIN = Way("the model alone")
CONTEXTS = (
    Way("half the window as context", context=0.5),
    Way("three quarters of the window as context", context=0.75),
)
OTHERS = (
    Way(
        "cache of the last 10,000 words",
        "cache",
        {},
        {"model_weight": WEIGHTS, "theta": (0.1, 0.3, 1.0, 3.0)},
    ),
    Way(
        "1,024 nearest neighbours in the train text",
        "knn",
        {},
        {"model_weight": WEIGHTS, "temperature": (0.3, 1.0, 3.0, 10.0)},
    ),
    Way("dynamic evaluation", "dynamic", {"rule": "sgd"}, {}, {"rate": (0.03, 0.1, 0.3, 1.0)}),
)


class Model(NamedTuple):
    """A model: its name, the corpus as --corpora names it, its config, and the ways to score
    with it.
    """

    name: str
    corpus: str
    config: dict
    ways: tuple[Way, ...]


def models() -> tuple[Model, ...]:
    """An LSTM that reads a stream, and transformers that read windows."""
    lstm = config_of(TABLES["grave_table"](), Line("penn_treebank", "adaptive"), "cpu")
    data = {key: penn_treebank.SETTINGS[key] for key in ("data.corpus", "data.vocabulary_size")}
    words = complete(quickstart.SETTINGS, quickstart.LAYERS["adp_t"], data | {"data.threshold": 1})
    return (
        Model("Penn Treebank, LSTM of width 256", "penn_treebank", lstm, (PLAIN, *OTHERS)),
        Model(
            "Penn Treebank, transformer of 2 blocks of 192",
            "penn_treebank",
            words,
            (PLAIN, *CONTEXTS, *OTHERS),
        ),
        Model(
            "quickstart (the Bible)",
            "",
            resolve(quickstart.get_config()),
            (PLAIN, *CONTEXTS, *OTHERS),
        ),
    )


def write_sample(workdir: Path, folder: Path, words: int) -> None:
    """Writes the first lines of the splits of a run's corpus that have so many words, 0 for all, as
    text files.

    The train split has `ENTRIES` times as many.
    """
    data, vocabulary = (
        json.loads((workdir / "config.json").read_text())["data"],
        read_words(workdir),
    )
    ids = load(data, vocabulary=vocabulary, splits=tuple(FILES)).ids
    for split, name in FILES.items():
        ends = np.flatnonzero(ids[split][:] == vocabulary.eos) + 1
        wanted = words * (ENTRIES if split == "train" else 1)
        ends = ends[: np.searchsorted(ends, wanted) + 1] if words else ends
        lines = np.split(ids[split][: ends[-1]], ends[:-1])
        with replacing(folder / name) as file:
            file.write(
                "".join(
                    " ".join(vocabulary.words[token] for token in line[:-1]) + "\n"
                    for line in lines
                ).encode()
            )


def numbers_of(model: Model, way: Way, workdir: Path, words: int) -> dict:
    """Of a way to score: the options chosen, the perplexities, and the least seconds and the
    words of the test text.
    """
    request = Request(
        method=way.method, context=int(way.context * model.config["batches"]["sequence_length"])
    )
    samples = {size: workdir / "samples" / str(size) for size in (WARM, words)}
    for size, folder in samples.items():
        if not (folder / FILES["test"]).exists():
            write_sample(workdir, folder, size)
    own = {"datastore": str(samples[words])} if way.method == "knn" else {}
    asked = request._replace(split="validation", data_path=str(samples[words]))
    tried = [own | each for each in way.candidates()]
    results = [evaluate(workdir, asked._replace(options=options)) for options in tried]
    best = min(range(len(tried)), key=lambda number: results[number]["perplexity"])
    valid, options = results[best], tried[best]
    options = {key: (valid[key],) if key in way.grids else value for key, value in options.items()}
    tests = [
        evaluate(workdir, request._replace(data_path=str(samples[size]), options=options))
        for size in (WARM, *[words] * REPEATS)
    ][1:]
    return {
        "chosen": {key: valid[key] for key in way.grids} | {key: options[key] for key in way.tried},
        "valid": valid["perplexity"],
        "test": tests[0]["perplexity"],
        "seconds": min(test["seconds"] for test in tests),
        "words": tests[0]["words"],
    }


def cells(way: Way, numbers: Mapping) -> str:
    """A line of the table."""
    chosen = ", ".join(f"{key} {value:g}" for key, value in numbers["chosen"].items())
    shown = f"{numbers['valid']:.1f}", f"{numbers['test']:.1f}", f"{numbers['seconds']:,.1f}"
    return (
        f"| {way.label} | {chosen} | {' | '.join(shown)} |"
        f" {numbers['words'] / numbers['seconds']:,.0f} |"
    )


def lines(size: str, runs: Path, corpora: Mapping[str, str]) -> list[str]:
    """What stands below the heading of the section, after training and scoring what is not
    finished.

    runs: the directory of the models' workdirs. corpora: local copies by name.
    """
    words = WORDS[size]
    scored = f"the first {words:,} words of each split" if words else "the whole of each split"
    entries = f"the first {ENTRIES * words:,} words" if words else "all words"
    found = [
        f"\nPerplexity of {scored}. Options are chosen on the validation text. Seconds are those of"
        f" the test text, the least of {REPEATS} times, after programs have been compiled and the"
        f" datastore of neighbours has been written: {entries} of the train split. One run each."
    ]
    for model in models():
        workdir = runs / f"{model.corpus or 'quickstart'}-{model.config['body']['name']}"
        if model.corpus in corpora:
            model.config["data"]["path"] = corpora[model.corpus]
        train(model.config, workdir)
        kept = workdir / "methods.json"
        numbers = json.loads(kept.read_text()) if kept.exists() else {}
        for way in model.ways:
            if way.label not in numbers:
                numbers[way.label] = numbers_of(model, way, workdir, words)
                write_json(kept, numbers)
        found += [f"\n{model.name}:\n", f"| {COLUMNS} |\n|---|---{'|---:' * 4}|"]
        found += [cells(way, numbers[way.label]) for way in model.ways]
    return found
