"""The arrays that a caller gives to the core, checked: numpy arrays and lists become JAX
arrays, and shapes must fit.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.numerics.arrays import floats
from adaptive_jax.numerics.bands import Band


def given(
    hidden, bands: Sequence[Band], clusters: Band | None
) -> tuple[jax.Array, list[Band], Band | None]:
    """`hidden [..., features]`, bands and clusters as JAX arrays; see
    `adaptive_jax.losses.banded`.

    Raises:
        InputError: hidden states of another width than the bands take, or bands and clusters that
            do not fit together.
    """
    if not bands:
        raise InputError(f"bands={bands} has no band: give at least Band(table)")
    bands = [_band(f"bands[{i}]", band) for i, band in enumerate(bands)]
    tails, head = len(bands) - 1, bands[0]
    empty = tails and np.shape(head.table)[:-1] == (0,)  # a head of clusters alone
    head = _checked("bands[0]", head, "features", 0 if empty else "words")
    features = (head.table if head.projection is None else head.projection).shape[1]
    bands = [
        head,
        *(_checked(f"bands[{i}]", band, features) for i, band in enumerate(bands[1:], 1)),
    ]
    if clusters is None and tails:
        raise InputError(
            f"clusters=None does not fit {len(bands)} bands: give a Band whose table has {tails}"
            " rows"
        )
    if clusters is not None:
        if not tails:
            raise InputError(
                "clusters=Band(...) does not fit one band, which has no tails: give clusters=None"
            )
        clusters = _checked(
            "clusters",
            _band("clusters", clusters)._replace(projection=None),
            head.table.shape[1],
            tails,
        )
    return floats("hidden", hidden, ..., features), bands, clusters


def _band(what, band):
    if not isinstance(band, Sequence) or not 1 <= len(band) <= 3:
        raise InputError(
            f"{what} of type {type(band).__name__} is no band: give Band(table, projection, bias)"
        )
    return Band(*band)


def _checked(what, band, features, words="words"):
    """A band whose hidden states, or for clusters those of the head, have this width."""
    table, projection, bias = band
    width = features if projection is None else "width"
    table = floats(f"{what}.table", table, words, width) if words else jnp.asarray(table)
    if projection is not None:
        projection = floats(f"{what}.projection", projection, table.shape[1], features)
    return Band(
        table,
        projection,
        None if bias is None or not words else floats(f"{what}.bias", bias, len(table)),
    )
