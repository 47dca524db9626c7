"""One chunk of tokens through one softmax, with its share of every gradient: the inner part of `adaptive_jax.outputs.banded`."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_jax import dropout


class Regularisation(NamedTuple):
    """What a training loss may add to the plain negative log-likelihood; every field 0 adds nothing.

    `tail_dropout`: rate of dropout after the first projection of every tail (Baevski & Auli 2019, section 5.4).
    `label_smoothing`: share of the target's probability that is spread evenly over the columns of each softmax the
    token visits (the head, and the tail of its word), hence over the whole vocabulary for a full softmax.
    `z_loss`: weight of the squared log-normaliser of each softmax the token visits.
    """

    tail_dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0


PLAIN = Regularisation()


class Tokens(NamedTuple):
    """Tokens that wait for a softmax, or a chunk of them.

    `hidden [tokens, features]`; `column [tokens]`: the column that the token scores; `weight [tokens]`; `seeds`: uint32
    `[tokens, 2]`, those of the token's dropout, or None.
    """

    hidden: jax.Array
    column: jax.Array
    weight: jax.Array
    seeds: jax.Array | None


class Softmax(NamedTuple):
    """The rows that one softmax compares with, or their gradients.

    `table [words, width]`; `projection [width, features]` or None; `clusters [tails, width]`, the head's further rows, or None.
    """

    table: jax.Array
    projection: jax.Array | None
    clusters: jax.Array | None


def project(hidden, projection):
    """Hidden states `[tokens, features]` in the width of a band."""
    return hidden if projection is None else jnp.dot(hidden, projection.T)


def logits_of(x, rows):
    """Float32 logits `[tokens, words]` of projected states `[tokens, width]` and `rows [words, width]`."""
    return jnp.dot(x, rows.T, preferred_element_type=jnp.float32)


def one_chunk(settings, softmax, tokens, narrow, with_gradients):
    """Loss and gradients of one chunk.

    Returns:
        `((loss, nll, d_hidden), d_softmax)`: `loss` and `nll [tokens]` of each token, the gradients weighted and in float32, that
        of the table as its transpose if `narrow`. Without gradients `d_hidden` and `d_softmax` are None.
    """
    hidden, column, weight, seeds = tokens
    table, projection, clusters = softmax
    words = table.shape[0]
    kept = _kept(settings.tail_dropout, seeds, table.shape[1]) if settings.tail_dropout else 1.0
    x = (project(hidden, projection) * kept).astype(hidden.dtype)
    parts = [(logits_of(x, rows), rows, first) for rows, first in ((table, 0), (clusters, words)) if rows is not None]

    columns = sum(rows.shape[0] for _, rows, _ in parts)
    scored = sum(_at(logits, column - first) for logits, _, first in parts)
    peak = functools.reduce(jnp.maximum, [logits.max(axis=1) for logits, _, _ in parts])
    powers = [jnp.exp(logits - peak[:, None]) for logits, _, _ in parts]
    total = sum(power.sum(axis=1) for power in powers)
    normaliser = peak + jnp.log(total)
    nll = normaliser - scored
    share, loss = settings.label_smoothing, nll
    if share:
        mean = sum(logits.sum(axis=1) for logits, _, _ in parts) / columns
        loss = normaliser - (1 - share) * scored - share * mean
    if settings.z_loss:
        loss = loss + settings.z_loss * normaliser**2
    if not with_gradients:
        return (loss, nll, None), None

    # softmax - target times the sum of the powers: what differs by token alone is multiplied into its vectors, which are short.
    scale = weight / total
    scaled = (x * scale[:, None]).astype(x.dtype)
    d_x, d_rows = 0.0, []
    for power, (_, rows, first) in zip(powers, parts, strict=True):
        hit = column[:, None] == first + jnp.arange(rows.shape[0])[None]
        target = (1 - share) * hit + share / columns
        if settings.z_loss:
            power = power * (1 + 2 * settings.z_loss * normaliser)[:, None]
        d_logits = (power - total[:, None] * target).astype(x.dtype)
        d_x += jnp.dot(d_logits, rows, preferred_element_type=jnp.float32)
        sides = (scaled, d_logits) if narrow and rows is table else (d_logits, scaled)
        d_rows.append(jnp.dot(sides[0].T, sides[1], preferred_element_type=jnp.float32))
    d_x = d_x * scale[:, None] * kept
    d_table, d_clusters = d_rows if clusters is not None else (*d_rows, None)
    if projection is None:
        return (loss, nll, d_x), Softmax(d_table, None, d_clusters)
    d_x = d_x.astype(x.dtype)
    d_hidden = jnp.dot(d_x, projection, preferred_element_type=jnp.float32)
    d_projection = jnp.dot(d_x.T, hidden, preferred_element_type=jnp.float32)
    return (loss, nll, d_hidden), Softmax(d_table, d_projection, d_clusters)


def _at(logits, column):
    """`logits[i, column[i]]` for every row i, 0 where the column lies outside."""
    picked = jnp.take_along_axis(logits, column[:, None], axis=1, mode="fill", fill_value=0.0)[:, 0]
    return jnp.where(column < 0, 0.0, picked)  # a negative column counts from the end


def _kept(rate, seeds, width):
    """Dropout's factors `[tokens, width]` of the tokens with these seeds."""
    return dropout.kept(seeds, dropout.places((width,)), rate) / (1 - rate)
