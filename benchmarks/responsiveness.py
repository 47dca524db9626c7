"""How fast models read text: Table 4 of Dauphin et al. 2017, whose models have about the same
perplexity on Billion Word.

    python -m benchmarks.responsiveness [--models=lstm_2048,gcnn_9,gcnn_8b,transformer]
        [--tokens=15000] [--steps=100] [--json=FILE]

- throughput: many sequences at a time, 750 of 20 tokens, each from its beginning.
- responsiveness: one sequence of 15,000 contiguous tokens. All are known, so convolutions and
  attention read them at once, as in the paper; the LSTM reads one after the other.
- one by one: a token at a time, as text is written. Each call continues the memory of the body, and
  the next call waits for its result. The transformer's cache has room for the whole sequence. The
  paper has no such numbers.

All are in tokens a second: of input and body alone, and with the output layer, which scores the
next word of 793,471. The LSTM and the GCNNs are the rows of configs/billion_word.py with random
parameters; weight normalisation is computed beforehand, as is usual after training. The transformer
has as many parameters in its body as the LSTM, and its words and output layer. The paper's numbers
hold with the output layer; it does not say which CPU it used.
"""

import functools
import itertools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config.keys import resolve
from adaptive_jax.errors import check_at_least, check_known
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.numerics.batch import Batch
from benchmarks.outputs import machine
from configs import billion_word

# Tokens a second in Table 4: throughput on a CPU and on a GPU, responsiveness on a GPU.
PAPER = {
    "lstm_2048": (169, 45_622, 2_282),
    "gcnn_9": (121, 29_116, 29_116),
    "gcnn_8b": (179, 45_878, 45_878),
}
TRANSFORMER = {
    "layers": 6,
    "features": 512,
    "heads": 8,
    "feed_forward": 2048,
}  # 18.9M, as many as the LSTM
MODELS = (*PAPER, "transformer")
SEQUENCES, LENGTH = 750, 20


def config_of(name: str) -> dict:
    """The config of a model."""
    row = name if name in PAPER else "lstm_2048"
    config = resolve(billion_word.get_config(row)) | {"dtype": "float32"}
    if "weight_norm" in config["body"]:
        config["body"]["weight_norm"] = False
    if name == "transformer":
        config["input"]["width"] = config["body"]["features"]
        config["body"] = resolve(billion_word.get_config("adp_t"))["body"] | TRANSFORMER
    return config


def random_params(model) -> dict:
    """Parameters of the right shapes, small and random: only their time counts."""
    random = np.random.default_rng(0)

    def draw(shape):
        return jnp.asarray(0.02 * random.standard_normal(shape.shape, np.float32))

    return jax.tree.map(draw, parameter_shapes(model))


def batch_of(rows: int, length: int, words: int) -> Batch:
    """Text of `rows` sequences; the word of rank r is as frequent as 1/r."""
    shares = 1 / np.arange(1, words + 1)
    ids = (
        np.random.default_rng(0)
        .choice(words, (rows, length + 1), p=shares / shares.sum())
        .astype(np.int32)
    )
    return Batch(
        jnp.asarray(ids[:, :-1]),
        jnp.asarray(ids[:, 1:]),
        jnp.ones((rows, length)),
        jnp.arange(rows),
    )


def at_once(model, params, batch: Batch, repeats: int) -> dict[str, float]:
    """Tokens a second of reading a batch: of the body alone, and with the scores of the
    targets. The fastest run counts.
    """

    def body(model, batch):
        return model.hidden(batch)[0]

    def whole(model, batch):
        return model.nll(model.hidden(batch)[0], batch.targets)

    speeds = {}
    for name, read in ("body", body), ("whole", whole):
        apply = functools.partial(model.apply, method=read)
        compiled = jax.jit(apply).lower({"params": params}, batch).compile()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            jax.block_until_ready(compiled({"params": params}, batch))
            seconds.append(time.perf_counter() - start)
        speeds[name] = batch.inputs.size / min(seconds)
    return speeds


def one_by_one(model, params, ids: list[int], length: int) -> dict[str, float]:
    """Tokens a second where each of `ids` is a call of its own; the transformer's memory holds
    `length` tokens.
    """

    def body(model, token, target, carry):
        return model.step(token, carry)

    def whole(model, token, target, carry):
        hidden, carry = model.step(token, carry)
        return model.nll(hidden, target), carry

    speeds = {}
    tokens = [jnp.full((1, 1), word, jnp.int32) for word in ids]
    for name, read in ("body", body), ("whole", whole):
        call = jax.jit(functools.partial(model.apply, method=read), donate_argnums=3)
        result, carry = call(
            {"params": params}, tokens[0], tokens[0], model.body.cache(1, length)
        )  # compiles
        jax.block_until_ready(result)
        start = time.perf_counter()
        for token, target in itertools.pairwise(tokens):
            result, carry = call({"params": params}, token, target, carry)
            jax.block_until_ready(result)
        speeds[name] = (len(tokens) - 1) / (time.perf_counter() - start)
    return speeds


def measure(name: str, tokens: int, steps: int, repeats: int) -> dict:
    """Speeds of a model by measure, and the parameters of its parts."""
    config = config_of(name)
    words = config["data"]["vocabulary_size"]
    model = build(config, words)
    params, text = random_params(model), batch_of(1, tokens, words)
    once = 1 if name == "lstm_2048" else repeats  # a minute or more on a CPU
    return {
        "model": name,
        "parameters": {
            part: sum(leaf.size for leaf in jax.tree.leaves(params[part])) for part in params
        },
        "throughput": at_once(model, params, batch_of(SEQUENCES, LENGTH, words), repeats),
        "responsiveness": at_once(model, params, text, once),
        "one by one": one_by_one(model, params, text.inputs[0, : steps + 1].tolist(), tokens),
    }


def table(found: list[dict]) -> str:
    """Speeds; ratios of those with the output layer to the LSTM's, and the paper's ratios on a
    CPU and on a GPU.
    """
    lines = [
        "| model | body | measure | body, tokens/s | with output | to the LSTM | paper, CPU |"
        " paper, GPU |"
    ]
    lines.append("|---|---:|---|---:|---:|---:|---:|---:|")
    lstm = next((row for row in found if row["model"] == "lstm_2048"), None)
    for row in found:
        name = row["model"]
        for measure, *columns in (
            ("throughput", 0, 1),
            ("responsiveness", None, 2),
            ("one by one", None, None),
        ):
            body, whole = row[measure]["body"], row[measure]["whole"]
            cells = [
                name,
                f"{row['parameters']['body'] / 1e6:.1f}M",
                measure,
                f"{body:,.1f}",
                f"{whole:,.1f}",
            ]
            cells.append(f"{whole / lstm[measure]['whole']:.2f}" if lstm else "")
            for at in columns:
                known = name in PAPER and at is not None
                cells.append(f"{PAPER[name][at] / PAPER['lstm_2048'][at]:.2f}" if known else "")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(settings) -> None:
    """Measures the models, prints the table and writes the JSON."""
    for name in settings.models:
        check_known(f"--models={name}", name, MODELS)
    given = {"--tokens": settings.tokens, "--steps": settings.steps, "--repeats": settings.repeats}
    check_at_least(1, **given)
    print(
        f"{machine()}; {SEQUENCES} sequences of {LENGTH} tokens; one of {settings.tokens:,}",
        flush=True,
    )
    found = []
    for name in settings.models:
        found.append(measure(name, settings.tokens, settings.steps, settings.repeats))
        print(json.dumps(found[-1]), flush=True)
    print(table(found))
    if settings.json:
        Path(settings.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    flags.DEFINE_list("models", list(MODELS), "Models to measure.")
    flags.DEFINE_integer("tokens", 15_000, "Tokens of the one sequence.")
    flags.DEFINE_integer("steps", 100, "Tokens that are read one by one.")
    flags.DEFINE_integer("repeats", 2, "Timed runs, of which the fastest counts.")
    flags.DEFINE_string("json", None, "File for the numbers.")
    commands.run(lambda: main(flags.FLAGS))
