"""One pass over the bands of a softmax: tokens, sorted by band, visit the head and then their tail,
a chunk at a time.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses import flash_tails, partitioned, plans, reports
from adaptive_jax.losses.arguments import Settings
from adaptive_jax.losses.chunks import Results, Softmax, Tokens, Wanted, one_chunk
from adaptive_jax.losses.groups import band_slice, in_dtype, lay_out
from adaptive_jax.losses.plans import Plan
from adaptive_jax.losses.reports import LOG_PROBS
from adaptive_jax.losses.sharded import columns_on_device, words_on_device
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.products import is_cpu_bfloat16, sum_dtype

# The gradient of tables narrower than this is summed as its transpose: at width 16, XLA's product
# on a CPU was 2.6 times as fast with the narrow side transposed. For wider tables, transposing the
# sum back costs as much as it saves, except in bfloat16 on a CPU, where the operands must be
# row-major and the chunk of logits would have to be transposed instead.
NARROW = 32
HIGH = 1e30  # above every logit: powers relative to it are 0


def grouped_pass(call, axis_name, tokens: Tokens, softmax):
    """`one_pass` on a mesh, where bands are grouped on the device. If one band needs the gradient
    of its table, projection or bias, those of all bands are computed.
    """
    (static, gradients), (bands, clusters, array_settings), sizes = call, softmax, []
    axis_name = axis_name or static.settings.axis_name

    def grouped(bands, clusters):
        rows, *arrays = lay_out(bands, clusters, static.words, axis_name)
        sizes.append(rows)  # a trace-time constant
        return tuple(arrays)

    arrays, pull_back = jax.vjp(grouped, bands, clusters)
    static, structure, flags = static._replace(sizes=sizes[0]), jax.tree.structure(softmax), None
    if gradients is not None:
        of_bands, of_clusters, _ = structure.unflatten(gradients.shared)
        of_all = [*of_bands, *([of_clusters] if clusters else [])]
        kinds = Band(*map(any, zip(*of_all, strict=True)))
        groups, grouped_clusters = arrays
        flags = [
            flag
            for band in (*groups, *([grouped_clusters] if grouped_clusters else []))
            for flag, array in zip(kinds, band, strict=True)
            if array is not None
        ]
        flags = partitioned.Gradients(gradients.tokens, (*flags, *[False] * len(array_settings)))
    results, d_hidden, d_softmax = one_pass(
        (static, flags), axis_name, tokens, (*arrays, array_settings)
    )
    if gradients is None:
        return results, None, None
    dense = jax.tree.map(
        lambda array, d: jnp.zeros_like(array) if d is None else d, arrays, d_softmax[:2]
    )
    pulled = jax.tree.leaves((*pull_back(dense), array_settings))
    pairs = zip(gradients.shared, pulled, strict=True)
    return results, d_hidden, structure.unflatten([d if flag else None for flag, d in pairs])


def one_pass(call, axis_name, tokens: Tokens, softmax):
    """Visits the head with all tokens, then every tail with its own; tokens of weight 0 visit
    nothing, if `static.masked`.

    Args:
        call: a `Static`, and a `partitioned.Gradients` or None.
        axis_name: the axis of a mesh that shards the words, or None.
        tokens: `[...]` of one device, whose columns are word ids.
        softmax: groups, clusters and array settings, see `adaptive_jax.losses.arguments.Arguments`.

    Returns:
        `(Results without gradient, d_hidden, d_softmax)`: gradients in the dtypes of their arrays,
        None for those not requested.
    """
    (static, gradients), (groups, clusters, array_settings) = call, softmax
    shape, words, dtype = tokens.weight.shape, static.words, sum_dtype(static.dtype)
    names = tuple(name for name in static.settings.reports if name != "nll")  # always a result
    names += (LOG_PROBS,) if static.settings.target_log_probs else ()
    settings = static.settings._replace(**array_settings, reports=names)
    if axis_name is not None:
        settings = settings._replace(axis_name=axis_name)
    tokens = jax.tree.map(lambda a: a.reshape(-1, *a.shape[len(shape) :]), tokens)
    live = tokens.weight != 0 if static.masked else None
    hidden = tokens.hidden.astype(static.dtype)
    if live is not None:  # 0 · NaN is NaN
        hidden = jnp.where(live[:, None], hidden, 0)

    count, rows = len(tokens.column), tuple(itertools.chain(*static.sizes))
    places = _places(tokens.column, words, rows, clusters is not None, settings.axis_name)
    groups, clusters = in_dtype((groups, clusters), static.dtype)
    group_plans = [
        plans.plan(i, sizes, group.table.shape[1], count, hidden.dtype.itemsize, settings.chunk)
        for i, (sizes, group) in enumerate(zip(static.sizes, groups, strict=True))
    ]
    # Room keeps every chunk in bounds; the head's begin at multiples of their size.
    room = max(-count % group_plans[0].tokens, *(plan.tokens for plan in group_plans[1:]), 0)
    order = Order.of(places.band, live, len(words), room)
    queue = jax.tree.map(order.queue, tokens._replace(hidden=hidden, column=places.in_head))
    flags = None
    if gradients is not None:
        flags = jax.tree.unflatten(jax.tree.structure(softmax), gradients.shared)
    zeros = jnp.zeros_like(queue.weight, dtype)
    d_hidden = jnp.zeros_like(queue.hidden, dtype) if flags and gradients.tokens else None
    statistics = reports.empty(settings, queue.weight, queue.column)
    totals, first, sums = Results(zeros, zeros, statistics, d_hidden), 0, []
    for i, (sizes, group) in enumerate(zip(static.sizes, groups, strict=True)):
        end = first + len(sizes)
        stage = Stage(
            settings=settings if i else settings._replace(tail_dropout=0.0),  # Baevski & Auli, 5.4
            plan=group_plans[i],
            sizes=sizes,
            group=group,
            clusters=None if i else clusters,
            columns=places.columns[first:end],
            begins=order.ends[first - 1 : end - 1] if i else [0],
            ends=order.ends[first:end] if i else [order.ends[-1] if static.masked else count],
            word_counts=None if places.word_counts is None else places.word_counts[first:end],
            wanted=flags and Wanted(gradients.tokens, flags[0][i], None if i else flags[1]),
            one_chunk=i == 0 and group_plans[0].tokens >= count,
        )
        visit = visit_chunks
        if i and tokens.cotangents is None and flash_tails.fits(settings, group, len(sizes)):
            visit = flash_tails.visit
        queue = queue._replace(column=order.queue(places.in_tail)) if i == 1 else queue
        totals, gradient = visit(stage, queue, totals)
        sums.append(gradient)
        first = end

    results = jax.tree.map(
        lambda array: order.undo(array).reshape(*shape, *array.shape[1:]), totals
    )
    if gradients is None:
        return results, None, None
    d_softmax = tuple(d_group for d_group, _ in sums), sums[0][1], dict.fromkeys(array_settings)
    d_hidden, d_softmax = jax.tree.map(
        lambda array, d: None if d is None else d.astype(array.dtype),
        (tokens.hidden, softmax),
        (results.d_hidden, d_softmax),
    )
    return results._replace(d_hidden=None), d_hidden, d_softmax


class Places(NamedTuple):
    """Columns of the words of tokens, each `[tokens]`."""

    band: jax.Array
    in_head: jax.Array  # of the word, or of the cluster of its band
    in_tail: jax.Array  # of the word in its band
    columns: tuple[int, ...]  # of the softmax of each band, on all devices
    word_counts: jax.Array | None  # rows of each band that are words on this device; None: all


def _places(ids, words, rows, has_clusters: bool, axis_name: str | None) -> Places:
    """The columns of word ids.

    words: of each band, on all devices.
    rows: of each band's table, on this device.
    has_clusters: False where clusters are rows of the head's table, see `lay_out`.
    """
    starts = jnp.cumsum(jnp.array([0, *words], ids.dtype), dtype=ids.dtype)
    band = jnp.searchsorted(starts[1:-1], ids, side="right").astype(ids.dtype)
    columns = words[0] + len(words) - 1, *words[1:]
    in_tables, first_cluster = (words, rows[0]) if has_clusters else (columns, words[0])
    in_head = jnp.where(band == 0, ids, first_cluster + band - 1)
    in_tail = ids - starts[band]
    if axis_name is not None:
        in_head, in_tail = columns_on_device(axis_name, in_tail, band, jnp.array(rows))
    word_counts = words_on_device(axis_name, rows, in_tables)
    return Places(band, in_head, in_tail, columns, word_counts)


class Order(NamedTuple):
    """The order in which tokens visit bands: the tokens of a band are consecutive, and those that
    visit no band are last.
    """

    order: jax.Array | None  # tokens by place; None: not sorted
    inverse: jax.Array | None
    ends: jax.Array | None  # of each band
    count: int  # tokens
    room: int  # places behind the last token

    @classmethod
    def of(cls, band, live, bands: int, room: int) -> "Order":
        """The order of tokens of these bands.

        live: bool `[tokens]`, False for tokens that visit none; None: all visit.
        """
        count = len(band)
        place = jnp.arange(count)
        if bands > 1:
            key = band if live is None else jnp.where(live, band, bands)
            order = jnp.argsort(key, stable=True)
            ends = jnp.searchsorted(key[order], jnp.arange(bands), side="right")
            return cls(order, jnp.argsort(order), ends, count, room)
        if live is None:
            return cls(None, None, None, count, room)
        visits = jnp.cumsum(live)
        inverse = jnp.where(live, visits - 1, visits[-1] + place - visits)
        order = jnp.zeros_like(inverse).at[inverse].set(place, unique_indices=True)
        return cls(order, inverse, visits[-1:], count, room)

    def queue(self, array):
        """Sorts an array `[tokens, ...]` in this order, with room behind it."""
        array = array if self.order is None else array[self.order]
        return jnp.pad(array, [(0, self.room)] + [(0, 0)] * (array.ndim - 1))

    def undo(self, array):
        """Restores a queue `[tokens + room, ...]` to the order of the tokens, `[tokens, ...]`."""
        return array[: self.count] if self.inverse is None else array[self.inverse]


class Stage(NamedTuple):
    """One softmax, or a group of similar ones, and its tokens: band i has tokens `begins[i]` to
    `ends[i] - 1` of the queue.
    """

    settings: Settings
    plan: Plan
    sizes: tuple[int, ...]  # rows of each band
    group: Band  # in the dtype of products
    clusters: Band | None
    columns: tuple[int, ...]  # of each softmax, on all devices
    begins: jax.Array | list
    ends: jax.Array | list
    word_counts: jax.Array | None  # rows of each band that are words on this device; None: all
    wanted: Wanted | None
    one_chunk: bool = False  # True: one chunk has all tokens

    def trips(self):
        """Number of trips of a loop over all chunks, and a function from a trip to `(band, chunk of
        the band)`.
        """
        chunk, begins, ends = self.plan.tokens, self.begins, self.ends
        if len(begins) == 1:
            return (ends[0] - begins[0] + chunk - 1) // chunk, lambda trip: (0, trip)
        counts = (ends - begins + chunk - 1) // chunk
        trips = jnp.cumsum(counts)

        def locate(trip):
            number = jnp.sum(trip >= trips)
            return number, trip - (trips - counts)[number]

        return trips[-1], locate


def visit_chunks(stage: Stage, queue: Tokens, totals: Results):
    """Runs tokens through the bands of a group, a chunk at a time.

    Returns:
        `totals` with loss, nll, reports and gradients of the hidden states added, and the float32
        gradients `(group, clusters)`.
    """
    size, group, wanted = stage.plan.tokens, stage.group, stage.wanted
    single, rows = len(stage.sizes) == 1, max(stage.sizes)
    narrow = single and (group.table.shape[1] < NARROW or is_cpu_bfloat16(group.table))
    tile = min(stage.plan.words or rows, rows)
    tiles = -(-rows // tile) if rows else 1  # a head of clusters alone
    trips, locate = stage.trips()

    def visit_chunk(trip, state):
        totals, sums = state
        number, trip = locate(trip)
        start = stage.begins[number] + trip * size
        chunk_of = functools.partial(lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        inside = start + jnp.arange(size) < stage.ends[number]
        tokens = jax.tree.map(chunk_of, queue)
        tokens = tokens._replace(weight=jnp.where(inside, tokens.weight, 0.0))
        if tokens.normaliser is not None:  # it is 0 in rows outside, and 0 / 0 is NaN
            peak = jnp.where(inside, tokens.normaliser.logsumexp, HIGH)
            relative = {"peak": peak, "total": jnp.ones_like(peak), "logsumexp": peak}
            tokens = tokens._replace(normaliser=tokens.normaliser._replace(**relative))
        band_rows = band_slice(group, stage.sizes, number, stage.word_counts)
        columns = stage.columns[0] if single else jnp.array(stage.columns)[number]
        arrays = stage.settings, group, band_rows, stage.clusters, columns
        softmax = Softmax(*arrays, tile, tiles, stage.plan.keeps_logits, narrow)
        tokens = tokens._replace(column=tokens.column + band_rows.shift)
        results, sums = one_chunk(softmax, tokens, wanted, sums)

        # Rows after the band's last token belong to the next band: this chunk adds 0 to them.
        def put(total, result):
            result = jnp.where(inside.reshape(-1, *[1] * (result.ndim - 1)), result, 0)
            return lax.dynamic_update_slice_in_dim(total, chunk_of(total) + result, start, 0)

        return jax.tree.map(put, totals, results), sums

    def transposed(sums):
        if narrow and tiles == 1 and sums[0] is not None and sums[0].table is not None:
            return sums[0]._replace(table=sums[0].table.T), sums[1]
        return sums

    sums, dtype = (None, None), sum_dtype(group.table.dtype)
    if wanted is not None:
        sums = jax.tree.map(
            lambda flag, array: jnp.zeros_like(array, dtype) if flag else None,
            (wanted.band, wanted.clusters),
            (group, stage.clusters),
        )
    state = totals, transposed(sums)
    if stage.one_chunk:
        totals, sums = visit_chunk(0, state)
    else:
        totals, sums = lax.fori_loop(0, trips, visit_chunk, state)
    return totals, transposed(sums)
