"""Groups of bands that one loop visits, so that a table of hundreds of bands compiles in the time
of a few.

Consecutive tails of one width and of nearly equal sizes form a group. Its arrays are concatenated;
for each member, a loop reads as many rows as the largest member has and masks those of the
neighbour, so no array is copied to make all members equally large.

On accelerators tables are padded to whole tiles of rows, as matrix units need them, once; otherwise
the compiler would pad them for every chunk of tokens. Clusters become rows after the head's words,
so they need no products of their own.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses.plans import TILE
from adaptive_jax.numerics.bands import MANY_BANDS, Band
from adaptive_jax.numerics.platforms import platform

# The largest band of a group has at most this many times the rows of the smallest, which bounds the
# work spent on masked rows.
PADDING = 1.25
# From this length on, XLA sums products over words in up to 128 parts, and pads every chunk unless
# the parts are multiples of 8 words.
LONG = 2**17
LONG_TILE = 1024


class Slice(NamedTuple):
    """Rows of a group's arrays that hold one band; traced in a loop over bands.

    Attributes:
        first: first row of table and bias.
        rows: number of rows, those of the group's largest band.
        projection: first row of the projection.
        valid: bool `[rows]`, True for words of this band, False for those of a neighbour and
            padding. None: all rows are valid.
        shift: rows before the band's first word.
    """

    first: jax.Array | int
    rows: int
    projection: jax.Array | int = 0
    valid: jax.Array | None = None
    shift: jax.Array | int = 0


def band_slice(group: Band, sizes: tuple[int, ...], number, present=None) -> Slice:
    """The slice of a group's arrays that holds its band `number`.

    Args:
        sizes: rows of each band of the group.
        present: `[bands]`, the number of words at the beginning of each band; None: all rows.
    """
    if len(sizes) == 1:
        rows = len(group.table)
        return Slice(0, rows, 0, None if present is None else jnp.arange(rows) < present[0])
    largest = max(sizes)
    start = jnp.array(list(itertools.accumulate(sizes[:-1], initial=0)))[number]
    first = jnp.minimum(start, len(group.table) - largest)
    row = jnp.arange(largest) - (start - first)
    words = jnp.array(sizes) if present is None else present
    valid = (row >= 0) & (row < words[number])
    return Slice(first, largest, number * group.table.shape[1], valid, start - first)


def read_band(group: Band, part: Slice) -> Band:
    """Arrays of one band, as many rows as the largest band of the group has."""
    table, projection, bias = group
    if projection is not None:
        projection = read_rows(projection, part.projection, table.shape[1])
    bias = None if bias is None else read_rows(bias, part.first, part.rows)
    return Band(read_rows(table, part.first, part.rows), projection, bias)


def read_rows(array: jax.Array, first, rows: int) -> jax.Array:
    """Rows `[first, first + rows)`; the array itself if it has no other rows."""
    return array if rows == len(array) else lax.dynamic_slice_in_dim(array, first, rows)


def add_rows(array: jax.Array, values: jax.Array, first) -> jax.Array:
    """Adds `values` to the rows of the array from `first` on, in place if possible."""
    if len(values) == len(array):
        return array + values
    rows = lax.dynamic_slice_in_dim(array, first, len(values)) + values
    return lax.dynamic_update_slice_in_dim(array, rows, first, 0)


def join(bands: list[Band]) -> tuple[tuple[tuple[int, ...], ...], tuple[Band, ...]]:
    """Rows of each band, and arrays, both by group.

    Bands of 40, 9, 9, … and 8 words give `((40,), (9, 9, …, 8))`. A group has the table `[words,
    width]`, projection `[bands · width, features]` and bias `[words]`. The head is a group of its
    own; so is every tail that has fewer than `MANY_BANDS` similar ones in a row.
    """
    candidates = [[bands[0]]]
    for i, band in enumerate(bands[1:]):
        sizes = [len(member.table) for member in (*candidates[-1], band)]
        if i and _kind(band) == _kind(candidates[-1][-1]) and max(sizes) <= PADDING * min(sizes):
            candidates[-1].append(band)
        else:
            candidates.append([band])
    groups = []
    for candidate in candidates:
        groups += [candidate] if len(candidate) >= MANY_BANDS else [[band] for band in candidate]
    sizes = tuple(tuple(len(band.table) for band in group) for group in groups)
    return sizes, tuple(map(_concatenated, groups))


def in_dtype(tree, dtype):
    """Bands of a tree with table and projection in the dtype of products; biases are added in
    float32.
    """
    return jax.tree.map(
        lambda band: Band(*jax.tree.map(lambda a: a.astype(dtype), tuple(band[:2])), band.bias),
        tree,
        is_leaf=lambda leaf: isinstance(leaf, Band),
    )


def lay_out(bands: list[Band], clusters: Band | None, words: Sequence[int], axis_name):
    """`(sizes, groups, clusters)`: the groups of `join`, padded to whole tiles on accelerators.

    On accelerators clusters also become rows of the head, after its words, and the clusters
    returned are None. With `axis_name`, words are sharded and only `join` is applied.

    Args:
        words: words of each band; its other rows are padding.
    """
    sizes, groups = join(bands)
    if axis_name is not None or platform() == "cpu":
        return sizes, groups, clusters
    head = groups[0]
    if clusters is not None:
        bias = None if head.bias is None else head.bias[: words[0]]
        head = _joined(Band(head.table[: words[0]], head.projection, bias), clusters)
    groups = [
        _padded(group) if len(rows) == 1 else group
        for group, rows in zip((head, *groups[1:]), sizes, strict=True)
    ]
    sizes = tuple(
        (len(group.table),) if len(rows) == 1 else rows
        for group, rows in zip(groups, sizes, strict=True)
    )
    return sizes, tuple(groups), None


def _concatenated(bands):
    if len(bands) == 1:
        return bands[0]
    fields = zip(*bands, strict=True)
    return Band(*(None if arrays[0] is None else lax.concatenate(arrays, 0) for arrays in fields))


def _kind(band):
    """Shapes and dtypes that all bands of a group share."""
    shapes = [None if array is None else (array.shape[1:], array.dtype) for array in band]
    return shapes, None if band.projection is None else len(band.projection)


def _joined(band, clusters):
    """The band with the rows of another after its own."""
    table = jnp.concatenate([band.table, clusters.table])
    if band.bias is None and clusters.bias is None:
        return Band(table, band.projection)
    biases = [
        jnp.zeros(len(b.table), jnp.float32) if b.bias is None else b.bias for b in (band, clusters)
    ]
    return Band(table, band.projection, jnp.concatenate(biases))


def _padded(band):
    """The band padded by rows of 0 to a multiple of `TILE`, or of `LONG_TILE`."""
    rows = -len(band.table) % (TILE if len(band.table) < LONG else LONG_TILE)
    bias = None if band.bias is None else jnp.pad(band.bias, (0, rows))
    return Band(jnp.pad(band.table, [(0, rows), (0, 0)]), band.projection, bias)
