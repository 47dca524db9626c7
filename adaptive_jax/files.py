"""Files on disks and in object storage: paths, files that replace others whole, checksums.

    path_of("~/runs/a")             # a pathlib.Path
    path_of("gs://bucket/runs/a")   # an etils.epath.Path, which Orbax and JAX use as well

In a store (gs:// or s3://) an object is written whole or not at all. Nothing is renamed, appended
to or locked, and a folder is a part of a name. `ObjectFiles` reads and writes objects through
tensorstore, as Orbax does arrays. gcsfs and s3fs are not used: s3fs kept a listing from before
tensorstore wrote an object, and left half an object when an error ended the writing; the two weigh
89 MB and need credentials in a second place. Only paths of stores import tensorstore, fsspec and
etils.
"""

import contextlib
import functools
import glob
import hashlib
import io
import os
import shutil
import time
import uuid
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from adaptive_jax.errors import InputError, of_extra, one_line

SCHEMES = "gs", "s3"
# Seconds to wait for the first answer; tensorstore alone would try for a quarter of an hour
PATIENCE = 60.0
DAY = 86_400  # in seconds
AT_ONCE = 4  # objects that are compared with their checksums
# Names of files that nothing here unpacks
PACKED = ".zst", ".lz4", ".lzma", ".z", ".7z", ".rar"
ARCHIVES = ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"


def in_store(path: str | os.PathLike) -> bool:
    """Whether a path or a text names a place in object storage."""
    return "://" in os.fspath(path)


def path_of(place: str | os.PathLike) -> Path:
    """The path that a text names, a ~ at its start expanded; a path stays as it is.

    Raises:
        InputError: a URL of another kind, a NUL byte, or the home of an unknown user.
    """
    if "\0" in os.fspath(place):
        raise InputError(f"{os.fspath(place)!r} must be a path, which has no NUL byte")
    if not in_store(place):
        try:
            return Path(place).expanduser()
        except RuntimeError:
            raise InputError(
                f"{place} must be a path, and there is no such user: write it without the ~"
            ) from None
    if not isinstance(place, str):
        return place
    scheme, _, rest = place.partition("://")
    if scheme not in SCHEMES or not rest.strip("/"):
        raise InputError(f"{place} must be a path, gs://BUCKET/NAME or s3://BUCKET/NAME")
    from etils import epath

    _register()
    return epath.Path(place.rstrip("/"))


def absolute(path: Path) -> Path:
    """The path from the root of the disk; a place in a store is absolute already."""
    return path if in_store(path) else path.absolute()


def names_in(directory: Path) -> list[str]:
    """Names of the files and folders in a directory; none of one that does not exist."""
    try:
        return [path.name for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def files_below(directory: Path) -> list[Path]:
    """The files in a directory and in its folders; none of one that does not exist."""
    if not in_store(directory):
        return [path for path in directory.rglob("*") if path.is_file()]
    import tensorstore

    store = tensorstore.KvStore.open(kvstore(f"{directory}/")).result()
    names = [name.decode() for name in store.list().result()]
    return [directory / name for name in names if not name.endswith("/")]


def check_reachable(path: Path) -> None:
    """Checks that a store answers, before a long preparation.

    Raises:
        InputError: it does not, or does not let this user read.
    """
    if not in_store(path):
        return
    import tensorstore

    try:
        store = tensorstore.KvStore.open(kvstore(f"{path}/")).result(timeout=PATIENCE)
        store.read("config.json").result(timeout=PATIENCE)
    except Exception as error:  # tensorstore raises many kinds
        raise InputError(
            f"cannot reach {path}: {reason(error)}; check its name and your credentials"
        ) from error


def kvstore(url: str) -> str | dict:
    """What tensorstore opens for a URL. It reads Google's variables, and some of AWS's."""
    if not url.startswith("s3://"):
        return url
    bucket, _, path = url.removeprefix("s3://").partition("/")
    spec, address = {"driver": "s3", "bucket": bucket, "path": path}, os.getenv("AWS_ENDPOINT_URL")
    if address:
        spec |= {"endpoint": address, "aws_region": os.environ.get("AWS_REGION", "us-east-1")}
    if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise it logs five lines about missing files
        spec |= {"aws_credentials": {"type": "environment"}}
    return spec


def reason(error: BaseException) -> str:
    """Why tensorstore failed, in one line, without its notes for its own authors."""
    if isinstance(error, TimeoutError):
        return f"no answer within {PATIENCE:g} seconds"
    return one_line(error).partition(" [tensorstore_spec")[0][:300]


class ObjectFiles:
    """The objects of a store as files, in memory: the methods that fsspec derives its others from.

    Settings, metadata, metrics and programs are small. Folders need not be made.
    """

    scheme: str

    def _open(self, path: str, mode: str = "rb", **_) -> io.IOBase:
        """Opens an object to read it, or to write it anew, whole, when it is closed.

        Raises:
            FileNotFoundError: there is no such object to read.
            ValueError: another mode, as appending.
        """
        store, key = self._locate(path)
        if mode == "wb":
            return _NewObject(lambda content: store.write(key, content).result())
        if mode != "rb":
            raise ValueError(f"mode must be r or w for {path} in object storage, got {mode}")
        found = store.read(key).result()
        if found.state != "value":
            raise FileNotFoundError(2, "No such object", f"{path}")
        return io.BytesIO(found.value)

    def ls(self, path: str, detail: bool = True, **_) -> list:
        """Lists a folder. Raises FileNotFoundError if there is none."""
        names, here = self._names_below(path), self._strip_protocol(path)
        if not names:
            raise FileNotFoundError(2, "No such folder", f"{path}")
        folders = {name.partition("/")[0]: "/" in name for name in sorted(names, reverse=True)}
        folders.pop("", None)  # the empty object that a store's own tools make for a folder
        found = [_entry(f"{here}/{name}", folder) for name, folder in sorted(folders.items())]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **_) -> dict:
        """The name and type of an object or a folder. Raises FileNotFoundError if there is none."""
        store, key = self._locate(path)
        is_object = key and key.encode() in _keys(store, key, key + "\0")
        if not is_object and not self._names_below(path):
            raise FileNotFoundError(2, "No such object", f"{path}")
        return _entry(self._strip_protocol(path), not is_object)

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Deletes an object, or a folder if `recursive`. Raises FileNotFoundError if there is
        none.
        """
        (store, key), folder = self._locate(path), self.info(path)["type"] == "directory"
        if folder and not recursive:
            raise IsADirectoryError(21, "Is a folder", f"{path}")
        if folder:
            store.delete_range(store.KeyRange(f"{key}/", f"{key}0")).result()
        else:
            store.write(key, None).result()

    def _locate(self, path):
        """The store of the path's bucket, and the path's key in it."""
        bucket, _, key = self._strip_protocol(path).partition("/")
        return _bucket(f"{self.scheme}://{bucket}/"), key

    def _names_below(self, path):
        """Names of all objects in a folder and its folders, from there on."""
        store, key = self._locate(path)
        keys = _keys(store, f"{key}/", f"{key}0") if key else _keys(store, "", "")
        return [name.decode()[len(key) + bool(key) :] for name in keys]


def _entry(name, folder):
    return {"name": name, "size": None, "type": "directory" if folder else "file"}


def _keys(store, first, end):
    return store.list(store.KeyRange(first, end)).result()


@functools.cache
def _bucket(url):
    import tensorstore

    return tensorstore.KvStore.open(kvstore(url)).result()


@functools.cache
def _register():
    """Has fsspec, and so etils.epath, Orbax and JAX, reach stores by `ObjectFiles`."""
    import fsspec

    for protocols in ("gs", "gcs"), ("s3",):
        named = {"protocol": protocols, "scheme": protocols[0]}
        files = type("Files", (ObjectFiles, fsspec.AbstractFileSystem), named)
        for protocol in protocols:
            fsspec.register_implementation(protocol, files, clobber=True)


class _NewObject(io.BytesIO):
    """An object that is written when it is closed, and not at all after an error."""

    def __init__(self, write: Callable[[bytes], object]):
        super().__init__()
        self._write = write

    def close(self):
        if not self.closed:
            self._write(self.getvalue())
        super().close()

    def __exit__(self, kind, *_):
        super().close() if kind else self.close()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file that replaces `path` when the block ends without an error, so readers never
    see half of it.

    Raises:
        InputError: object storage does not take it.
    """
    if in_store(path):
        content = io.BytesIO()
        yield content
        try:
            path.write_bytes(content.getvalue())
        except Exception as error:  # tensorstore raises many kinds
            raise InputError(
                f"cannot write {path}: {reason(error)}; what was saved before is intact. Check your"
                " permission to write there, then run the same command to resume"
            ) from error
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not tempfile: only their owner can read its files, and a cache may be shared.
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with unfinished.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a power failure could leave the new name and no content
        os.replace(unfinished, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # the error of a full disk names no file
        raise
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Makes a directory to fill that gets the name `path`, where nothing or an empty directory is,
    when the block ends without an error.

    A block that fails leaves nothing. What a killed process left for the same `path` is removed
    when it is a day old. In object storage, which renames nothing, the directory is `path` itself,
    and what a killed process left stays.
    """
    if in_store(path):
        try:
            yield path
        except BaseException:
            path.rmtree(missing_ok=True)
            raise
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.new"):
        if time.time() - left.stat().st_mtime > DAY:
            shutil.rmtree(left, ignore_errors=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.new")
    try:
        unfinished.mkdir()
        yield unfinished
        os.replace(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def write_checksums(path: Path, files: Sequence[Path]) -> None:
    """Writes the SHA-256 of files below `path`'s directory, as `sha256sum --check` reads them."""
    files = sorted(files)
    names = [file.relative_to(path.parent).as_posix() for file in files]
    lines = [f"{sha}  {name}\n" for sha, name in zip(_sha256_of_each(files), names, strict=True)]
    with replacing(path) as file:
        file.write("".join(lines).encode())


def add_checksum(path: Path, file: Path) -> None:
    """Adds the SHA-256 of a file to what `write_checksums` wrote."""
    with replacing(path) as listed:
        line = f"{_sha256_of_each([file])[0]}  {file.relative_to(path.parent).as_posix()}\n"
        listed.write(path.read_bytes() + line.encode())


def changed_file(path: Path, below: Sequence[str] = ("",)) -> str | None:
    """The first file that `write_checksums` listed in `path` and that is missing or has changed;
    the list itself where it is missing or damaged; None if all are as they were.

    below: only files whose names start with one of these.
    """
    try:
        lines = [line.partition("  ") for line in path.read_text().splitlines()]
    except (OSError, ValueError):
        return path.name
    if not lines or any(len(digest) != 64 for digest, _, _ in lines):
        return path.name
    listed = {name: digest for digest, _, name in lines if name.startswith(tuple(below))}
    found = _sha256_of_each([path.parent / name for name in listed])
    pairs = zip(listed.items(), found, strict=True)
    return next((name for (name, digest), now in pairs if now != digest), None)


def _sha256_of_each(paths):
    """The SHA-256 of files, by a thread for each core; None of a file that is missing."""

    def sha256(path):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError), path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    # Objects are read whole, into memory.
    with ThreadPoolExecutor(AT_ONCE if any(map(in_store, paths)) else os.cpu_count()) as threads:
        return list(threads.map(sha256, paths))


def unpacked(file: BinaryIO, name: str) -> BinaryIO:
    """The bytes of a file, decompressed as its name says: .gz, .xz, .bz2, or .zip of one file.

    Raises:
        InputError: a .zip of several files; a file that is packed otherwise. What is damaged raises
            the errors of its format.
    """
    if name.lower().endswith(ARCHIVES):
        raise InputError(f"{name} is an archive, which is not read here: unpack it first")
    if name.lower().endswith(PACKED):
        raise InputError(f"{name} is packed in a way that is not read here: unpack it first")
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
        return archive.open(members[0])
    with of_extra("train"):
        from fsspec.compression import compr
        from fsspec.utils import infer_compression
    return compr[infer_compression(name)](file, mode="rb")
