"""Language models of other trainers with their own loss, and with linear_cross_entropy in its
place. Only `benchmarks.adoption` imports these modules, once a checkout is on the path.

Each has `LAYOUTS`, names of meshes and shardings, and `programs(layout, size, devices, place)`:
name of a loss to a lowered program that returns that loss and the gradients of all parameters, and
its arguments, made by `place(make, shardings)`. The first is the trainer's own.
"""

from typing import NamedTuple

OURS = "linear_cross_entropy"


class Size(NamedTuple):
    """Of a transformer of two layers and of a batch. `dtype` is that of products."""

    words: int
    width: int = 64
    heads: int = 4
    rows: int = 16
    length: int = 64
    dtype: str = "float32"
