"""Peak performance and memory of accelerators, used for utilisation and plans; and the cache of
compiled programs.
"""

import os
import platform
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from adaptive_jax.errors import InputError
from adaptive_jax.files import path_of


class Accelerator(NamedTuple):
    """The maker's figures of one device: dense bfloat16 FLOP/s, bytes of memory, memory
    bandwidth in bytes/s.
    """

    flops: float
    memory: float
    bandwidth: float


# The first name that is part of `jax.Device.device_kind` counts.
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
    """The figures of a `device_kind`; None for a CPU or any other device that is not listed."""
    return next((figures for name, figures in ACCELERATORS.items() if name in kind), None)


def memory() -> int | None:
    """Bytes that programs may use on the smallest device of all hosts; None if a device does
    not report it, as a CPU.
    """
    mib = min(
        (device.memory_stats() or {}).get("bytes_limit", 0) // 2**20
        for device in jax.local_devices()
    )
    return int(np.min(multihost_utils.process_allgather(np.int32(mib)))) * 2**20 or None


def installed() -> int:
    """Bytes of memory of this machine, for each of its devices: what `memory` cannot say of a
    CPU.
    """
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // jax.local_device_count()


def keep_programs(cache: str | os.PathLike) -> None:
    """Keeps compiled programs below the directory `cache`, on a disk or in a store, unless JAX
    already has a compilation cache.

    Each machine has its own directory of programs for a CPU, because they may use instructions that
    another CPU lacks.

    Raises:
        InputError: there can be no such directory.
    """
    try:
        if not cache:
            raise RuntimeError
        place = path_of(cache)
    except RuntimeError:  # no such user
        raise InputError(
            f"data.cache={cache!r} is no directory: give the path of one on a disk"
        ) from None
    if jax.config.jax_compilation_cache_dir is None:
        place = (
            place
            / "programs"
            / (platform.node() if jax.default_backend() == "cpu" else jax.default_backend())
        )
        jax.config.update("jax_compilation_cache_dir", str(place))


def utilisation(flops: float, seconds: float, devices: int, kind: str) -> float | None:
    """Model FLOP utilisation (Chowdhery et al. 2022, appendix B): `flops / (seconds · devices ·
    peak FLOP/s in bfloat16)`.

    `flops` are those of all matrix products of a forward pass, times three; recomputation does not
    count. None for a device that is not listed.
    """
    figures = accelerator(kind)
    return figures and flops / (seconds * devices * figures.flops)
