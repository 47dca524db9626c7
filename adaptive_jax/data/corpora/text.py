"""The text of each split as one stream of bytes, from files, compressed files, directories and
archives.

texts = local_texts("text_files", "my_corpus")
    # {"train": Text(files=(.../train.txt.xz,)), ...}
for chunk in texts["train"].chunks(): ...
    # Chunk(name=".../train.txt.xz", data=b"the cat ...", done=0.01)
"""

import codecs
import contextlib
import fnmatch
import gzip
import lzma
import tarfile
import zipfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.errors import InputError

NAMES = {"train": ("train",), "validation": ("valid", "validation"), "test": ("test",)}
SUFFIXES = ("", ".xz", ".gz")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
CHUNK = 1 << 20


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
    """

    files: tuple[Path, ...]
    members: str = ""

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
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                where = f"{' '.join(name.split())} after {read:,} bytes of text"
                raise InputError(
                    f"cannot read {where}: {reason}; replace it by a complete copy"
                ) from error
            before += file.stat().st_size


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


# The names of the splits in the published copies, for those who unpacked one or have the archive.
_TOKENS = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
_RAW = ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw")
_HELD_OUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout-0000{}-of-00050"
PUBLISHED_NAMES = {
    "penn_treebank": ("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
    "wikitext2": _TOKENS,
    "wikitext103": _TOKENS,
    "wikitext2_raw": _RAW,
    "wikitext103_raw": _RAW,
    # The first of 50 held-out shards is the usual test set (Jozefowicz et al. 2016, section 4.1).
    "billion_word": (
        "training-monolingual.tokenized.shuffled/news.en-*",
        _HELD_OUT.format(1),
        _HELD_OUT.format(0),
    ),
}


def published_texts(corpus: str, archive: Path) -> dict[str, Text]:
    """Returns the splits in the published archive of a corpus."""
    names = zip(SPLITS, PUBLISHED_NAMES[corpus], strict=True)
    return {split: Text((archive,), f"*/{name}") for split, name in names}


def local_texts(corpus: str, path: str, needed: Collection[str]) -> dict[str, Text]:
    """Returns the text of each split found.

    path: the published archive of the corpus, or a directory that holds, for each split, one of
        train.txt, train.txt.xz, train.txt.gz; a directory train/ with such files; the published
        names.
    Raises InputError if a split in `needed` is missing or a split is found twice.
    """
    place = Path(path).expanduser().resolve()
    if place.is_file() and place.name.endswith(ARCHIVES) and corpus in PUBLISHED_NAMES:
        return published_texts(corpus, place)
    if not place.is_dir():
        raise InputError(
            f"data.path={path} is not a directory; give one with train.txt, valid.txt and test.txt"
        )
    texts = {}
    for split, published in zip(SPLITS, PUBLISHED_NAMES.get(corpus, ("", "", "")), strict=True):
        files = [f"{name}.txt{suffix}" for name in NAMES[split] for suffix in SUFFIXES]
        found = {name: Text((place / name,)) for name in files if (place / name).is_file()}
        found |= {
            f"{name}/": _directory(place / name) for name in NAMES[split] if (place / name).is_dir()
        }
        if published and (shards := sorted(place.glob(published))):
            found[published] = Text(tuple(shards))
        if len(found) > 1:
            raise InputError(
                f"data.path={path} has both {' and '.join(list(found)[:2])}; keep one of them"
            )
        if not found and split in needed:
            choice = ", ".join([*files, f"{NAMES[split][0]}/", *([published] if published else [])])
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
