"""Lines of text from files and standard input, one at a time."""

import contextlib
import gzip
import lzma
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from adaptive_jax.errors import InputError, one_line

STDIN = "-"
OPENERS = {".gz": gzip.open, ".xz": lzma.open}


class TextFiles:
    """The lines of files, without their line feeds. Only a line feed, and the end of a file, ends a
    line.

    names: of files, also .gz and .xz; "-" is standard input, and so are no names.

    Attributes:
        size: bytes of the files; 0 where that is not known, as of a pipe.
        done: bytes read.
        terminal: whether they are typed.

    Raises:
        InputError: a file that cannot be opened; while they are read: one that is damaged, not
            UTF-8, or has a NUL byte.
    """

    def __init__(self, names: Sequence[str] = ()):
        self.names, self.done = list(names) or [STDIN], 0
        self._files = [_open(name) for name in self.names]
        stats = [os.fstat(file.fileno()) for file in self._files]
        self.size = (
            sum(each.st_size for each in stats)
            if all(stat.S_ISREG(each.st_mode) for each in stats)
            else 0
        )
        self.terminal = any(file.isatty() for file in self._files)

    def __iter__(self) -> Iterator[str]:
        before = 0
        for name, file in zip(self.names, self._files, strict=True):
            for number, line in enumerate(_unpacked(name, file), start=1):
                if self.size:
                    self.done = before + file.tell()
                yield _decoded(line, number, name)
            before = self.done


def read_text(name: str) -> str:
    """All of a text file. Raises InputError as `TextFiles`."""
    files = TextFiles([name])
    [file] = files._files
    data = b"".join(_unpacked(name, file))
    for number, line in enumerate(data.split(b"\n"), start=1):
        _decoded(line, number, name)
    return data.decode("utf-8-sig")


def _open(name):
    if name == STDIN:
        if sys.stdin is None:
            raise InputError("standard input is closed: give a file, or text through a pipe")
        return sys.stdin.buffer
    try:
        file = Path(name).expanduser().open("rb")
        os.fstat(file.fileno())
        return file
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(
            f"cannot read {name}: {reason}; give a file, or - for standard input"
        ) from None


def _unpacked(name, file):
    """The lines of a file in bytes, decompressed."""
    opener = OPENERS.get(Path(name).suffix, contextlib.nullcontext)
    try:
        with opener(file) as stream:
            yield from stream
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile) as error:
        raise InputError(
            f"cannot read {name}: {one_line(error)}; replace it by a complete copy"
        ) from None


def _decoded(line, number, name):
    where = f"{'standard input' if name == STDIN else name}, line {number}"
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{where}: not UTF-8; convert the file to UTF-8") from None
    if "\0" in text:
        raise InputError(
            f"{where}: a NUL byte, which text never has; repair the file, or convert it to UTF-8"
        )
    return text.removesuffix("\n")
