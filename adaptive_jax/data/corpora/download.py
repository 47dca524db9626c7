"""Downloads that resume where they were interrupted, and are checked against their hashes."""

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from adaptive_jax.data.corpora.cached import bar, cache_errors, make_once
from adaptive_jax.errors import InputError, one_line

CHUNK, TRIES, TIMEOUT = 1 << 20, 3, 60  # bytes, times, seconds without an answer


def download(address: str, folder: Path, sha256: str = "") -> Path:
    """The file at an address, downloaded into a folder once. An interrupted download is kept as
    NAME.part and resumed, unless the server has another file by then.

    sha256: the hash that the file must have, in hex; empty: any.

    Raises:
        InputError: an address that names no file; the server does not answer, or not with this
            file, or the folder cannot be written.
    """
    name = address.partition("?")[0].rsplit("/", 1)[-1]
    if not name:
        raise InputError(f"{address} names no file: use the address of one")
    path = folder / name
    part = path.with_name(f"{path.name}.part")

    def make():
        for _ in range(TRIES - 1):
            with contextlib.suppress(http.client.HTTPException, OSError):
                _fetch(address, part)
                break
        else:
            _fetch(address, part)
        if sha256:
            with part.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != sha256:
                part.unlink()
                raise InputError(
                    f"{address} is not the published file, its SHA-256 is {found}: use a local"
                    " copy, for a corpus by --config.data.path=DIR"
                )
        os.replace(part, path)
        part.with_suffix(".version").unlink(missing_ok=True)

    try:
        with cache_errors(folder):
            make_once(path, make)
    except InputError:
        raise
    except (http.client.HTTPException, OSError, ValueError) as error:
        raise InputError(
            f"cannot download {address} ({one_line(error)[:80]}): try again, which resumes, or use"
            " a local copy, for a corpus by --config.data.path=DIR"
        ) from error
    return path


def _fetch(address, part):
    """Appends to `part` what it lacks of the file, or writes all of it where the file is no longer
    the one that `part` began with; NAME.version says which that was.
    """
    version = part.with_suffix(".version")
    begin = part.stat().st_size if part.exists() and version.exists() else 0
    headers = {"Range": f"bytes={begin}-"} if begin else {}
    if begin and (before := version.read_text()):
        headers["If-Range"] = before
    request = urllib.request.Request(address, headers=headers)
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        complete = error.headers.get("Content-Range", "") == f"bytes */{begin}"
        if begin and error.code == 416 and complete:
            return
        if error.code == 416:
            part.unlink(missing_ok=True)  # of a longer file
        raise
    with contextlib.closing(answer), bar(f"downloading {part.stem}") as show:
        # A server that has another version, or no ranges, sends all of it.
        done = begin if answer.status == 206 else 0
        if not done:
            part.unlink(missing_ok=True)
            tag = answer.headers.get("ETag", "")
            if not tag or tag.startswith("W/"):  # a weak one names no bytes
                tag = answer.headers.get("Last-Modified", "")
            version.write_text(tag)
        whole = done + int(answer.headers.get("Content-Length", 0))
        with part.open("ab" if done else "wb") as file:
            while data := answer.read(CHUNK):
                file.write(data)
                done += len(data)
                show(done / max(whole, done))
    if done < whole:
        raise ConnectionError(f"it ended after {done:,} of {whole:,} bytes")
