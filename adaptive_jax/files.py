"""Files that are never seen half-written."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes the place of `path` once the block ends well; a reader never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: its files are readable by their owner only, and a cache may be shared.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            yield file
        os.replace(unfinished, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a disk that is full does not say for which file
        raise
    finally:
        unfinished.unlink(missing_ok=True)
