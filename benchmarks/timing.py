"""Shared parts of the benchmarks: times of several peers in one process and their errors, the
machine, torch's name of JAX's device, its memory, the file of numbers.
"""

import importlib.util
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from adaptive_jax.errors import InputError

REST = 0.3  # seconds on a CPU: the threads of a peer that ran may spin that long, waiting for more


def launches() -> int:
    """Number of launches of work of milliseconds before its end is waited for: 20 on a GPU, as
    a launch and a wait take as long as a kernel.
    """
    return 1 if jax.default_backend() == "cpu" else 20


def launched(program: Callable, *arguments: object) -> Callable:
    """A function that launches a compiled program `launches()` times and waits for the last one."""

    def run():
        for _ in range(launches()):
            results = program(*arguments)
        return jax.block_until_ready(results)

    return run


def timed(peers: dict[str, Callable], repeats: int, runs: int = 1, calls: int = 1) -> list[dict]:
    """Times functions that return when their work is done: for each a row with its name, median
    and least seconds.

    The peers take turns, `repeats` times, so that a busy machine slows all of them alike. In its
    turn a peer runs once untimed, to get back the memory and the cache that the peer before it
    used, and then `runs` times; their mean is one time.

    calls: how many calls each function makes; the seconds are those of one.
    """
    on_cpu = jax.default_backend() == "cpu"
    seconds = {name: [] for name in peers}
    for run in peers.values():
        run()
    for _ in range(repeats):
        for name, run in peers.items():
            if on_cpu:
                time.sleep(REST)
            run()
            start = time.perf_counter()
            for _ in range(runs):
                run()
            seconds[name].append((time.perf_counter() - start) / (runs * calls))
    return [
        {"peer": name, "seconds": statistics.median(times), "fastest": min(times)}
        for name, times in seconds.items()
    ]


def write_json(file: str | None, numbers: object) -> None:
    """Writes what `--json` asks for, if it does."""
    if file:
        Path(file).write_text(json.dumps(numbers, indent=2) + "\n")


def machine() -> str:
    """The device and the versions of Python and JAX, in a line."""
    device, python = jax.devices()[0], platform.python_version()
    kind = " ".join(dict.fromkeys([device.platform, device.device_kind]))  # "cpu" of a CPU
    return f"{kind}, {platform.machine()}, python {python}, jax {jax.__version__}"


def first_line(error: Exception) -> str:
    """Message of an error in a line; its type if it has none."""
    return next(iter(str(error).splitlines()), "")[:120] or type(error).__name__


def exact_products(dtype: str):
    """A context in which products of float32 are float32, as torch's are; JAX alone takes TF32 for
    them on GPUs. Products of other types stay.
    """
    return jax.default_matmul_precision("highest" if jnp.dtype(dtype) == jnp.float32 else None)


def torch_device() -> str | None:
    """The torch device of the same kind as JAX's: "cpu" or "cuda". None without torch, or if
    torch has no such device.
    """
    if not importlib.util.find_spec("torch"):
        return None
    import torch

    device = {"cpu": "cpu", "gpu": "cuda"}.get(jax.default_backend())
    return None if device == "cuda" and not torch.cuda.is_available() else device


def torch_memory(run):
    """Peak bytes of one run above what an earlier run left, gradients among it; None where the
    system does not count them.
    """
    import torch

    if torch_device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    def kilobytes(name):
        return int(re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])

    try:
        # The peak starts again from what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        before = kilobytes("VmRSS")
    except OSError:
        return None
    run()
    return 1024 * (kilobytes("VmHWM") - before)


def whole_numbers(flag: str, texts: Sequence, least: int = 1) -> list[int]:
    """The numbers of a flag that lists them. Raises InputError: a text that is no whole number, or
    one below `least`.
    """
    if not all(str(text).isdecimal() and int(text) >= least for text in texts):
        value = ",".join(map(str, texts))
        raise InputError(f"{flag}={value} must be whole numbers, {least} or more")
    return list(map(int, texts))
