"""Log-probabilities of all words, and the most probable one, from the bands of
`adaptive_jax.losses.banded`.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses.arguments import validate_bands
from adaptive_jax.losses.groups import Slice, band_slice, in_dtype, join, read_band
from adaptive_jax.numerics.arrays import in_chunks
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.meshes import axes_of, by_token, pvary
from adaptive_jax.numerics.products import product, wide

LOGITS = 2**25  # most float32 logits that exist at a time in `predict`: 128 MiB
TAIL_ROWS = 64  # most tokens of a chunk of a tail: few need it, and a chunk is computed whole


def project(hidden: jax.Array, projection: jax.Array | None) -> jax.Array:
    """Hidden states `[tokens, features]` in the width of a band."""
    return hidden if projection is None else product(hidden, projection.T)


def logits_of(x: jax.Array, band: Band) -> jax.Array:
    """Logits `[tokens, words]`, float32 or wider, of projected states `[tokens, width]`."""
    logits = wide(x, band.table.T)
    return logits if band.bias is None else logits + band.bias[None].astype(logits.dtype)


def log_probs(hidden, bands, clusters=None):
    """Log-probabilities `[..., vocabulary]` of every word, normalised, in float32, or float64 for
    hidden states of float64.

    Allocates the whole result: pass only the needed rows of `hidden [..., features]`.

    Raises:
        InputError: mismatched shapes.
    """
    hidden, bands, clusters = validate_bands(hidden, bands, clusters)
    return by_token(_log_probs, hidden, (bands, clusters))


def _log_probs(hidden, softmax):
    bands, clusters = softmax
    shape, hidden = hidden.shape[:-1], hidden.reshape(-1, hidden.shape[-1])
    sizes, (head, *tails) = join(bands)
    head = of_head(hidden, head, clusters)
    end, columns = sizes[0][0], [head[:, : sizes[0][0]]]
    for group, words in zip(tails, sizes[1:], strict=True):
        reached = head[:, end : end + len(words)]
        columns.append(_log_probs_of_group(hidden, in_dtype(group, hidden.dtype), words, reached))
        end += len(words)
    return jnp.concatenate(columns, axis=1).reshape(*shape, -1)


def of_head(hidden, head, clusters):
    """Log-probabilities `[tokens, words + tails]` of the head's words and of the tails, for
    `hidden [tokens, features]`.
    """
    first, *rest = [in_dtype(band, hidden.dtype) for band in (head, clusters) if band is not None]
    x = project(hidden, first.projection)
    logits = [logits_of(x, band) for band in (first, *rest)]
    return jax.nn.log_softmax(jnp.concatenate(logits, axis=1), axis=1)


def of_member(hidden, group, member: Slice):
    """Log-probabilities `[tokens, rows]` of a tail's words within the tail, for the rows of a slice
    of its group; -inf for rows of a neighbour.
    """
    band = in_dtype(read_band(group, member), hidden.dtype)
    logits = logits_of(project(hidden, band.projection), band)
    if member.valid is not None:
        logits = jnp.where(member.valid[None], logits, -jnp.inf)
    return jax.nn.log_softmax(logits, axis=1)


def _log_probs_of_group(hidden, group, sizes, reached):
    """Log-probabilities `[tokens, words]` of a group of tails, from the log-probabilities
    `reached [tokens, tails]` of the tails in the head.
    """

    def visit(number, out):
        member = band_slice(group, sizes, number)
        values = lax.dynamic_slice_in_dim(reached, number, 1, axis=1)
        values += of_member(hidden, group, member)
        if member.valid is None:
            return values
        earlier = lax.dynamic_slice_in_dim(out, member.first, values.shape[1], axis=1)
        values = jnp.where(member.valid[None], values, earlier)
        return lax.dynamic_update_slice_in_dim(out, values, member.first, axis=1)

    out = jnp.zeros((len(hidden), sum(sizes)), reached.dtype)
    out = pvary(out, axes_of((hidden, group, reached)))
    return visit(0, out) if len(sizes) == 1 else lax.fori_loop(0, len(sizes), visit, out)


class _Best(NamedTuple):
    value: jax.Array  # [tokens], log-probability of the best word so far
    word: jax.Array  # [tokens], its id


def predict(hidden, bands, clusters=None) -> jax.Array:
    """The most probable word of each token, int32 `[...]`; the smallest id in a tie.

    It is the argmax of `log_probs`, without that matrix. No word of a tail is more probable than
    its tail, so a tail is computed only for tokens whose best word so far is less probable than the
    tail. Shapes are static: a loop whose trip count depends on the data visits those tokens. A
    token of NaN gets word 0.

    Args:
        hidden: `[..., features]`.
        bands, clusters: see `adaptive_jax.losses.banded`.

    Raises:
        InputError: mismatched shapes.
    """
    hidden, bands, clusters = validate_bands(hidden, bands, clusters)
    return by_token(_predicted, hidden, (bands, clusters))[..., 0]


def _predicted(hidden, softmax):
    """`predict [..., 1]`, with a last axis in place of the features."""
    bands, clusters = softmax
    shape, hidden = hidden.shape[:-1], hidden.reshape(-1, hidden.shape[-1])
    sizes, (head, *tails) = join(bands)
    best, reached = _of_head(hidden, head, clusters)
    tail, first = 0, sizes[0][0]
    for group, members in zip(tails, sizes[1:], strict=True):
        group = in_dtype(group, hidden.dtype)

        def visit(number, best, group=group, members=members, tail=tail, first=first):
            member = band_slice(group, members, number)
            reach = lax.dynamic_index_in_dim(reached, tail + number, axis=1, keepdims=False)
            return _of_tail(hidden, (group, member, first), reach, best)

        best = lax.fori_loop(0, len(members), visit, best) if members[1:] else visit(0, best)
        tail, first = tail + len(members), first + sum(members)
    return best.word.reshape(*shape, 1)


def _of_head(hidden, head, clusters):
    """The best of the head's words, and the log-probabilities `[tokens, tails]` of the tails."""
    words, count = len(head.table), len(hidden)
    rows = _rows(count, words)

    def visit(part):
        values = of_head(part, head, clusters)
        if not words:  # a head of tails alone
            nothing = jnp.full(len(part), -jnp.inf, values.dtype), jnp.zeros(len(part), jnp.int32)
            return _Best(*pvary(nothing, axes_of(values))), values
        return _best(values[:, :words]), values[:, words:]

    parts = lax.map(visit, in_chunks(hidden, rows))
    return jax.tree.map(lambda a: lax.collapse(a, 0, 2)[:count], parts)


def _of_tail(hidden, tail, reach, best):
    """Updates the best words by a tail `(group, member, first word of the group)`, whose
    log-probabilities are `reach [tokens]`.
    """
    group, member, first = tail
    count = len(hidden)
    largest = len(group.table) if member.valid is None else len(member.valid)
    rows = _rows(min(count, TAIL_ROWS), largest)
    reachable = reach > best.value
    # Tokens that need the tail, followed by the index of no token.
    order = jnp.nonzero(reachable, size=count + rows, fill_value=count)[0]

    def visit(trip, best):
        places = lax.dynamic_slice_in_dim(order, trip * rows, rows)
        values = of_member(hidden.at[places].get(mode="clip"), group, member)
        values += reach.at[places].get(mode="clip")[:, None]
        value, column = _best(values)
        places = jnp.where(value > best.value.at[places].get(mode="clip"), places, count)
        word = (first + member.first + column).astype(jnp.int32)
        word = best.word.at[places].set(word, mode="drop")
        return _Best(best.value.at[places].set(value, mode="drop"), word)

    return lax.fori_loop(0, (reachable.sum() + rows - 1) // rows, visit, best)


def _best(values):
    """The best column of each row of `values [rows, n]`, the first of equal ones."""
    column = values.argmax(axis=1)
    value = jnp.take_along_axis(values, column[:, None], axis=1)[:, 0]
    return _Best(value, column.astype(jnp.int32))


def _rows(count, words):
    """Tokens of a chunk, in chunks of equal size with at most `LOGITS` logits over the words."""
    limit = max(1, LOGITS // max(1, words))
    return math.ceil(count / math.ceil(count / limit))
