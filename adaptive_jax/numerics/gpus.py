"""NVIDIA's GPUs by short names, as XLA's compiler needs them to compile where they are not."""

from typing import NamedTuple

KIB, MIB = 2**10, 2**20


class GPU(NamedTuple):
    """The public figures of one GPU that XLA's compiler reads; sizes in bytes, those of shared
    memory and caches for each core.
    """

    kind: str  # as `jax.Device.device_kind`
    capability: tuple[int, int]
    cores: int  # streaming multiprocessors
    lanes: int  # float32 lanes of a core
    threads: int  # of a core, at a time
    clock: float  # GHz
    shared: int  # shared memory of a core; a block of threads gets 1 KiB less
    cache: int  # level 2, of the whole device
    memory: int
    bandwidth: float  # bytes a second


# NVIDIA's data sheets and architecture papers, and the CUDA programming guide's table of
# capabilities.
GPUS = {
    "a100": GPU(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        108,
        64,
        2048,
        1.41,
        164 * KIB,
        40 * MIB,
        81_920 * MIB,
        2.039e12,
    ),
    "rtx4090": GPU(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        128,
        128,
        1536,
        2.52,
        100 * KIB,
        72 * MIB,
        24_564 * MIB,
        1.008e12,
    ),
    "h100": GPU(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        132,
        128,
        2048,
        1.98,
        228 * KIB,
        50 * MIB,
        81_008 * MIB,
        3.352e12,
    ),
    "h200": GPU(
        "NVIDIA H200", (9, 0), 132, 128, 2048, 1.98, 228 * KIB, 50 * MIB, 143_771 * MIB, 4.8e12
    ),
    "b200": GPU(
        "NVIDIA B200", (10, 0), 148, 128, 2048, 1.965, 228 * KIB, 126 * MIB, 183_359 * MIB, 8.0e12
    ),
}


def description(gpu: GPU) -> str:
    """The device as text that XLA reads: a `GpuTargetConfigProto`."""
    major, minor = gpu.capability
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: {48 * KIB}
  shared_memory_per_core: {gpu.shared}
  shared_memory_per_block_optin: {gpu.shared - KIB}
  threads_per_core_limit: {gpu.threads}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.lanes}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  clock_rate_ghz: {gpu.clock}
  l2_cache_size: {gpu.cache}
  memory_bandwidth: {gpu.bandwidth:.0f}
  device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 13 patch: 0 }}
device_description_str: "{gpu.kind}"
"""
