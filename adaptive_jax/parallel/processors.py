"""CPU settings that must be made before JAX starts: large memory pages and two devices, which are
faster, and collectives in one order, without which several hosts hang.

If JAX_NUM_CPU_DEVICES or XLA_FLAGS sets the number of CPU devices, neither devices nor memory are
changed.
"""

import importlib.util
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LARGE_PAGES = "glibc.malloc.hugetlb=1"
PLUGINS = "jax_plugins", "libtpu"  # of jax[cuda] and jax[tpu]
FILES, NVIDIA, OTHERS = Path("/dev"), "nvidia[0-9]*", ("kfd", "accel*", "vfio/[0-9]*")
LSTMS = "lstm", "awd_lstm"  # with few rows, their wide layers are faster on one device
WIDE, LEAST_ROWS = 512, 64  # units of a wide layer, and rows that are enough for two devices
# If false, XLA begins independent collectives in the order of the program
IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler"
COUNT_VARIABLE = "JAX_NUM_CPU_DEVICES"
COUNT_FLAG = "--xla_force_host_platform_device_count"


def use_large_pages() -> None:
    """Restarts this process with large memory pages if it will compute on a CPU, and glibc can ask
    the system for them and does not yet.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    chosen = _devices_are_chosen() or "hugetlb" in tunables
    if chosen or may_have_accelerators() or not _large_pages_exist():
        return
    os.environ["GLIBC_TUNABLES"] = ":".join(filter(None, (tunables, LARGE_PAGES)))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def use_two_devices(config: Mapping) -> bool:
    """Splits a CPU of two or more cores into two devices, each with half of the rows and a copy of
    the parameters, and returns True if training runs on them. Call it before JAX uses a device.

    There is one device for an odd number of rows, on several hosts, and for wide LSTMs with few
    rows, whose matrices both devices would read at every step.
    """
    import jax  # here, because `use_large_pages` comes first and restarts

    tokens, length = config["tokens_per_update"], config["batches"]["sequence_length"]
    rows = tokens // length if length else 0
    body, few = config["body"], 0 < rows < LEAST_ROWS
    one = rows % 2 or (few and body["name"] in LSTMS and max(body["widths"], default=0) >= WIDE)
    if _devices_are_chosen() or jax.distributed.is_initialized() or one or cores() < 2:
        return False
    jax.config.update("jax_num_cpu_devices", 2)
    return jax.default_backend() == "cpu"


def order_collectives() -> None:
    """Makes the processes of a run on CPUs begin their collectives in the same order; otherwise
    they may wait for each other forever. Call it before JAX uses a device.
    """
    options = os.environ.get("XLA_FLAGS", "")
    if IN_ORDER not in options:
        os.environ["XLA_FLAGS"] = f"{options} {IN_ORDER}=false".strip()


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _devices_are_chosen():
    return COUNT_VARIABLE in os.environ or COUNT_FLAG in os.environ.get("XLA_FLAGS", "")


def may_have_accelerators() -> bool:
    """True if JAX, which need not be imported yet, may find devices besides the CPU."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return not platforms.startswith("cpu")
    usable = any(map(importlib.util.find_spec, PLUGINS))
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    names = OTHERS if hidden else (NVIDIA, *OTHERS)
    return usable and any(path for name in names for path in FILES.glob(name))


def _large_pages_exist():
    """True if programs must ask for large pages, and glibc can do so, as from 2.35 on."""
    name, version = platform.libc_ver()
    on_request = PAGES.exists() and "[madvise]" in PAGES.read_text()
    return on_request and name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)
