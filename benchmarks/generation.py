"""Words a second that a trained model writes: with a cache and closed tails, with a cache alone,
and without a cache.

    python -m benchmarks.generation --workdir=runs/quickstart [--words=60] [--repeats=3]

All draw at temperature 1, one row. Without a cache, each word reads a whole window anew, as a plain
loop over the model does. The peers take turns, and times are medians. Below, what share of the
tails each way to choose words opens at a step.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import adaptive_jax
from adaptive_jax.config import commands
from adaptive_jax.errors import check_at_least
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.text.generate import Options, Writer
from adaptive_jax.text.load import LoadedModel
from benchmarks.timing import interleaved

WORDS = flags.DEFINE_integer("words", 60, "Words to write.")
REPEATS = flags.DEFINE_integer("repeats", 3, "Times that each peer writes them.")
WAYS = {
    "draws": {},
    "temperature 0.7": {"temperature": 0.7},
    "top p 0.9": {"top_p": 0.9},
    "top k 10": {"top_k": 10},
    "most probable word": {"temperature": 0.0},
    "4 beams": {"beams": 4},
}


def without_cache(loaded: LoadedModel, words: int):
    """A function that writes so many words, reading the last window of tokens anew for each,
    and all probabilities.
    """
    run, length = loaded.run, loaded.run.config["batches"]["sequence_length"]

    @jax.jit
    def draw(params, lexicon, tables, tokens, last, key):
        variables = {"params": params, "lexicon": lexicon, "tables": tables}
        zeros = jnp.zeros((1, length), jnp.int32)
        batch = Batch(tokens, zeros, jnp.ones((1, length)), jnp.zeros(1, jnp.int32))
        log_probs = run.model.apply(variables, batch, last[None, None], method="log_probs")
        return jax.random.categorical(key, log_probs[0, 0])

    def write():
        tokens = [run.vocabulary.eos]
        for number in range(words):
            seen = np.zeros((1, length), np.int32)
            seen[0, : min(length, len(tokens))] = tokens[-length:]
            last, key = (
                np.int32(min(length, len(tokens)) - 1),
                jax.random.fold_in(jax.random.key(0), number),
            )
            tokens.append(int(draw(run.params, run.lexicon, loaded.tables, seen, last, key)))

    return write


def with_all_probabilities(loaded: LoadedModel, words: int):
    """A function that writes so many words with the body's cache; the window does not slide."""
    run = loaded.run

    @jax.jit
    def draw(params, lexicon, tables, token, carry, key):
        variables = {"params": params, "lexicon": lexicon, "tables": tables}
        hidden, carry = run.model.apply(variables, token[None, None], carry, method="step")
        log_probs = run.model.apply(
            variables, hidden[:, 0], method=lambda model, hidden: model.output.log_probs(hidden)
        )
        return jax.random.categorical(key, log_probs[0]).astype(jnp.int32), carry

    def write():
        token, carry = np.int32(run.vocabulary.eos), run.model.body.cache(1, words)
        for number in range(words):
            key = jax.random.fold_in(jax.random.key(0), number)
            token, carry = draw(run.params, run.lexicon, loaded.tables, token, carry, key)
            int(token)

    return write


def opened(loaded: LoadedModel, words: int, **options: object) -> float:
    """The share of tails that a step opens in the mean."""
    writer = Writer(loaded.decoder, loaded.lines, "", Options(words=words, **options))
    writer.continuations()
    return writer.draft.opened / max(1, writer.draft.steps * loaded.decoder.tails)


def main() -> None:
    """Measures and prints both tables."""
    words, repeats = WORDS.value, REPEATS.value
    check_at_least(1, words=words, repeats=repeats)
    loaded = adaptive_jax.load(commands.workdir()[0])
    peers = {
        "cache, tails where they matter": lambda: loaded.generate(words=words),
        "cache, all probabilities": with_all_probabilities(loaded, words),
        "no cache, all probabilities": without_cache(loaded, words),
    }
    print(f"{loaded!r}\n\n| one row, temperature 1 | words/s |\n|---|---:|")
    for name, (median, _) in interleaved(peers, repeats).items():
        print(f"| {name} | {words / median:,.0f} |", flush=True)
    if loaded.decoder.tails:
        print(
            f"\n| words chosen by | tails opened at a step, of {loaded.decoder.tails} |\n|---|---:|"
        )
        for name, options in WAYS.items():
            print(f"| {name} | {opened(loaded, words, **options):.1%} |", flush=True)


if __name__ == "__main__":
    commands.define_workdir("Directory of a run that train.py made.", several_hosts=False)
    flags.adopt_module_key_flags(commands)
    commands.run(main)
