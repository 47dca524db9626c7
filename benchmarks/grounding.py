"""What composing word vectors costs: whole updates of GroC's rows over those of the tied row, in
the same run.

    python -m benchmarks.grounding --text=DIR --lexicon=DIR [--config=configs/wikitext2.py]
        [--repeats=5] [--json=FILE]

--text is a directory with the corpus's train.txt, valid.txt and test.txt: the words of all three
are the vocabulary, as in GroC's public code. --lexicon is a directory of WordNet or a .jsonl file.
Each of --rows of the config makes updates of its paper's size, 20 rows of 35 tokens of the text,
with its own dropout and optimizer. Rows take turns, so that a busy machine slows all of them alike;
times are medians. An epoch has as many updates for every row, so the ratios are those of epochs
(Table 10 of Pappas et al. 2020).

FLOPs are those of matrix products, counted from the layers: three times the forward pass, every
word being counted as a long one. So counted, the public code's encoder does the same, for one more,
empty, word: it reads each word once, too.
"""

import collections
import json
import math
from pathlib import Path

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config.flags import read
from adaptive_jax.data.vocabulary.lexicon import coverage, lexicon
from adaptive_jax.data.vocabulary.words import EOS, Vocabulary
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.model.language_model import (
    LanguageModel,
    build,
    parameter_shapes,
    variable_shapes,
)
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import sharding
from adaptive_jax.planning.plan import multiplied, training_flops
from adaptive_jax.training.state import initial_state, shape_of_state
from adaptive_jax.training.update import make_update
from benchmarks.outputs import machine
from benchmarks.timing import interleaved

ROWS = ["groc_tied", "groc_convolutional", "groc_adaptive", "groc"]


def vocabulary_of(directory: str) -> tuple[Vocabulary, np.ndarray]:
    """The vocabulary of a corpus, all three splits, and the ids of its train split."""
    lines = {}
    for split in ("train", "valid", "test"):
        path = Path(directory) / f"{split}.txt"
        if not path.is_file():
            raise InputError(
                f"--text={directory} has no {split}.txt: give a directory with train.txt, valid.txt"
                " and test.txt"
            )
        lines[split] = path.read_text(encoding="utf-8").splitlines()
    counts = collections.Counter(
        word for part in lines.values() for line in part for word in (*line.split(), EOS)
    )
    vocabulary = Vocabulary.build(counts)
    return vocabulary, vocabulary.encode_lines(lines["train"][:2000])


def update_of(config: dict, vocabulary: Vocabulary, ids: np.ndarray):
    """A function that makes an update, the bytes that it needs as the compiler counts them, and
    what the lexicon covers.
    """
    model, optimizer, mesh = (
        build(config, len(vocabulary)),
        optim.from_config(config),
        sharding.device_mesh(),
    )
    time = config["batches"]["sequence_length"]
    rows = config["tokens_per_update"] // time
    ids = ids[: rows * (time + 1)].reshape(1, rows, time + 1)
    weights, reset = np.ones((1, rows, time), np.float32), np.zeros((1, rows), bool)
    batch = Batch(
        ids[..., :-1], ids[..., 1:], weights, np.arange(rows, dtype=np.int32)[None], reset=reset
    )
    arrays = lexicon(vocabulary, model.wants())
    given = (
        jax.device_put(arrays, sharding.replicated(mesh)),
        sharding.put_batch(mesh, batch, axis=1),
    )
    state = [initial_state(model, optimizer, 0, mesh, (1, rows))]
    update = make_update(
        model, optimizer, mesh, 0, shape_of_state(model, optimizer, mesh, (1, rows))
    )
    program = update.lower(state[0], *given).compile()

    def run():
        state[0], metrics = program(state[0], *given)
        return float(metrics["loss"])

    memory = program.memory_analysis()
    return run, memory.temp_size_in_bytes + memory.argument_size_in_bytes, coverage(arrays)


def flops_of(config: dict, words: int) -> dict[str, float]:
    """FLOPs of an update: of its tokens, and of composing all words."""
    model = build(config, words)
    token = training_flops(model, config["batches"]["sequence_length"])
    token -= 6 * multiplied(parameter_shapes(model)["input"])  # of words, not of tokens
    return {
        "tokens": config["tokens_per_update"] * token,
        "composed": 3 * composed_flops(model),
    }


def composed_flops(model: LanguageModel) -> float:
    """FLOPs of composing the vectors of all words once, forward; all words count as long ones."""
    if model.composed_words() != "all":
        return 0.0
    total, words = 0.0, jnp.arange(model.input.vocabulary_size)
    given = variable_shapes(model) | {"tables": {}}
    for layer_of in (lambda m: m.input), (lambda m: m.output.table):
        layer = layer_of(model)
        if not hasattr(layer, "compose"):
            continue

        def compose(given, words, layer_of=layer_of):
            method = lambda model, words: layer_of(model).compose(words)
            return model.apply(given, words, method=method, mutable=["tables"])[1]["tables"]

        chunk = getattr(getattr(layer, "cnn", layer), "chunk", len(words))
        total += product_flops(jax.make_jaxpr(compose)(given, words).jaxpr, -(-len(words) // chunk))
        given |= {"tables": jax.eval_shape(compose, given, words)}
    return total


def product_flops(jaxpr, trips: int = 1) -> float:
    """FLOPs of all matrix products in a jaxpr. The body of a scan counts as often as it runs.

    Of the loops of unknown length, only the most expensive counts, and it counts `trips` times: of
    the character CNN, a chunk of long words.
    """
    total, loops = 0, [0]
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * depth
        inner = sum(
            product_flops(inner, trips)
            for inner in jax.extend.core.jaxprs_in_params(equation.params)
        )
        if equation.primitive.name == "while":
            loops.append(inner * trips)
        else:
            total += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total + max(loops)


def measure(settings) -> dict:
    """`rows`, one for each of --rows: seconds, ratios to the first, FLOPs and bytes."""
    vocabulary, ids = vocabulary_of(settings.text)
    given = {"path": settings.text, "vocabulary_size": len(vocabulary)}
    made, configs = {}, {}
    for row in settings.rows:
        config = read(f"{settings.config}:{row}")
        config["data"] |= given
        if config["input"]["name"] == "groc":
            config["input"]["lexicon"] = settings.lexicon or ""
        configs[row], made[row] = config, update_of(config, vocabulary, ids)
    seconds = interleaved({row: run for row, (run, _, _) in made.items()}, settings.repeats)
    first = settings.rows[0]
    work = {row: flops_of(config, len(vocabulary)) for row, config in configs.items()}
    return {
        "machine": machine(),
        "words": len(vocabulary),
        "repeats": settings.repeats,
        "rows": [
            {
                "row": row,
                "seconds": median,
                "fastest": least,
                "ratio": median / seconds[first][0],
                "bytes": made[row][1],
                "flops": work[row],
                "flops_ratio": (
                    (work[row]["tokens"] + work[row]["composed"]) / work[first]["tokens"]
                ),
                "coverage": made[row][2],
            }
            for row, (median, least) in seconds.items()
        ],
    }


def main(settings) -> None:
    """Prints a table of the rows and writes the JSON."""
    check_at_least(1, **{"--repeats": settings.repeats})
    if not settings.text:
        raise InputError(
            "--text is missing: give a directory with train.txt, valid.txt and test.txt"
        )
    result = measure(settings)
    print(f"{result['machine']}; {result['words']:,} words; median of {settings.repeats}")
    print(
        f"{'row':22} {'ms':>9} {'fastest':>9} {'ratio':>6} {'GFLOP of tokens':>15} {'of words':>9}"
        f" {'ratio':>6} {'MB':>7}"
    )
    for row in result["rows"]:
        work = row["flops"]
        print(
            f"{row['row']:22} {row['seconds'] * 1e3:9,.1f} {row['fastest'] * 1e3:9,.1f}"
            f" {row['ratio']:6.2f} {work['tokens'] / 1e9:15,.1f} {work['composed'] / 1e9:9,.1f}"
            f" {row['flops_ratio']:6.2f} {row['bytes'] / 1e6:7,.0f}"
        )
    if settings.json:
        Path(settings.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    flags.DEFINE_string("text", None, "Directory of the corpus.")
    flags.DEFINE_string("lexicon", None, "WordNet's directory, or a .jsonl file.")
    flags.DEFINE_string("config", "configs/penn_treebank.py", "Config file with the rows.")
    flags.DEFINE_list("rows", ROWS, "Rows; ratios are to the first.")
    flags.DEFINE_integer("repeats", 5, "Timed updates of each row.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda: main(flags.FLAGS))
