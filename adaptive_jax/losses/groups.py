"""Groups of bands that one loop visits, so that a table of hundreds of bands compiles in the time
of a few.

Consecutive tails of one width whose sizes are nearly equal make a group. Its tables stand one after
another in one array; to visit a member, a loop reads as many rows as the largest member has and
masks those that are a neighbour's. Nothing is copied to make all members equally large.

On accelerators tables are laid out for matrix units, whose products have columns in multiples of
128. A compiler pads other numbers of columns for every chunk of tokens; here tables are padded
once. Clusters become rows behind the head's words, where they need no products of their own.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses.chunks import TILE
from adaptive_jax.numerics.bands import MANY_BANDS, Band
from adaptive_jax.numerics.platforms import platform

# How many times as large as the smallest band of a group the largest may be: so much work at most
# goes to rows that are masked.
PADDING = 1.25
# Of a band this long XLA sums products over words in up to 128 parts, and pads for each chunk where
# those are not of 8 words.
LONG = 2**17
LONG_TILE = 1024


def join(bands: list[Band]) -> tuple[tuple[tuple[int, ...], ...], tuple[Band, ...]]:
    """Groups bands: words of each band, and arrays, both by group.

    Bands of 40, 9, 9, … and 8 words give `((40,), (9, 9, …, 8))`. The arrays of a group stand one
    after another: table `[words, width]`, projection `[bands · width, features]`, bias `[words]`.
    The head is a group of its own; so is every tail that has fewer than `MANY_BANDS` alike in a
    row.
    """
    runs = [[bands[0]]]
    for i, band in enumerate(bands[1:]):
        sizes = [len(one.table) for one in (*runs[-1], band)]
        if i and _kind(band) == _kind(runs[-1][-1]) and max(sizes) <= PADDING * min(sizes):
            runs[-1].append(band)
        else:
            runs.append([band])
    groups = []
    for run in runs:
        groups += [run] if len(run) >= MANY_BANDS else [[band] for band in run]
    sizes = tuple(tuple(len(band.table) for band in group) for group in groups)
    return sizes, tuple(map(_concatenated, groups))


def num_chunks(begins, ends, chunk: int):
    """Trips of a loop over all chunks of a group, whose bands have tokens `begins[i]` to `ends[i] -
    1`.

    Returns:
        The number of trips, and a function from the trip to (number of the band, chunk of that
        band).
    """
    if len(begins) == 1:
        return (ends[0] - begins[0] + chunk - 1) // chunk, lambda trip: (0, trip)
    counts = (ends - begins + chunk - 1) // chunk
    done = jnp.cumsum(counts)

    def locate(trip):
        number = jnp.sum(trip >= done)
        return number, trip - (done - counts)[number]

    return done[-1], locate


class BandView:
    """A band of a group; in a loop its number is known only when the program runs.

    Attributes:
        valid: bool `[largest size]`, the rows read that are the band's own words; None: all.
        first: the first row that is read.
        shift: rows read before the band's own.
    """

    def __init__(self, group: Band, sizes: tuple[int, ...], number, present=None):
        """`present`: how many of each band's rows are words, the first ones; None: all."""
        self.valid, self.first, self.shift, self._cuts = None, 0, 0, None
        if len(sizes) > 1:
            largest, width = max(sizes), group.table.shape[1]
            start = jnp.array(list(itertools.accumulate(sizes[:-1], initial=0)))[number]
            self.first = jnp.minimum(start, len(group.table) - largest)
            self.shift = start - self.first
            rows = jnp.arange(largest) - self.shift
            words = jnp.array(sizes) if present is None else present
            self.valid = (rows >= 0) & (rows < words[number])
            self._cuts = Band((self.first, largest), (number * width, width), (self.first, largest))
        elif present is not None:
            self.valid = jnp.arange(len(group.table)) < present[0]

    def read(self, group: Band) -> Band:
        """The member's arrays, with rows of its neighbours up to the largest size."""
        if self._cuts is None:
            return group

        def read(array, cut):
            return None if array is None else lax.dynamic_slice_in_dim(array, *cut)

        return Band(*map(read, group, self._cuts))

    def add(self, group: Band, more: Band) -> Band:
        """The group's arrays with `more`, of the shape that `read` gives, added to those of the
        member.
        """
        sums = jax.tree.map(jnp.add, self.read(group), more)
        if self._cuts is None:
            return sums

        def write(array, part, cut):
            return part if part is None else lax.dynamic_update_slice_in_dim(array, part, cut[0], 0)

        return Band(*map(write, group, sums, self._cuts))


def _concatenated(bands):
    if len(bands) == 1:
        return bands[0]
    fields = zip(*bands, strict=True)
    return Band(*(None if of[0] is None else lax.concatenate(of, 0) for of in fields))


def _kind(band):
    """What bands of one group have in common."""
    shapes = [None if array is None else (array.shape[1:], array.dtype) for array in band]
    return shapes, None if band.projection is None else len(band.projection)


def tiled(
    words: Sequence[int],
    groups: tuple[Band, ...],
    sizes: tuple[tuple[int, ...], ...],
    clusters: Band | None,
):
    """Sizes, groups and clusters, in the order of `join`, with whole tiles of rows on
    accelerators, unchanged on a CPU.

    Args:
        words: words of each band; rows behind them are padding.
        groups, sizes: as `join` returns them. Groups of several bands stay as they are.
        clusters: they move into the head, behind its words, and None is returned for them.
    """
    if platform() == "cpu":
        return sizes, groups, clusters
    head = groups[0]
    if clusters is not None:
        bias = None if head.bias is None else head.bias[: words[0]]
        head = _joined(Band(head.table[: words[0]], head.projection, bias), clusters)
    rows, laid = [], []
    for group, own in zip((head, *groups[1:]), sizes, strict=True):
        laid.append(_padded(group) if len(own) == 1 else group)
        rows.append((len(laid[-1].table),) if len(own) == 1 else own)
    return tuple(rows), tuple(laid), None


def _joined(band, more):
    """The band with the rows of another behind its own."""
    table = jnp.concatenate([band.table, more.table])
    if band.bias is None and more.bias is None:
        return Band(table, band.projection)
    biases = [
        jnp.zeros(len(b.table), jnp.float32) if b.bias is None else b.bias for b in (band, more)
    ]
    return Band(table, band.projection, jnp.concatenate(biases))


def _padded(band):
    """The band with rows of 0 behind its own, up to a multiple of `TILE`, or of `LONG_TILE`."""
    rows = -len(band.table) % (TILE if len(band.table) < LONG else LONG_TILE)
    bias = None if band.bias is None else jnp.pad(band.bias, (0, rows))
    return Band(jnp.pad(band.table, [(0, rows), (0, 0)]), band.projection, bias)
