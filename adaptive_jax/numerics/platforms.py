"""The platform that a program is traced for: that of the surrounding mesh, whose devices may be
absent.
"""

import contextlib

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from adaptive_jax.numerics.devices import GPUS

NAMES = {"cuda": "gpu", "rocm": "gpu"}
# Compute capabilities with 163 or 227 KiB of shared memory per thread block; the others from 8.0 on
# have 99.
LARGE_SHARED_MEMORY = (8, 0), (8, 7), (9, 0), (10, 0), (10, 3), (11, 0)


def platform() -> str:
    """The name of the platform, "cpu", "gpu" or "tpu": that of the mesh, also under
    `jax.shard_map`; without a mesh, that of `jax.default_device` or JAX's default backend.

    The devices of the arrays are ignored: JAX learns them after tracing.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    device = device or jax.config.jax_default_device or jax.default_backend()
    name = getattr(device, "platform", device)  # JAX also takes platform names as devices
    return NAMES.get(name, name)


def device_kind() -> str:
    """`jax.Device.device_kind` of the device that this code is traced for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return _default_device().device_kind if device is None else device.device_kind


def _default_device():
    """The device of `jax.default_device`, or the first one."""
    default = jax.config.jax_default_device
    if isinstance(default, jax.Device):
        return default
    return jax.devices(default)[0]  # of a platform, or None


def capability() -> tuple[int, int]:
    """The compute capability of the NVIDIA GPU that this code is traced for, such as (9, 0);
    (0, 0) for other devices.
    """
    if platform() != "gpu":
        return 0, 0
    if device_kind() != _default_device().device_kind:  # it may be absent
        kinds = {chip.kind: chip.capability for chip in GPUS.values()}
        return kinds.get(device_kind(), (0, 0))
    major, _, minor = str(getattr(_default_device(), "compute_capability", "")).partition(".")
    # The versions of AMD GPUs are names.
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)


def tracing_for(platform: str, kind: str) -> contextlib.AbstractContextManager:
    """Context manager in which code is traced for a device of this platform and kind; inside
    `jax.shard_map`, the devices of its mesh take precedence.
    """
    device = AbstractDevice(kind, None, platform)
    mesh = AbstractMesh((1,), ("target",), axis_types=(AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
