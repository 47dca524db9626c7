"""The work of a banded softmax: floating-point operations of its matrix products.

The formulas are for a forward pass. A training step, with its backward pass, takes three times as
many.
"""

from collections.abc import Sequence

import numpy as np

from adaptive_jax.numerics.bands import Band


def band_flops(rows, width, columns, features=0):
    """FLOPs of one band: `rows` hidden states, projected to `width` if that is not theirs, times
    the band's columns.

        2 · rows · width · (columns + features)

    columns: words of the band; in the head, one more for every tail. features: width of the hidden
    states, or 0 for a band without projection. Arrays broadcast.
    """
    return 2.0 * rows * width * (columns + features)


def softmax_flops(bands: Sequence[Band], visits: Sequence[float]) -> float:
    """FLOPs of a softmax over `bands`, arrays or their shapes, the head first.

    visits: hidden states that each band is computed for. The head serves all, a tail those whose
        target is in its band.
    """
    total, extra = 0.0, len(bands) - 1
    for (table, projection, _), rows in zip(bands, visits, strict=True):
        words, width = table.shape
        total += band_flops(
            rows, width, words + extra, 0 if projection is None else projection.shape[1]
        )
        extra = 0
    return float(total)


def zipf_visits(bands: Sequence[Band]) -> np.ndarray:
    """Visits per token to each band, if the word of rank r has a probability proportional to
    1/r (Zipf's law).
    """
    ends = np.cumsum([band.table.shape[0] for band in bands])
    reached = np.cumsum(np.append(0.0, 1 / np.arange(1, ends[-1] + 1)))
    return np.append(1.0, np.diff(reached[ends]) / reached[-1])
