"""One training at a time in a workdir: by a lock of the system, or by a lease in object
storage, which has no locks.
"""

import contextlib
import errno
import inspect
import logging
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import filelock

from adaptive_jax.errors import InputError
from adaptive_jax.files import replacing
from adaptive_jax.parallel import hosts, sharding
from adaptive_jax.stores import in_store
from adaptive_jax.workdir.lease import Lease

WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Holds a workdir for one training. The first host takes the lock, and the system releases it
    when that process ends.

    In a store it takes a lease, see `Lease`. Reading the run, as evaluation does, needs no lock.

    Raises:
        InputError: another training holds it; names its machine and process.
    """
    with _leased(workdir) if in_store(workdir) else _locked(workdir):
        yield


@contextlib.contextmanager
def _leased(workdir):
    lease, busy = Lease(str(workdir), _who()), None
    if hosts.first():
        busy = lease.take()
    hosts.wait("the lease")
    try:
        _refuse(workdir, busy)
        yield
    finally:
        lease.release()


@contextlib.contextmanager
def _locked(workdir):
    lock, holder, busy = None, workdir / ".training", None
    if hosts.first():
        workdir.mkdir(parents=True, exist_ok=True)
        lock = _lock(workdir / ".training.lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            busy = _read(holder) or "another process"
        except (NotImplementedError, OSError) as error:
            if getattr(error, "errno", errno.ENOSYS) not in WITHOUT_LOCKS:
                raise
            logger.warning("the disk of %s has no locks: start no second training there", workdir)
    try:
        _refuse(workdir, busy)
        if lock is not None:
            with replacing(
                holder
            ) as file:  # beside the lock, because whoever tries the lock empties its file
                file.write(_who().encode())
        yield
    finally:
        if lock is not None and lock.is_locked:
            holder.unlink(missing_ok=True)
            lock.release()


def _refuse(workdir, busy):
    """Raises InputError on all hosts if the first one has found another training."""
    if sharding.sum_over_hosts(busy is not None):
        raise InputError(
            f"{workdir} is in use by the training of {busy or 'another process'}: wait for its end,"
            " or give another --workdir"
        )


def _who():
    return f"process {os.getpid()} on {platform.node()}"


def _lock(path):
    # Where the disk has no locks, newer versions of filelock would make a file that a killed
    # process leaves behind.
    takes = inspect.signature(filelock.FileLock.__init__).parameters
    return filelock.FileLock(
        path, **{"fallback_to_soft": False} if "fallback_to_soft" in takes else {}
    )


def _read(path):
    with contextlib.suppress(FileNotFoundError):
        return path.read_text()
