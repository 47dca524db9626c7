"""A lease on a workdir in object storage: an object `.training` that its holder writes anew all the
time.

The store changes an object only if it is still the one that was read, so two trainings do not both
take the lease. (For s3:// tensorstore looks before it writes, which leaves a moment for both.) One
that was killed writes no more: after `SILENT` seconds without a sign of life another takes the
lease over, at once if its process was on the same machine and is gone. A training that was silent
that long and goes on, as after its machine slept, is not stopped: it warns that another has taken
over.
"""

import logging
import os
import platform
import re
import threading
import time

import tensorstore

from adaptive_jax.errors import InputError, one_line
from adaptive_jax.object_files import kvstore

NAME = ".training"
BEAT = 10  # seconds between two signs of life
SILENT = 45  # seconds without one, after which nobody holds the lease any more

logger = logging.getLogger(__name__)


class Lease:
    """The lease on a workdir, by its URL.

    holder: who takes it, `process 12 on HOST`.
    """

    def __init__(self, url: str, holder: str):
        self.url, self.holder, self.beats = url, holder, 0
        self.store = self.generation = self.thread = None
        self.ended = threading.Event()

    def take(self) -> str | None:
        """Takes the lease and keeps it until `release`. Returns the holder if that is another one,
        who is alive.

        Raises:
            InputError: the store does not answer, or this user may not write there.
        """
        try:
            self.store = tensorstore.KvStore.open(kvstore(f"{self.url}/")).result()
            found = self.store.read(NAME).result()
            if found.state == "value" and not _gone(found.value.decode()):
                logger.warning(
                    "%s was in use by %s: waiting %d seconds for a sign of life",
                    self.url,
                    _first(found),
                    SILENT,
                )
                time.sleep(SILENT)
                before, found = found, self.store.read(NAME).result()
                if found.state == "value" and found.stamp.generation != before.stamp.generation:
                    return _first(found)
            if not self._write(found.stamp.generation):  # another one was quicker
                return _first(self.store.read(NAME).result())
        except (ValueError, NotImplementedError, OSError) as error:  # what tensorstore raises
            reason = one_line(error).partition(" [tensorstore_spec")[0][:300]
            raise InputError(
                f"cannot write {self.url}: {reason}; check your permission to write there"
            ) from error
        self.thread = threading.Thread(target=self._beat, daemon=True)
        self.thread.start()
        return None

    def release(self) -> None:
        """Gives the lease back, if it was taken and is still held. If the store does not
        answer, it ends by itself.
        """
        if self.thread is None:
            return
        self.ended.set()
        self.thread.join()
        try:
            if self.generation is not None:
                self.store.write(NAME, None, if_equal=self.generation).result()
        except (
            Exception
        ) as error:  # what tensorstore raises; it must not hide how the training ended
            logger.warning(
                "cannot give back the lease on %s (%s): wait %d seconds",
                self.url,
                one_line(error)[:200],
                SILENT,
            )

    def _beat(self):
        while not self.ended.wait(BEAT):
            try:
                if not self._write(self.generation):
                    found = self.store.read(NAME).result()
                    if (
                        found.state == "value" and _first(found) == self.holder
                    ):  # the answer to a write was lost
                        self.generation = found.stamp.generation
                        continue
                    self.generation = None
                    logger.warning(
                        "another training has taken over %s: stop one of the two", self.url
                    )
                    return
            except Exception as error:  # the next one may pass
                logger.warning("no sign of life in %s (%s)", self.url, one_line(error)[:200])

    def _write(self, generation):
        """Whether the object still was the one of `generation`, and is ours now."""
        self.beats += 1
        written = self.store.write(
            NAME, f"{self.holder}\n{self.beats}\n".encode(), if_equal=generation
        ).result()
        self.generation = written.generation
        return bool(written.generation)


def _first(found):
    """The holder that an object names."""
    return found.value.decode().partition("\n")[0] or "another process"


def _gone(content):
    """Whether the holder was a process of this machine that has ended."""
    named = re.match(r"process (\d+) on (.*)", content)
    if named is None or named[2] != platform.node():
        return False
    if int(named[1]) == os.getpid():  # in a container that started anew
        return True
    try:
        os.kill(int(named[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False
