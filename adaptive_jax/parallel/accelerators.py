"""Memory of the attached devices, their utilisation, and the cache of compiled programs."""

import os
import platform

import jax
import numpy as np
from jax.experimental import multihost_utils

from adaptive_jax.config import cache
from adaptive_jax.numerics.devices import find


def memory() -> int | None:
    """Bytes that programs may use on the smallest device of all hosts; None if a device, such as
    a CPU, does not report it.
    """
    mib = min(
        (device.memory_stats() or {}).get("bytes_limit", 0) // 2**20
        for device in jax.local_devices()
    )
    return int(np.min(multihost_utils.process_allgather(np.int32(mib)))) * 2**20 or None


def memory_of_machine(devices: int) -> int:
    """Bytes of this machine's memory for each of its devices in use, which `memory` does not know
    for CPUs.
    """
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // devices


def keep_programs() -> None:
    """Keeps compiled programs in `cache.directory()`, unless JAX has a compilation cache already.

    Programs for CPUs are kept for each machine, as they may use instructions that other CPUs lack.
    """
    if jax.config.jax_compilation_cache_dir is None:
        backend = jax.default_backend()
        machine = platform.node() if backend == "cpu" else backend
        place = str(cache.directory() / "programs" / machine)
        jax.config.update("jax_compilation_cache_dir", place)


def utilisation(flops: float, seconds: float, devices: int, kind: str) -> float | None:
    """Model FLOP utilisation (Chowdhery et al. 2022, appendix B): `flops / (seconds · devices ·
    peak FLOP/s in bfloat16)`; None for a device that `adaptive_jax.numerics.devices` does not list.

    flops: FLOPs by `adaptive_jax.planning.plan.training_flops`, without recomputation.
    """
    device = find(kind)
    return device and flops / (seconds * devices * device.flops)
