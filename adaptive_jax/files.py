"""Files that nobody sees half-written, and checksums that tell whether they are still what was
written.
"""

import contextlib
import hashlib
import io
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from adaptive_jax.stores import in_store, put


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends without an error, so readers never
    see half of it.

    Raises:
        InputError: object storage does not take it.
    """
    if in_store(path):
        content = io.BytesIO()
        yield content
        put(path, content.getvalue())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: only their owner can read its files, and a cache may be shared.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(
                file.fileno()
            )  # otherwise a power failure may leave the new name and no content
        os.replace(unfinished, path)
    except OSError as error:
        error.filename = error.filename or str(
            path
        )  # the error of a full disk does not name the file
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def write_checksums(path: Path, files: Sequence[Path]) -> None:
    """Writes the SHA-256 of files below `path`'s directory, as `sha256sum --check` reads them."""
    lines = [
        f"{_sha256(file)}  {file.relative_to(path.parent).as_posix()}\n" for file in sorted(files)
    ]
    with replacing(path) as file:
        file.write("".join(lines).encode())


def changed_file(path: Path, below: Sequence[str] = ("",)) -> str | None:
    """The first file that `write_checksums` listed in `path` and that is missing or has changed;
    None if all are as they were.

    below: only files whose names start with one of these. A list that is missing or damaged itself
        says nothing.
    """
    lines = path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []
    for line in lines:
        digest, _, name = line.partition("  ")
        file = path.parent / name
        if (
            len(digest) == 64
            and name.startswith(tuple(below))
            and not (file.is_file() and _sha256(file) == digest)
        ):
            return name
    return None


def _sha256(path):
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
