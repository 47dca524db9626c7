"""Splits a text, one file or the files of a folder, into train, validation and test text."""

import hashlib
import itertools
import os
from pathlib import Path

from adaptive_jax.data.corpora.cached import make_once
from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.text import (
    NAMES,
    SPLIT,
    Text,
    check_eos,
    has_splits,
    text_files,
)
from adaptive_jax.data.vocabulary.words import EOS
from adaptive_jax.errors import InputError
from adaptive_jax.files import TARS, remove_unfinished, replacing

HELD_OUT = 20  # one line in 20 is validation text, and one in 20 is test text
MAX_LINES = 10_000  # of validation text, and of test text


def unsplit_text(path: str) -> Text | None:
    """The text of the file `path`, or of the files below a directory, see `text_files`; None for a
    directory with splits or without files, and for a tar archive.
    """
    place = Path(os.path.expanduser(path)).absolute()  # a link may point to another suffix
    files = text_files(place) if place.is_dir() else [place] if place.is_file() else []
    if not files or (len(files) > 1 and has_splits(place)):
        return None
    packed = len(files) == 1 and files[0].name.endswith(TARS)
    return None if packed else Text(tuple(files))


def split_lines(text: Text, cache: Path) -> tuple[Path, tuple[int, int, int]]:
    """Copies the lines of a text into a directory below `cache`: the first 90 % to train.txt, then
    5 % to valid.txt and 5 % to test.txt, at most 10,000 lines each.

    The order of the lines stays, so that neighbouring lines are seldom in different splits. An
    empty line, which ends a document for break_mode "complete_doc", separates two files. The same
    text is copied once.

    text: files in UTF-8, as `adaptive_jax.files.unpacked` reads them.

    Returns:
        The directory, and the numbers of lines of train.txt, valid.txt and test.txt.

    Raises:
        InputError: JSON, fewer than three lines, a part without words, a file that cannot be read,
            is not UTF-8 or has `<eos>` of its own.
    """
    file, total, ends = text.files[0], 0, 0
    for line in _documents(text):
        total, ends = total + 1, ends + line.count(EOS.encode())
    check_eos(ends, total, file)
    if total < 3:
        raise InputError(
            f"{file} has {total} line(s), too few to split: put a sentence or a paragraph on each"
            " line, or use a directory with train.txt, valid.txt and test.txt"
        )
    held_out = max(1, min(total // HELD_OUT, MAX_LINES))
    counts = total - 2 * held_out, held_out, held_out
    directory = cache / SPLIT / hashlib.sha256(repr(text.identity).encode()).hexdigest()[:16]
    paths = [directory / f"{NAMES[name][0]}.txt" for name in SPLITS]

    def copy():
        remove_unfinished(directory, "*.txt")
        lines = _documents(text)
        for path, count in zip(paths, counts, strict=True):
            words = False
            with replacing(path) as part:
                for line in itertools.islice(lines, count):
                    words = words or bool(line.strip())
                    part.write(line)
                if not words:
                    raise InputError(
                        f"{file} has no words in the {count:,} lines of {path.name}: remove empty"
                        " lines at its beginning and end"
                    )

    if not all(path.exists() for path in paths):
        paths[-1].unlink(missing_ok=True)  # makes all again if one of the others was removed
    make_once(paths[-1], copy)
    return directory, counts


def _documents(text):
    """Yields the lines of a text, and an empty line between two files."""
    for number, file in enumerate(text.files):
        yield from [b"\n"] * (number > 0)
        yield from Text((file,)).lines()
