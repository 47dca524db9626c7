"""Files of a cache: each is made once, by one of the processes that want it, and read again
later.
"""

import contextlib
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from adaptive_jax.errors import InputError, of_extra_train
from adaptive_jax.files import in_store, path_of, replacing

with of_extra_train():
    import filelock

CACHE = "~/.cache/adaptive_jax"

logger = logging.getLogger(__name__)


def home_of(path: str, key: str) -> Path:
    """The directory that a setting names, a ~ at its start expanded. Raises InputError: empty,
    a URL, or an unknown user's.
    """
    try:
        if path and "://" not in path:
            return Path(path).expanduser()
    except RuntimeError:  # no such user
        pass
    raise InputError(f"{key}={path!r} is no directory: give the path of one on a disk")


def cache_of(cache: str) -> Path:
    """The directory where this machine prepares corpora: `data.cache`, or the default one if that
    is in object storage.

    Objects cannot be mapped into memory.

    Raises:
        InputError: as `home_of` and `path_of`.
    """
    if in_store(cache):
        path_of(cache)
        cache = CACHE
    return home_of(cache, "data.cache")


@contextlib.contextmanager
def usable(cache: Path) -> Iterator[None]:
    """Turns what the system says about files of the cache into an InputError."""
    try:
        yield
    except OSError as error:
        if not str(error.filename or "").startswith(str(cache)):
            raise
        at = "" if str(error.filename) == str(cache) else f" ({error.filename})"
        raise InputError(
            f"cannot write data.cache={cache}{at}: {error.strerror or error}; make room, or give a"
            " directory that you may write"
        ) from error


def once(path: Path, make: Callable[[], None]) -> None:
    """Calls `make` if its file is missing. If several processes want the file, one makes it and
    the others wait.
    """
    if path.exists():
        return
    # A spawned process that runs the script again would wait for its parent, which waits for it.
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
            for unfinished in set(path.parent.glob(f".{path.name}.*")) - {
                Path(lock.lock_file)
            }:  # left by a killed process
                unfinished.unlink()
            make()
    finally:
        lock.release()


def read_ids(path: Path, words: int) -> np.ndarray:
    """Maps the ids of a split into memory: int32 `[tokens]`, read-only. Raises InputError for a
    damaged file.

    Only the ends of the file are looked at, since a split may be larger than memory.
    """
    try:
        with np.errstate(over="ignore"):
            ids = np.lib.format.open_memmap(path, mode="r")
        some = np.concatenate([ids[:1000], ids[-1000:]])
        if ids.dtype != np.int32 or ids.ndim != 1 or ids.nbytes + ids.offset != path.stat().st_size:
            raise ValueError(f"it has {path.stat().st_size:,} bytes for {ids.size:,} {ids.dtype}")
        if len(ids) and not 0 <= some.min() <= some.max() < words:
            raise ValueError(f"it has ids from {some.min()} to {some.max()}, of {words:,} words")
    except Exception as error:  # a damaged header makes NumPy fail in many ways
        raise InputError(damaged(path, error)) from error
    return ids


def write_numbers(path: Path, *numbers: int) -> None:
    """Writes whole numbers as text."""
    with replacing(path) as file:
        file.write(" ".join(map(str, numbers)).encode())


def read_numbers(path: Path) -> list[int]:
    """Reads what `write_numbers` wrote. Raises InputError for a damaged file."""
    try:
        text = path.read_bytes()
        if not text.replace(b" ", b"").isdigit():
            raise ValueError("it should have numbers")
        return list(map(int, text.split()))
    except (OSError, ValueError) as error:
        raise InputError(damaged(path, error)) from error


def damaged(path: Path, error: BaseException) -> str:
    """The message about a file of the cache that cannot be read."""
    reason = " ".join(str(error).split())[:150] or type(error).__name__
    return f"{path} is damaged ({reason}); remove it to have it made again"


@contextlib.contextmanager
def bar(what: str) -> Iterator[Callable[[float], None]]:
    """Yields `show(share)`, which draws a progress bar with the time left if stderr is a
    terminal.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.update(task, completed=share)
