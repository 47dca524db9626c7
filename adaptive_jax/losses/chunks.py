"""One chunk of tokens through one softmax, with its share of every gradient: the inner part of
`adaptive_jax.losses.banded`.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses import reports
from adaptive_jax.losses.settings import Tokens, used
from adaptive_jax.losses.sharded import is_first, sum_over
from adaptive_jax.numerics import dropout
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.platforms import platform
from adaptive_jax.numerics.products import product, sum_dtype, wide

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

# Smoothed differences of probabilities times this keep their 11 bits in float16, from 2^-24 on; the
# largest number of float16 is 64 times as large.
LIFT = 1024
LEAST = 1e-30  # divided by LIFT it is a normal float32


def chunk_size(band: int, words: int, width: int) -> int:
    """Tokens whose logits are alive at a time in a band of so many words, whose vectors have this
    width; band 0 is the head.

    On a CPU 512 for a head of 20,000 words, 96 for a tail; on an accelerator 3,328 and 512.
    """
    if platform() == "cpu":
        fit = max(CHUNK_LOGITS // words, width // TABLE_SHARE)
        return max(8, min(TAIL_CHUNK if band else HEAD_CHUNK, fit))
    rows = min(FAST_TAIL_CHUNK if band else FAST_HEAD_CHUNK, FAST_CHUNK_LOGITS // words)
    return rows // TILE * TILE or max(8, rows)


def rows_of_chunk(tokens: int, most: int) -> int:
    """Rows of each of the chunks that hold so many tokens, at most `most` in each.

    On a CPU `most`, or all tokens if they are fewer. On an accelerator as few chunks as suffice
    share the tokens evenly, in whole tiles of 128: of 4,096 tokens and at most 3,328, two chunks
    have 2,048 rows each.
    """
    if platform() == "cpu" or tokens <= most:
        return min(tokens, most)
    share = math.ceil(tokens / math.ceil(tokens / most))
    return min(most, math.ceil(share / TILE) * TILE)


def project(hidden: jax.Array, projection: jax.Array | None) -> jax.Array:
    """Hidden states `[tokens, features]` in the width of a band."""
    return hidden if projection is None else product(hidden, projection.T)


def logits_of(x: jax.Array, band: Band) -> jax.Array:
    """Logits `[tokens, words]`, float32 or wider, of projected states `[tokens, width]`."""
    logits = wide(x, band.table.T)
    return logits if band.bias is None else logits + band.bias[None].astype(logits.dtype)


def one_chunk(settings, softmax, tokens, valid=None, *, narrow=False, with_gradients=True):
    """Loss and gradients of one chunk.

    Args:
        softmax: `(band, clusters)`, both of type `Band`; `clusters` holds further rows of the head,
            or is None.
        valid: bool `[words]`, the columns of the band that exist; None: all. The others are words
            of a neighbour, or padding.
        narrow: return the gradient of the band's table as its transpose.

    Returns:
        `((loss, nll [tokens], d_hidden, *reported), d_softmax)`: gradients are weighted and in
        float32, or wider, or None if not asked for; `reported` is empty, or what
        `reports.observed` gives.
    """
    band, clusters = softmax
    x, mask = states(settings, tokens, band)
    parts = [part_of(settings, x, band, 0, valid)]
    if clusters is not None:
        parts.append(part_of_clusters(settings, x, softmax))
    loss, nll, found = _losses(settings, parts, tokens.column, tokens.probs)
    reported = ()
    if settings.reports:
        stats = reports.start(settings, x)
        for part in (part for part in parts if part.logits.shape[1]):  # a head may have no words
            stats = reports.merge(stats, part.logits, part.first)
        columns = sum(len(part.band.table) for part in parts)
        reported = (reports.observed(settings, stats, found, tokens.column, columns),)
        found = found._replace(entropy=reported[0].get("entropy"))
    if not with_gradients:
        return (loss, nll, None, *reported), None

    gradients = Gradients(settings, x, tokens, found)
    d_x, d_parts = 0.0, []
    for power, part in zip(gradients.found.powers, parts, strict=True):
        d_logits, d_bias = gradients.of_logits(power, part, tokens.column)
        d_x += wide(d_logits, part.band.table)
        left, right = d_logits, gradients.states
        if narrow and part.band is band:
            left, right = right, left
        d_parts.append(Band(gradients.lowered(wide(left.T, right)), None, d_bias))
    d_band, d_clusters = (*d_parts, None)[:2]
    d_x = gradients.of_states(d_x) * mask
    d_hidden, d_projection = through_projection(d_x, tokens.hidden, band.projection)
    d_softmax = d_band._replace(projection=d_projection), d_clusters
    return (loss, nll, d_hidden, *reported), d_softmax


def states(settings, tokens: Tokens, band: Band) -> tuple:
    """What meets the table, `[tokens, width]`: hidden states, projected and dropped out; and the
    factors of dropout, or 1.
    """
    x = project(tokens.hidden, band.projection)
    rate = settings.tail_dropout
    if not rate:
        return x, 1.0
    mask = dropout.keep_mask(tokens.seeds, dropout.positions(x.shape[1:]), rate)
    mask = mask.astype(sum_dtype(x.dtype)) / (1 - rate)
    return x * mask.astype(x.dtype), mask


def through_projection(d_x, hidden, projection) -> tuple:
    """The float32 gradients of hidden states and projection, from that of the states that meet the
    table.
    """
    if projection is None:
        return d_x, None
    d_x, lowering = lifted(d_x, hidden.dtype)
    return wide(d_x, projection) * lowering, wide(d_x.T, hidden) * lowering


def lifted(array, dtype) -> tuple:
    """A float32 array in the dtype of a product, and the factor of the product that makes up for
    it: in float16 the array is divided, so that its largest number is `LIFT`.
    """
    if dtype != jnp.float16:
        return array.astype(dtype), 1.0
    lowering = jnp.maximum(jnp.max(jnp.abs(array)), LEAST) / LIFT
    return (array / lowering).astype(dtype), lowering


class Gradients:
    """Gradients of a chunk's softmax.

    That of a logit is `factor · (power - target)`, with powers and targets times the sum of the
    powers, and one factor for each token. Factors are multiplied into a token's vectors, which are
    short, not into its logits.

    In float16 a sum of powers may be infinite and a small weight 0. So powers become probabilities,
    weights at most 1, and gradients of logits are lifted by `LIFT` before the products and lowered
    after them.

    Attributes:
        found: the `Normaliser`.
        states: the states `x [tokens, width]` times their token's factor.
    """

    def __init__(self, settings, x, tokens: Tokens, found: "Normaliser"):
        by_token = tokens.weight if tokens.pulls is None else tokens.pulls
        self._lowering = None
        if x.dtype == jnp.float16:
            powers = [power / found.total[:, None] for power in found.powers]
            found = found._replace(powers=powers, total=jnp.ones_like(found.total))
            largest = jnp.maximum(jnp.max(jnp.abs(by_token)), LEAST)
            by_token, self._lowering = by_token / largest, largest / LIFT
        if tokens.pulls is not None:
            tokens, by_token = tokens._replace(pulls=by_token), 1.0
        self._settings, self._tokens, self._dtype = settings, tokens, x.dtype
        self.found, self._factor = found, (by_token / found.total)[:, None]
        self.states = (x.astype(self._factor.dtype) * self._factor).astype(x.dtype)

    def of_logits(self, power, part: "Part", column) -> tuple:
        """Those of a part's logits `[tokens, columns]`, less the factors, in the dtype of the
        states; and that of its bias.
        """
        if part.band.bias is None and self._is_plain():
            target = column - part.first
            return _overwritten(power.astype(self._dtype), power, target, self.found.total), None
        exact = scaled_d_logits(self._settings, power, part, column, self.found, self._tokens)
        if self._lowering is not None:
            exact = exact * LIFT
        d_bias = None
        if part.band.bias is not None:
            d_bias = self.lowered(jnp.sum(exact * self._factor, axis=0))
        return exact.astype(self._dtype), d_bias

    def of_states(self, d_x):
        """Those of the states, from the products of gradients of logits with the rows."""
        return self.lowered(d_x * self._factor)

    def lowered(self, product):
        """A product with gradients of logits, as it would be had these not been lifted."""
        return product if self._lowering is None else product * self._lowering

    def _is_plain(self):
        """Whether `_overwritten` computes gradients of logits."""
        settings, tokens = self._settings, self._tokens
        regularised = settings.label_smoothing or used(settings.z_loss) or used(settings.soft_cap)
        hard = tokens.probs is None and tokens.pulls is None
        return platform() == "gpu" and hard and not regularised and self._dtype != jnp.float16


class Part(NamedTuple):
    """Columns of a softmax: the words of a band, or the head's clusters."""

    logits: jax.Array  # [tokens, columns]
    band: Band
    first: int  # the first column
    valid: jax.Array | None  # bool [columns], those that exist; None: all

    def columns(self) -> "jax.Array | int":
        """How many columns exist."""
        return len(self.band.table) if self.valid is None else self.valid.sum()

    def where_valid(self, values, other):
        """`values [tokens, columns]` in the columns that exist, `other` elsewhere."""
        return values if self.valid is None else jnp.where(self.valid[None], values, other)


class Normaliser(NamedTuple):
    """The sum over all columns, on all devices, of the powers of one softmax."""

    powers: list[jax.Array]  # of each part, divided by the power of the largest logit
    total: jax.Array  # [tokens]
    logsumexp: jax.Array  # [tokens]
    columns: jax.Array | int  # how many there are
    entropy: jax.Array | None = None  # [tokens]


def part_of_clusters(settings, x, softmax) -> "Part | None":
    """The columns behind the band's words, those of the clusters, if there are any."""
    band, clusters = softmax
    if clusters is None:
        return None
    first = None
    if settings.axis_name is not None:
        first = jnp.full(len(clusters.table), is_first(settings.axis_name))
    return part_of(settings, x, clusters, len(band.table), first)


def part_of(settings, x, band: Band, first, valid) -> Part:
    """The columns of a band, from `first` on; the logits of those that do not exist are -inf."""
    logits = logits_of(x, band)
    if used(settings.soft_cap):
        logits = settings.soft_cap * jnp.tanh(logits / settings.soft_cap)
    part = Part(logits, band, first, valid)
    return part._replace(logits=part.where_valid(logits, -jnp.inf))


def _losses(settings, parts, column, probs=None):
    """Loss and nll `[tokens]`, and the normaliser."""
    scored = sum(scored_in(part.logits, column - part.first, probs) for part in parts)
    peak = functools.reduce(
        jnp.maximum, [part.logits.max(axis=1) for part in parts if part.logits.size]
    )
    peak = peak if settings.axis_name is None else lax.pmax(peak, settings.axis_name)
    powers = [jnp.exp(part.logits - peak[:, None]) for part in parts]
    total = sum(power.sum(axis=1) for power in powers)
    smoothed = ()
    if settings.label_smoothing:
        counts = [part.columns() for part in parts]
        logits = sum(part.where_valid(part.logits, 0.0).sum(axis=1) for part in parts)
        smoothed = logits, sum(counts)
    loss, nll, found = totalled(settings, peak, (total, scored, *smoothed), probs)
    return loss, nll, found._replace(powers=powers)


def totalled(settings, peak, sums, probs):
    """Loss and nll `[tokens]`, and a `Normaliser` without powers.

    Args:
        peak: `[tokens]`, the largest logit on all devices.
        sums: of this device: the sum of powers relative to `peak`, and the logit of the target, or
            the expected one of soft targets, both `[tokens]`; for smoothing also the sum of the
            logits `[tokens]`, and how many columns there are.
        probs: of soft targets, or None.
    """
    total, scored, *smoothed = sum_over(settings.axis_name, *sums)
    logsumexp = peak + jnp.log(total)
    loss = nll = (logsumexp if probs is None else logsumexp * jnp.sum(probs, axis=1)) - scored
    columns, share = 1, settings.label_smoothing
    if share:
        # The count was summed beside vectors of tokens.
        columns = smoothed[1] if settings.axis_name is None else smoothed[1][0]
        columns = jnp.asarray(columns, total.dtype)
        average = smoothed[0] / columns
        loss = logsumexp - (1 - share) * scored - share * average
    if used(settings.z_loss):
        loss = loss + settings.z_loss * logsumexp**2
    return loss, nll, Normaliser([], total, logsumexp, columns)


def scaled_d_logits(settings, power, part, column, found, tokens=None):
    """The gradient of a part's logits `[tokens, columns]`, times the sum of the powers; by
    cotangents, if the tokens have them.
    """
    share = settings.label_smoothing
    probs, pulls = (None, None) if tokens is None else (tokens.probs, tokens.pulls)
    raised = power
    if used(settings.z_loss):
        raised = power * (1 + 2 * settings.z_loss * found.logsumexp)[:, None]
    if probs is None:
        hit = column[:, None] == part.first + jnp.arange(power.shape[1], dtype=column.dtype)[None]
        target = (1 - share) * hit.astype(power.dtype) + share / found.columns
        if share:
            target = part.where_valid(target, 0.0)
        exact = raised - found.total[:, None] * target
        if pulls is not None:
            plain = power - jnp.where(hit, found.total[:, None], 0.0)
            exact = pulls[:, :1] * exact + pulls[:, 1:2] * plain
    else:
        mass = jnp.sum(probs, axis=1)[:, None]
        each = probs * found.total[:, None]
        exact = raised + (mass - 1) * power
        if pulls is not None:
            exact = pulls[:, :1] * exact + pulls[:, 1:2] * mass * power
            each = each * (pulls[:, :1] + pulls[:, 1:2])
        at = (
            jnp.arange(len(column))[:, None],
            jnp.where(column < part.first, power.shape[1], column - part.first),
        )
        exact = exact.at[at].add(-each, mode="drop")
    if pulls is not None:
        exact = exact + pulls[:, 2:3] * power
        if found.entropy is not None:
            away = part.logits - (found.logsumexp - found.entropy)[:, None]
            exact = exact - pulls[:, 3:] * jnp.where(power > 0, power * away, 0.0)
    if used(settings.soft_cap):
        exact = exact * part.where_valid(1 - (part.logits / settings.soft_cap) ** 2, 0.0)
    return exact


def _overwritten(rounded, power, column, total):
    """`scaled_d_logits` of a plain softmax, from rounded powers in which only the targets' are
    written anew.

    On a GPU the pass that sums the powers writes them rounded, too, so none reads the logits once
    more: of 1.5 GB that a chunk of 3,328 tokens and 20,000 words moves, 0.27. The numbers are the
    same.
    """
    # A negative one would count from the end.
    column = jnp.where(column < 0, power.shape[1], column)
    target = jnp.take_along_axis(power, column[:, None], axis=1)[:, 0] - total
    at = rounded.at[jnp.arange(len(column)), column]
    return at.set(target.astype(rounded.dtype), mode="drop", unique_indices=True)


def scored_in(logits, column, probs):
    """The logit `[tokens]` of each row's column, or the sum of those of several times their
    probabilities; 0 where a column lies outside.
    """
    if probs is None:
        return _at(logits, column[:, None])[:, 0]
    return jnp.sum(jnp.where(probs == 0, 0.0, probs * _at(logits, column)), axis=1)


def _at(logits, column):
    """`logits[i, column[i, j]]` for every row i, 0 where the column lies outside."""
    if not logits.shape[1]:
        return jnp.zeros(column.shape, logits.dtype)
    inside = (column >= 0) & (column < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.where(inside, column, 0), axis=1)
    return jnp.where(inside, picked, 0.0)
