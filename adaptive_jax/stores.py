"""Paths of disks and of object storage: gs://bucket/… and s3://bucket/….

    path_of("~/runs/a")             # a pathlib.Path
    path_of("gs://bucket/runs/a")   # an etils.epath.Path, with the methods of a pathlib.Path;
                                    # Orbax and JAX use the same

In a store an object is written whole or not at all. Nothing is renamed, appended to or locked, and
folders are only parts of names.
"""

import io
import logging
import math
import os
import shutil
from pathlib import Path

from adaptive_jax.errors import InputError, one_line

SCHEMES = "gs", "s3"
# Seconds to wait for the first answer; tensorstore alone would try for a quarter of an hour
PATIENCE = 60.0

logger = logging.getLogger(__name__)


def in_store(path: str | os.PathLike) -> bool:
    """Whether a path or a text names a place in object storage."""
    return "://" in os.fspath(path)


def path_of(place: str | os.PathLike) -> Path:
    """The path that a text names, a ~ at its start expanded; a path stays as it is.

    Raises:
        InputError: a URL of another kind.
        RuntimeError: the home of an unknown user.
    """
    if not in_store(place):
        return Path(place).expanduser()
    if not isinstance(place, str):
        return place
    scheme, _, rest = place.partition("://")
    if scheme not in SCHEMES or not rest.strip("/"):
        raise InputError(
            f"{place} is no place to write to: give a directory, gs://BUCKET/NAME or"
            " s3://BUCKET/NAME"
        )
    from etils import epath  # these imports take a second, which runs on a disk save

    from adaptive_jax import object_files

    object_files.register()
    return epath.Path(place.rstrip("/"))


def absolute(path: Path) -> Path:
    """The path from the root of the disk; a place in a store is absolute already."""
    return path if in_store(path) else path.absolute()


def free(directory: Path) -> float:
    """Bytes that can still be written there; infinite in a store."""
    return math.inf if in_store(directory) else shutil.disk_usage(directory).free


def check_reachable(path: Path) -> None:
    """Finds out whether a store answers, before a long preparation.

    Raises:
        InputError: it does not, or does not let this user read.
    """
    if in_store(path):
        from adaptive_jax import object_files

        try:
            object_files.answer(str(path), PATIENCE)
        except Exception as error:  # tensorstore raises many kinds
            said = (
                f"no answer within {PATIENCE:g} seconds"
                if isinstance(error, TimeoutError)
                else _said(error)
            )
            raise InputError(
                f"cannot reach {path}: {said}; check its name and your credentials"
            ) from error


def put(path: Path, content: bytes) -> None:
    """Writes an object whole.

    Raises:
        InputError: the store does not take it.
    """
    try:
        path.write_bytes(content)
    except Exception as error:  # tensorstore raises many kinds
        raise InputError(
            f"cannot write {path}: {_said(error)}; what was saved before is intact. Check your"
            " permission to write there, then run the same command to resume"
        ) from error


def names_in(directory: Path) -> list[str]:
    """Names of the files and folders in a directory; none of one that does not exist."""
    try:
        return [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def move_tree(directory: Path, to: Path) -> None:
    """Moves the objects of a folder to one that does not exist, one by one."""
    for path in directory.iterdir():
        if path.is_dir():
            move_tree(path, to / path.name)
        else:
            path.copy(to / path.name)
    directory.rmtree()


def _said(error):
    return one_line(error).partition(" [tensorstore_spec")[0][
        :300
    ]  # what follows is for tensorstore's own authors


class Rewritten:
    """A file in a store that grows: nothing can be appended there, so every `flush` writes all of
    it.

    A store that does not take it gives a warning, and the next `flush` tries again: only a log is
    lost.
    """

    def __init__(self, path: Path):
        self.path, self.content = path, io.BytesIO()

    def write(self, content: bytes) -> None:
        """Adds to the end."""
        self.content.write(content)

    def flush(self) -> None:
        """Writes the object."""
        try:
            put(self.path, self.content.getvalue())
        except InputError as error:
            logger.warning("%s", error)

    def close(self) -> None:
        """As `flush`."""
        self.flush()
