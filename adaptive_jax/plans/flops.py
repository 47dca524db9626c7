"""Floating-point operations of matrix products: of a banded softmax by formula, of any other function by its jaxpr.

These are forward passes; a training step, with its backward pass, takes three times as many.
"""

import math
from collections.abc import Sequence

import jax.extend.core
import numpy as np

from adaptive_jax.bands import Band


def band_flops(rows, width, columns, projected_from=0):
    """FLOPs of one band: `rows` hidden states, projected to `width` if they have another one, times the band's columns.

        2 · rows · width · (columns + projected_from)

    columns: words of the band; for the head also one for every tail. projected_from: width of the hidden states, or 0 if the
    band has no projection. Arrays broadcast.
    """
    return 2.0 * rows * width * (columns + projected_from)


def softmax_flops(bands: Sequence[Band], rows: Sequence[float]) -> float:
    """FLOPs of a softmax over `bands`, arrays or their shapes, the head first.

    rows: hidden states that visit each band. The head is visited by all, a tail by those whose target is in its band.
    """
    total = 0.0
    for i, (band, visits) in enumerate(zip(bands, rows, strict=True)):
        words, width = band.table.shape
        tails = len(bands) - 1 if i == 0 else 0
        total += band_flops(visits, width, words + tails, 0 if band.projection is None else band.projection.shape[1])
    return float(total)


def zipf_rows(bands: Sequence[Band]) -> np.ndarray:
    """Visits to each band per token if the word of rank r has probability proportional to 1/r (Zipf's law)."""
    ends = np.cumsum([band.table.shape[0] for band in bands])
    reached = np.cumsum(1 / np.arange(1, ends[-1] + 1))
    return np.append(1.0, np.diff(reached[ends - 1]) / reached[-1])


def product_flops(jaxpr) -> float:
    """FLOPs of all matrix products in a jaxpr. A scan counts as often as it repeats.

    Of the loops whose length is not known, only the most expensive one counts, and it counts as one iteration.
    """
    total, loops = 0, [0]
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * depth
        inner = sum(map(product_flops, jax.extend.core.jaxprs_in_params(equation.params)))
        if equation.primitive.name == "while":
            loops.append(inner)
        else:
            total += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total + max(loops)
