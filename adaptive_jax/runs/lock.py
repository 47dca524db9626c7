"""One training at a time in a workdir on a disk. In a bucket there is no lock."""

import contextlib
import errno
import logging
import os
import platform
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.errors import InputError, of_extra
from adaptive_jax.files import in_bucket, write_bytes
from adaptive_jax.parallel import hosts, sharding

with of_extra("train"):
    import filelock

HOLDER = ".training"  # holds `process 12 on HOST`, and an id of the training
WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}

logger = logging.getLogger(__name__)


class Lock(NamedTuple):
    """A workdir that a training holds.

    Attributes:
        holder: the file that says who holds it; None in a bucket, and on hosts but the first.
        content: of the file.
    """

    holder: Path | None = None
    content: str = ""

    def check(self) -> None:
        """Checks, before anything is saved, that the workdir is still this training's.

        Raises:
            InputError: it was removed, or removed and begun anew by another training.
        """
        content = self.holder.read_text() if self.holder and self.holder.exists() else ""
        if content == self.content:
            return
        process = content.partition("\n")[0]
        fault = f"is now that of {process}" if process else "was removed"
        raise InputError(
            f"{self.holder.parent} {fault}: this training ends, and updates since its last"
            " checkpoint are lost"
        )


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[Lock]:
    """Holds a workdir for one training. The first host takes the lock, which the system releases
    when the process ends.

    Reading the run, as evaluation does, needs no lock.

    Raises:
        InputError: another training holds it; names its machine and process.
    """
    if in_bucket(workdir):
        yield Lock()
        return
    # Where a disk has no locks, filelock would make a file that a killed process leaves behind.
    lock = filelock.FileLock(workdir / ".training.lock", fallback_to_soft=False)
    process = f"process {os.getpid()} on {platform.node()}"
    lock_of_this_run = Lock(workdir / HOLDER, f"{process}\n{uuid.uuid4().hex}\n")
    other_process = None
    try:
        if hosts.first():
            other_process = _take(lock, *lock_of_this_run)
        hosts.barrier("the lock")
        if sharding.sum_over_hosts(other_process is not None):
            raise InputError(
                f"{workdir} is in use by the training of {other_process or 'another process'}: wait"
                " for its end, or use another --workdir"
            )
        yield lock_of_this_run if hosts.first() else Lock()
    finally:
        if lock.is_locked:
            holder, content = lock_of_this_run
            if holder.exists() and holder.read_text() == content:
                holder.unlink()
            lock.release()


def _take(lock, holder, content):
    """Takes the lock. Returns the process that holds it if that is another training's."""
    holder.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return holder.read_text().partition("\n")[0] if holder.exists() else "another process"
    except (NotImplementedError, OSError) as error:
        if getattr(error, "errno", errno.ENOSYS) not in WITHOUT_LOCKS:
            raise
        text = "the disk of %s has no locks: start no second training there"
        logger.warning(text, holder.parent)
    write_bytes(holder, content.encode())  # not the lock's file: whoever tries it empties it
    return None
