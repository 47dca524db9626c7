"""Float32 products in float32 on every backend.

JAX's default for a product of two float32 arrays is TF32, of 10 bits, on an NVIDIA GPU, and one
pass in bfloat16, of 7, on a TPU.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.devices.platforms import platform


def exact(function: Callable, body: nn.Module) -> Callable:
    """`function`, to be traced by JAX, with products in float32 if the `dtype` of its model's body
    is float32, or not named.

    The gradients of these products are computed likewise. Where JAX_DEFAULT_MATMUL_PRECISION is
    set, for example to tensorfloat32, that holds. On a CPU nothing changes: its products are exact
    anyway.
    """

    narrow = getattr(body, "dtype", jnp.float32) != jnp.float32

    @functools.wraps(function)
    def traced(*arguments):
        if narrow or jax.config.jax_default_matmul_precision is not None or platform() == "cpu":
            return function(*arguments)
        with jax.default_matmul_precision("highest"):
            return function(*arguments)

    return traced
