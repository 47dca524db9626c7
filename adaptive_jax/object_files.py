"""Files of gs:// and s3:// for fsspec, by tensorstore: etils.epath, and so Orbax and JAX, read and
write them.

fsspec's own implementations need a package for each store, and credentials in other places than
tensorstore, which writes the arrays of checkpoints. Objects are read and written whole, in memory:
they are settings, metadata, metrics and programs.
"""

import functools
import io
import os
from collections.abc import Callable

import fsspec
import tensorstore

Range = tensorstore.KvStore.KeyRange


def kvstore(url: str) -> str | dict:
    """What tensorstore opens for a URL."""
    if not url.startswith("s3://"):
        return url
    bucket, _, path = url.removeprefix("s3://").partition("/")
    return {"driver": "s3", "bucket": bucket, "path": path} | of_s3()


def of_s3() -> dict:
    """What tensorstore has to be told of S3 besides a bucket and a path: what it does not read
    of AWS's variables.
    """
    told, address = {}, os.environ.get("AWS_ENDPOINT_URL")
    if address:
        told |= {"endpoint": address, "aws_region": os.environ.get("AWS_REGION", "us-east-1")}
    if (
        "AWS_ACCESS_KEY_ID" in os.environ
    ):  # otherwise it logs five lines about files that are not there
        told |= {"aws_credentials": {"type": "environment"}}
    return told


class _New(io.BytesIO):
    """An object that is written when it is closed, and not at all after an error."""

    def __init__(self, put: Callable[[bytes], None], content: bytes = b""):
        super().__init__()
        self.write(content)
        self.put = put

    def close(self):
        if not self.closed:
            self.put(self.getvalue())
        super().close()

    def __exit__(self, kind, *_):
        super().close() if kind else self.close()


class ObjectFiles(fsspec.AbstractFileSystem):
    """A store as a file system whose folders are the parts of names before each slash."""

    scheme = ""

    def open(self, path: str, mode: str = "rb", **_):
        """A file of an object: to read it, to write it anew, or to write it with more at its
        end, whole when it is closed.
        """
        store, key = self._place(path)
        if "w" in mode:
            file = _New(lambda content: store.write(key, content).result())
        else:
            found = store.read(key).result()
            if found.state != "value" and "r" in mode:
                raise FileNotFoundError(
                    2, "No such object", f"{self.scheme}://{self._strip_protocol(path)}"
                )
            file = (
                io.BytesIO(found.value)
                if "r" in mode
                else _New(lambda content: store.write(key, content).result(), found.value)
            )
        return file if "b" in mode else io.TextIOWrapper(file, "utf-8")

    def ls(self, path: str, detail: bool = True, **_) -> list:
        """What is in a folder. Raises FileNotFoundError if there is none."""
        names, here = self._below(path), self._strip_protocol(path)
        if not names:
            raise FileNotFoundError(2, "No such folder", f"{self.scheme}://{here}")
        children = {name.partition("/")[0]: "/" in name for name in reversed(names)}
        found = [
            self._entry(f"{here}/{name}", folder)
            for name, folder in sorted(children.items())
            if name
        ]
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **_) -> dict:
        """The name and type of an object or a folder. Raises FileNotFoundError if there is
        neither.
        """
        (store, key), here = self._place(path), self._strip_protocol(path)
        if key and key.encode() in store.list(Range(key, key + "\0")).result():
            return self._entry(here, False)
        if self._below(path):
            return self._entry(here, True)
        raise FileNotFoundError(2, "No such object", f"{self.scheme}://{here}")

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Deletes an object, or all in a folder. Raises FileNotFoundError if there is none."""
        folder = self.info(path)["type"] == "directory"
        if folder and not recursive:
            raise IsADirectoryError(21, "Is a folder", path)
        store, key = self._place(path)
        if folder:
            store.delete_range(Range(f"{key}/", f"{key}0")).result()
        else:
            store.write(key, None).result()

    def mkdir(self, path: str, create_parents: bool = True, **_) -> None:
        """Makes an empty folder: an object without content whose name ends with a slash, as the
        stores' own tools do.
        """
        store, key = self._place(path)
        if key:
            store.write(f"{key}/", b"").result()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """As `mkdir`."""
        self.mkdir(path)

    def _place(self, path):
        bucket, _, key = self._strip_protocol(path).partition("/")
        return _bucket(f"{self.scheme}://{bucket}/"), key

    def _below(self, path):
        """Names of all objects in a folder and its folders, from there on."""
        store, key = self._place(path)
        prefix = f"{key}/" if key else ""
        keys = store.list(Range(prefix, f"{key}0") if key else Range()).result()
        return sorted(name.decode()[len(prefix) :] for name in keys)

    @staticmethod
    def _entry(name, folder):
        return {"name": name, "size": None, "type": "directory" if folder else "file"}


class GoogleFiles(ObjectFiles):
    """Google Cloud Storage."""

    protocol, scheme = ("gs", "gcs"), "gs"


class S3Files(ObjectFiles):
    """Amazon S3."""

    protocol, scheme = ("s3",), "s3"


@functools.cache
def _bucket(url):
    return tensorstore.KvStore.open(kvstore(url)).result()


@functools.cache
def register() -> None:
    """Has fsspec use these classes."""
    for kind in (GoogleFiles, S3Files):
        for protocol in kind.protocol:
            fsspec.register_implementation(protocol, kind, clobber=True)


def answer(url: str, seconds: float) -> None:
    """Reads from a store. Raises what tensorstore raises, TimeoutError after so many seconds."""
    store = tensorstore.KvStore.open(kvstore(f"{url}/")).result(timeout=seconds)
    store.read("config.json").result(timeout=seconds)
