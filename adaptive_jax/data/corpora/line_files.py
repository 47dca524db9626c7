"""Lines of text from files, tables and standard input, one at a time."""

import csv
import functools
import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from types import MappingProxyType
from typing import NamedTuple

from adaptive_jax.data.corpora.text import LINE, check_is_text, line_fault
from adaptive_jax.errors import InputError, check_known, one_line
from adaptive_jax.files import in_bucket, path_of, unpacked

STDIN = "-"


class TextLine(NamedTuple):
    """A text to score and its source.

    Attributes:
        text: one line, or several with line feeds between them.
        number: number of the line in its file, or of the row in its table, from 1. Number 1 has no
            context before it.
        file: "-" for standard input, empty for text without a file.
        columns: the other columns of its table.
    """

    text: str
    number: int
    file: str = ""
    columns: Mapping[str, str] = MappingProxyType({})


class TextFiles:
    """Iterates over the lines of files, without their ends: "\\n", "\\r\\n" or the end of a file.

    names: files, also .gz, .xz, .bz2 and .zip; "-", or no name at all, is standard input.

    Attributes:
        size: bytes of the files; 0 if unknown, as for a pipe.
        done: bytes read so far.
        terminal: whether a file is a terminal.

    Raises:
        InputError: a file that cannot be opened; while reading: one that is damaged, not UTF-8, or
            has a NUL byte, or a line or a word too long for memory.
    """

    def __init__(self, names: Sequence[str] = ()):
        self._files = [(name, _open(name)) for name in names or [STDIN]]
        stats = [os.fstat(file.fileno()) for _, file in self._files]
        are_files = all(stat.S_ISREG(result.st_mode) for result in stats)
        self.size, self.done = sum(result.st_size for result in stats) if are_files else 0, 0
        self.terminal = any(file.isatty() for _, file in self._files)
        self._columns: Sequence[str] = ()  # of the first table

    def __iter__(self) -> Iterator[str]:
        return (line.removesuffix("\n").removesuffix("\r") for line in self._lines())

    def read(self) -> str:
        """The whole text, with its line ends."""
        return "".join(self._lines())

    def texts(self, column: str = "") -> Iterator[TextLine]:
        """Yields the lines with their sources, or the texts in a column of tables, whose cells are
        separated by commas, or in .tsv files by tabs.

        Raises:
            InputError: a table without this column, with two columns of the same name, or with
                other columns than the first table; a row with more or fewer cells than the header,
                or with stray quotes or line ends.
        """
        for name, file in self._files:
            if column:
                yield from self._texts_of_column(name, file, column)
                continue
            for number, line in enumerate(self._lines_of(name, file), start=1):
                yield TextLine(line.removesuffix("\n").removesuffix("\r"), number, str(name))

    def _texts_of_column(self, name, file, column):
        tabs = ".tsv" in PurePath(str(name).lower()).suffixes
        csv.field_size_limit(LINE)  # of the whole process; Python's own is 131,072 characters
        table = csv.DictReader(
            self._lines_of(name, file), delimiter="\t" if tabs else ",", strict=True
        )
        number = 0
        try:
            names = table.fieldnames or ()
            check_known(f"{name}: column {column!r}", column, names)
            if len(set(names)) < len(names):
                raise InputError(f"{name}: columns must have different names, got {[*names]}")
            self._columns = self._columns or names
            if names != self._columns:
                raise InputError(
                    f"{name}: columns must be those of the first table, {[*self._columns]}, got"
                    f" {[*names]}: score each table by itself"
                )
            for number, row in enumerate(table, start=1):
                if None in row or None in row.values():
                    raise InputError(
                        f"{name}, row {number} must have as many cells as the header,"
                        f" {len(table.fieldnames)}: put quotes around text with separators"
                    )
                yield TextLine(row.pop(column), number, str(name), row)
        except csv.Error as error:
            raise InputError(
                f"{name}, row {number + 1}: {error}; put quotes around text with quotes or line"
                " ends, and double the quotes inside"
            ) from None

    def _lines(self):
        for name, file in self._files:
            yield from self._lines_of(name, file)

    def _lines_of(self, name, file):
        before = self.done
        place = "standard input" if name == STDIN else name
        for number, line in enumerate(_unpacked(name, file), start=1):
            if self.size:
                self.done = before + file.tell()
            if fault := line_fault(line):
                raise InputError(f"{place}, line {number}: {fault}")
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")


def _open(name):
    if name == STDIN:
        return sys.stdin.buffer
    check_is_text(str(name))
    if in_bucket(name):
        raise InputError(f"{name} must be a file on a disk: copy it there")
    try:
        return path_of(name).open("rb")
    except OSError as error:
        why = error.strerror or one_line(error)
        raise InputError(
            f"cannot read {name}: {why}; use a file, or - for standard input"
        ) from None


def _unpacked(name, file):
    """Yields the lines of a file, bytes, decompressed according to its name."""
    try:
        yield from iter(functools.partial(unpacked(file, str(name)).readline, LINE + 1), b"")
    except InputError:
        raise
    except Exception as error:  # each format has its own: zlib.error, LZMAError, BadZipFile …
        raise InputError(
            f"cannot read {name}: {one_line(error)}; replace it by a complete copy"
        ) from None
