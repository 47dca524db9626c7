"""Speed of scoring and writing text: `--of=evaluate` and `--of=generate` of
`benchmarks.throughput`.

`evaluate` scores random words, as frequent as words are by Zipf's law, with random parameters:

- `evaluate`: `adaptive_jax.scores.scoring.scores`, which evaluate.py runs: windows are cut,
  brought to the device, scored, and the scores brought back.
- `forward pass`: the same program on the same windows, which are on the device already; nothing is
  brought back.
- `all outputs`: windows computed anew for each context, an output for every token of a row.

`generate` writes with a trained run at temperature 1, one row:

- `generate`: with a cache, as the command draws.
- `all probabilities`: with the cache and every word's probability; the window does not slide.
- `no cache`: each word reads a whole window anew, as a plain loop over the model does.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import adaptive_jax
from adaptive_jax.data.batches.windows import Windows, windows
from adaptive_jax.data.vocabulary.words import EOS, Vocabulary
from adaptive_jax.model.language_model import build, init_params
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.parallel import sharding
from adaptive_jax.runs.run import Run, put_lexicon
from adaptive_jax.scores.scoring import as_stream, initial_carry, make_scorer, scores

BATCH = 2_048  # tokens


def evaluate_peers(config: dict, context: int, tokens: int, ids: np.ndarray) -> dict[str, Callable]:
    """Functions by name that score `ids [tokens]`."""
    run, layout = _random_run(config), config["batches"]["layout"]
    window = config["batches"]["sequence_length"]
    rows = 16 if layout == "streams" else max(1, min(BATCH, tokens) // window)
    asked = Windows(window, context, "none", layout, rows, run.mesh.size)
    used = as_stream(run.model, asked, tokens)

    def evaluate():
        if sum(len(scored.nll) for scored in scores(run, ids, asked)) != tokens:
            raise RuntimeError("not every token was scored once")

    return {
        "evaluate": evaluate,
        "forward pass": _forward_pass(run, ids, used, used.context_columns),
        "all outputs": _forward_pass(run, ids, asked, 0),
    }


def _random_run(config):
    """A model of a config with random parameters and made-up words."""
    words = config["data"]["vocabulary_size"]
    names = (EOS, *(f"w{number}" for number in range(1, words)))
    model = build(config, words)
    params = jax.jit(lambda: init_params(model, 0))()
    vocabulary = Vocabulary(names, np.arange(words, 0, -1))
    mesh = sharding.device_mesh()
    lexicon = put_lexicon(model, vocabulary, mesh)
    parts = {"model": model, "params": params, "lexicon": lexicon, "mesh": mesh}
    return Run(None, config, vocabulary).with_parts(step=0, **parts)


def _forward_pass(run, ids, settings, unscored):
    """A function that computes the scores of all windows. unscored: columns that the output
    layer skips.
    """
    words = len(run.vocabulary)
    scorer = make_scorer(run.model, run.mesh, unscored, words, words)
    batches = [batch for batch, _ in windows(ids, run.vocabulary.eos, settings)[1]]
    if not unscored:
        batches = [batch._replace(first=np.zeros_like(batch.first)) for batch in batches]
    given, first = [sharding.put_batch(run.mesh, batch) for batch in batches], ()
    if settings.layout == "streams":
        first = initial_carry(run.model, run.mesh, len(batches[0].first))()

    def run_all():
        carry, results = first, []
        for batch in given:
            (nll, _), carry = scorer(run.params, run.lexicon, {}, batch, carry)
            results.append(nll)
        jax.block_until_ready(results)

    return run_all


def generate_peers(workdir, words: int) -> dict[str, Callable]:
    """Functions by name that write so many words with a trained run."""
    loaded = adaptive_jax.load(workdir)
    run, length = loaded.run, loaded.run.config["batches"]["sequence_length"]
    variables = {"params": run.params, "lexicon": run.lexicon, "tables": loaded.tables}
    keys = [jax.random.fold_in(jax.random.key(0), number) for number in range(words)]

    @jax.jit
    def step(variables, token, carry, key):
        hidden, carry = run.model.apply(variables, token[None, None], carry, method="step")
        log_probs = run.model.apply(
            variables, hidden[:, 0], method=lambda model, hidden: model.output.log_probs(hidden)
        )
        return jax.random.categorical(key, log_probs[0]).astype(jnp.int32), carry

    @jax.jit
    def anew(variables, tokens, last, key):
        zeros, ones = jnp.zeros((1, length), jnp.int32), jnp.ones((1, length))
        batch = Batch(tokens, zeros, ones, jnp.zeros(1, jnp.int32))
        log_probs = run.model.apply(variables, batch, last[None, None], method="log_probs")
        return jax.random.categorical(key, log_probs[0, 0])

    def with_cache():
        token, carry = np.int32(run.vocabulary.eos), run.model.cache(1, words)
        for key in keys:
            token, carry = step(variables, token, carry, key)
            int(token)

    def without_cache():
        tokens = [run.vocabulary.eos]
        for key in keys:
            seen, count = np.zeros((1, length), np.int32), min(length, len(tokens))
            seen[0, :count] = tokens[-length:]
            tokens.append(int(anew(variables, seen, np.int32(count - 1), key)))

    return {
        "generate": lambda: loaded.generate(words=words),
        "all probabilities": with_cache,
        "no cache": without_cache,
    }
