"""The core: a softmax over a vocabulary cut into bands, with loss and gradient in one pass.

A banded softmax (Grave et al. 2017; Baevski & Auli 2019, section 3) has a **head**, a softmax over
the frequent words of band 0 and one more column for every **tail**, and the tails, each a softmax
over the words of one further band:

    p(word) = p_head(word)                  for a word of band 0
    p(word) = p_head(tail i) · p_i(word)    for a word of band i

With one band it is the full softmax. Everything here is a pure function of arrays:

- `bands` is a list of `Band(table, projection, bias)`, frequent words first; the logits of a band
  are `(hidden @ projection.T) @ table.T + bias`. Word ids count through the bands in order.
- `clusters` is a Band without projection, `table [tails, width_0]`, whose rows stand for the tails
  in the head: tail i has column `words_0 + i - 1`. It is None if there is one band. Band 0 may then
  have no words, a table `[0, width]`: the head chooses among the tails alone (a hierarchical
  softmax of two levels).

How it stays fast with static shapes: tokens are sorted by band once, those of weight 0 last, then
every softmax runs over its own tokens only, `chunk` tokens at a time, in a loop whose trip count is
read off the data. A token of weight 0 costs nothing and changes nothing, whatever its hidden state.
While the logits of a chunk are alive, `softmax - onehot` gives the chunk's share of every gradient
(`adaptive_jax.losses.chunks`), so logits are computed once, `[tokens, vocabulary]` never exists,
and the backward pass only scales. Many tails that are alike share one loop
(`adaptive_jax.losses.groups`); on NVIDIA GPUs a tail in 16 bits has kernels instead
(`adaptive_jax.losses.flash_tails`).
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.errors import InputError
from adaptive_jax.losses import flash_tails
from adaptive_jax.losses.chunks import PLAIN, Settings, Tokens, chunk_size, one_chunk, rows_of_chunk
from adaptive_jax.losses.distribution import in_dtype, log_probs
from adaptive_jax.losses.given import given
from adaptive_jax.losses.groups import Member, join, trips
from adaptive_jax.losses.sharded import columns_here, present, same_axes, words_of
from adaptive_jax.losses.tiles import tiled
from adaptive_jax.numerics.arrays import exists, floats, ids, whole_numbers
from adaptive_jax.numerics.products import halved

__all__ = ["PLAIN", "Settings", "chunk_size", "log_probs", "loss", "losses", "nll"]

# The gradient of tables narrower than this is summed as its transpose: at width 16, XLA's product
# on a CPU was 2.6 times as fast with the narrow side transposed. For wider tables, transposing the
# sum back costs what is won, but in bfloat16 on a CPU, where the sum's operands must lie row after
# row and the chunk of logits would have to be transposed instead.
NARROW = 32


def loss(hidden, targets, weights, bands, clusters=None, settings: Settings = PLAIN, seeds=None):
    """Weighted sum of the regularised losses of all tokens; the same pass computes its gradients.

    Args:
        hidden: `[..., features]`, any float dtype: matrix products run in it, sums and logarithms
            in float32.
        targets: `[...]` word ids. Where the weight is 0, any number may stand, such as -1.
        weights: `[...]`, 0 for padding; None: all 1. Tokens of weight 0 are not computed: their
            hidden states may be NaN, all their results are 0, and so is the gradient of their
            weights. Time is in proportion to the other tokens.
        bands, clusters: see the module.
        settings: see `Settings`.
        seeds: uint32 `[tokens, 2]`, see `dropout.row_seeds`, needed when `tail_dropout > 0`. A
            token's mask is a function of its seeds alone, so neither the order of tokens nor chunks
            change it.

    Returns:
        `(loss, nll)`: the scalar `sum(weights · regularised nll)` in nats, differentiable once, and
        `nll [...]`, the plain negative log-likelihood of every token in the order given, a report
        without gradient. With tail dropout both see the same mask. The nll is 0 where the weight
        is 0; elsewhere that of a target that does not exist is NaN, as are loss and gradients.

    Raises:
        InputError: a target that is known outside `jax.jit` and does not exist; shapes that do not
            fit; settings out of range; tail dropout without seeds.
    """
    settings.check()
    hidden, bands, clusters = given(hidden, bands, clusters)
    shape, words = hidden.shape[:-1], words_of(bands, settings.words, settings.axis_name)
    masked = weights is not None
    targets, weights, exist = _targets(targets, weights, shape, sum(words))
    if not settings.tail_dropout:
        seeds = None
    elif seeds is None:
        raise InputError(
            f"tail_dropout={settings.tail_dropout} needs seeds: give dropout.row_seeds(key, numbers"
            " of the tokens)"
        )
    else:
        seeds = whole_numbers("seeds", seeds, targets.size, 2)
    sizes, softmax = _laid_out(settings, words, bands, clusters)
    flat = same_axes(
        settings.axis_name,
        hidden.reshape(-1, hidden.shape[-1]),
        softmax,
        weights.ravel(),
        targets.ravel(),
    )
    total, each = _loss(_Static(settings, sizes, words, masked), *flat, seeds)
    return total, lax.stop_gradient(jnp.where(exist, each.reshape(shape), 0 * weights))


def losses(hidden, targets, weights, bands, clusters=None, settings: Settings = PLAIN):
    """`weights · regularised nll` `[...]` of every token in nats, in the order given, without tail
    dropout; arguments as `loss`.

    Differentiable for any cotangent, by a second pass: where their sum is all that is needed, use
        `loss`.

    Raises:
        InputError: as `loss`.
    """
    settings.check()
    hidden, bands, clusters = given(hidden, bands, clusters)
    shape, words = hidden.shape[:-1], words_of(bands, settings.words, settings.axis_name)
    hidden = hidden.reshape(-1, hidden.shape[-1])
    masked = weights is not None
    targets, weights, _ = _targets(targets, weights, shape, sum(words))
    sizes, softmax = _laid_out(settings, words, bands, clusters)
    counted = (weights != 0).astype(jnp.float32).ravel()
    flat = same_axes(settings.axis_name, hidden, softmax, counted, targets.ravel())
    return weights * _losses(_Static(settings, sizes, words, masked), *flat).reshape(shape)


def nll(hidden, targets, bands, clusters=None, chunk: int | None = None):
    """Negative log-likelihood `[...]` of every target in nats: `losses` with weights 1; NaN for
    a target that does not exist.
    """
    return losses(hidden, targets, None, bands, clusters, Settings(chunk=chunk))


def _targets(targets, weights, shape, words):
    """Targets, weights and which targets exist. A target that does not exist becomes 0, and its
    weight NaN if it is not 0.
    """
    targets = ids(
        "targets", targets, words, *shape, weights=weights
    )  # before weights that are known become an array of JAX
    weights = (
        jnp.ones(shape, jnp.float32) if weights is None else floats("weights", weights, *shape)
    )
    exist = exists(targets, words)
    return jnp.where(exist, targets, 0), jnp.where(exist | (weights == 0), weights, jnp.nan), exist


def _laid_out(settings, words, bands, clusters):
    """Rows of each band by group, and `(groups, clusters)`: clusters are None where they stand
    in the head, behind its words.
    """
    sizes, groups = join(bands)
    if settings.axis_name is None:
        sizes, groups, clusters = tiled(words, groups, sizes, clusters)
    return sizes, (groups, clusters)


class _Static(NamedTuple):
    """What is known of a loss when it is traced."""

    settings: Settings
    sizes: tuple[tuple[int, ...], ...]  # rows of each band, by group
    words: tuple[int, ...]  # of each band, on all devices
    masked: bool  # whether weights may be 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static, hidden, softmax, weights, targets, seeds):
    report = _one_pass(
        static, Tokens(hidden, targets, weights, seeds), softmax, with_gradients=False
    )
    return jnp.sum(weights * report.loss), report.nll


def _loss_forward(static, hidden, softmax, weights, targets, seeds):
    hidden, softmax, weights = _differentiated_once((hidden, softmax, weights))
    report = _one_pass(
        static, Tokens(hidden, targets, weights, seeds), softmax, with_gradients=True
    )
    return (jnp.sum(weights * report.loss), report.nll), (
        report.loss.astype(weights.dtype),
        report.gradients,
    )


def _loss_backward(static, residuals, cotangents):
    d_weights, (d_hidden, d_softmax) = residuals
    scale, _ = cotangents
    return (
        *jax.tree.map(lambda g: (scale * g).astype(g.dtype), (d_hidden, d_softmax, d_weights)),
        None,
        None,
    )


_loss.defvjp(_loss_forward, _loss_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(static, hidden, softmax, counted, targets):
    tokens = Tokens(hidden, targets, counted, None)
    return _one_pass(static, tokens, softmax, with_gradients=False).loss


def _losses_forward(static, hidden, softmax, counted, targets):
    hidden, softmax = _differentiated_once((hidden, softmax))
    return _losses(static, hidden, softmax, counted, targets), (hidden, softmax, targets)


def _losses_backward(static, residuals, cotangent):
    hidden, softmax, targets = residuals
    report = _one_pass(
        static, Tokens(hidden, targets, cotangent, None), softmax, with_gradients=True
    )
    return *report.gradients, None, None


_losses.defvjp(_losses_forward, _losses_backward)


@jax.custom_jvp
def _differentiated_once(arrays):
    """The arrays. Gradients that depend on them have no gradient of their own."""
    return arrays


@_differentiated_once.defjvp
def _refuse(primals, tangents):
    raise InputError(
        "this loss has no second derivative: for one, give"
        " optax.softmax_cross_entropy_with_integer_labels all logits"
    )


class _Report(NamedTuple):
    loss: jax.Array  # [tokens], regularised
    nll: jax.Array  # [tokens]
    gradients: tuple | None  # of (hidden, softmax), each of the shape and dtype of its array


def _one_pass(static, tokens, softmax, with_gradients):
    """Visits the head with all tokens, then every tail with its own tokens; `tokens.column`
    holds word ids. Those of weight 0 visit nothing, if `static.masked`.
    """
    settings, sizes, all_words, masked = static
    groups, clusters = softmax
    live = tokens.weight != 0 if masked else None
    if masked:  # 0 · NaN is NaN
        tokens = tokens._replace(hidden=jnp.where(live[:, None], tokens.hidden, 0))
    targets, count, axis_name = tokens.column, len(tokens.column), settings.axis_name
    chunks = [
        (
            min(count, settings.chunk)
            if settings.chunk
            else _chunk_of_group(i, words, group.table.shape[1], count)
        )
        for i, (words, group) in enumerate(zip(sizes, groups, strict=True))
    ]
    rows = [*itertools.chain(*sizes)]
    tails, first_cluster = len(rows) - 1, rows[0]
    columns = all_words
    if clusters is None and tails:  # they stand in the head, see `_laid_out`
        first_cluster, columns = all_words[0], (all_words[0] + tails, *all_words[1:])
    exist = present(axis_name, rows, columns)
    starts = jnp.cumsum(jnp.array([0, *all_words]))
    band = jnp.searchsorted(starts[1:-1], targets, side="right")
    order, back, ends = _sorted(band, live, len(all_words))

    def in_order(
        array,
    ):  # with room for one chunk behind, so that a slice of one chunk is always in bounds
        array = array if order is None else array[order]
        return jnp.pad(array, [(0, max(chunks))] + [(0, 0)] * (array.ndim - 1))

    head_column = jnp.where(band == 0, targets, first_cluster + band - 1)
    tail_column = targets - starts[band]
    if axis_name is not None:
        head_column, tail_column = columns_here(
            axis_name, targets - starts[band], band, jnp.array(rows)
        )
    in_head = jax.tree.map(in_order, tokens._replace(column=head_column))
    in_tail = in_head._replace(column=in_order(tail_column))
    zeros = jnp.zeros_like(in_head.weight, jnp.float32)
    outcome = (
        zeros,
        zeros,
        jnp.zeros_like(in_head.hidden, jnp.float32) if with_gradients else None,
    )
    first, gradients = 0, []
    for group, words, chunk in zip(groups, sizes, chunks, strict=True):
        here = (
            in_dtype(group, tokens.hidden.dtype),
            None if first else in_dtype(clusters, tokens.hidden.dtype),
        )
        queue, spans = in_head, ([0], [ends[-1] if masked else count])
        own = settings._replace(chunk=chunk)
        if first:
            end = first + len(words)
            spans = (
                (ends[first - 1 : end - 1], ends[first:end])
                if len(words) > 1
                else ([ends[first - 1]], [ends[first]])
            )
            queue = in_tail
        else:  # the paper drops units after the first projection of every cluster but the head
            own = own._replace(tail_dropout=0.0)
        own_words = None if exist is None else exist[first : first + len(words)]
        run = flash_tails.visit if first and flash_tails.fits(own, here[0], len(words)) else _visit
        outcome, gradient = run(
            (own, words), here, queue, (*spans, own_words), outcome, with_gradients
        )
        gradients.append(gradient)
        first += len(words)

    loss_, nll_, d_hidden = jax.tree.map(lambda a: a[:count] if back is None else a[back], outcome)
    if not with_gradients:
        return _Report(loss_, nll_, None)
    d_softmax = tuple(d_group for d_group, _ in gradients), gradients[0][1]
    like = jax.tree.map(
        lambda g, of: g.astype(of.dtype), (d_hidden, d_softmax), (tokens.hidden, softmax)
    )
    return _Report(loss_, nll_, like)


def _sorted(band, live, bands):
    """Tokens by band, those that are not live behind all: `order`, its inverse, and the end of each
    band.

    live: bool `[tokens]`; None: all. Order and inverse are None where tokens stay where they are.
    """
    at = jnp.arange(len(band))
    if bands > 1:
        key = band if live is None else jnp.where(live, band, bands)
        order = jnp.argsort(key, stable=True)
        ends = jnp.searchsorted(key[order], jnp.arange(bands), side="right")
        return order, jnp.argsort(order), ends
    if live is None:
        return None, None, None
    done = jnp.cumsum(live)
    back = jnp.where(live, done - 1, done[-1] + at - done)
    return jnp.zeros_like(back).at[back].set(at, unique_indices=True), back, done[-1:]


def _visit(static, softmax, queue, spans, outcome, with_gradients):
    """Runs tokens through the bands of a group, a chunk at a time; band i takes
    `queue[begins[i]:ends[i]]`.

    `spans` is `(begins, ends, exist)`; band i has `exist[i]` words here, the rest of its rows being
    padding, or exist is None. Adds loss, nll and gradient of the hidden states to `outcome`, and
    returns it with the gradient of `softmax`.
    """
    settings, sizes = static
    chunk, (begins, ends, exist) = settings.chunk, spans
    narrow = (softmax[0].table.shape[1] < NARROW or halved(softmax[0].table)) and len(sizes) == 1
    total, which = trips(begins, ends, chunk)

    def visit_chunk(trip, state):
        outcome, (d_group, d_clusters) = state
        number, trip = which(trip)
        at = begins[number] + trip * chunk
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=at, slice_size=chunk)
        inside = at + jnp.arange(chunk) < ends[number]
        part = jax.tree.map(cut, queue)
        part = part._replace(weight=jnp.where(inside, part.weight, 0.0))
        member = Member(softmax[0], sizes, number, exist)
        part = part._replace(column=part.column + member.shift)
        band = member.read(softmax[0])
        results, gradient = one_chunk(
            settings,
            (band, softmax[1]),
            part,
            member.own,
            narrow=narrow,
            with_gradients=with_gradients,
        )

        # Rows behind the band's last token belong to the next band: they get 0 here and their own
        # chunk's result there.
        def put(whole, result):
            result = jnp.where(inside.reshape(-1, *[1] * (result.ndim - 1)), result, 0.0)
            return lax.dynamic_update_slice_in_dim(whole, cut(whole) + result, at, 0)

        outcome = jax.tree.map(put, outcome, results)
        if not with_gradients:
            return outcome, (None, None)
        return outcome, (
            member.add(d_group, gradient[0]),
            jax.tree.map(jnp.add, d_clusters, gradient[1]),
        )

    def transposed(gradient):
        band, clusters = gradient
        return (
            (band._replace(table=band.table.T), clusters) if with_gradients and narrow else gradient
        )

    zeros = (
        jax.tree.map(lambda a: jnp.zeros_like(a, jnp.float32), softmax)
        if with_gradients
        else (None, None)
    )
    outcome, sums = lax.fori_loop(0, total, visit_chunk, (outcome, transposed(zeros)))
    return outcome, transposed(sums)


def _chunk_of_group(index, sizes, width, tokens):
    """`chunk_size`, shared evenly by the tokens that all visit the head; about twice the tokens
    that a band of a group gets.
    """
    most = chunk_size(index, max(1, *sizes), width)
    if index == 0:
        return rows_of_chunk(tokens, most)
    return (
        min(tokens, most)
        if len(sizes) == 1
        else min(tokens, most, max(8, 2 ** math.ceil(math.log2(2 * tokens / len(sizes)))))
    )
