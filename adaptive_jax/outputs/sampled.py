"""Losses on a sample of the vocabulary: sampled softmax and noise-contrastive estimation."""

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from adaptive_jax.errors import check_at_least, check_known
from adaptive_jax.losses import banded, distribution
from adaptive_jax.losses.arguments import validate_bands
from adaptive_jax.losses.plans import chunk_size
from adaptive_jax.numerics.arrays import look_up
from adaptive_jax.numerics.bands import Band, band_flops
from adaptive_jax.numerics.layers import Dropout, from_lexicon
from adaptive_jax.outputs import scanned
from adaptive_jax.outputs.output import Loss, Output

PROPOSALS = ("log_uniform", "unigram")
# Score of a candidate that is the target: finite, so that gradients are 0, not NaN, where all
# candidates are the target.
HIT_SCORE = -1e30


class Sampled(Output):
    """Full softmax that is trained on the target and a sample of candidates (Bengio & Senécal 2008;
    Jean et al. 2015, section 3).

    The loss is that of a softmax over target and candidates, where the score of each candidate is
    corrected for its expected count (Blanc & Rendle 2018, section 2):

        -log(exp s(target) / (exp s(target) + Σ_w exp(s(w) - log(samples · Q(w)))))

    where w are the candidates. So the normaliser is unbiased, and the loss is an estimate of the
    nll, which training reports too. Candidates are drawn from Q with replacement, and depend on the
    rng stream "dropout" alone: all tokens of an update share them, on every device and in every
    microbatch. A candidate that is the token's target is left out. Without `train`, as in `nll` and
    `log_probs`, the softmax is over all words.

    Attributes:
        table: a module with `bands()` of one band, see `adaptive_jax.outputs.tables`.
        samples: number of candidates per update (8,192 in Józefowicz et al. 2016).
        proposal: the distribution Q. "log_uniform": by the rank of the word alone, `log((rank + 1)
            / rank) / log(V + 1)`, ranks from 1, close to Zipf's law; words must be in order of
            frequency. "unigram": by counts in the training text.
        input_dropout: rate of dropout on the hidden states.

    Raises:
        InputError: a number or name out of range; a table of several bands; a lexicon of another
            vocabulary.
    """

    samples: int = 1024
    proposal: str = "log_uniform"
    input_dropout: float = 0.0

    many_bands: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, samples=self.samples)
        check_known(f"proposal={self.proposal!r}", self.proposal, PROPOSALS)

    @property
    def lexicon_spec(self) -> dict:
        """Lexicon arrays that the layer reads, see `adaptive_jax.data.vocabulary.lexicon`."""
        return {"counts": {}} if self.proposal == "unigram" else {}

    def lexicon_shapes(self, words: int) -> dict:
        """Shapes and dtypes of the arrays in `lexicon_spec`, for this number of words."""
        counts = jax.ShapeDtypeStruct((words,), jnp.float32)
        return {"counts": counts} if self.proposal == "unigram" else {}

    def setup(self):
        self.dropout = Dropout(self.input_dropout)
        [(table, *_)] = self.bands()
        if self.proposal == "unigram":
            self.counts = from_lexicon(self, "counts", len(table))

    def flops(self, bands: Sequence[Band]) -> float:
        """FLOPs per token of the training loss's forward pass, for target and candidates."""
        [(table, projection, _)] = bands
        features = 0 if projection is None else projection.shape[1]
        return band_flops(1, table.shape[1], self.samples + 1, features)

    def loss(
        self,
        hidden: jax.Array,
        targets: jax.Array,
        weights: jax.Array | None = None,
        row_ids=None,
        *,
        train: bool = False,
    ) -> Loss:
        """See `adaptive_jax.outputs.output.Output.loss`. With `train`, the softmax is over target
        and candidates, and `nll` is an estimate.
        """
        hidden, [band], _ = validate_bands(hidden, self.bands(train=train), None)
        if not train:
            return Loss(*banded.loss(hidden, targets, weights, [band]))
        hidden = self.dropout(hidden, row_ids, train=train)
        words = len(band.table)
        key, counts = self.make_rng("dropout"), None
        if self.proposal == "log_uniform":
            candidates = log_uniform(key, words, self.samples)
        else:
            counts = positive_counts(self.counts)
            candidates = unigram(key, counts, self.samples)
        chunk = chunk_size(0, self.samples, band.table.shape[1])
        static = type(self).losses, math.log(words)
        chunked = scanned.ChunkedLoss(_rows, _losses, words, chunk, static)
        drawn = candidates, counts
        return Loss(*scanned.total_and_nll(chunked, hidden, targets, weights, band, drawn))

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Negative log-likelihood of each target `[...]` among all words, in nats; see
        `banded.losses`.
        """
        return banded.losses(hidden, targets, None, self.bands())

    def log_probs(self, hidden: jax.Array) -> jax.Array:
        """Log-probabilities of all words, `[..., vocabulary]`: pass only the positions that you
        need.
        """
        return distribution.log_probs(hidden, self.bands())

    @staticmethod
    def losses(nll: jax.Array, target_odds: jax.Array, odds: jax.Array) -> jax.Array:
        """The loss `[tokens]`.

        Args:
            nll: `[tokens]`, estimated.
            target_odds: `[tokens]`, log-odds that the target is data, not noise.
            odds: `[tokens, samples]`, those of the candidates.
        """
        return nll


class NCE(Sampled):
    """Full softmax that is trained to distinguish targets from noise (Gutmann & Hyvärinen 2012;
    Mnih & Teh 2012, section 3).

        -log σ(s(target) - log(samples · Q(target)))
        - Σ_w log σ(log(samples · Q(w)) - s(w))

    where w are the noise words. Scores s are used as log-probabilities: the model learns to be
    normalised, so no normaliser is computed. They are the logits minus log V, so that a fresh model
    is normalised, like one whose bias starts at -log V (Devlin et al. 2014). Noise is drawn once
    for all tokens of an update, and may contain the target. Evaluation normalises; the nll that
    training reports is the estimate that `Sampled` has as its loss.

    Attributes: as those of `adaptive_jax.outputs.sampled.Sampled`.
    """

    @staticmethod
    def losses(nll: jax.Array, target_odds: jax.Array, odds: jax.Array) -> jax.Array:
        """The loss `[tokens]`; arguments as those of `Sampled.losses`."""
        return jax.nn.softplus(-target_odds) + jax.nn.softplus(odds).sum(axis=1)


class _Rows(NamedTuple):
    """Parameters of the words to score: the target of each token, or each candidate.

    Attributes:
        table: `[n, width]`, their rows of the table.
        bias: `[n]`, or None.
        expected: `[n]`, the log of the word's expected count among the candidates.
    """

    table: jax.Array
    bias: jax.Array | None
    expected: jax.Array


def _rows(targets, band, constants):
    """Returns the `_Rows` of the targets, and a pair of those of the candidates and the projection.

    constants: candidates, and the counts of all words, or None for a log-uniform proposal.
    """
    candidates, counts = constants
    words, tokens = len(band.table), len(targets)
    # One gather, whose gradient is one scatter, summed in float32.
    drawn = jnp.concatenate([targets, candidates])
    chance = log_uniform_chance(drawn, words) if counts is None else unigram_chance(drawn, counts)
    bias = None if band.bias is None else look_up(band.bias[:, None], drawn)[:, 0]
    rows = _Rows(look_up(band.table, drawn), bias, math.log(len(candidates)) + chance)
    of_targets = jax.tree.map(lambda a: a[:tokens], rows)
    return of_targets, (jax.tree.map(lambda a: a[tokens:], rows), band.projection)


def _losses(static, hidden, targets, target_rows, shared, constants):
    """Loss and estimated nll `[tokens]`; static: `Sampled.losses`, and the log of the number of
    words.
    """
    (losses, log_words), (rows, projection), (candidates, _) = static, shared, constants
    x = scanned.project(hidden, projection)
    scores = jnp.sum(x * target_rows.table.astype(x.dtype), axis=1)
    logits = scanned.product(x, rows.table, hidden.dtype)
    if rows.bias is not None:
        scores += target_rows.bias.astype(scores.dtype)
        logits += rows.bias[None].astype(logits.dtype)
    # Divided by their expected counts, their exponentials estimate the sum over all words but the
    # target.
    corrected = logits - rows.expected[None]
    hit = targets[:, None] == candidates[None]
    normaliser = jax.nn.logsumexp(jnp.where(hit, HIT_SCORE, corrected), axis=1)
    nll = jax.nn.softplus(normaliser - scores)
    target_odds = scores - target_rows.expected - log_words
    return losses(nll, target_odds, corrected - log_words), nll


def log_uniform(key: jax.Array, words: int, samples: int) -> jax.Array:
    """Draws ids `[samples]` from the distribution of `log_uniform_chance`."""
    coarse, fine = jax.random.uniform(key, (2, samples)) * math.log(words + 1)
    # A uniform float32 has 23 bits, too few for the words of a large vocabulary.
    ranks = jnp.floor(jnp.exp(coarse) * jnp.exp(fine * 2.0**-23)).astype(jnp.int32)
    return jnp.clip(ranks - 1, 0, words - 1)


def log_uniform_chance(ids: jax.Array, words: int) -> jax.Array:
    """Log-probability of each id, `log((id + 2) / (id + 1)) / log(words + 1)`."""
    return jnp.log(jnp.log1p(1 / (ids.astype(jnp.float32) + 1)) / math.log(words + 1))


def positive_counts(counts) -> jax.Array:
    """Counts of words, float32 `[words]`, such that every word can be drawn, as a word of
    probability 0 has no loss: a count of 0 becomes half the smallest positive one. If all are 0,
    all words are equally likely.
    """
    counts = jnp.asarray(counts, jnp.float32)
    counts = jnp.where(jnp.any(counts > 0), counts, 1.0)
    rarest = jnp.min(counts, where=counts > 0, initial=jnp.inf)
    return jnp.where(counts > 0, counts, rarest / 2)


def unigram(key: jax.Array, counts: jax.Array, samples: int) -> jax.Array:
    """Draws ids `[samples]` with probabilities proportional to `counts [words]`.

    It draws a block of words, then a word in it: a uniform float32 has 23 bits, too few to reach a
    word that occurs once in a large text.
    """
    words = len(counts)
    side = math.isqrt(words - 1) + 1
    blocks = jnp.pad(counts, (0, side * side - words)).reshape(side, side)
    of_block, of_word = jax.random.uniform(key, (2, samples))

    def draw(sums, share):
        return jnp.minimum(jnp.searchsorted(sums, share * sums[-1], side="right"), side - 1)

    block = jax.vmap(draw, (None, 0))(jnp.cumsum(blocks.sum(axis=1)), of_block)
    word = jax.vmap(draw)(jnp.cumsum(blocks, axis=1)[block], of_word)
    return jnp.minimum(block * side + word, words - 1)


def unigram_chance(ids: jax.Array, counts: jax.Array) -> jax.Array:
    """Log-probability of each id."""
    return jnp.log(counts[ids] / counts.sum())
