"""Files of published corpora, by the download manager of tensorflow-datasets."""

import shutil
import sys
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.data.corpora.cached import make_once
from adaptive_jax.errors import InputError, explain, of_extra, one_line

TIMEOUT = 60  # seconds without an answer


class File(NamedTuple):
    """Size in bytes and SHA-256, in hex, of a published file."""

    size: int
    sha256: str


def url_infos(files: Mapping[str, File]) -> dict:
    """The sizes and hashes by address, in the form of tensorflow-datasets."""
    from tensorflow_datasets.core.download import checksums

    return {
        address: checksums.UrlInfo(size=file.size, checksum=file.sha256, filename=None)
        for address, file in files.items()
    }


def download(name: str, files: Mapping[str, File], folder: Path) -> list[Path]:
    """Downloads the files of a corpus into a folder once, verifies them and returns their paths.
    An interrupted download starts over.

    files: size and hash of each file, by address.

    Raises:
        InputError: a server does not answer, or sends another file.
    """
    with of_extra("train"):
        import tensorflow_datasets as tfds

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()

    def fetch():
        for unfinished in (folder / name).glob("*.tmp.*"):
            shutil.rmtree(unfinished)
        for address in files:  # tensorflow-datasets would try for minutes
            request = urllib.request.Request(address, method="HEAD")
            urllib.request.urlopen(request, timeout=TIMEOUT).close()
        manager().download(list(files))
        complete.touch()

    def manager():
        return tfds.download.DownloadManager(
            download_dir=folder, dataset_name=name, url_infos=url_infos(files)
        )

    complete = folder / f"{name}.complete"
    local = "use a local copy: --config.data.path=DIR, or --data_path=DIR to evaluate"
    try:
        make_once(complete, fetch)
        return [Path(path) for path in manager().download(list(files))]
    except tfds.download.download_manager.NonMatchingChecksumError as error:
        raise InputError(
            f"{name} is not the published file ({one_line(error)[:200]}): {local}"
        ) from error
    except (OSError, tfds.download.DownloadError) as error:
        if explain(error):
            raise
        raise InputError(
            f"cannot download {name} from {next(iter(files))} ({one_line(error)[:80]}): try again,"
            f" or {local}"
        ) from error
