"""What accelerators can do at most, by their makers' figures, for utilisation and for plans."""

import platform
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils


class Accelerator(NamedTuple):
    """One device: matrix products in bfloat16, dense, in FLOP/s; bytes of memory; bytes a second to and from it."""

    flops: float
    memory: float
    bandwidth: float


# By a part of `jax.Device.device_kind`; the first that is found counts.
ACCELERATORS = {
    "B200": Accelerator(2250e12, 180e9, 8.0e12),
    "H200": Accelerator(989e12, 141e9, 4.8e12),
    "H100": Accelerator(989e12, 80e9, 3.35e12),
    "A100": Accelerator(312e12, 80e9, 2.0e12),
    "V100": Accelerator(125e12, 32e9, 0.9e12),  # in float16
    "TPU7x": Accelerator(2307e12, 192e9, 7.4e12),
    "TPU v6": Accelerator(918e12, 32e9, 1.64e12),
    "TPU v5 lite": Accelerator(197e12, 16e9, 0.82e12),
    "TPU v5": Accelerator(459e12, 95e9, 2.77e12),
    "TPU v4": Accelerator(275e12, 32e9, 1.23e12),
}


def accelerator(kind: str) -> Accelerator | None:
    """The figures of a `device_kind`; None for a CPU and whatever else is not listed."""
    return next((figures for name, figures in ACCELERATORS.items() if name in kind), None)


def memory() -> int | None:
    """Bytes that programs may use on the device that has least, of all hosts; None where it does not say, as a CPU does not."""
    mib = min((device.memory_stats() or {}).get("bytes_limit", 0) // 2**20 for device in jax.local_devices())
    return int(np.min(multihost_utils.process_allgather(np.int32(mib)))) * 2**20 or None


def keep_programs(cache: Path) -> None:
    """Has compiled programs kept below `cache` and found again by later runs, unless JAX was told of a place already.

    Those for a CPU are kept by machine, since they may use what another CPU lacks.
    """
    if jax.config.jax_compilation_cache_dir is None:
        place = cache / "programs" / (platform.node() if jax.default_backend() == "cpu" else jax.default_backend())
        jax.config.update("jax_compilation_cache_dir", str(place))


def utilisation(flops: float, seconds: float, devices: int, kind: str) -> float | None:
    """Model FLOP utilisation: matrix work that the model calls for, over what the devices could do in the time.

        flops / (seconds · devices · peak FLOP/s in bfloat16)

    flops are those of a forward pass times three, by `plan`: nothing that is computed again counts, nor does anything but
    matrix products (Chowdhery et al. 2022, appendix B). None for a device that is not listed.
    """
    figures = accelerator(kind)
    return figures and flops / (seconds * devices * figures.flops)
