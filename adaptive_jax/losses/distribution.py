"""Log-probabilities of all words, from the bands of `adaptive_jax.losses.banded`."""

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses.chunks import logits_of, project
from adaptive_jax.losses.given import given
from adaptive_jax.losses.groups import Member, join
from adaptive_jax.numerics.bands import Band


def log_probs(hidden, bands, clusters=None):
    """Log-probabilities `[..., vocabulary]` of every word, normalised, in float32.

    Builds the matrix that it returns: give it only the rows of `hidden [..., features]` that are
        needed.

    Raises:
        InputError: shapes that do not fit.
    """
    hidden, bands, clusters = given(hidden, bands, clusters)
    shape, hidden = hidden.shape[:-1], hidden.reshape(-1, hidden.shape[-1])
    sizes, (head, *tails) = join(bands)
    head = of_head(hidden, head, clusters)
    done, columns = sizes[0][0], [head[:, : sizes[0][0]]]
    for group, words in zip(tails, sizes[1:], strict=True):
        reached = head[:, done : done + len(words)]
        columns.append(_log_probs_of_group(hidden, in_dtype(group, hidden.dtype), words, reached))
        done += len(words)
    return jnp.concatenate(columns, axis=1).reshape(*shape, -1)


def of_head(hidden, head, clusters):
    """Log-probabilities `[tokens, words + tails]` of the head's words and of its tails, for
    `hidden [tokens, features]`.
    """
    first, *rest = [in_dtype(band, hidden.dtype) for band in (head, clusters) if band is not None]
    x = project(hidden, first.projection)
    return jax.nn.log_softmax(
        jnp.concatenate([logits_of(x, band) for band in (first, *rest)], axis=1), axis=1
    )


def of_member(hidden, group, member):
    """Log-probabilities `[tokens, rows]` of a tail's words within the tail, for the rows of its
    group that `member` reads.

    Rows that are a neighbour's have -inf.
    """
    band = in_dtype(member.read(group), hidden.dtype)
    logits = logits_of(project(hidden, band.projection), band)
    return jax.nn.log_softmax(
        logits if member.own is None else jnp.where(member.own[None], logits, -jnp.inf), axis=1
    )


def _log_probs_of_group(hidden, group, sizes, reached):
    """Log-probabilities `[tokens, words]` of a group of tails; `reached [tokens, tails]` are
    those of the tails in the head.
    """

    def visit(number, out):
        member = Member(group, sizes, number)
        values = lax.dynamic_slice_in_dim(reached, number, 1, axis=1) + of_member(
            hidden, group, member
        )
        if member.own is None:
            return values
        here = lax.dynamic_slice_in_dim(out, member.first, values.shape[1], axis=1)
        return lax.dynamic_update_slice_in_dim(
            out, jnp.where(member.own[None], values, here), member.first, axis=1
        )

    out = jnp.zeros((len(hidden), sum(sizes)), jnp.float32)
    return visit(0, out) if len(sizes) == 1 else lax.fori_loop(0, len(sizes), visit, out)


def in_dtype(band, dtype):
    """The band in the dtype of the products; the bias is added in float32."""
    if band is None:
        return None
    table, projection, bias = band
    return Band(table.astype(dtype), None if projection is None else projection.astype(dtype), bias)
