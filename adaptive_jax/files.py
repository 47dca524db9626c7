"""Paths, files that replace others atomically, checksums, and compressed files.

    path_of("~/runs/a")             # a pathlib.Path
    path_of("gs://bucket/runs/a")   # an etils.epath.Path, which Orbax and JAX use as well

gcsfs reads and writes gs://. An object there is written as a whole or not at all, and nothing is
appended, renamed or locked.
"""

import contextlib
import glob
import hashlib
import io
import os
import re
import shutil
import time
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TextIO

from adaptive_jax.errors import InputError, of_extra

BUCKETS = "gs://"
DAY = 86_400  # in seconds
TIMEOUT = 30  # seconds in which a store must answer
# Ends of file names, for formats that `unpacked` refuses
PACKED = ".zst", ".lz4", ".lzma", ".z", ".7z", ".rar"
TARS = ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"
PDF = b"%PDF-"
CONTROLS = re.compile("[\0-\b\v-\x1f\x7f-\x9f]")  # control characters but tabs and line feeds


def in_bucket(path: str | os.PathLike) -> bool:
    """True if a path is in Google Cloud Storage."""
    return os.fspath(path).startswith(BUCKETS)


def path_of(place: str | os.PathLike) -> Path:
    """Returns a path with a leading ~ expanded: a pathlib.Path, or an etils.epath.Path for
    gs://BUCKET/NAME.

    Raises:
        InputError: another URL, a NUL byte, or the home of an unknown user.
        MissingPackage: a bucket, and the extra `gcs` is not installed.
    """
    name = os.fspath(place)
    if "\0" in name:
        raise InputError(f"{name!r} must be a path, which has no NUL byte")
    if "://" not in name:
        try:
            return Path(name).expanduser()
        except RuntimeError:
            raise InputError(
                f"{name} must be a path, and there is no such user: write it without the ~"
            ) from None
    if not in_bucket(name) or not name.removeprefix(BUCKETS).strip("/"):
        raise InputError(
            f"{name} must be a path or gs://BUCKET/NAME; other stores can be mounted, see"
            " docs/runs.md"
        )
    with of_extra("gcs"):
        import fsspec
        import gcsfs  # noqa: F401
        import google.cloud.storage  # noqa: F401 (Orbax asks it at every listing)
        from etils import epath
    # gcsfs would cache listings, and miss what Orbax and other processes write.
    settings = fsspec.config.conf.setdefault("gcs", {})
    settings |= {"use_listings_cache": False, "requests_timeout": TIMEOUT} | settings
    return epath.Path(name.rstrip("/"))


def local_directory(place: str, key: str) -> Path:
    """The directory `place`, the value of the setting `key`, with a leading ~ expanded.

    Raises:
        InputError: it is empty, a URL, or the home of an unknown user.
    """
    if not place or "://" in place:
        raise InputError(f"{key}={place!r} must be a directory on a local disk")
    return path_of(place)


def absolute(path: Path) -> Path:
    """The absolute path; one in a bucket is absolute already."""
    return path if in_bucket(path) else path.absolute()


def names_in(directory: Path) -> list[str]:
    """Names of the files and folders in a directory; none if it does not exist."""
    try:
        return [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def files_below(directory: Path) -> list[Path]:
    """The files in a directory and all folders below it; none if it does not exist."""
    files = []
    for name in names_in(directory):
        path = directory / name
        files += files_below(path) if path.is_dir() else [path]
    return files


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds `path` to an OSError that names no file, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:  # errors of a store have none, and a name would hide their text
            error.filename = error.filename or str(path)
        raise


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends without an error, so that readers
    never see a half-written file.
    """
    if in_bucket(path):
        content = io.BytesIO()
        yield content
        path.write_bytes(content.getvalue())
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile, whose files only their owner can read: a cache may be shared.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with naming(path), unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a power failure could leave the new name and no content
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file in one step, see `replacing`."""
    with replacing(path) as file:
        file.write(content)


def remove_unfinished(directory: Path, pattern: str) -> None:
    """Removes the temporary files that `replacing` left in a killed process, but no lock.

    pattern: of the names of the replaced files, such as "*.txt", or their stem.
    """
    for unfinished in directory.glob(f".{pattern}.*"):
        if unfinished.suffix != ".lock":
            unfinished.unlink()


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Makes a temporary directory that is renamed to `path`, where nothing or an empty directory
    is, when the block ends without an error.

    A block that fails leaves nothing. What a killed process left for the same `path` is removed
    after a day.

    Raises:
        InputError: a path in a bucket.
    """
    if in_bucket(path):
        raise InputError(f"{path} must be a directory on a disk: write it there, then copy it")
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    for remainder in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        if time.time() - remainder.stat().st_mtime > DAY:
            shutil.rmtree(remainder, ignore_errors=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    try:
        unfinished.mkdir()
        yield unfinished
        os.replace(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_checksums(path: Path, files: Sequence[Path]) -> None:
    """Writes the SHA-256 of files below `path`'s directory, as `sha256sum --check` reads it."""
    files = sorted(files)
    names = [file.relative_to(path.parent).as_posix() for file in files]
    lines = [f"{sha}  {name}\n" for sha, name in zip(_sha256_of_each(files), names, strict=True)]
    write_bytes(path, "".join(lines).encode())


def add_checksum(path: Path, file: Path) -> None:
    """Adds the SHA-256 of a file to a list of `write_checksums`."""
    with replacing(path) as listed:
        line = f"{_sha256_of_each([file])[0]}  {file.relative_to(path.parent).as_posix()}\n"
        listed.write(path.read_bytes() + line.encode())


def changed_file(path: Path, below: Sequence[str] = ("",)) -> str | None:
    """The first file of a list of `write_checksums` that is missing or has changed; the list itself
    if it is missing or damaged; None if all files are unchanged.

    below: check only files whose names start with one of these.
    """
    try:
        lines = [line.partition("  ") for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return path.name
    if not lines or any(len(digest) != 64 for digest, _, _ in lines):
        return path.name
    listed = {name: digest for digest, _, name in lines if name.startswith(tuple(below))}
    sums = _sha256_of_each([path.parent / name for name in listed])
    pairs = zip(listed.items(), sums, strict=True)
    return next((name for (name, digest), now in pairs if now != digest), None)


def _sha256_of_each(paths):
    """The SHA-256 of each file, None if it is missing, computed by one thread per core."""

    def sha256(path):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        return list(threads.map(sha256, paths))


def unpacked(file: BinaryIO, name: str) -> BinaryIO:
    """A file's content, decompressed as its name says: .gz, .xz, .bz2, or .zip with one file.

    Raises:
        InputError: a .zip with several files, or encrypted; another compression; a PDF. A damaged
            file raises the errors of its format.
    """
    if hasattr(file, "peek") and file.peek(len(PDF)).startswith(PDF):
        raise InputError(f"{name} is a PDF, not text: extract its text first, as by pdftotext")
    if name.lower().endswith(TARS + PACKED):
        raise InputError(f"{name} is packed in a way that cannot be read: unpack it first")
    if name.lower().endswith(".zip"):
        archive = zipfile.ZipFile(file)
        members = [
            member
            for member in archive.infolist()
            if not member.is_dir() and not member.filename.startswith("__MACOSX/")
        ]
        if len(members) != 1:
            raise InputError(
                f"{name} holds {len(members)} files: unpack it, or pack one file alone"
            )
        try:
            return archive.open(members[0])
        except RuntimeError as error:  # a password, or Deflate64, which Windows uses from 2 GB on
            raise InputError(f"{name} cannot be unpacked ({error}): unpack it first") from None
    with of_extra("train"):
        from fsspec.compression import compr
        from fsspec.utils import infer_compression
    return compr[infer_compression(name)](file, mode="rb")


def escaped(text: str, file: TextIO) -> str:
    """Text that is safe to print: on a terminal, control characters but tabs and line feeds are
    escaped, because a corpus or a prompt could use them to change what the terminal shows.
    """
    return CONTROLS.sub(lambda match: repr(match[0])[1:-1], text) if file.isatty() else text
