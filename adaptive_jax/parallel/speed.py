"""How fast the devices of a run multiply matrices, for plans of how long it takes."""

import time
from collections.abc import Collection

import jax
import jax.numpy as jnp

from adaptive_jax.numerics.products import wide
from adaptive_jax.parallel import accelerators, sharding

ROWS = 2048  # vectors of a product that is measured
SECONDS = 0.1  # for which each width is measured
WIDTH = 512  # where dtypes are compared


def product_speed(widths: Collection[int]) -> dict[int, float]:
    """FLOP/s of matrix products of vectors of each width, by all devices of all hosts together; the
    same on every host.

    Of a listed accelerator, the maker's figure; of others, measured, for some 0.2 s a width.
    """
    figures = accelerators.accelerator(jax.devices()[0].device_kind)
    if figures is not None:
        return dict.fromkeys(widths, figures.flops * jax.device_count())
    # Devices of a CPU share its cores.
    devices = 1 if jax.default_backend() == "cpu" else jax.local_device_count()
    return {
        width: float(sharding.sum_over_hosts(int(_measured(width) * devices))) for width in widths
    }


def gain_of_bfloat16() -> float:
    """How many times as fast as in float32 this machine multiplies matrices in bfloat16,
    measured for some 0.4 s.
    """
    return _measured(WIDTH, jnp.bfloat16) / _measured(WIDTH)


def _measured(width, dtype=jnp.float32):
    x, matrix = jnp.ones((ROWS, width), dtype), jnp.ones((width, 4 * width), dtype)
    product = jax.jit(wide).lower(x, matrix).compile()
    product(x, matrix).block_until_ready()
    start, times = time.perf_counter(), 0
    while (passed := time.perf_counter() - start) < SECONDS or not times:
        product(x, matrix).block_until_ready()
        times += 1
    return 8 * ROWS * width**2 * times / passed
