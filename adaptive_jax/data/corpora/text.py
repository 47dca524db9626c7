"""The text of each split as one stream of bytes: from files, compressed files, directories and
archives, or from records of tensorflow-datasets.

texts = local_texts("my_corpus", ("train",))
    # {"train": Text(files=(.../train.txt.xz,)), ...}
for chunk in texts["train"].chunks(): ...
    # Chunk(name=".../train.txt.xz", data=b"the cat ...", done=0.01)
"""

import codecs
import contextlib
import fnmatch
import gzip
import itertools
import json
import lzma
import tarfile
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.vocabulary.words import EOS
from adaptive_jax.errors import InputError, one_line

NAMES = {"train": ("train",), "validation": ("valid", "validation"), "test": ("test",)}
SUFFIXES = ("", ".xz", ".gz")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
CHUNK = 1 << 20
RECORDS = 1000  # of tensorflow-datasets, in a chunk


class Chunk(NamedTuple):
    """name: of the file or archive member; data: its next bytes; done: the share of the split
    read so far, 0 to 1.
    """

    name: str
    data: bytes
    done: float


class Text(NamedTuple):
    """One split of a corpus.

    files: plain, .xz or .gz files, read as one, where the end of each file ends its last line; or
        archives.
    members: the pattern of the members of an archive to read, in the archive's order.
    note: see `Corpus`.
    """

    files: tuple[Path, ...]
    members: str = ""
    note = ""

    @property
    def identity(self) -> tuple:
        """Changes with the path, the size and the modification time of a file."""
        stats = [(str(file), file.stat()) for file in self.files]
        return (self.members, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))

    @property
    def size(self) -> int:
        """Bytes of the files on the disk."""
        return sum(file.stat().st_size for file in self.files)

    def chunks(self) -> Iterator[Chunk]:
        """Yields the text, a MiB at a time. InputError: a file that cannot be read to its end."""
        before, total = 0, max(self.size, 1)
        for file in self.files:
            name, read = str(file), 0
            try:
                with file.open("rb") as raw:
                    for name, stream in _streams(file, raw, self.members):
                        start = read
                        while data := stream.read(CHUNK):
                            text = data if read > start else data.removeprefix(codecs.BOM_UTF8)
                            read += len(data)
                            yield Chunk(name, text, min(1.0, (before + raw.tell()) / total))
            except Exception as error:  # damaged archives make their readers fail in many ways
                raise InputError(
                    f"cannot read {' '.join(name.split())} after {read:,} bytes of text:"
                    f" {one_line(error)[:200]}; replace it by a complete copy"
                ) from error
            before += file.stat().st_size

    def lines(self) -> Iterator[bytes]:
        """Yields the lines, each with its line feed. The end of a file ends its last line.

        Raises:
            InputError: as `chunks`, and as `decode_text`.
        """
        for name, chunks in itertools.groupby(self.chunks(), lambda chunk: chunk.name):
            rest, number = bytearray(), itertools.count(1)

            def checked(line, name=name, number=number):
                where = f"{name}, line {next(number)}"
                decode_text(line, lambda _: where)
                return bytes(line) + b"\n"

            for chunk in chunks:
                rest += chunk.data
                if b"\n" in chunk.data:
                    *lines, rest = rest.split(b"\n")
                    yield from map(checked, lines)
            if rest:
                yield checked(rest)


class Records(NamedTuple):
    """Some records of a split that tensorflow-datasets prepared, one a line, read like `Text`.

    files: the directory with dataset_info.json. begin, end: the first record, and the one after
        the last. note: see `Corpus`.
    """

    files: tuple[Path]
    split: str
    begin: int
    end: int
    note = "lm1b of tensorflow-datasets, whose held-out text is not that of published results"

    @property
    def identity(self) -> tuple:
        """Changes with the path and the time of preparation."""
        directory, split, *part = self
        prepared = (directory[0] / "dataset_info.json").stat().st_mtime_ns
        return str(directory[0]), split, tuple(part), prepared

    @property
    def size(self) -> int:
        """Bytes of the files that hold these records, among others."""
        files = self.files[0].glob(f"*-{self.split}.array_record*")
        return sum(file.stat().st_size for file in files)

    def chunks(self) -> Iterator[Chunk]:
        """Yields the sentences, one a line, a thousand at a time."""
        import tensorflow_datasets as tfds

        source = tfds.builder_from_directory(self.files[0]).as_data_source(split=self.split)
        for first in range(self.begin, self.end, RECORDS):
            last = min(first + RECORDS, self.end)
            texts = [record["text"] for record in source.__getitems__(range(first, last))]
            data = b"".join(text.replace(b"\n", b" ") + b"\n" for text in texts)
            done = (last - self.begin) / (self.end - self.begin)
            yield Chunk(f"{self.files[0]} ({self.split})", data, done)


def decode_text(data: bytes, where: Callable[[int], str]) -> str:
    """The text of bytes in UTF-8. where: names file and line of the byte at an offset.

    Raises:
        InputError: other bytes, or a NUL byte; with file and line.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where(error.start)}: not UTF-8; convert the file to UTF-8") from error
    if (zero := data.find(b"\0")) >= 0:
        raise InputError(
            f"{where(zero)}: a NUL byte, which text never has; repair the file, or convert it to"
            " UTF-8"
        )
    return text


def own_eos(where: str) -> InputError:
    """The error about a text that has `<eos>` of its own. where: its file, or its file and line."""
    return InputError(
        f"{where}: the text has {EOS} of its own, and every end of a line becomes one: remove them,"
        f" as by `sed 's/ *{EOS}//g'`"
    )


def _streams(file: Path, raw: BinaryIO, members: str) -> Iterator[tuple[str, BinaryIO]]:
    """Name and text of the file itself, or of each member of an archive."""
    if not members:
        decompress = {".xz": lzma.open, ".gz": gzip.open}.get(file.suffix, contextlib.nullcontext)
        with decompress(raw) as stream:
            yield str(file), stream
        return
    found = False
    if file.suffix == ".zip":
        with zipfile.ZipFile(raw) as archive:
            for name in fnmatch.filter(archive.namelist(), members):
                found = True
                yield f"{file}/{name}", archive.open(name)
    else:
        with tarfile.open(fileobj=raw, mode="r|*") as archive:
            for member in archive:
                if member.isfile() and fnmatch.fnmatch(member.name, members):
                    found = True
                    yield f"{file}/{member.name}", archive.extractfile(member)
    if not found:
        raise OSError(f"it has no member {members}")


def archived_texts(archive: Path, patterns: Sequence[str]) -> dict[str, Text]:
    """The splits in an archive, whose members match these three patterns below its folder."""
    return {
        split: Text((archive,), f"*/{pattern}")
        for split, pattern in zip(SPLITS, patterns, strict=True)
    }


def local_texts(
    path: str, needed: Collection[str], patterns: Sequence[str] = ("", "", "")
) -> dict[str, Text]:
    """Returns the text of each split found.

    path: the published archive of the corpus, or a directory that holds, for each split, one of
        train.txt, train.txt.xz, train.txt.gz; a directory train/ with such files; files with the
        published names.
    patterns: of the published names of train, validation and test, "" for none.

    Raises:
        InputError: a split in `needed` is missing, or a split is found twice.
    """
    place = Path(path).expanduser().resolve()
    if place.is_file() and place.name.endswith(ARCHIVES) and all(patterns):
        return archived_texts(place, patterns)
    if not place.is_dir():
        raise InputError(
            f"data.path={path} is not a directory; give one with train.txt, valid.txt and test.txt"
        )
    texts = {}
    for split, pattern in zip(SPLITS, patterns, strict=True):
        files = [f"{name}.txt{suffix}" for name in NAMES[split] for suffix in SUFFIXES]
        found = {name: Text((place / name,)) for name in files if (place / name).is_file()}
        for name in NAMES[split]:
            if (place / name).is_dir():
                found[f"{name}/"] = _directory(place / name)
        if pattern and (shards := sorted(place.glob(pattern))):
            found[pattern] = Text(tuple(shards))
        if len(found) > 1:
            raise InputError(
                f"data.path={path} has both {' and '.join(list(found)[:2])}; keep one of them"
            )
        if not found and split in needed:
            choice = ", ".join(filter(None, [*files, f"{NAMES[split][0]}/", pattern]))
            raise InputError(f"data.path={path} has no {split} split; add one of {choice}")
        if found:
            (texts[split],) = found.values()
    return texts


def _directory(directory: Path) -> Text:
    """All files of a directory in order of name, except hidden ones."""
    files = sorted(
        file for file in directory.iterdir() if file.is_file() and not file.name.startswith(".")
    )
    if not files:
        raise InputError(f"{directory} has no files; put text into it, or remove it")
    return Text(tuple(files))


def tfds_texts(place: Path, name: str) -> dict[str, Records]:
    """The splits of a data set in a directory of tensorflow-datasets, or of the set itself; {} if
    there are none.

    tensorflow-datasets shuffles the held-out sentences of lm1b, so the usual test set, the first of
    50 shards, is lost. Here, the first fiftieth of them is the test split and the second fiftieth
    the validation split.

    Raises:
        InputError: records in a format that only TensorFlow can read.
    """
    places = [place, *sorted(place.glob(f"{name}/*"))]
    found = [path for path in places if (path / "dataset_info.json").is_file()]
    if not found:
        return {}
    builder = found[-1]
    if not list(builder.glob("*.array_record*")):
        raise InputError(
            f"{builder} has no array_record files; run `tfds build {name}"
            " --file_format=array_record`, or give the original archive"
        )
    # Not read by tensorflow_datasets: a run whose ids are prepared should not import it.
    splits = json.loads((builder / "dataset_info.json").read_text())["splits"]
    sentences = {split["name"]: sum(map(int, split["shardLengths"])) for split in splits}
    held_out = max(1, sentences["test"] // 50)
    return {
        "train": Records((builder,), "train", 0, sentences["train"]),
        "validation": Records((builder,), "test", held_out, 2 * held_out),
        "test": Records((builder,), "test", 0, held_out),
    }
