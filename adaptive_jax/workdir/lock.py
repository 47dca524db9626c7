"""One training at a time in a workdir: a lock on a disk, a lease in object storage."""

import contextlib
import errno
import logging
import os
import platform
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import tensorstore

from adaptive_jax.errors import InputError, of_extra
from adaptive_jax.files import in_store, kvstore, reason, replacing
from adaptive_jax.parallel import hosts, sharding

with of_extra("train"):
    import filelock

HOLDER = ".training"  # holds `process 12 on HOST`
WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
BEAT = 10  # seconds between two signs of life of a lease
SILENT = 45  # seconds without one, after which nobody holds the lease any more

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Holds a workdir for one training. Only the first host takes the lock or the lease.

    Reading the run, as evaluation does, needs no lock.

    Raises:
        InputError: another training holds it; names its machine and process. Or the store does not
            answer, or does not let this user write.
    """
    held, busy = Lease(str(workdir)) if in_store(workdir) else Lock(workdir), None
    try:
        if hosts.first():
            busy = held.take()
        hosts.barrier("the lock")
        if sharding.sum_over_hosts(busy is not None):
            raise InputError(
                f"{workdir} is in use by the training of {busy or 'another process'}: wait for its"
                " end, or use another --workdir"
            )
        yield
    finally:
        held.release()


class Lock:
    """A lock on a directory, which the system releases when the process ends."""

    def __init__(self, workdir: Path):
        self.workdir, self.holder = workdir, workdir / HOLDER
        # Where a disk has no locks, filelock would make a file that a killed process leaves behind.
        self.lock = filelock.FileLock(workdir / ".training.lock", fallback_to_soft=False)

    def take(self) -> str | None:
        """Takes the lock. Returns who holds it if that is another training."""
        self.workdir.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.acquire(timeout=0)
        except filelock.Timeout:
            return self.holder.read_text() if self.holder.exists() else "another process"
        except (NotImplementedError, OSError) as error:
            if getattr(error, "errno", errno.ENOSYS) not in WITHOUT_LOCKS:
                raise
            logger.warning(
                "the disk of %s has no locks: start no second training there", self.workdir
            )
        with replacing(self.holder) as file:  # not the lock's file: whoever tries it empties it
            file.write(_this_process().encode())
        return None

    def release(self) -> None:
        """Gives the lock back, if it was taken."""
        if self.lock.is_locked:
            self.holder.unlink(missing_ok=True)
            self.lock.release()


class Lease:
    """An object that its holder writes anew every `BEAT` seconds, by the URL of its workdir.

    The store replaces it only if it is still the one that was read, so two trainings do not both
    take the lease. (For s3:// tensorstore looks before it writes, which leaves a moment for both.)
    After `SILENT` seconds without a sign of life another training takes it over. One that slept
    and wakes up is not stopped: it warns that another has taken over.
    """

    def __init__(self, url: str):
        # Names of hosts and numbers of processes repeat in containers; this does not.
        self.url, self.holder = url, f"{_this_process()}\n{os.urandom(8).hex()}\n"
        self.store = self.generation = self.thread = None
        self.ended = threading.Event()

    def take(self) -> str | None:
        """Takes the lease and keeps it until `release`. Returns who holds it if that is another
        training, which is alive.
        """
        try:
            self.store = tensorstore.KvStore.open(kvstore(f"{self.url}/")).result()
            found = self._read()
            if found.state == "value":
                text = "%s was in use by %s: waiting %d seconds for a sign of life"
                logger.warning(text, self.url, _process_of(found), SILENT)
                time.sleep(SILENT)
                before, found = found, self._read()
                if found.state == "value" and found.stamp.generation != before.stamp.generation:
                    return _process_of(found)
            if not self._write(found.stamp.generation):  # another one was quicker
                return _process_of(self._read())
        except (ValueError, NotImplementedError, OSError) as error:  # what tensorstore raises
            raise InputError(
                f"cannot write {self.url}: {reason(error)}; check your permission to write there"
            ) from error
        self.thread = threading.Thread(target=self._beat, daemon=True)
        self.thread.start()
        return None

    def release(self) -> None:
        """Gives the lease back, if it is held. If the store does not answer, it ends by itself."""
        if self.thread is None:
            return
        self.ended.set()
        self.thread.join()
        try:
            if self.generation:
                self.store.write(HOLDER, None, if_equal=self.generation).result()
        except Exception as error:  # it must not hide how the training ended
            text = "cannot give back the lease on %s (%s): wait %d seconds"
            logger.warning(text, self.url, reason(error), SILENT)

    def _beat(self):
        while not self.ended.wait(BEAT):
            try:
                if self._write(self.generation):
                    continue
                found = self._read()
                if not found.value.decode().startswith(self.holder):
                    text = "another training has taken over %s: stop one of the two"
                    logger.warning(text, self.url)
                    return
                self.generation = found.stamp.generation  # the answer to a write was lost
            except Exception as error:  # the next one may pass
                logger.warning("no sign of life in %s (%s)", self.url, reason(error))

    def _read(self):
        return self.store.read(HOLDER).result()

    def _write(self, generation):
        """Whether the object still was the one of `generation`, and is ours now."""
        content = f"{self.holder}{time.time_ns()}\n".encode()  # each is another object to S3
        self.generation = self.store.write(HOLDER, content, if_equal=generation).result().generation
        return bool(self.generation)


def _this_process():
    return f"process {os.getpid()} on {platform.node()}"


def _process_of(found):
    """The process that a lease names."""
    return found.value.decode().partition("\n")[0] or "another process"
