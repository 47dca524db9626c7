"""Compilation targets: devices that need not be attached.

    topology("h100")        one H100
    topology("h100:8")      eight of one host
    topology("h100:2x8")    eight of each of two hosts
    topology("v5e:2x2")     four chips of a TPU v5e, by the shape of their grid

Nothing runs on them. The compiler is the device's, so memory, fusions, kernels and collectives are
real. Its choice among kernels for matrix products is not, because that takes timings on the device.
"""

import importlib
import importlib.util
import os
import re
import sys
from typing import NamedTuple

import jax
from jax.experimental import topologies

from adaptive_jax.errors import InputError, one_line
from adaptive_jax.numerics.devices import DEVICES, GPUS, description

TPUS = ("v4", "v5e", "v5p", "v6e")
# For libtpu, which would otherwise ask the cloud for a minute which TPU this is, complain that
# there is none, and serve one process only.
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
CURE = "pip install -e '.[targets]' in an environment of its own"


class Target(NamedTuple):
    """Devices of one kind that need not be attached."""

    name: str
    devices: list[jax.Device]  # to compile for, in a mesh; no array can be put on them
    memory: int  # bytes that programs may use on each
    options: dict  # of the compiler


def topology(name: str) -> Target:
    """The devices that a name stands for, see the module.

    Raises:
        InputError: no such name, or its compiler is not installed.
    """
    kind, _, grid = name.partition(":")
    gpu, size = kind in GPUS, r":[1-9]\d*"
    pattern = rf"({size}(x[1-9]\d*)?)?" if gpu else rf"{size}(x[1-9]\d*)*"
    if kind not in (*GPUS, *TPUS) or not re.fullmatch(kind + pattern, name):
        raise InputError(
            f"--target={name} must be one of {', '.join(GPUS)}, with their number as in h100:8, or"
            f" with hosts and GPUs of each as in h100:2x8; or a TPU {', '.join(TPUS)}, with the"
            " grid of its chips as in v5e:2x2"
        )
    compiler = ("nvidia", "jax_plugins") if gpu else ("libtpu",)
    missing = [module for module in compiler if importlib.util.find_spec(module) is None]
    if missing or sys.version_info < (3, 12):
        raise InputError(
            f"--target={name} needs {' and '.join(missing) or 'compilers for other devices'}"
            f" on Python 3.12 or newer, and this is {sys.version.split()[0]}: {CURE}"
        )
    devices = _gpus(kind, grid) if gpu else _tpus(name)
    # JAX takes three quarters of a GPU's memory by default; XLA leaves 98 % of a TPU's to programs.
    memory = int(DEVICES[kind].memory * (0.75 if gpu else 0.98))
    # Without the device the compiler cannot time kernels.
    return Target(name, devices, memory, {"xla_gpu_autotune_level": "0"} if gpu else {})


def _gpus(kind, grid):
    # The plugin refuses to start without cuBLAS and cuDNN, which only running programs need.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    shape = "x".join(["1", "1", *(grid or "1").split("x")][-3:])
    options = {"platform": "cuda", "target_config": description(kind), "topology": shape}
    try:
        return topologies.get_topology_desc(**options).devices
    except NotImplementedError:  # JAX was started without the plugin
        versions = (f"jax_plugins.xla_cuda{version}" for version in (13, 12))
        plugin = next(name for name in versions if importlib.util.find_spec(name))
        importlib.import_module(plugin).initialize()
        return topologies.get_topology_desc(**options).devices


def _tpus(name):
    for variable, value in NO_TPU.items():
        os.environ.setdefault(variable, value)
    try:
        return topologies.get_topology_desc(name, platform="tpu").devices
    except jax.errors.JaxRuntimeError as error:
        raise InputError(
            f"--target={name}: libtpu knows no such grid: {one_line(error)[:200]}"
        ) from error
