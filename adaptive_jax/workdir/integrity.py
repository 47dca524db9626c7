"""Which checkpoints a directory has, and whether their files are whole: checksums, and reading them
back.

Object storage checks what it is given and keeps checksums of its own. So there a checkpoint is
whole if Orbax has marked it as committed, which it does last, and if its lists can be read; it is
not read back.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import tensorstore

from adaptive_jax.files import changed_file, in_store, kvstore, names_in, replacing, write_checksums

ITEMS = ("params", "averages", "optimizer", "carry", "tables")
CHECKSUMS = "checksums.sha256"
COMMITTED = "commit_success.txt"  # which Orbax writes last in a store


def steps_in(directory: Path) -> list[int]:
    """The steps of checkpoints in a directory, the latest first, whole or not; none of one that
    does not exist.

    In a store, one that was never committed is none: the next training deletes it.
    """
    steps = sorted((int(name) for name in names_in(directory) if name.isdecimal()), reverse=True)
    return [
        step
        for step in steps
        if not in_store(directory) or (directory / str(step) / COMMITTED).exists()
    ]


def set_aside(directory: Path) -> Path:
    """Renames the directory of a checkpoint to STEP.damaged, and returns its new path."""
    aside = directory.with_name(f"{directory.name}.damaged")
    if in_store(directory):
        # First, because half of a checkpoint must not look like one.
        (directory / COMMITTED).unlink(missing_ok=True)
        aside.rmtree(missing_ok=True)
        _move_tree(directory, aside)
        with replacing(aside / COMMITTED) as file:  # or Orbax would delete it
            file.write(b"set aside")
    else:
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(directory, aside)
    return aside


def _move_tree(directory, to):
    for path in directory.iterdir():
        if path.is_dir():
            _move_tree(path, to / path.name)
        else:
            path.copy(to / path.name)
    directory.rmtree()


def seal(directory: Path) -> None:
    """Lists the checksums of all files of a checkpoint; not in a store."""
    if in_store(directory):
        return
    write_checksums(
        directory / CHECKSUMS,
        [path for path in directory.rglob("*") if path.is_file() and path.name != CHECKSUMS],
    )


def problem(directory: Path, items: Sequence[str] = ITEMS) -> str | None:
    """What is wrong with the files of a checkpoint, or None. Checksums notice a single wrong bit;
    Orbax alone does not.

    items: those to read.
    """
    if in_store(directory):
        return unreadable(directory)
    if changed := changed_file(directory / CHECKSUMS, (*items, "metrics", "_")):
        return f"{changed} is missing or has changed"
    sums = directory / CHECKSUMS
    files = sum(path.is_file() for path in directory.rglob("*"))
    return (
        None
        if sums.exists() and len(sums.read_bytes().splitlines()) == files - 1
        else unreadable(directory)
    )


def unreadable(directory):
    """Why the files of a checkpoint cannot be read, or None. Reads all of them, in a store
    their lists, and decodes no array.
    """
    try:
        items = [path for path in directory.iterdir() if path.name in ITEMS]
        if not items:
            return "it has no parameters"
        if (metrics := directory / "metrics" / "metrics").exists():
            json.loads(metrics.read_text())
        for item in items:
            json.loads((item / "_METADATA").read_text())
            stored = in_store(item)
            base = kvstore(f"{item}/") if stored else {"driver": "file", "path": f"{item}/"}
            store = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
            keys = store.list().result()
            if not keys or (
                not stored and any(store.read(key).result().state != "value" for key in keys)
            ):
                return f"{item.name} is incomplete"
    except (OSError, ValueError, KeyError) as error:
        return " ".join(str(error).split())[:200]
    return None
