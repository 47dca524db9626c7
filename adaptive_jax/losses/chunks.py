"""One chunk of tokens through one softmax, with its share of every gradient: the inner part of
`adaptive_jax.losses.banded`.
"""

import functools
import math
import numbers
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.errors import InputError, check_at_least, check_known, check_rates
from adaptive_jax.losses.sharded import is_first, sum_over
from adaptive_jax.numerics import dropout
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.platforms import platform
from adaptive_jax.numerics.products import product, wide

# Tokens whose logits are alive at a time, measured on a CPU (benchmarks/outputs.py). Every token
# visits the head, whose matrix products need many rows for full speed. A tail computes the rows of
# its last chunk that stay empty, so its chunks are smaller. Each chunk reads the whole table and
# adds to its gradient, so small chunks are slow. The logits of very long bands are held to 2^25
# float32, 128 MiB, or to a quarter of the table's size, if that is more.
HEAD_CHUNK = 512
TAIL_CHUNK = 96
CHUNK_LOGITS = 2**25
TABLE_SHARE = 4

# For accelerators, computed and not yet measured. For a word of width 1, a chunk of n rows computes
# 6 n FLOP and adds once to the sum of the gradients, 8 to 16 bytes. At 180 FLOP a byte (an H200 in
# bfloat16) that takes as long as 240 to 480 rows do: the head has ten times as many, and a tail of
# 800 tokens loses least to sums and empty rows together at sqrt(2 · 800 · 240) = 620 rows.
FAST_HEAD_CHUNK = 4096
FAST_TAIL_CHUNK = 512
FAST_CHUNK_LOGITS = 2**26
TILE = 128  # rows and columns of a matrix unit

TAILS = ("auto", "chunks")


class Settings(NamedTuple):
    """Static settings of the core. The defaults give the plain negative log-likelihood.

    Attributes:
        tail_dropout: rate of dropout after the projection of every tail (Baevski & Auli 2019,
            section 5.4).
        label_smoothing: share of the target's probability that is spread evenly over the columns of
            each softmax the token visits (the head, and the tail of its word), hence over the whole
            vocabulary for a full softmax.
        z_loss: weight of the squared log-normaliser of each softmax the token visits.
        chunk: tokens whose logits are alive at a time; None chooses a size for each softmax.
        soft_cap: every logit becomes `soft_cap · tanh(logit / soft_cap)` (Gemma 2, section 2);
            None: it stays.
        axis_name: the axis of `jax.shard_map` that cuts the words of every band, see
            `adaptive_jax.losses.sharded`; None: none.
        words: words of every band, whose table may have rows behind them, on all devices, that are
            padding; None: no padding.
        tails: "auto" computes a tail by kernels where they run
            (`adaptive_jax.losses.flash_tails`); "chunks" nowhere.
    """

    tail_dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    chunk: int | None = None
    soft_cap: float | None = None
    axis_name: str | None = None
    words: tuple[int, ...] | None = None
    tails: str = "auto"

    def check(self) -> None:
        """Checks the ranges of all settings.

        Raises:
            InputError: a rate or label_smoothing outside [0, 1), a z_loss that is negative or
                infinite, a chunk of no token, a soft_cap that is not above 0, or an unknown way for
                tails.
        """
        check_rates(self, "tail_dropout", "label_smoothing")
        if not isinstance(self.z_loss, numbers.Real) or not 0 <= self.z_loss < math.inf:
            raise InputError(f"z_loss={self.z_loss!r} is no weight: give 0 or more")
        check_known(f"tails={self.tails!r}", self.tails, TAILS)
        if self.chunk is not None:
            check_at_least(1, chunk=self.chunk)
        cap = self.soft_cap
        if cap is not None and (
            isinstance(cap, bool) or not isinstance(cap, numbers.Real) or not 0 < cap < math.inf
        ):
            raise InputError(
                f"soft_cap={cap!r} is no cap: give a number above 0, or None for no cap"
            )


PLAIN = Settings()


class Tokens(NamedTuple):
    """Tokens that wait for a softmax, or a chunk of them.

    Attributes:
        hidden: `[tokens, features]`.
        column: `[tokens]`, the column of the target in the softmax.
        weight: `[tokens]`.
        seeds: uint32 `[tokens, 2]`, the seeds of each token's tail dropout, or None.
    """

    hidden: jax.Array
    column: jax.Array
    weight: jax.Array
    seeds: jax.Array | None


def chunk_size(band: int, words: int, width: int, backend: str | None = None) -> int:
    """Tokens whose logits are alive at a time in a band of so many words, whose vectors have this
    width; band 0 is the head.

    On a CPU 512 for a head of 20,000 words, 96 for a tail; on an accelerator 3,328 and 512.
    `backend`: by default the platform that the program is traced for.
    """
    if (backend or platform()) == "cpu":
        return max(
            8,
            min(
                TAIL_CHUNK if band else HEAD_CHUNK, max(CHUNK_LOGITS // words, width // TABLE_SHARE)
            ),
        )
    rows = min(FAST_TAIL_CHUNK if band else FAST_HEAD_CHUNK, FAST_CHUNK_LOGITS // words)
    return rows // TILE * TILE or max(8, rows)


def rows_of_chunk(tokens: int, most: int, backend: str | None = None) -> int:
    """Rows of each of the chunks that hold so many tokens, at most `most` in each.

    On a CPU `most`, or all tokens if they are fewer. On an accelerator as few chunks as suffice
    share the tokens evenly, in whole tiles of 128: of 4,096 tokens and at most 3,328, two chunks
    have 2,048 rows each. `backend`: by default JAX's.
    """
    if (backend or platform()) == "cpu" or tokens <= most:
        return min(tokens, most)
    share = math.ceil(tokens / math.ceil(tokens / most))
    return min(most, math.ceil(share / TILE) * TILE)


def project(hidden: jax.Array, projection: jax.Array | None) -> jax.Array:
    """Hidden states `[tokens, features]` in the width of a band."""
    return hidden if projection is None else product(hidden, projection.T)


def logits_of(x: jax.Array, band: Band) -> jax.Array:
    """Float32 logits `[tokens, words]` of states `[tokens, width]` that are already projected."""
    logits = wide(x, band.table.T)
    return logits if band.bias is None else logits + band.bias[None].astype(jnp.float32)


def one_chunk(settings, softmax, tokens, own=None, *, narrow=False, with_gradients=True):
    """Loss and gradients of one chunk.

    Args:
        softmax: `(band, clusters)`, both of type `Band`; `clusters` holds further rows of the head,
            or is None.
        own: bool `[words]`, the columns of the band that exist; None: all. The others are words of
            a neighbour, or padding.
        narrow: return the gradient of the band's table as its transpose.

    Returns:
        `((loss, nll [tokens], d_hidden), d_softmax)`: gradients are weighted and in float32, or
        None if not asked for.
    """
    hidden, column, weight, seeds = tokens
    band, _ = softmax
    mask = (
        _scaled_mask(settings.tail_dropout, seeds, band.table.shape[1])
        if settings.tail_dropout
        else 1.0
    )
    x = (project(hidden, band.projection) * mask).astype(hidden.dtype)
    parts = _parts(settings, x, softmax, own)
    loss, nll, found = _losses(settings, parts, column)
    if not with_gradients:
        return (loss, nll, None), None

    # softmax - target times the sum of the powers: factors of a whole token are multiplied into its
    # vectors, which are short.
    scale = weight / found.total
    scaled = (x * scale[:, None]).astype(x.dtype)
    overwrites = platform() == "gpu" and not (
        settings.label_smoothing or settings.z_loss or settings.soft_cap
    )
    d_x, d_parts = 0.0, []
    for power, part in zip(found.powers, parts, strict=True):
        rows = part.band
        if overwrites and rows.bias is None:
            d_logits = _overwritten(power.astype(x.dtype), power, column - part.first, found.total)
        else:
            exact = _scaled_d_logits(settings, power, part, column, found)
            d_logits = exact.astype(x.dtype)
        d_x += wide(d_logits, rows.table)
        left, right = (scaled, d_logits) if narrow and rows is band else (d_logits, scaled)
        d_table = wide(left.T, right)
        d_parts.append(
            Band(
                d_table,
                None,
                None if rows.bias is None else jnp.sum(exact * scale[:, None], axis=0),
            )
        )
    d_x = d_x * scale[:, None] * mask
    d_band, d_clusters = (*d_parts, None)[:2]
    if band.projection is None:
        return (loss, nll, d_x), (d_band, d_clusters)
    d_x = d_x.astype(x.dtype)
    d_hidden = wide(d_x, band.projection)
    d_projection = wide(d_x.T, hidden)
    return (loss, nll, d_hidden), (d_band._replace(projection=d_projection), d_clusters)


class _Part(NamedTuple):
    """Columns of a softmax: the words of a band, or the head's clusters."""

    logits: jax.Array  # [tokens, columns]
    band: Band
    first: int  # the first column
    own: jax.Array | None  # bool [columns], those that exist; None: all


class _Normaliser(NamedTuple):
    """The sum over all columns, on all devices, of the powers of one softmax."""

    powers: list[jax.Array]  # of each part, divided by the power of the largest logit
    total: jax.Array  # [tokens]
    logsumexp: jax.Array  # [tokens]
    columns: jax.Array | int  # how many there are


def _parts(settings, x, softmax, own):
    band, clusters = softmax
    parts = [_Part(logits_of(x, band), band, 0, own)]
    if clusters is not None:
        first = (
            None
            if settings.axis_name is None
            else jnp.full(len(clusters.table), is_first(settings.axis_name))
        )
        parts.append(_Part(logits_of(x, clusters), clusters, len(band.table), first))
    if settings.soft_cap:
        parts = [
            part._replace(logits=settings.soft_cap * jnp.tanh(part.logits / settings.soft_cap))
            for part in parts
        ]
    return [part._replace(logits=_where(part.own, part.logits, -jnp.inf)) for part in parts]


def _losses(settings, parts, column):
    """Loss and nll `[tokens]`, and the normaliser."""
    scored = sum(_at(part.logits, column - part.first) for part in parts)
    peak = functools.reduce(
        jnp.maximum, [part.logits.max(axis=1) for part in parts if part.logits.size]
    )
    peak = peak if settings.axis_name is None else lax.pmax(peak, settings.axis_name)
    powers = [jnp.exp(part.logits - peak[:, None]) for part in parts]
    total = sum(power.sum(axis=1) for power in powers)
    share, mine, columns = settings.label_smoothing, (), 1
    if share:
        counts = [len(part.band.table) if part.own is None else part.own.sum() for part in parts]
        mine = (
            sum(_where(part.own, part.logits, 0.0).sum(axis=1) for part in parts),
            functools.reduce(operator.add, counts),
        )
    total, scored, *smoothed = sum_over(settings.axis_name, total, scored, *mine)
    logsumexp = peak + jnp.log(total)
    loss = nll = logsumexp - scored
    if share:
        sums, columns = smoothed
        columns = (
            columns if settings.axis_name is None else columns[0]
        )  # it was summed beside vectors of tokens
        loss = logsumexp - (1 - share) * scored - share * (sums / columns)
    if settings.z_loss:
        loss = loss + settings.z_loss * logsumexp**2
    return loss, nll, _Normaliser(powers, total, logsumexp, columns)


def _scaled_d_logits(settings, power, part, column, found):
    """The gradient of a part's logits `[tokens, columns]`, times the sum of the powers."""
    share = settings.label_smoothing
    hit = column[:, None] == part.first + jnp.arange(len(part.band.table))[None]
    target = (1 - share) * hit + share / found.columns
    if share:
        target = _where(part.own, target, 0.0)
    if settings.z_loss:
        power = power * (1 + 2 * settings.z_loss * found.logsumexp)[:, None]
    exact = power - found.total[:, None] * target
    if settings.soft_cap:
        exact = exact * _where(part.own, 1 - (part.logits / settings.soft_cap) ** 2, 0.0)
    return exact


def _overwritten(rounded, power, column, total):
    """`_scaled_d_logits` of a plain softmax, from rounded powers in which only the targets' are
    written anew.

    On a GPU the pass that sums the powers writes them rounded, too, so none reads the logits once
    more: of 1.5 GB that a chunk of 3,328 tokens and 20,000 words moves, 0.27. The numbers are the
    same.
    """
    column = jnp.where(
        column < 0, power.shape[1], column
    )  # a negative one would count from the end
    target = jnp.take_along_axis(power, column[:, None], axis=1)[:, 0] - total
    at = rounded.at[jnp.arange(len(column)), column]
    return at.set(target.astype(rounded.dtype), mode="drop", unique_indices=True)


def _where(own, values, other):
    """`values [tokens, words]` in the columns that exist, `other` elsewhere."""
    return values if own is None else jnp.where(own[None], values, other)


def _at(logits, column):
    """`logits[i, column[i]]` for every row i, 0 where the column lies outside."""
    picked = jnp.take_along_axis(logits, column[:, None], axis=1, mode="fill", fill_value=0.0)[:, 0]
    return jnp.where(
        column < 0, 0.0, picked
    )  # take_along_axis counts a negative column from the end


def _scaled_mask(rate, seeds, width):
    """Dropout's factors `[tokens, width]` of the tokens with these seeds."""
    return dropout.keep_mask(seeds, dropout.positions((width,)), rate) / (1 - rate)
