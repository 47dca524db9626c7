"""Whether the files of a checkpoint are whole: checksums, and reading them back."""

import json
from collections.abc import Sequence
from pathlib import Path

import tensorstore

from adaptive_jax.files import changed_file, write_checksums

ITEMS = ("params", "averages", "optimizer", "carry", "tables")
WHOLE = "default"  # the one item of checkpoints made before there were several
CHECKSUMS = "checksums.sha256"


def seal(directory: Path) -> None:
    """Lists the checksums of all files of a checkpoint."""
    write_checksums(directory / CHECKSUMS, [path for path in directory.rglob("*") if path.is_file() and path.name != CHECKSUMS])


def problem(directory: Path, items: Sequence[str] = ITEMS) -> str | None:
    """What is wrong with the files of a checkpoint, or None. Checksums notice a single wrong bit; Orbax alone does not.

    items: those to read.
    """
    if changed := changed_file(directory / CHECKSUMS, (*items, "metrics", "_")):
        return f"{changed} is missing or has changed"
    sums = directory / CHECKSUMS
    files = sum(path.is_file() for path in directory.rglob("*"))
    return None if sums.exists() and len(sums.read_bytes().splitlines()) == files - 1 else unreadable(directory)


def unreadable(directory):
    """Why the files of a checkpoint cannot be read, or None. Reads all of them, and decodes no array."""
    try:
        items = [path for path in directory.iterdir() if path.name in (*ITEMS, WHOLE)]
        if not items:
            return "it has no parameters"
        if (metrics := directory / "metrics" / "metrics").exists():
            json.loads(metrics.read_text())
        for item in items:
            json.loads((item / "_METADATA").read_text())
            store = tensorstore.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": f"{item}/"}}).result()
            keys = store.list().result()
            if not keys or any(store.read(key).result().state != "value" for key in keys):
                return f"{item.name} is incomplete"
    except (OSError, ValueError, KeyError) as error:
        return " ".join(str(error).split())[:200]
    return None
