"""How fast evaluate.py scores: against a forward pass over the same windows, and against computing
what is not scored.

    python -m benchmarks.evaluation [--models=transformer_small,gcnn_small,awd_small] [--window=256]
        [--context=0,192] [--tokens=16384] [--repeats=5] [--json=FILE]

Models are rows of configs/wikitext2.py with random parameters, and the text is random words of
their vocabulary, as frequent as words are by Zipf's law. For each model and context:

- `evaluate`: `adaptive_jax.evaluation.scoring.scores`, which evaluate.py runs: windows are cut,
  brought to the device, scored, and the scores brought back.
- `forward pass`: the same program on the same windows, which are on the device already; nothing is
  brought back. The output layer has no more than the targets that count.
- `all outputs`: windows computed anew for each context, an output for every token of a row, and
  those that do not count masked.

They take turns, and the least time of each counts, since a busy machine only adds to it. On a CPU
the last column compares processor time, which other processes hardly change. A context is left out
where the model takes none. `reads` is how many tokens the body reads for each token that is scored.
"""

import itertools
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from absl import flags

from adaptive_jax.config import commands
from adaptive_jax.config.keys import resolve
from adaptive_jax.data.batches.windows import Windows, windows
from adaptive_jax.data.vocabulary.words import EOS, Vocabulary
from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.evaluation.runs import Run
from adaptive_jax.evaluation.scoring import PLAIN, continued, initial_carry, make_scorer, scores
from adaptive_jax.model.language_model import build, init_params
from adaptive_jax.parallel import sharding
from configs import wikitext2

BATCH = 2_048  # tokens
PEERS = EVALUATE, FORWARD, ALL = "evaluate", "forward pass", "all outputs"
COLUMNS = (
    "model",
    "context",
    "reads",
    *(f"{name}, words/s" for name in PEERS),
    "evaluate / forward pass",
)
COLUMNS += "evaluate / all outputs", "evaluate / forward pass, processor"


def random_run(config: dict) -> Run:
    """A model of a config with random parameters and made-up words."""
    words = config["data"]["vocabulary_size"]
    vocabulary = Vocabulary(
        (EOS, *(f"w{number}" for number in range(1, words))), np.arange(words, 0, -1)
    )
    model = build(config, words)
    params = jax.jit(lambda: init_params(model, 0))()
    return Run(model, params, {}, sharding.device_mesh(), vocabulary, config, 0)


def text(words: int, tokens: int) -> np.ndarray:
    """Ids of words as frequent as by Zipf's law: int32 `[tokens]`."""
    chances = 1 / np.arange(1, words + 1)
    return (
        np.random.default_rng(0).choice(words, tokens, p=chances / chances.sum()).astype(np.int32)
    )


def forward_pass(run: Run, ids: np.ndarray, settings: Windows, unscored: int):
    """A function that computes the scores of all windows; and how many tokens it reads.

    unscored: columns that the output layer skips.
    """
    scorer = make_scorer(
        run.model, run.mesh, unscored, (len(run.vocabulary), len(run.vocabulary), PLAIN)
    )
    batches = [batch for batch, _ in windows(ids, run.vocabulary.eos, settings)[1]]
    if not unscored:
        batches = [batch._replace(first=np.zeros_like(batch.first)) for batch in batches]
    given = [sharding.put_batch(run.mesh, batch) for batch in batches]
    first = (
        initial_carry(run.model, run.mesh, len(batches[0].first))()
        if settings.layout == "streams"
        else ()
    )

    def run_all():
        carry, results = first, []
        for batch in given:
            (nll, _), carry = scorer(run.params, run.lexicon, {}, batch, carry)
            results.append(nll)
        jax.block_until_ready(results)

    return run_all, sum(batch.batch.inputs.size for batch in batches)


def timed(peers: dict[str, Callable], repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """The least elapsed and the least processor seconds of each function in `repeats` turns,
    after one that is not timed.
    """
    elapsed, processor = dict.fromkeys(peers, math.inf), dict.fromkeys(peers, math.inf)
    for turn in range(repeats + 1):
        for name, run in peers.items():
            begin = time.perf_counter(), time.process_time()
            run()
            seconds = time.perf_counter() - begin[0], time.process_time() - begin[1]
            if turn:
                elapsed[name], processor[name] = (
                    min(elapsed[name], seconds[0]),
                    min(processor[name], seconds[1]),
                )
    return elapsed, processor


def measure(name: str, context: int, settings) -> dict | None:
    """The line of a model and a context: both, `reads`, and `seconds` and `processor` of each
    peer; None if it takes no context.
    """
    check_known(f"--models={name}", name, wikitext2.ROWS)
    config = resolve(wikitext2.get_config(name)) | {"dtype": "float32"}
    layout = config["batches"]["layout"]
    if context and layout == "streams":
        return None
    run, tokens = random_run(config), settings.tokens
    ids = text(len(run.vocabulary), tokens)
    rows = 16 if layout == "streams" else max(1, min(BATCH, tokens) // settings.window)
    asked = Windows(settings.window, context, "none", layout, rows, run.mesh.size)
    used = continued(run.model, asked, tokens)
    forward, read = forward_pass(run, ids, used, used.unscored)

    def evaluate():
        if sum(len(scored.nll) for scored in scores(run, ids, asked)) != tokens:
            raise RuntimeError("not every token has been scored once")

    peers = {EVALUATE: evaluate, FORWARD: forward, ALL: forward_pass(run, ids, asked, 0)[0]}
    seconds, processor = timed(peers, settings.repeats)
    return {
        "model": name,
        "context": context,
        "reads": read / tokens,
        "seconds": seconds,
        "processor": processor,
    }


def table(found: list[dict], tokens: int) -> str:
    """The lines as a Markdown table, in words a second."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|---|{'---:|' * (len(COLUMNS) - 1)}"]
    for line in found:
        times, processor = line["seconds"], line["processor"]
        cells = [
            line["model"],
            line["context"],
            f"{line['reads']:.2f}",
            *(f"{tokens / times[peer]:,.0f}" for peer in PEERS),
        ]
        ratios = (
            times[FORWARD] / times[EVALUATE],
            times[ALL] / times[EVALUATE],
            processor[FORWARD] / processor[EVALUATE],
        )
        cells += [f"{ratio:.2f}" for ratio in ratios]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(settings) -> None:
    """Measures every model with every context; prints a table and writes the numbers."""
    check_at_least(
        1, **{f"--{name}": getattr(settings, name) for name in ("window", "tokens", "repeats")}
    )
    try:
        contexts = [int(context) for context in settings.context]
    except ValueError:
        raise InputError(
            f"--context={','.join(settings.context)} is no list of whole numbers: give such as"
            " 0,192"
        ) from None
    found = []
    for name, context in itertools.product(settings.models, contexts):
        if line := measure(name, context, settings):
            found.append(line)
            print(json.dumps(line), flush=True)
    about = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    print(f"windows of {settings.window:,}, {settings.tokens:,} tokens; {json.dumps(about)}")
    print(table(found, settings.tokens))
    if settings.json:
        Path(settings.json).write_text(json.dumps(about | {"lines": found}, indent=2) + "\n")


if __name__ == "__main__":
    flags.DEFINE_list(
        "models", ["transformer_small", "gcnn_small", "awd_small"], "Rows of configs/wikitext2.py."
    )
    flags.DEFINE_integer("window", 256, "Tokens of a window.")
    flags.DEFINE_list(
        "context",
        ["0", "192"],
        "Tokens of a window that are given and not scored, one or several numbers.",
    )
    flags.DEFINE_integer("tokens", 16_384, "Tokens of the text.")
    flags.DEFINE_integer("repeats", 5, "Times that each peer is measured.")
    flags.DEFINE_string("json", "", "File to write the numbers to.")
    commands.run(lambda: main(flags.FLAGS))
