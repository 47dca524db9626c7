"""Lines of text from files and standard input, one at a time."""

import os
import stat
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from adaptive_jax.errors import InputError, of_extra_train, one_line

STDIN = "-"


class TextFiles:
    """The lines of files, without their line feeds. Only a line feed or the end of a file ends a
    line.

    names: of files, also .gz, .xz, .bz2 and .zip; "-" is standard input, as is an empty list.

    Attributes:
        size: bytes of the files; 0 if unknown, as of a pipe.
        done: bytes read.
        terminal: whether they are typed.

    Raises:
        InputError: a file that cannot be opened; while reading: one that is damaged, not UTF-8, or
            has a NUL byte.
    """

    def __init__(self, names: Sequence[str] = ()):
        self.names, self.done = list(names) or [STDIN], 0
        self._files = [_open(name) for name in self.names]
        stats = [os.fstat(file.fileno()) for file in self._files]
        regular = all(stat.S_ISREG(each.st_mode) for each in stats)
        self.size = sum(each.st_size for each in stats) if regular else 0
        self.terminal = any(file.isatty() for file in self._files)

    def __iter__(self) -> Iterator[str]:
        before = 0
        for name, file in zip(self.names, self._files, strict=True):
            for number, line in enumerate(_unpacked(name, file), start=1):
                if self.size:
                    self.done = before + file.tell()
                yield _decoded(line, number, name)
            before = self.done

    def read(self) -> str:
        """All of the text, with a line feed after each line that has one."""
        return "".join(
            _decoded(line, number, name, end="")
            for name, file in zip(self.names, self._files, strict=True)
            for number, line in enumerate(_unpacked(name, file), start=1)
        )


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
    """The lines of a file in bytes, decompressed as its name says."""
    with of_extra_train():
        from fsspec.compression import compr
        from fsspec.utils import infer_compression
    try:
        yield from compr[infer_compression(name)](file, mode="rb")
    except Exception as error:  # each format has its own: zlib.error, LZMAError, BadZipFile …
        raise InputError(
            f"cannot read {name}: {one_line(error)}; replace it by a complete copy"
        ) from None


def _decoded(line, number, name, end="\n"):
    where = f"{'standard input' if name == STDIN else name}, line {number}"
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError:
        raise InputError(f"{where}: not UTF-8; convert the file to UTF-8") from None
    if "\0" in text:
        raise InputError(
            f"{where}: a NUL byte, which text never has; repair the file, or convert it to UTF-8"
        )
    return text.removesuffix(end)
