"""A chunk of tokens through one softmax, a tile of words at a time: its loss and its share of every
gradient.

The logits of one tile exist at a time, or those of all tiles of a chunk, see
`adaptive_jax.losses.plans`. The gradient of a logit is

    factor · (power_slope · power - target_slope · total · [target] - ...)

for powers `exp(logit - peak)`, their sum `total`, and one factor per token, which multiplies the
token's vectors, not its logits.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses import reports
from adaptive_jax.losses.arguments import Settings, used
from adaptive_jax.losses.groups import Slice, add_rows, read_band, read_rows
from adaptive_jax.losses.sharded import ABSENT, is_first, sum_over
from adaptive_jax.numerics import dropout
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.meshes import axes_of, pvary
from adaptive_jax.numerics.platforms import platform
from adaptive_jax.numerics.products import inner, product, sum_dtype, wide

# Smoothed differences of probabilities from 2^-24 on, times this, keep their 11 bits in float16;
# its largest number is 64 times as large.
LIFT = 1024
LEAST = 1e-30  # divided by LIFT it is a normal float32


class Cotangents(NamedTuple):
    """Cotangents of a token's results in a second pass, each `[tokens]`, divided by its weight."""

    loss: jax.Array
    logsumexp: jax.Array
    entropy: jax.Array


class Normaliser(NamedTuple):
    """Sums over all columns of one softmax, on all devices, each `[tokens]`."""

    peak: jax.Array  # powers are exp(logit - peak)
    total: jax.Array  # the sum of the powers
    logsumexp: jax.Array
    entropy: jax.Array | None = None


class Tokens(NamedTuple):
    """Tokens that visit a softmax, or a chunk of them.

    Attributes:
        hidden: `[tokens, features]`.
        column: `[tokens]`, or `[tokens, k]`, the columns of the targets in the softmax.
        weight: `[tokens]`.
        seeds: uint32 `[tokens, 2]`, the seeds of each token's tail dropout, or None.
        mass: in the shape of column, weights of the targets; None: 1, less label smoothing.
        cotangents: of a second pass over the logits; None in the first.
        normaliser: of the first pass, if the second has it: its peak is the logsumexp, its total 1.
    """

    hidden: jax.Array
    column: jax.Array
    weight: jax.Array
    seeds: jax.Array | None = None
    mass: jax.Array | None = None
    cotangents: Cotangents | None = None
    normaliser: Normaliser | None = None


class Results(NamedTuple):
    """Results of tokens: loss and nll `[tokens]` in nats, reports by name, and the gradient of
    the hidden states in float32 or float64, or None.
    """

    loss: jax.Array
    nll: jax.Array
    reports: dict
    d_hidden: jax.Array | None = None


class Wanted(NamedTuple):
    """Flags of the requested gradients."""

    hidden: bool
    band: Band  # of bool; None where the band has no such array
    clusters: Band | None


class Columns(NamedTuple):
    """Columns of a softmax: a tile of words, or the head's clusters."""

    logits: jax.Array  # [tokens, columns]
    table: jax.Array  # [columns, width]
    first: jax.Array | int  # index of the first column
    target: jax.Array  # columns of the targets, counted from `first`; may be out of range
    valid: jax.Array | None  # bool [columns]; None: all

    def where_valid(self, values, other):
        """`values [tokens, columns]` in valid columns, `other` elsewhere."""
        return values if self.valid is None else jnp.where(self.valid[None], values, other)


class Softmax(NamedTuple):
    """One softmax, for chunks of tokens.

    Attributes:
        group, part: the arrays of a group of bands, and the rows that belong to this softmax.
        clusters: further rows of the head, or None.
        columns: the number of columns, on all devices.
        tile, tiles: words of a tile, and their number.
        keeps_logits: whether logits of several tiles are kept for the gradients.
        narrow: whether the table's gradient is computed as its transpose.
    """

    settings: Settings
    group: Band
    part: Slice
    clusters: Band | None
    columns: jax.Array | int
    tile: int
    tiles: int
    keeps_logits: bool
    narrow: bool

    def tile_columns(self, x, target, i, logits=None) -> Columns:
        """Tile i for states `x [tokens, width]`; computes its logits unless they are passed.

        The last tile is as large as the others, so it may overlap the tile before; the shared rows
        are not valid in it.
        """
        rows, valid, first = self.tile, self.part.valid, 0
        if self.tiles > 1:
            start = i * rows
            first = jnp.minimum(start, self.part.rows - rows)
            valid = None if valid is None else lax.dynamic_slice_in_dim(valid, first, rows)
            if self.part.rows % rows:
                later = first + jnp.arange(rows) >= start
                valid = later if valid is None else valid & later
            target = jnp.where(target < start, ABSENT, target - first)
        table, _, bias = read_band(
            self.group._replace(projection=None), Slice(self.part.first + first, rows)
        )
        if logits is None:
            logits = self._logits(x, table, bias, valid)
        return Columns(logits, table, first, target, valid)

    def cluster_columns(self, x, target) -> Columns:
        """The columns of the clusters, which follow the band's words."""
        (table, _, bias), first, valid = self.clusters, self.part.rows, None
        if self.settings.axis_name is not None:  # all devices have them, only one counts them
            valid = jnp.full(len(table), is_first(self.settings.axis_name))
        return Columns(self._logits(x, table, bias, valid), table, first, target - first, valid)

    def _logits(self, x, table, bias, valid):
        """float32 or wider; -inf where a column is not valid."""
        cap = self.settings.soft_cap
        with jax.named_scope("logits"):
            logits = inner(x, table)
            if bias is not None:
                logits = logits + bias[None].astype(logits.dtype)
            if used(cap):
                logits = cap * jnp.tanh(logits / cap)
        return logits if valid is None else jnp.where(valid[None], logits, -jnp.inf)


def one_chunk(softmax: Softmax, tokens: Tokens, wanted: Wanted | None, sums):
    """Results and gradients of one chunk of tokens.

    Args:
        wanted: the gradients to compute, or None.
        sums: `(group, clusters)`, float32 sums of their gradients so far, None for those that are
            not wanted. The table's is transposed, `[width, words]`, if the softmax is narrow and
            has one tile.

    Returns:
        `(results, sums)`, the sums with the gradients of these tokens added.
    """
    group, part, projection = softmax.group, softmax.part, softmax.group.projection
    if projection is not None:
        projection = read_rows(projection, part.projection, group.table.shape[1])
    x, mask = states(softmax.settings, tokens, projection)
    clusters, normaliser, logits = None, tokens.normaliser, None
    if softmax.clusters is not None:
        clusters = softmax.cluster_columns(x, tokens.column)
    if normaliser is None:
        keep = wanted is not None and (softmax.keeps_logits or softmax.tiles == 1)
        results, normaliser, logits = _normalised(softmax, tokens, x, clusters, keep)
    else:
        zeros = jnp.zeros_like(normaliser.total)
        results = Results(zeros, zeros, {})
    if wanted is None:
        return results, sums
    arrays = tokens, x, clusters, normaliser, logits
    d_hidden, d_group, d_clusters = _gradients(softmax, *arrays, wanted, sums)
    if d_hidden is not None:
        flags = wanted.hidden, wanted.band.projection
        arrays = d_hidden * mask, tokens.hidden, projection
        d_hidden, chunk_gradient = through_projection(*arrays, *flags)
        if chunk_gradient is not None:
            d_projection = add_rows(d_group.projection, chunk_gradient, part.projection)
            d_group = d_group._replace(projection=d_projection)
    return results._replace(d_hidden=d_hidden), (d_group, d_clusters)


def states(settings, tokens: Tokens, projection) -> tuple:
    """`(x, mask)`: the states `[tokens, width]` that multiply the table, which are hidden states
    after projection and dropout, and the factors of dropout, or 1.
    """
    x = tokens.hidden if projection is None else product(tokens.hidden, projection.T)
    rate = settings.tail_dropout
    if not rate:
        return x, 1.0
    mask = dropout.keep_mask(tokens.seeds, dropout.positions(x.shape[1:]), rate)
    mask = mask.astype(sum_dtype(x.dtype)) / (1 - rate)
    return x * mask.astype(x.dtype), mask


def through_projection(d_x, hidden, projection, of_hidden=True, of_projection=True) -> tuple:
    """The float32 gradients of hidden states and projection from the gradient `d_x` of the
    projected states; None for those that are not wanted.
    """
    if projection is None:
        return d_x, None
    d_x, lowering = lifted(d_x, hidden.dtype)
    d_hidden = wide(d_x, projection) * lowering if of_hidden else None
    return d_hidden, wide(d_x.T, hidden) * lowering if of_projection else None


def lifted(array, dtype) -> tuple:
    """A float32 array cast to the dtype of a product, and the factor to multiply the product by: in
    float16 the array is scaled so that its largest number is `LIFT`.
    """
    if dtype != jnp.float16:
        return array.astype(dtype), 1.0
    lowering = jnp.maximum(jnp.max(jnp.abs(array)), LEAST) / LIFT
    return (array / lowering).astype(dtype), lowering


class _Sums(NamedTuple):
    """Sums over the columns so far, each `[tokens]`; `scored` has the shape of the targets."""

    peak: jax.Array
    total: jax.Array  # of powers relative to peak
    scored: jax.Array  # logits of the targets
    logit_sum: jax.Array | None  # for label smoothing
    stats: dict  # see `reports.start`

    def add(self, columns: Columns, peak):
        """Adds columns to the sums, relative to a new peak."""
        total = self.total * jnp.exp(self.peak - peak)
        total = total + jnp.exp(columns.logits - peak[:, None]).sum(axis=1)
        logit_sum = self.logit_sum
        if logit_sum is not None:
            logit_sum = logit_sum + columns.where_valid(columns.logits, 0.0).sum(axis=1)
        scored = self.scored + target_logits(columns)
        stats = reports.merge(self.stats, columns.logits, columns.first)
        return _Sums(peak, total, scored, logit_sum, stats)


def target_logits(columns: Columns) -> jax.Array:
    """The logits of the targets, in their shape; 0 where the target is not among the columns."""
    target, count = columns.target, columns.logits.shape[1]
    inside = (target >= 0) & (target < count)
    index = jnp.where(inside, target, 0).reshape(len(target), -1)
    logits = jnp.take_along_axis(columns.logits, index, axis=1)
    return jnp.where(inside, logits.reshape(target.shape), 0.0)


@jax.named_scope("normaliser")
def _normalised(softmax: Softmax, tokens: Tokens, x, clusters: Columns | None, keep: bool):
    """`(results, normaliser, logits)`; `logits[i] [tokens, words]` are those of tile i, None unless
    `keep`.
    """
    settings, target, one_tile = softmax.settings, tokens.column, softmax.tiles == 1
    axis, dtype, share = settings.axis_name, sum_dtype(x.dtype), settings.label_smoothing
    zeros, low = jnp.zeros(len(x), dtype), jnp.full(len(x), reports.LOW, dtype)
    stats = reports.start(settings, x)
    sums = _Sums(low, zeros, jnp.zeros(target.shape, dtype), zeros if share else None, stats)
    add_columns = _add_one_tile if one_tile else _add_tiles
    sums, logits = add_columns(sums, softmax, x, target, clusters, keep)
    total, scored, summed = sums.total, sums.scored, sums.logit_sum
    if axis is not None:
        total, scored, summed = sum_over(axis, total, scored, summed)
    logsumexp = sums.peak + jnp.log(total)
    # The powers of several tiles are recomputed relative to the logsumexp, so their sum is 1.
    relative = (sums.peak, total) if one_tile else (logsumexp, jnp.ones_like(total))
    columns = softmax.part.rows + (0 if clusters is None else len(clusters.table))
    scores = logsumexp, scored, target
    statistics = reports.observed(settings, sums.stats, *scores, columns)
    normaliser = Normaliser(*relative, logsumexp, statistics.get("entropy"))
    if tokens.mass is None or tokens.mass.ndim == 1:
        loss = nll = logsumexp - scored
    else:
        expected = jnp.where(tokens.mass == 0, 0.0, tokens.mass * scored).sum(axis=1)
        loss = nll = logsumexp * tokens.mass.sum(axis=1) - expected
    if share:
        loss = (
            logsumexp - (1 - share) * scored - share * summed / jnp.asarray(softmax.columns, dtype)
        )
    if used(settings.z_loss):
        loss = loss + settings.z_loss * logsumexp**2
    return Results(loss, nll, statistics), normaliser, logits


def _add_one_tile(sums: _Sums, softmax: Softmax, x, target, clusters, keep: bool):
    """`(sums, logits)` as in `_normalised`, with all columns at once."""
    words, axis = softmax.tile_columns(x, target, 0), softmax.settings.axis_name
    parts = [part for part in (words, clusters) if part is not None and len(part.table)]
    peak = functools.reduce(jnp.maximum, [part.logits.max(axis=1) for part in parts])
    peak = peak if axis is None else lax.pmax(peak, axis)
    for part in parts:
        sums = sums.add(part, peak)
    return sums, [words.logits] if keep else None


def _add_tiles(sums: _Sums, softmax: Softmax, x, target, clusters, keep: bool):
    """As `_add_one_tile`, one tile at a time."""
    axis, shape = softmax.settings.axis_name, (softmax.tiles, len(x), softmax.tile)

    def visit(i, state):
        (sums, logits), part = state, softmax.tile_columns(x, target, i)
        logits = None if logits is None else logits.at[i].set(part.logits)
        return sums.add(part, jnp.maximum(sums.peak, part.logits.max(axis=1))), logits

    logits = jnp.zeros(shape, sum_dtype(x.dtype)) if keep else None
    sums, logits = pvary((sums, logits), axes_of(x))
    if clusters is not None:
        sums = sums.add(clusters, jnp.maximum(sums.peak, clusters.logits.max(axis=1)))
    sums, logits = lax.fori_loop(0, softmax.tiles, visit, (sums, logits))
    if axis is not None:
        peak = lax.pmax(sums.peak, axis)
        sums = sums._replace(peak=peak, total=sums.total * jnp.exp(sums.peak - peak))
    return sums, logits


class _Slopes(NamedTuple):
    """Coefficients of the gradients of logits, see the module; numbers, or `[tokens, 1]`.

    Attributes:
        power: of the powers.
        target: of the targets, times `total`; `[tokens, k]` for k targets.
        uniform: of every valid column, for label smoothing, or None.
        entropy: of `power · (logit - mean logit)`, or None.
        factor: of a token's vectors.
        lowering: factor that undoes the lift of float16 products, or 1.
    """

    power: jax.Array | float
    target: jax.Array
    uniform: jax.Array | None
    entropy: jax.Array | None
    factor: jax.Array
    lowering: jax.Array | float


def _slopes(softmax: Softmax, tokens: Tokens, normaliser: Normaliser, dtype) -> _Slopes:
    """The coefficients of a chunk; in float16, weights are at most 1."""
    z_loss, share = softmax.settings.z_loss, softmax.settings.label_smoothing
    cotangents, mass, total = tokens.cotangents, tokens.mass, normaliser.total[:, None]
    target = 1 - share if mass is None else mass.reshape(len(mass), -1)
    power = 1 - share if mass is None else target.sum(axis=1)[:, None]
    of_loss = 1.0 if cotangents is None else cotangents.loss[:, None]
    uniform = entropy = None
    if used(z_loss):
        power = power + of_loss * 2 * z_loss * normaliser.logsumexp[:, None]
    if share:
        power = power + of_loss * share
        uniform = total * of_loss * share / jnp.asarray(softmax.columns, total.dtype)
    if cotangents is not None:
        power = power + cotangents.logsumexp[:, None]
        entropy = None if normaliser.entropy is None else cotangents.entropy[:, None]
    weight, lowering = tokens.weight[:, None], 1.0
    if dtype == jnp.float16:
        largest = jnp.maximum(jnp.max(jnp.abs(weight)), LEAST)
        weight, lowering = weight / largest, largest / LIFT
    return _Slopes(power, total * target, uniform, entropy, weight / total, lowering)


def _d_logits(settings, columns: Columns, power, normaliser: Normaliser, slopes: _Slopes):
    """The gradient of logits `[tokens, columns]`, without the factor."""
    target = columns.target
    gradient = power if isinstance(slopes.power, float | int) else power * slopes.power
    if slopes.uniform is not None:
        uniform = jnp.broadcast_to(slopes.uniform, power.shape)
        gradient = gradient - columns.where_valid(uniform, 0.0)
    if target.ndim == 1:
        hit = target[:, None] == jnp.arange(power.shape[1], dtype=target.dtype)[None]
        gradient = gradient - jnp.where(hit, slopes.target, 0.0)
    else:
        row = jnp.arange(len(target))[:, None]
        target = jnp.where(target < 0, power.shape[1], target)  # negative indices would wrap
        gradient = gradient.at[row, target].add(-slopes.target, mode="drop")
    if slopes.entropy is not None:
        away = columns.logits - (normaliser.logsumexp - normaliser.entropy)[:, None]
        gradient = gradient - slopes.entropy * jnp.where(power > 0, power * away, 0.0)
    if used(settings.soft_cap):
        slope = columns.where_valid(1 - (columns.logits / settings.soft_cap) ** 2, 0.0)
        gradient = gradient * slope
    return gradient


def overwritten(power, target, total, dtype):
    """`_d_logits` of a plain softmax: rounded powers in which the targets' entries are overwritten.

    On a GPU the pass that sums the powers also writes them rounded, so no pass reads the logits
    again. This saves 0.27 of the 1.5 GB that a chunk of 3,328 tokens and 20,000 words moves, and
    changes no number.
    """
    target = jnp.where(target < 0, power.shape[1], target)  # negative indices would wrap
    value = jnp.take_along_axis(power, target[:, None], axis=1)[:, 0] - total
    rounded = power.astype(dtype).at[jnp.arange(len(target)), target]
    return rounded.set(value.astype(dtype), mode="drop", unique_indices=True)


def _is_plain(softmax: Softmax, tokens: Tokens, wanted: Wanted, dtype) -> bool:
    """True where `overwritten` computes gradients of logits."""
    settings = softmax.settings
    regularised = settings.label_smoothing or used(settings.z_loss) or used(settings.soft_cap)
    biased = wanted.band.bias or (wanted.clusters is not None and wanted.clusters.bias)
    rescaled = tokens.mass is not None or dtype == jnp.float16
    return platform() == "gpu" and not (regularised or biased or rescaled)


def _gradients(softmax: Softmax, tokens, x, clusters, normaliser, logits, wanted: Wanted, sums):
    """The gradient of the states `x`, or None, and `sums` with the gradients of group and clusters
    added.

    In float16 a sum of powers may overflow and a small weight may underflow. So powers become
    probabilities, weights at most 1, and gradients of logits are multiplied by `LIFT` before the
    products.
    """
    if x.dtype == jnp.float16:
        ones = jnp.ones_like(normaliser.total)
        normaliser = normaliser._replace(peak=normaliser.logsumexp, total=ones)
    slopes = _slopes(softmax, tokens, normaliser, x.dtype)
    plain = _is_plain(softmax, tokens, wanted, x.dtype)
    lowering, lift = slopes.lowering, LIFT if x.dtype == jnp.float16 else 1.0
    factored = (x.astype(slopes.factor.dtype) * slopes.factor).astype(x.dtype)
    of_states = wanted.hidden or wanted.band.projection

    def products(columns, flags, narrow=False):
        """The gradients of the states, and of table and bias of these columns."""
        power, d_x, d_table = jnp.exp(columns.logits - normaliser.peak[:, None]), None, None
        if plain:
            d_logits = overwritten(power, columns.target, normaliser.total, x.dtype)
        else:
            gradient = lift * _d_logits(softmax.settings, columns, power, normaliser, slopes)
            d_logits = gradient.astype(x.dtype)
        if of_states:
            with jax.named_scope("gradient_of_hidden"):
                d_x = wide(d_logits, columns.table)
        if flags.table:
            with jax.named_scope("gradient_of_table"):
                left, right = (factored, d_logits) if narrow else (d_logits, factored)
                d_table = lowering * wide(left.T, right)
        d_bias = lowering * jnp.sum(gradient * slopes.factor, axis=0) if flags.bias else None
        return d_x, Band(d_table, None, d_bias)

    def visit(i, state):
        d_x, group = state
        columns = softmax.tile_columns(x, tokens.column, i, None if logits is None else logits[i])
        tile_gradient, part = products(columns, wanted.band, softmax.narrow)
        first, table, bias = softmax.part.first + columns.first, group.table, group.bias
        if table is not None and softmax.narrow and softmax.tiles == 1:
            table = table + part.table
        elif table is not None:
            table = add_rows(table, part.table.T if softmax.narrow else part.table, first)
        bias = None if bias is None else add_rows(bias, part.bias, first)
        return None if d_x is None else d_x + tile_gradient, group._replace(table=table, bias=bias)

    d_group, d_clusters = sums
    state = jnp.zeros_like(x, sum_dtype(x.dtype)) if of_states else None, d_group
    one_tile = softmax.tiles == 1
    d_x, d_group = visit(0, state) if one_tile else lax.fori_loop(0, softmax.tiles, visit, state)
    if clusters is not None:
        of_clusters, part = products(clusters, wanted.clusters)
        d_x = None if d_x is None else d_x + of_clusters
        d_clusters = jax.tree.map(jnp.add, d_clusters, part)
    return None if d_x is None else lowering * slopes.factor * d_x, d_group, d_clusters
