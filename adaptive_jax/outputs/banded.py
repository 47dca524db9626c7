"""The core: a softmax over a vocabulary cut into bands, with loss and gradient in one pass.

A banded softmax (Grave et al. 2017; Baevski & Auli 2019, section 3) has a **head**, a softmax over the frequent words
of band 0 and one more column for every **tail**, and the tails, each a softmax over the words of one further band:

    p(word) = p_head(word)                  for a word of band 0
    p(word) = p_head(tail i) · p_i(word)    for a word of band i

With one band and no tail it is the full softmax. Everything here is a pure function of arrays:

- `bands` is a tuple of `(table [words_i, width_i], projection [width_i, features] | None)`, frequent words first; the
  logits of band i are `(hidden @ projection.T) @ table.T`. Word ids count through the bands in order.
- `clusters [tails, width_0]` are the rows of the head that stand for the tails: tail i has column `words_0 + i - 1`.

How it stays fast with static shapes: tokens are sorted by band once, then every softmax runs over its own tokens only,
`chunk` tokens at a time, in a loop whose trip count is read off the data. While the logits of a chunk are alive,
`softmax - onehot` gives the chunk's share of every gradient (`adaptive_jax.outputs.chunks`), so logits are computed once,
`[tokens, vocabulary]` never exists, and the backward pass only scales.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax import dropout
from adaptive_jax.outputs.chunks import PLAIN, Regularisation, Softmax, Tokens, logits_of, one_chunk, project

# Tokens whose logits are alive at a time, on a CPU by measurement (benchmarks/outputs.py). The head, which every token visits,
# wants rows enough for full speed of its matrix products; a tail pays for the rows of its last chunk that stay empty, so it takes
# fewer. The logits of a long head would leave the caches, and very long bands are held to 2^25 float32 logits, 128 MiB.
HEAD_CHUNK = 512
LONG_HEAD_CHUNK = 128
TAIL_CHUNK = 96
CHUNK_LOGITS = 2**25

# On accelerators by counting, not yet measured. For a word of width 1, a chunk of n rows computes 6 n FLOP and adds once to the sum
# of the gradients, 8 to 16 bytes. At 180 FLOP a byte (an H200 in bfloat16) that takes as long as 240 to 480 rows do: the head has
# ten times as many, and a tail of 800 tokens loses least to sums and empty rows together at sqrt(2 · 800 · 240) = 620 rows.
FAST_HEAD_CHUNK = 4096
FAST_TAIL_CHUNK = 512
FAST_CHUNK_LOGITS = 2**26
TILE = 128  # rows of a matrix unit

# Of tables narrower than this the gradient is summed as its transpose: at width 16 XLA's product on a CPU was 2.6 times as fast
# when it is the narrow side that is turned. For wider ones turning the sum back costs what is won.
NARROW = 32


def chunk_size(band: int, words: int, backend: str | None = None) -> int:
    """Tokens whose logits are alive at a time in a band of so many words; band 0 is the head.

    On a CPU 512 for a head of 20,000 words, 96 for a tail; on an accelerator 3,328 and 512. `backend`: by default JAX's.
    """
    if (backend or jax.default_backend()) == "cpu":
        head = HEAD_CHUNK if words * HEAD_CHUNK < CHUNK_LOGITS // 2 else LONG_HEAD_CHUNK
        return max(8, min(head if band == 0 else TAIL_CHUNK, CHUNK_LOGITS // words))
    rows = min(FAST_TAIL_CHUNK if band else FAST_HEAD_CHUNK, FAST_CHUNK_LOGITS // words)
    return rows // TILE * TILE or max(8, rows)


def loss(hidden, targets, weights, bands, clusters, *, regularisation: Regularisation = PLAIN, key=None, numbers=None, chunk=None):
    """Weighted sum of the regularised losses of all tokens, its gradients computed in the same pass.

    Args:
        hidden: `[tokens, features]`, any float dtype: matrix products run in it, sums and logarithms in float32.
        targets: `[tokens]` word ids.
        weights: `[tokens]`, 0 for padding.
        bands, clusters: see the module; `clusters` is None when there is one band.
        regularisation: see `Regularisation`.
        key: a PRNG key, needed when `tail_dropout > 0`.
        numbers: int32 `[tokens]`, the tokens' numbers in the update, by default 0, 1, 2 …: what tail dropout drops is a function of
            key, number and unit alone, wherever and in whatever order tokens are visited.
        chunk: tokens whose logits are alive at a time; by default `chunk_size` of each band.

    Returns:
        `(loss, nll)`: the scalar `sum(weights · regularised nll)` in nats, differentiable once, and `nll [tokens]`, the plain
        negative log-likelihood of every token in the order given, a report without gradient. With tail dropout both
        see the same mask.

    Raises:
        ValueError: tail dropout without a key.
    """
    if regularisation.tail_dropout and key is None:
        raise ValueError(f"tail_dropout={regularisation.tail_dropout} needs a key")
    numbers = jnp.arange(len(targets)) if numbers is None else numbers
    seeds = dropout.row_seeds(key, numbers) if regularisation.tail_dropout else None
    total, each = _loss((regularisation, chunk), hidden, weights, tuple(bands), clusters, targets, seeds)
    return total, lax.stop_gradient(each)


def nll(hidden, targets, bands, clusters, *, chunk=None):
    """Negative log-likelihood `[tokens]` of every target in nats, in the order given.

    Differentiable in `hidden`, `bands` and `clusters` for any cotangent, by a second pass: to train, use `loss`.
    """
    return _nll((PLAIN, chunk), hidden, tuple(bands), clusters, targets)


def log_probs(hidden, bands, clusters):
    """Log-probabilities `[tokens, vocabulary]` of every word, normalised, in float32.

    Builds the matrix it returns: give it the rows of `hidden` that are asked for, and no others.
    """
    bands, clusters = jax.tree.map(lambda a: a.astype(hidden.dtype), (tuple(bands), clusters))
    logits = [logits_of(project(hidden, projection), table) for table, projection in bands]
    words = bands[0][0].shape[0]
    if clusters is not None:
        x = project(hidden, bands[0][1])
        logits[0] = jnp.concatenate([logits[0], logits_of(x, clusters)], axis=1)
    head, *tails = [jax.nn.log_softmax(band, axis=1) for band in logits]
    reached = [head[:, words + i, None] + tail for i, tail in enumerate(tails)]
    return jnp.concatenate([head[:, :words], *reached], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static, hidden, weights, bands, clusters, targets, seeds):
    report = _one_pass(*static, hidden, weights, bands, clusters, targets, seeds, with_gradients=False)
    return jnp.sum(weights * report.loss), report.nll


def _loss_forward(static, hidden, weights, bands, clusters, targets, seeds):
    report = _one_pass(*static, hidden, weights, bands, clusters, targets, seeds, with_gradients=True)
    return (jnp.sum(weights * report.loss), report.nll), (report.loss.astype(weights.dtype), report.gradients)


def _loss_backward(static, residuals, cotangents):
    d_weights, (d_hidden, d_bands, d_clusters) = residuals
    scale, _ = cotangents
    gradients = (d_hidden, d_weights, d_bands, d_clusters)
    return *jax.tree.map(lambda g: (scale * g).astype(g.dtype), gradients), None, None


_loss.defvjp(_loss_forward, _loss_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _nll(static, hidden, bands, clusters, targets):
    weights = jnp.ones(targets.shape, jnp.float32)
    return _one_pass(*static, hidden, weights, bands, clusters, targets, None, with_gradients=False).nll


def _nll_forward(static, hidden, bands, clusters, targets):
    return _nll(static, hidden, bands, clusters, targets), (hidden, bands, clusters, targets)


def _nll_backward(static, residuals, cotangent):
    hidden, bands, clusters, targets = residuals
    report = _one_pass(*static, hidden, cotangent, bands, clusters, targets, None, with_gradients=True)
    return *report.gradients, None


_nll.defvjp(_nll_forward, _nll_backward)


class _Report(NamedTuple):
    loss: jax.Array  # [tokens], regularised
    nll: jax.Array  # [tokens]
    gradients: tuple | None  # of (hidden, bands, clusters), each of the shape and dtype of its array


def _one_pass(regularisation, chunk, hidden, weights, bands, clusters, targets, seeds, *, with_gradients):
    """Visits the head with all tokens, then every tail with its own tokens."""
    tokens = hidden.shape[0]
    sizes = [table.shape[0] for table, _ in bands]
    chunks = [min(tokens, chunk or chunk_size(i, words)) for i, words in enumerate(sizes)]
    starts = jnp.cumsum(jnp.array([0, *sizes]))
    band = jnp.searchsorted(starts[1:-1], targets, side="right")
    order = jnp.argsort(band, stable=True)
    ends = jnp.searchsorted(band[order], jnp.arange(len(bands)), side="right")

    def in_order(array):  # with room for one chunk behind, so that a slice of one chunk is always in bounds
        return jnp.pad(array[order], [(0, max(chunks))] + [(0, 0)] * (array.ndim - 1))

    head_column = jnp.where(band == 0, targets, sizes[0] + band - 1)
    in_head = jax.tree.map(in_order, Tokens(hidden, head_column, weights, seeds))
    in_tail = in_head._replace(column=in_order(targets - starts[band]))
    zeros = jnp.zeros(in_head.weight.shape, jnp.float32)
    outcome = (zeros, zeros, jnp.zeros(in_head.hidden.shape, jnp.float32) if with_gradients else None)
    d_softmaxes = []
    for i, (table, projection) in enumerate(bands):
        softmax = Softmax(table, projection, clusters if i == 0 else None)
        softmax = jax.tree.map(lambda a: a.astype(hidden.dtype), softmax)  # once, not in every chunk
        # The paper drops units after the first projection of every cluster but the head.
        settings = regularisation._replace(tail_dropout=0.0) if i == 0 else regularisation
        queue, span = (in_head, (0, tokens)) if i == 0 else (in_tail, (ends[i - 1], ends[i]))
        outcome, d_softmax = _visit(settings, chunks[i], softmax, queue, span, outcome, with_gradients)
        d_softmaxes.append(d_softmax)

    back = jnp.argsort(order)
    loss_, nll_, d_hidden = jax.tree.map(lambda a: a[back], outcome)
    if not with_gradients:
        return _Report(loss_, nll_, None)
    d_bands = tuple((d.table, d.projection) for d in d_softmaxes)
    gradients = (d_hidden, d_bands, d_softmaxes[0].clusters)
    like = jax.tree.map(lambda g, of: g.astype(of.dtype), gradients, (hidden, tuple(bands), clusters))
    return _Report(loss_, nll_, like)


def _visit(settings, chunk, softmax, queue, span, outcome, with_gradients):
    """Runs the tokens of `queue[span]` through one softmax, a chunk at a time.

    Adds loss, nll and gradient of the hidden states to `outcome`, and returns it with the gradient of `softmax`.
    """
    begin, end = span
    narrow = softmax.table.shape[1] < NARROW

    def visit_chunk(trip, state):
        outcome, d_softmax = state
        at = begin + trip * chunk
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=at, slice_size=chunk)
        inside = at + jnp.arange(chunk) < end
        part = jax.tree.map(cut, queue)
        part = part._replace(weight=jnp.where(inside, part.weight, 0.0))
        results, d_chunk = one_chunk(settings, softmax, part, narrow, with_gradients)

        # Rows behind the band's last token belong to the next band: they get 0 here and their own chunk's result there.
        def put(whole, result):
            result = jnp.where(inside.reshape(-1, *[1] * (result.ndim - 1)), result, 0.0)
            return lax.dynamic_update_slice_in_dim(whole, cut(whole) + result, at, 0)

        return jax.tree.map(put, outcome, results), jax.tree.map(jnp.add, d_softmax, d_chunk)

    turn = (lambda d: d._replace(table=d.table.T)) if with_gradients and narrow else (lambda d: d)
    zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), softmax) if with_gradients else None
    outcome, sums = lax.fori_loop(0, (end - begin + chunk - 1) // chunk, visit_chunk, (outcome, turn(zeros)))
    return outcome, turn(sums)
