"""Downloads of large files, which go on where they were stopped."""

import contextlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from adaptive_jax.data.corpora import kept
from adaptive_jax.errors import InputError

CHUNK, TRIES, TIMEOUT = 1 << 20, 3, 60  # bytes, times, seconds without an answer


def fetched(address: str, folder: Path) -> Path:
    """The file of an address, downloaded into a folder once. What a download that was stopped has
    got is kept as NAME.part.

    Raises:
        InputError: the address does not answer, or not with the whole file, or the folder cannot be
            written.
    """
    path = folder / address.rsplit("/", 1)[-1]
    part = path.with_name(f"{path.name}.part")

    def make():
        for left in reversed(range(TRIES)):
            try:
                _fetch(address, part)
                return os.replace(part, path)
            except (
                urllib.error.URLError,
                http.client.HTTPException,
                TimeoutError,
                ConnectionError,
            ) as error:
                if not left or isinstance(error, urllib.error.HTTPError):
                    reason = " ".join(str(getattr(error, "reason", None) or error).split())[:60]
                    raise InputError(
                        f"cannot download {address} ({reason}): try again, which resumes, or give a"
                        " file of your own"
                    ) from error

    try:
        kept.once(path, make)
    except OSError as error:
        raise InputError(
            f"cannot write {folder}: {error.strerror or error}; give another --cache"
        ) from error
    return path


def _fetch(address, part):
    """Appends what `part` lacks of the file."""
    begin = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(address, headers={"Range": f"bytes={begin}-"} if begin else {})
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if (
            begin
            and error.code == 416
            and error.headers.get("Content-Range", "") == f"bytes */{begin}"
        ):
            return  # all of it is there
        raise
    with contextlib.closing(answer), kept.bar(f"downloading {part.stem}") as show:
        done = begin if answer.status == 206 else 0  # a server without ranges sends all of it
        whole = done + int(answer.headers.get("Content-Length", 0))
        with part.open("ab" if done else "wb") as file:
            while data := answer.read(CHUNK):
                file.write(data)
                done += len(data)
                show(done / max(whole, done))
    if done < whole:
        raise ConnectionError(f"it ended after {done:,} of {whole:,} bytes")
