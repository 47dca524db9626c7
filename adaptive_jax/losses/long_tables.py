"""Softmaxes over long tables: a chunk of tokens through one, a tile of words at a time.

A chunk adds its gradient to the sum `[words, width]` of the table's. Where that is long, the
chunk's own product `[words, width]` would be as large again, so it is made and added a tile of
words at a time, in place.

How many tokens a chunk has decides the speed, by the bytes moved and the work. With n tokens, V
words and width d:

    logits kept:            6 n V d FLOP, 4 V d numbers: table read twice, sum read and written
    logits computed again:  8 n V d FLOP, 5 V d numbers: the table is read three times

Kept, n is what memory for n V logits allows: 128 at 262,144 words, 3 at 10 million. Computed again,
only the logits of a tile are alive, so n is as large as for a short table, and the fourth product
is the price: 2 V d FLOP a token. Moving 4 V d numbers for each chunk is as dear where

    n = bytes(4 numbers) · speed / (2 · bandwidth)

- CPU, float32, two cores at 200 GFLOP/s and 20 GB/s: 80 tokens.
- H100, a bfloat16 table and a float32 sum, 500 TFLOP/s and 3.35 TB/s: 900.
- TPU v5e, 197 TFLOP/s and 0.82 TB/s: 1,440.

With fewer tokens than that, logits are computed again. Numbers of accelerators are computed and not
yet measured; there, a product is added in place by the compiler where logits are kept, and nothing
is tiled.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses import chunks, reports
from adaptive_jax.losses.sharded import ABSENT
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.meshes import axes_of, pvary
from adaptive_jax.numerics.platforms import platform
from adaptive_jax.numerics.products import sum_dtype, wide

LONG = 2**25  # numbers in a table from which on it is long: 128 MiB in float32
LEAST_KEPT, FAST_LEAST_KEPT = 80, 896  # tokens below which logits are computed again
TILE_NUMBERS, FAST_TILE_NUMBERS = 2**22, 2**26  # of a tile's logits, and of its rows


class Plan(NamedTuple):
    """How a softmax is computed."""

    tokens: int  # of a chunk, at most
    words: int | None = None  # of a tile; None: all at once
    kept: bool = True  # whether the logits of all words of a chunk are alive


def plan(band: int, words: int, width: int) -> Plan:
    """The plan of a band of so many words of this width; band 0 is the head.

    On a CPU 262,144 words of width 512 are computed by 128 tokens and tiles of 8,192 words; 10
    million of width 64 by 512 tokens, whose logits are computed twice.
    """
    most, slow = chunks.chunk_size(band, words, width), platform() == "cpu"
    if words * width < LONG:
        return Plan(most)
    least, numbers = (LEAST_KEPT, TILE_NUMBERS) if slow else (FAST_LEAST_KEPT, FAST_TILE_NUMBERS)
    kept = most >= least
    if kept and not slow:
        return Plan(most)
    if not kept:
        heads = chunks.HEAD_CHUNK if slow else chunks.FAST_HEAD_CHUNK
        tails = chunks.TAIL_CHUNK if slow else chunks.FAST_TAIL_CHUNK
        most = tails if band else heads
    tile = numbers // max(most, width)
    return Plan(most, max(tile // chunks.TILE * chunks.TILE, chunks.TILE), kept)


def one_chunk(settings, softmax, tokens, valid, sums, plan: Plan, *, narrow, with_gradients):
    """`chunks.one_chunk` by tiles of words.

    Args:
        sums: the gradient of `softmax` so far, to which that of these tokens is added in place; or
            Nones.
        narrow: whether products are faster as the transpose of a tile's gradient.

    Returns:
        `(results, sums)`.
    """
    x, mask = chunks.states(settings, tokens, softmax[0])
    tiles = _Tiles(settings, softmax, x, tokens, valid, plan.words)
    loss, nll, found, reported, kept = _normalised(tiles, plan.kept and with_gradients)
    if not with_gradients:
        return (loss, nll, None, *reported), sums
    d_x, (group, clusters) = _gradients(tiles, kept, found, sums, narrow)
    of_states = d_x * mask, tokens.hidden, softmax[0].projection
    d_hidden, d_projection = chunks.through_projection(*of_states)
    if d_projection is not None:
        group = group._replace(projection=group.projection + d_projection)
    return (loss, nll, d_hidden, *reported), (group, clusters)


class _Tiles:
    """The tiles of a softmax, for a chunk of tokens whose states are `x [tokens, width]`."""

    def __init__(self, settings, softmax, x, tokens, valid, words):
        self.settings, self.softmax, self.x, self.tokens = settings, softmax, x, tokens
        self.valid, self.rows = valid, len(softmax[0].table)
        self.words, self.dtype = min(words, self.rows), sum_dtype(x.dtype)
        self.count = -(-self.rows // self.words)
        self.clusters = chunks.part_of_clusters(settings, x, softmax)

    def part(self, i, logits=None):
        """A tile as a `chunks.Part`, and the targets' columns; its logits are computed or given.

        The last tile begins where it has as many rows as the others; those that an earlier one has
        do not exist in it.
        """
        band, new = self.softmax[0], i * self.words
        at = jnp.minimum(new, self.rows - self.words)
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=at, slice_size=self.words)
        mine = None if self.valid is None else cut(self.valid)
        if self.rows % self.words:
            later = at + jnp.arange(self.words) >= new
            mine = later if mine is None else mine & later
        tile = Band(cut(band.table), None, None if band.bias is None else cut(band.bias))
        column = jnp.where(self.tokens.column < new, ABSENT, self.tokens.column)
        if logits is None:
            return chunks.part_of(self.settings, self.x, tile, at, mine), column
        return chunks.Part(logits, tile, at, mine), column

    def columns(self):
        """How many columns there are on this device."""
        columns = self.rows if self.valid is None else self.valid.sum()
        return columns if self.clusters is None else columns + self.clusters.columns()

    def held(self):
        """How many columns this device has room for."""
        return self.rows + (0 if self.clusters is None else self.clusters.logits.shape[1])


def _normalised(tiles, keep):
    """`(loss, nll, normaliser, reported, logits)`; logits `[tiles, tokens, words]` if they are to
    be kept.
    """
    settings, tokens, x = tiles.settings, tiles.tokens, tiles.x

    def merge(state, part, column):
        peak, total, scored, summed, stats = state
        higher = jnp.maximum(peak, part.logits.max(axis=1))
        powers = jnp.exp(part.logits - higher[:, None])
        total = total * jnp.exp(peak - higher) + powers.sum(axis=1)
        scored = scored + chunks.scored_in(part.logits, column - part.first, tokens.probs)
        if settings.label_smoothing:
            summed = summed + part.where_valid(part.logits, 0.0).sum(axis=1)
        return higher, total, scored, summed, reports.merge(stats, part.logits, part.first)

    def read(i, state):
        state, kept = state
        part, column = tiles.part(i)
        return merge(state, part, column), None if kept is None else kept.at[i].set(part.logits)

    zeros = jnp.zeros(len(x), tiles.dtype)
    state = jnp.full(len(x), reports.LOW, tiles.dtype), zeros, zeros, zeros
    kept = jnp.zeros((tiles.count, len(x), tiles.words), tiles.dtype) if keep else None
    state, kept = pvary((state, kept), axes_of(x))
    state = *state, reports.start(settings, x)
    if tiles.clusters is not None:
        state = merge(state, tiles.clusters, tokens.column)
    state, kept = lax.fori_loop(0, tiles.count, read, (state, kept))
    peak, total, scored, summed, stats = state

    if settings.axis_name is not None:
        highest = lax.pmax(peak, settings.axis_name)
        total, peak = total * jnp.exp(peak - highest), highest
    smoothed = (summed, tiles.columns()) if settings.label_smoothing else ()
    sums = total, scored, *smoothed
    loss, nll, found = chunks.totalled(settings, peak, sums, tokens.probs)
    found, reported = found._replace(total=jnp.ones_like(total)), ()
    if settings.reports:
        told = reports.observed(settings, stats, found, tokens.column, tiles.held())
        found, reported = found._replace(entropy=told.get("entropy")), (told,)
    return loss, nll, found, reported, kept


def _gradients(tiles, kept, found, sums, narrow):
    """The gradient of the states, and `sums` with those of the softmax."""
    gradients = chunks.Gradients(tiles.settings, tiles.x, tiles.tokens, found)
    states = gradients.states

    def of_part(part, column):
        """The gradients of the states, and of the part's rows and biases."""
        power = jnp.exp(part.logits - found.logsumexp[:, None])
        d_logits, d_bias = gradients.of_logits(power, part, column)
        d_rows = wide(states.T, d_logits).T if narrow else wide(d_logits.T, states)
        d_rows = gradients.lowered(d_rows)
        return wide(d_logits, part.band.table), Band(d_rows, None, d_bias)

    def add(i, state):
        d_x, whole = state
        part, column = tiles.part(i, None if kept is None else kept[i])
        more, change = of_part(part, column)
        return d_x + more, jax.tree.map(lambda a, b: _add_at(a, b, part.first), whole, change)

    group, clusters = sums
    start = jnp.zeros_like(tiles.x, tiles.dtype), group._replace(projection=None)
    d_x, whole = lax.fori_loop(0, tiles.count, add, start)
    if tiles.clusters is not None:
        more, change = of_part(tiles.clusters, tiles.tokens.column)
        d_x, clusters = d_x + more, jax.tree.map(jnp.add, clusters, change)
    sums = whole._replace(projection=group.projection), clusters
    return gradients.of_states(d_x), sums


def times(scale, array, in_place: bool = True):
    """`scale · array` in the array's dtype. A long one is multiplied in place, where nothing else
    reads it, a tile of rows at a time.

    in_place: false for arrays that a mesh may cut: rows that are read at a time would be gathered.
    """

    def multiplied(factor, part):
        return (factor * part.astype(scale.dtype)).astype(part.dtype)

    if not in_place or array.size < LONG or array.ndim != 2:
        return multiplied(scale, array)
    rows = min(len(array), max(1, TILE_NUMBERS // array.shape[1]))

    def multiply(i, array):
        at = jnp.minimum(i * rows, len(array) - rows)
        factor = jnp.where(at + jnp.arange(rows) >= i * rows, scale, 1.0)[:, None]
        part = multiplied(factor, lax.dynamic_slice_in_dim(array, at, rows))
        return lax.dynamic_update_slice_in_dim(array, part, at, 0)

    return lax.fori_loop(0, -(-len(array) // rows), multiply, array)


def _add_at(whole, change, at):
    part = lax.dynamic_slice_in_dim(whole, at, len(change)) + change
    return lax.dynamic_update_slice_in_dim(whole, part, at, 0)
