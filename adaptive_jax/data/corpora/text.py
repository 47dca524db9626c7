"""The text of each split as one stream of bytes: from files, compressed files, directories and
archives.

texts = local_texts("my_corpus", ("train",))
    # {"train": Text(files=(.../train.txt.xz,)), ...}
for chunk in texts["train"].chunks(): ...
    # Chunk(name=".../train.txt.xz", data=b"the cat ...", done=0.01)
"""

import codecs
import fnmatch
import itertools
import re
import tarfile
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.vocabulary.words import EOS
from adaptive_jax.errors import InputError, one_line
from adaptive_jax.files import TARS, unpacked

NAMES = {"train": ("train",), "validation": ("valid", "validation", "val"), "test": ("test",)}
SUFFIXES = ("", ".xz", ".gz")
ARCHIVES = (".zip", *TARS)
SPLIT = "split"  # the directory of a cache that holds copies of split files
NOT_TEXT = re.compile(r"\.(jsonl?|parquet)(\.(gz|xz|bz2|zip))?$", re.IGNORECASE)
CHUNK_BYTES = 1 << 20
# Most bytes of a word, and of a line that must fit in memory: a small packed file may unpack to an
# endless one
WORD, LINE = 1 << 23, 1 << 27


class Chunk(NamedTuple):
    """Bytes of a split.

    name: the file or archive member.
    data: its next bytes.
    done: share of the split read so far, 0 to 1.
    """

    name: str
    data: bytes
    done: float


def check_eos(ends: int, lines: int, place: Path) -> None:
    """Checks that the text of a file does not mark the ends of its lines itself.

    Raises:
        InputError: more than one `<eos>` in two lines.
    """
    if 2 * ends > lines:
        raise InputError(
            f"{place}: the text has {EOS} of its own, and one is added to every line: remove them,"
            f" as by `sed 's/ *{EOS}//gI'`"
        )


def check_is_text(file: str) -> None:
    """Refuses files whose names say that they hold JSON or parquet.

    Raises:
        InputError: such a name.
    """
    if NOT_TEXT.search(file):
        raise InputError(
            f"{file} must be text, not JSON or parquet: write its texts line by line, see"
            " docs/own_data.md"
        )


def line_fault(data: bytes) -> str:
    """Returns the reason why a line, or its first `LINE + 1` bytes, is not text; "" if it is."""
    if len(data) > LINE:
        return f"a line of more than {LINE:,} bytes; put a sentence or a paragraph on each"
    if len(data) > WORD and re.search(rb"(?<!\S)\S{%d}" % (WORD + 1), data):
        return f"a word of more than {WORD:,} bytes; use text, words separated by spaces"
    return encoding_fault(data)


def encoding_fault(data: bytes) -> str:
    """Returns the reason why bytes are not text in UTF-8; "" if they are."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        is_utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        encoding = "UTF-16" if is_utf16 else "WINDOWS-1252"
        return f"not UTF-8; convert it, as by `iconv -f {encoding} -t UTF-8`"
    if b"\0" in data:
        return "a NUL byte, which text never has; repair the file, or convert it to UTF-8"
    return ""


class Text(NamedTuple):
    """One split of a corpus.

    files: plain or compressed files, as `adaptive_jax.files.unpacked` reads them, or archives. They
        are read as one text, in which the end of each file ends its last line.
    members: pattern of the archive members to read, in the archive's order; empty: no archives.
    """

    files: tuple[Path, ...]
    members: str = ""

    @property
    def identity(self) -> tuple:
        """A value that changes with the path, the size and the modification time of each file."""
        stats = [(str(file), file.stat()) for file in self.files]
        return (self.members, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))

    @property
    def size(self) -> int:
        """Bytes of the files on disk."""
        return sum(file.stat().st_size for file in self.files)

    def chunks(self) -> Iterator[Chunk]:
        """Yields the text, about a MiB at a time.

        Raises:
            InputError: JSON or parquet, or a file that cannot be read to its end.
        """
        before, total = 0, max(self.size, 1)
        for file in self.files:
            check_is_text(name := str(file))
            read = 0
            try:
                with file.open("rb") as raw:
                    for name, stream in _streams(file, raw, self.members):
                        start = read
                        while data := stream.read(CHUNK_BYTES):
                            text = data if read > start else data.removeprefix(codecs.BOM_UTF8)
                            read += len(data)
                            if text:
                                done = min(1.0, (before + raw.tell()) / total)
                                yield Chunk(name, text, done)
            except (InputError, PermissionError):
                raise
            except Exception as error:  # damaged archives make their readers fail in many ways
                after = f" after {read:,} bytes of text" if read else ""
                raise InputError(
                    f"cannot read {' '.join(name.split())}{after}:"
                    f" {one_line(error)[:200]}; replace it by a complete copy"
                ) from error
            before += file.stat().st_size

    def lines(self) -> Iterator[bytes]:
        """Yields the lines, each with its line feed. The end of a file ends its last line.

        Raises:
            InputError: as `chunks`, or a line that is not text, with its file and number.
        """
        for name, chunks in itertools.groupby(self.chunks(), lambda chunk: chunk.name):
            for number, line in enumerate(_split_lines(chunk.data for chunk in chunks), start=1):
                if fault := line_fault(line):
                    raise InputError(f"{name}, line {number}: {fault}")
                yield line


def _split_lines(parts):
    rest = bytearray()
    for part in parts:
        rest += part
        if b"\n" in part:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield bytes(line) + b"\n"
        if len(rest) > LINE:
            break
    if rest:
        yield bytes(rest) + b"\n"


def _streams(file: Path, raw: BinaryIO, members: str) -> Iterator[tuple[str, BinaryIO]]:
    """Yields the name and the text of a file, or of each member of an archive."""
    if not members:
        if file.suffix == ".gz" and not file.stat().st_size:  # gzip would read an empty text
            raise OSError("it has no bytes")
        yield str(file), unpacked(raw, str(file))
        return
    has_members = False
    if file.suffix == ".zip":
        with zipfile.ZipFile(raw) as archive:
            for name in fnmatch.filter(archive.namelist(), members):
                has_members = True
                yield f"{file}/{name}", archive.open(name)
    else:
        with tarfile.open(fileobj=raw, mode="r|*") as archive:
            for member in archive:
                if member.isfile() and fnmatch.fnmatch(member.name, members):
                    has_members = True
                    yield f"{file}/{member.name}", archive.extractfile(member)
    if not has_members:
        raise OSError(f"it has no member {members}")


def archived_texts(archive: Path, patterns: Sequence[str]) -> dict[str, Text]:
    """Returns the splits in an archive: the members in its top folder that match three patterns."""
    return {
        split: Text((archive,), f"*/{pattern}")
        for split, pattern in zip(SPLITS, patterns, strict=True)
    }


def local_texts(
    place: Path, splits: Collection[str], patterns: Sequence[str] = ("", "", "")
) -> dict[str, Text]:
    """Returns the text of each split that a place has.

    place: the published archive of the corpus, or a directory that holds, for each split, one of
        train.txt, train.txt.xz, train.txt.gz; a directory train/ of text files; files with the
        published names. If only one split is required, it may be a file of text.
    splits: the required splits.
    patterns: patterns of the published file names of train, validation and test; "": none.

    Raises:
        InputError: a required split is missing, or a split exists twice.
    """
    place = place.absolute()  # a link may point to another suffix
    if is_archive(place) and all(patterns):
        return archived_texts(place, patterns)
    if is_one_split(place) and len(splits) == 1:
        return {split: Text((place,)) for split in splits}
    if not place.is_dir():
        fault = "is not a directory" if place.exists() else "does not exist"
        fault = "is an archive: unpack it" if is_archive(place) else fault
        names = [f"{NAMES[split][0]}.txt" for split in SPLITS if split in splits or not splits]
        archive = ", or the published archive" if all(patterns) else ""
        raise InputError(
            f"data.path={place} {fault}; use a directory with {', '.join(names)}{archive}"
        )
    texts = {}
    for split, pattern in zip(SPLITS, patterns, strict=True):
        names = [f"{name}.txt{suffix}" for name in NAMES[split] for suffix in SUFFIXES]
        choices = {name: [place / name] for name in names if (place / name).is_file()}
        choices |= {f"{name}/": text_files(place / name) for name in NAMES[split]}
        if pattern:
            choices[pattern] = sorted(place.glob(pattern))
        choices = {name: files for name, files in choices.items() if files}
        if len(choices) > 1:
            raise InputError(
                f"data.path={place} has both {' and '.join(list(choices)[:2])}; keep one of them"
            )
        if not choices and split in splits:
            choice = ", ".join(filter(None, [*names, f"{NAMES[split][0]}/", pattern]))
            raise InputError(f"data.path={place} has no {split} split; add one of {choice}")
        for files in choices.values():
            texts[split] = Text(tuple(files))
    return texts


def is_archive(place: Path) -> bool:
    """True for a .zip or tar file."""
    return place.is_file() and place.name.endswith(ARCHIVES)


def is_one_split(place: Path) -> bool:
    """True for a file that is no archive, which can be the text of any one split."""
    return place.is_file() and not is_archive(place)


def text_files(directory: Path) -> list[Path]:
    """Returns all files below a directory, sorted by path, without hidden ones and backups of
    editors, whose names end in ~.
    """
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    parts = [file.relative_to(directory).parts for file in files]
    hidden = [names[-1].endswith("~") or any(n.startswith(".") for n in names) for names in parts]
    return [file for file, hides in zip(files, hidden, strict=True) if not hides]


def has_splits(directory: Path) -> bool:
    """True for a directory with a file or a folder that has the name of a split."""
    names = itertools.chain(*NAMES.values())
    suffixes = [f".txt{suffix}" for suffix in SUFFIXES]
    files = (directory / f"{name}{suffix}" for name in names for suffix in ("", *suffixes))
    return any(file.exists() for file in files)
