"""Groups of bands that one loop visits, so that a table of hundreds of bands compiles in the time
of a few.

Consecutive tails of one width whose sizes are nearly equal make a group. Its tables stand one after
another in one array; to visit a member, a loop reads as many rows as the largest member has and
masks those that are a neighbour's. Nothing is copied to make all members equally large.
"""

import itertools

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.numerics.bands import MANY_BANDS, Band

# How many times as large as the smallest band of a group the largest may be: so much work at most
# goes to rows that are masked.
PADDING = 1.25


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
    groups = [
        group
        for run in runs
        for group in ([run] if len(run) >= MANY_BANDS else [[band] for band in run])
    ]
    return tuple(tuple(len(band.table) for band in group) for group in groups), tuple(
        map(_concatenated, groups)
    )


def trips(begins, ends, chunk: int):
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

    def which(trip):
        number = jnp.sum(trip >= done)
        return number, trip - (done - counts)[number]

    return done[-1], which


class Member:
    """A band of a group; in a loop its number is known only when the program runs.

    Attributes:
        own: bool `[largest size]`, the rows read that are the band's own words; None: all.
        first: the first row that is read.
        shift: rows read before the band's own.
    """

    def __init__(self, group: Band, sizes: tuple[int, ...], number, present=None):
        """`present`: how many of each band's rows are words, the first ones; None: all."""
        self.own, self.first, self.shift, self._cuts = None, 0, 0, None
        if len(sizes) > 1:
            largest, width = max(sizes), group.table.shape[1]
            start = jnp.array(list(itertools.accumulate(sizes[:-1], initial=0)))[number]
            self.first = jnp.minimum(start, len(group.table) - largest)
            self.shift = start - self.first
            rows = jnp.arange(largest) - self.shift
            self.own = (rows >= 0) & (
                rows < (jnp.array(sizes) if present is None else present)[number]
            )
            self._cuts = Band((self.first, largest), (number * width, width), (self.first, largest))
        elif present is not None:
            self.own = jnp.arange(len(group.table)) < present[0]

    def read(self, group: Band) -> Band:
        """The member's arrays, with rows of its neighbours up to the largest size."""
        if self._cuts is None:
            return group
        pairs = zip(group, self._cuts, strict=True)
        return Band(
            *(
                None if array is None else lax.dynamic_slice_in_dim(array, *cut)
                for array, cut in pairs
            )
        )

    def add(self, group: Band, more: Band) -> Band:
        """The group's arrays with `more`, of the shape that `read` gives, added to those of the
        member.
        """
        sums = jax.tree.map(jnp.add, self.read(group), more)
        if self._cuts is None:
            return sums
        fields = zip(group, sums, self._cuts, strict=True)
        return Band(
            *(
                a if a is None else lax.dynamic_update_slice_in_dim(a, part, at, 0)
                for a, part, (at, _) in fields
            )
        )


def _concatenated(bands):
    if len(bands) == 1:
        return bands[0]
    return Band(
        *(
            None if arrays[0] is None else lax.concatenate(arrays, 0)
            for arrays in zip(*bands, strict=True)
        )
    )


def _kind(band):
    """What bands of one group have in common."""
    shapes = [None if array is None else (array.shape[1:], array.dtype) for array in band]
    return shapes, None if band.projection is None else len(band.projection)
