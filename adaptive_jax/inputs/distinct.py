"""Vectors of words in bands: each distinct word is looked up and projected once.

4,096 tokens that follow Zipf's law in a vocabulary of 267,735 have some 2,200 distinct words. Once
these are sorted by id, the words of a band are contiguous, so a loop visits each band's words a
chunk at a time; its trip count depends on the data. The backward pass first sums the gradients of a
word's tokens, so it writes every row of a table once.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses import partitioned
from adaptive_jax.losses.chunks import lifted
from adaptive_jax.numerics.arrays import distinct, exists
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.meshes import as_tuple, axes_of, pvary, vary_alike
from adaptive_jax.numerics.platforms import platform
from adaptive_jax.numerics.products import bits_on_cpu, of_bits, product, sum_dtype

# Words per chunk. On a CPU, 256 was no faster. Not measured on accelerators: each chunk launches
# kernels, so chunks there are few and large.
CHUNK, LARGE_CHUNK = 128, 1024


class _Static(NamedTuple):
    """Static arguments of a call."""

    dtype: jnp.dtype
    words: tuple[int, ...]  # number of words of each band, over all devices
    axes: tuple[str, ...]  # axes of `shard_map` over which tokens and words are sharded


def vectors(
    tokens: jax.Array, bands: Sequence[Band], dtype, words: Sequence[int], axes=()
) -> jax.Array:
    """Vectors `[..., features]` in `dtype` of token ids `[...]`, on any mesh; 0 for ids outside of
    the vocabulary. Differentiable once, in reverse mode.

    Args:
        bands: tables with projections, frequent words first.
        words: number of words of each band.
        axes: one or several axes of `jax.shard_map`, over which tokens and the words of every band
            are sharded, see `adaptive_jax.losses.sharded`: every device looks up the words it
            holds, for the tokens of all devices.
    """
    bands = [Band(band.table, band.projection) for band in bands]
    static = _Static(jnp.dtype(dtype), tuple(words), as_tuple(axes))
    if axes:
        tokens = lax.all_gather(tokens, axes, tiled=True)
    tokens, bands = vary_alike((tokens, bands))
    (tokens,), bands = partitioned.aligned((tokens[..., None],), bands, _by_words(bands))
    result = _vectors(static, tokens, bands)
    return lax.psum_scatter(result, axes, tiled=True) if axes else result


def _by_words(bands):
    return (True, False) * len(bands)  # tables and projections


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _vectors(static, tokens, bands):
    return partitioned.run(_look_up, static, (tokens,), bands, _by_words(bands), None)[0]


def _forward(static, tokens, bands):
    return _vectors(static, tokens, bands), (tokens, bands)


def _backward(static, saved, gradient):
    tokens, bands = saved
    by_words, tokens = _by_words(bands), (gradient, tokens[..., 0])
    gradients = partitioned.Gradients(False, (True,) * len(by_words))
    return None, partitioned.run(_add_up, static, tokens, bands, by_words, gradients)[2]


_vectors.defvjp(_forward, _backward)


def _look_up(static, axis_name, tokens, bands):
    """Forward function of `partitioned.run`, for the tokens of one device."""
    dtype, ids = static.dtype, tokens[0][..., 0]
    words, place = _words(ids, sum(static.words))

    def visit(table, band, row, rows):
        vectors = product(_rows(band.table, rows, dtype), band.projection)
        return lax.dynamic_update_slice_in_dim(table, bits_on_cpu(vectors), row, 0)

    shape = len(words) + _chunk(words), bands[0].projection.shape[1]
    table = pvary(bits_on_cpu(jnp.zeros(shape, dtype)), axes_of((ids, bands)))
    for band, spans in zip(bands, _spans(words, static, bands, axis_name), strict=True):
        table = _each_chunk(words, spans, functools.partial(visit, band=band), table)
    table = of_bits(table[place], dtype).reshape(*ids.shape, -1)
    return table if axis_name is None else lax.psum(table, axis_name), None, None


def _add_up(static, axis_name, tokens, bands):
    """Backward function of `partitioned.run`, for the tokens of one device."""
    dtype, (gradient, ids) = static.dtype, tokens
    words, place = _words(ids, sum(static.words))
    gradient = gradient.reshape(-1, gradient.shape[-1]).astype(sum_dtype(dtype))
    shape = len(words) + _chunk(words), gradient.shape[1]
    d_words = pvary(jnp.zeros(shape, gradient.dtype), axes_of((gradient, ids, bands)))
    d_words = d_words.at[place].add(gradient)

    def visit(sums, band, row, rows):
        d_vectors, lowering = lifted(lax.dynamic_slice_in_dim(d_words, row, len(rows)), dtype)
        _, pull = jax.vjp(product, _rows(band.table, rows, dtype), band.projection)
        d_rows, d_projection = (a.astype(d_words.dtype) * lowering for a in pull(d_vectors))
        table = sums.table.at[rows].set(
            d_rows.astype(band.table.dtype),
            mode="drop",
            indices_are_sorted=True,
            unique_indices=True,
        )
        return Band(table, sums.projection + d_projection.astype(sums.projection.dtype))

    def zeros(band):
        total = jnp.zeros(band.projection.shape, sum_dtype(band.projection.dtype))
        return pvary(Band(jnp.zeros_like(band.table), total), axes_of((gradient, ids, bands)))

    gradients = []
    for band, spans in zip(bands, _spans(words, static, bands, axis_name), strict=True):
        sums = _each_chunk(words, spans, functools.partial(visit, band=band), zeros(band))
        gradients.append(Band(sums.table, sums.projection.astype(band.projection.dtype)))
    return (), (), gradients


def _words(ids, count):
    """The distinct words of `ids` and the index of each id among them, see `arrays.distinct`; ids
    outside of the vocabulary have an index behind all words.
    """
    ids = ids.reshape(-1)
    return distinct(jnp.where(exists(ids, count), ids, count), count, _chunk(ids))


def _spans(words, static, bands, axis_name):
    """Yields `(first, begin, end)` for each band: this device has the band's words from id `first`
    on, and `words[begin:end]` are among them.

    axis_name: the mesh axis that shards the rows of every table, or None.
    """
    axes = static.axes if axis_name is None else axis_name
    part, first = lax.axis_index(axes) if axes else 0, 0
    for size, band in zip(static.words, bands, strict=True):
        first_row = first + part * len(band.table)
        edges = jnp.asarray([first_row, first_row + len(band.table)], words.dtype)
        edges = jnp.minimum(edges, first + size)  # further rows are padding
        yield first_row, *jnp.searchsorted(words, edges)
        first += size


def _chunk(words):
    return min(CHUNK if platform() == "cpu" else LARGE_CHUNK, len(words))


def _each_chunk(words, spans, visit, carry):
    """Folds `visit(carry, row=, rows=)` over the chunks of a band.

    `rows` are the table's rows of a chunk of words that begins at index `row`, in ascending order.
    Behind the band's last word they are out of range.
    """
    (first, begin, end), chunk = spans, _chunk(words)
    words = jnp.pad(words, (0, chunk))
    number = jnp.arange(chunk, dtype=words.dtype)
    beyond = jnp.iinfo(words.dtype).max - chunk + number

    def one(trip, carry):
        row = begin + trip * chunk
        rows = lax.dynamic_slice_in_dim(words, row, chunk) - first
        return visit(carry, row=row, rows=jnp.where(row + number < end, rows, beyond))

    return lax.fori_loop(0, (end - begin + chunk - 1) // chunk, one, carry)


def _rows(table, rows, dtype):
    """Rows of a table, 0 where out of range."""
    return table.at[rows].get(mode="fill", fill_value=0, indices_are_sorted=True).astype(dtype)
