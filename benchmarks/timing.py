"""What the benchmarks share: times of several peers in one process, and torch's name for the device of JAX."""

import importlib.util
import statistics
import time
from collections.abc import Callable

import jax


def interleaved(peers: dict[str, Callable], repeats: int, runs: int = 1) -> dict[str, tuple[float, float]]:
    """Times functions that return when their work is done: for each its median and least seconds.

    The peers take turns, `repeats` times, so that a busy machine slows all of them alike. In its turn a peer runs once untimed,
    to get back the memory and the cache that the peer before it used, and then `runs` times; their mean is one time.
    """
    seconds = {name: [] for name in peers}
    for run in peers.values():
        run()
    for _ in range(repeats):
        for name, run in peers.items():
            time.sleep(0.3)  # the threads of the peer before may spin for a while, waiting for more work
            run()
            start = time.perf_counter()
            for _ in range(runs):
                run()
            seconds[name].append((time.perf_counter() - start) / runs)
    return {name: (statistics.median(times), min(times)) for name, times in seconds.items()}


def torch_device() -> str | None:
    """The torch device of the same kind as JAX's: "cpu" or "cuda". None without torch, or if torch has no such device."""
    if not importlib.util.find_spec("torch"):
        return None
    import torch

    device = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend())
    return None if device == "cuda" and not torch.cuda.is_available() else device
