"""One training at a time in a workdir on a disk. In a bucket there is no lock."""

import contextlib
import errno
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

from adaptive_jax.errors import InputError, of_extra
from adaptive_jax.files import in_bucket, replacing
from adaptive_jax.parallel import hosts, sharding

with of_extra("train"):
    import filelock

HOLDER = ".training"  # holds `process 12 on HOST`
WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Holds a workdir for one training. The first host takes the lock, which the system releases
    when the process ends.

    Reading the run, as evaluation does, needs no lock.

    Raises:
        InputError: another training holds it; names its machine and process.
    """
    if in_bucket(workdir):
        yield
        return
    # Where a disk has no locks, filelock would make a file that a killed process leaves behind.
    lock = filelock.FileLock(workdir / ".training.lock", fallback_to_soft=False)
    holder, busy = workdir / HOLDER, None
    try:
        if hosts.first():
            busy = _take(lock, holder)
        hosts.barrier("the lock")
        if sharding.sum_over_hosts(busy is not None):
            raise InputError(
                f"{workdir} is in use by the training of {busy or 'another process'}: wait for its"
                " end, or use another --workdir"
            )
        yield
    finally:
        if lock.is_locked:
            holder.unlink(missing_ok=True)
            lock.release()


def _take(lock, holder):
    """Takes the lock. Returns the process that holds it if that is another training's."""
    holder.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return holder.read_text() if holder.exists() else "another process"
    except (NotImplementedError, OSError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in WITHOUT_LOCKS:
            raise
        text = "the disk of %s has no locks: start no second training there"
        logger.warning(text, holder.parent)
    process = f"process {os.getpid()} on {platform.node()}"
    with replacing(holder) as file:  # not the lock's file: whoever tries it empties it
        file.write(process.encode())
    return None
