"""Cached files. One process builds each file; the others wait for it."""

import contextlib
import logging
import multiprocessing
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from adaptive_jax.errors import InputError, of_extra, one_line
from adaptive_jax.files import remove_unfinished

with of_extra("train"):
    import filelock

logger = logging.getLogger(__name__)
BLOCK_BYTES = 1 << 24


def make_once(path: Path, make: Callable[[], object]) -> None:
    """Calls `make` if its file is missing. If several processes need the file, one makes it and
    the others wait.
    """
    if path.exists():
        return
    # A spawned process that runs the script again would wait for its parent, and the parent for it.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError('in a script of your own load corpora under `if __name__ == "__main__":`')
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.warning("another process is making %s; waiting for it", path)
        lock.acquire()
    try:
        if not path.exists():
            # Left by a killed process
            remove_unfinished(path.parent, path.stem)
            make()
    finally:
        lock.release()


def checksum(array: np.ndarray) -> str:
    """Checksum of a stored array: its size in bytes and a CRC-32 of the CRC-32s of its blocks.
    Detects damage, not forgery.
    """
    content = np.ravel(array).view(np.uint8)
    blocks = np.split(content, range(BLOCK_BYTES, len(content), BLOCK_BYTES))
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        sums = np.array([*threads.map(zlib.crc32, blocks)], "<u4")
    return f"{len(content)}-{zlib.crc32(sums.tobytes()):08x}"


def read_ids(path: Path, stored: str | None = None) -> np.ndarray:
    """Maps the ids of a split into memory: int32 `[tokens]`, read-only.

    stored: their `checksum`; None: not verified.

    Raises:
        InputError: a damaged file.
    """
    try:
        with np.errstate(over="ignore"):
            ids = np.lib.format.open_memmap(path, mode="r")
        if ids.dtype != np.int32 or ids.ndim != 1:  # the header has no checksum
            raise ValueError(f"it has {ids.dtype} of shape {ids.shape}")
        if stored is not None and stored != checksum(ids):
            raise ValueError("its checksum differs")
    except Exception as error:  # a damaged header makes NumPy fail in many ways
        raise damaged(path, error) from error
    return ids


def damaged(path: Path, error: BaseException) -> InputError:
    """Returns the error for a file of the cache that cannot be read."""
    return InputError(
        f"{path} is damaged ({one_line(error)[:150]}): remove {path.parent}, and the same command"
        " makes it again"
    )


@contextlib.contextmanager
def bar(label: str) -> Iterator[Callable[[float], None]]:
    """Yields `show(share)`, which draws a progress bar with the time left if stderr is a
    terminal.
    """
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(label, total=1.0)
        yield lambda share: progress.update(task, completed=share)
