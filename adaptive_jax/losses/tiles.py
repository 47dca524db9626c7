"""Tables laid out for matrix units, whose products have columns in multiples of 128.

A compiler pads other numbers of columns for every chunk of tokens; here tables are padded once.
Clusters become rows behind the head's words, where they need no products of their own.
"""

from collections.abc import Sequence

import jax.numpy as jnp

from adaptive_jax.losses.chunks import TILE
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.platforms import platform

# Of a band this long XLA sums products over words in up to 128 parts, and pads for each chunk where
# those are not of 8 words.
LONG = 2**17
LONG_TILE = 1024


def tiled(
    words: Sequence[int],
    groups: tuple[Band, ...],
    sizes: tuple[tuple[int, ...], ...],
    clusters: Band | None,
):
    """Sizes, groups and clusters, in the order of `groups.join`, with whole tiles of rows on
    accelerators, unchanged on a CPU.

    Args:
        words: words of each band; rows behind them are padding.
        groups, sizes: as `groups.join` returns them. Groups of several bands stay as they are.
        clusters: they move into the head, behind its words, and None is returned for them.
    """
    if platform() == "cpu":
        return sizes, groups, clusters
    head = groups[0]
    if clusters is not None:
        bias = None if head.bias is None else head.bias[: words[0]]
        head = _joined(Band(head.table[: words[0]], head.projection, bias), clusters)
    laid = [
        _padded(group) if len(rows) == 1 else group
        for group, rows in zip((head, *groups[1:]), sizes, strict=True)
    ]
    rows = tuple(
        (len(group.table),) if len(own) == 1 else own
        for group, own in zip(laid, sizes, strict=True)
    )
    return rows, tuple(laid), None


def _joined(band, more):
    """The band with the rows of another behind its own."""
    biases = None
    if band.bias is not None or more.bias is not None:
        biases = jnp.concatenate(
            [
                jnp.zeros(len(b.table), jnp.float32) if b.bias is None else b.bias
                for b in (band, more)
            ]
        )
    return Band(jnp.concatenate([band.table, more.table]), band.projection, biases)


def _padded(band):
    """The band with rows of 0 behind its own, up to a multiple of `TILE`, or of `LONG_TILE`."""
    rows = -len(band.table) % (TILE if len(band.table) < LONG else LONG_TILE)
    bias = None if band.bias is None else jnp.pad(band.bias, (0, rows))
    return Band(jnp.pad(band.table, [(0, rows), (0, 0)]), band.projection, bias)
