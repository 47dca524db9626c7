"""Accelerators by short names: the makers' figures, and the descriptions that XLA needs to compile
for a device that is absent.
"""

import re
from typing import NamedTuple

KIB, MIB = 2**10, 2**20


class Device(NamedTuple):
    """The maker's figures of one device."""

    name: str  # a pattern of whole words within `jax.Device.device_kind`
    flops: float  # dense bfloat16, per second
    memory: float  # bytes
    bandwidth: float  # bytes per second


class Chip(NamedTuple):
    """Further figures of an NVIDIA GPU, for XLA's compiler."""

    kind: str  # as `jax.Device.device_kind`
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes: int  # float32 lanes of a core
    threads: int  # of a core, at a time
    clock: float  # GHz
    shared: int  # KiB of shared memory of a core; a block of threads gets 1 less
    cache: int  # MiB of the level 2 cache


# The makers' data sheets. Of names that are part of others, the longer comes first.
DEVICES = {
    "a100_40gb": Device(r"A100-\w+-40GB", 312e12, 40_960 * MIB, 1.555e12),
    "a100": Device("A100", 312e12, 81_920 * MIB, 2.039e12),
    "rtx4090": Device("RTX 4090", 165e12, 24_564 * MIB, 1.008e12),
    "h100pcie": Device("H100 PCIe", 756e12, 81_008 * MIB, 2.039e12),
    "h100": Device("H100", 989e12, 81_008 * MIB, 3.352e12),
    "h200": Device("H200", 989e12, 143_771 * MIB, 4.8e12),
    "b200": Device("B200", 2250e12, 183_359 * MIB, 8.0e12),
    "gb200": Device("GB200", 2250e12, 183_359 * MIB, 8.0e12),  # a B200 beside a CPU
    "v100_16gb": Device(r"V100-\w+-16GB", 125e12, 16e9, 0.9e12),  # in float16
    "v100": Device("V100", 125e12, 32e9, 0.9e12),  # in float16
    "v4": Device("TPU v4", 275e12, 32e9, 1.23e12),
    "v5e": Device("TPU v5 lite", 197e12, 16e9, 0.82e12),
    "v5p": Device("TPU v5", 459e12, 95e9, 2.77e12),
    "v6e": Device("TPU v6 lite", 918e12, 32e9, 1.64e12),
    "v7x": Device("TPU7x", 2307e12, 192e9, 7.4e12),
}
# GPUs to compile for without one: NVIDIA's architecture papers, and the CUDA programming guide's
# table of capabilities.
GPUS = {
    "a100": Chip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 1.41, 164, 40),
    "rtx4090": Chip("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 1536, 2.52, 100, 72),
    "h100": Chip("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 1.98, 228, 50),
    "h200": Chip("NVIDIA H200", (9, 0), 132, 128, 2048, 1.98, 228, 50),
    "b200": Chip("NVIDIA B200", (10, 0), 148, 128, 2048, 1.965, 228, 126),
}


def find(kind: str) -> Device | None:
    """The device of a `device_kind`; None for a CPU or any other device that is not listed."""
    kind = re.sub(r"TPU v(\d)e\b", r"TPU v\1 lite", kind)  # JAX uses both names
    return next((device for device in DEVICES.values() if _has_name(kind, device.name)), None)


def _has_name(kind, name):
    """True if the name is a whole word: an "RTX A1000" is not an A100."""
    return re.search(rf"\b{name}(?!\d| Laptop)", kind) is not None


def description(name: str) -> str:
    """The `GpuTargetConfigProto` of a GPU of `GPUS`, as text."""
    device, chip = DEVICES[name], GPUS[name]
    major, minor = chip.capability
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_core: {chip.shared * KIB}
  shared_memory_per_block_optin: {(chip.shared - 1) * KIB}
  threads_per_core_limit: {chip.threads}
  core_count: {chip.cores}
  fpus_per_core: {chip.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  clock_rate_ghz: {chip.clock}
  l2_cache_size: {chip.cache * MIB}
  memory_bandwidth: {device.bandwidth:.0f}
  device_memory_size: {device.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 13 patch: 0 }}
device_description_str: "{chip.kind}"
"""
