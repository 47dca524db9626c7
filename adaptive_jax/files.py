"""Files that nobody sees half-written."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends without an error, so readers never see half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: only their owner can read its files, and a cache may be shared.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            yield file
        os.replace(unfinished, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # the error of a full disk does not name the file
        raise
    finally:
        unfinished.unlink(missing_ok=True)
