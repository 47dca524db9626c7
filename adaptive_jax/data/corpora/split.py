"""A text in one file, split into train, validation and test text."""

import hashlib
import itertools
import os
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.data.corpora.cached import make_once
from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.text import ARCHIVES, NAMES, SPLIT, Text, check_eos
from adaptive_jax.data.vocabulary.words import EOS
from adaptive_jax.errors import InputError
from adaptive_jax.files import replacing

SHARE = 20  # one line in 20 is validation text, and one in 20 is test text
MOST = 10_000  # lines of each


class Split(NamedTuple):
    """The copies of a file's lines: the directory with train.txt, valid.txt and test.txt, and
    the lines of each, in this order.
    """

    directory: Path
    lines: tuple[int, int, int]


def single_file(path: str) -> Path | None:
    """The only file of the directory `path`, hidden ones aside, or the file `path`; None for
    anything else, archives but .zip too.
    """
    place = Path(os.path.expanduser(path)).absolute()  # a link may point to another suffix
    if place.is_dir():
        entries = [entry for entry in place.iterdir() if not entry.name.startswith(".")]
        place = entries[0] if len(entries) == 1 else place
    archive = place.name.endswith(ARCHIVES) and not place.name.endswith(".zip")
    return place if place.is_file() and not archive else None


def split_lines(file: Path, cache: Path) -> Split:
    """Copies the lines of a file into a directory below `cache`: the first 90 % to train, then 5 %
    and 5 % to validate and test.

    Validation and test have 10,000 lines at most. The order stays, so neighbouring lines are seldom
    in different splits. The same file is copied once.

    file: UTF-8 text, as `adaptive_jax.files.unpacked` reads it.

    Raises:
        InputError: JSON, fewer than three lines, a part without words, a file that cannot be read,
            is not UTF-8 or has `<eos>` of its own.
    """
    text, total, ends = Text((file,)), 0, 0
    for line in text.lines():
        total, ends = total + 1, ends + line.count(EOS.encode())
    check_eos(ends, total, file)
    if total < 3:
        raise InputError(
            f"{file} has {total} line(s), too few to split: put a sentence or a paragraph on each"
            " line, or use a directory with train.txt, valid.txt and test.txt"
        )
    few = max(1, min(total // SHARE, MOST))
    counts = total - 2 * few, few, few
    directory = cache / SPLIT / hashlib.sha256(repr(text.identity).encode()).hexdigest()[:16]
    paths = [directory / f"{NAMES[name][0]}.txt" for name in SPLITS]

    def copy():
        for left in directory.glob(".*.txt.*"):  # of a process that was killed
            if left.suffix != ".lock":
                left.unlink()
        lines = text.lines()
        for path, count in zip(paths, counts, strict=True):
            words = False
            with replacing(path) as copy:
                for line in itertools.islice(lines, count):
                    words = words or bool(line.strip())
                    copy.write(line)
                if not words:
                    raise InputError(
                        f"{file} has no words in the {count:,} lines of {path.name}: remove empty"
                        " lines at its beginning and end"
                    )

    if paths[-1].exists() and not all(path.exists() for path in paths):
        paths[-1].unlink(missing_ok=True)  # written last: one of the others was removed
    make_once(paths[-1], copy)
    return Split(directory, counts)
