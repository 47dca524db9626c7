"""Corpora by name: the vocabulary, and the ids of each split as memory-mapped arrays.

corpus = load({"corpus": "text_files", "path": "my_corpus", "threshold": 3})
corpus.ids["train"]            # int32 [tokens], one <eos> after each line
corpus.vocabulary.words[0]     # the most frequent word
"""

import contextlib
import functools
import hashlib
import logging
import multiprocessing
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import filelock
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from adaptive_jax.data.corpora import sources, storage
from adaptive_jax.data.corpora.corpus import SPLITS, Corpus
from adaptive_jax.data.corpora.shards import COMPLETE, Shards
from adaptive_jax.data.corpora.text import Text, local_texts
from adaptive_jax.data.corpora.tokenise import TOKENISERS
from adaptive_jax.data.vocabulary import subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.files import replacing

logger = logging.getLogger(__name__)

COUNTS = "counts.txt"
PREPARED_BY_TFDS = "~/tensorflow_datasets"  # where to look for lm1b without a path
FORMAT = 2  # part of every source's name: increase it when the same text is to give other shards or ids


class Published(NamedTuple):
    """What the literature says of a corpus: words of the vocabulary (0 if nothing) and words of each split, `<eos>` included."""

    vocabulary: int
    words: Mapping[str, int]


_WIKITEXT2 = dict(zip(SPLITS, (2_088_628, 217_646, 245_569), strict=True))
_WIKITEXT103 = _WIKITEXT2 | {"train": 103_227_021}
CORPORA: dict[str, Published | None] = {
    "penn_treebank": Published(10_000, dict(zip(SPLITS, (929_589, 73_760, 82_430), strict=True))),
    "wikitext2": Published(33_278, _WIKITEXT2),
    "wikitext2_raw": Published(0, _WIKITEXT2),
    "wikitext103": Published(267_735, _WIKITEXT103),
    "wikitext103_raw": Published(0, _WIKITEXT103),
    "billion_word": Published(793_471, {}),
    "europarl": None,
    "text_files": None,
    "embedded": None,
}


class Settings(NamedTuple):
    """The group `data` of a config.

    corpus: one of `CORPORA`.
    path: a local copy, see `local_texts`; for billion_word also where tensorflow-datasets prepared `lm1b`; or empty, for the
        published copy; or a URL that holds a prepared corpus, see `storage`, where the settings below have no effect.
    cache: the directory for what is prepared.
    threshold, limit: see `Vocabulary.build`, which counts the train split.
    codes: 0 for words, or the number of merges to learn from the train split for sub-word units, see `Subwords`.
    tokeniser, lower: "none" for text whose words are separated by spaces, or "moses"; whether to lower-case it.
    vocabulary_size: not used here; plans need it before the corpus is read.
    """

    corpus: str
    path: str = ""
    cache: str = "~/.cache/adaptive_jax"
    threshold: int = 1
    limit: int = 0
    codes: int = 0
    tokeniser: str = "none"
    lower: bool = False
    vocabulary_size: int = 0


def load(data: Mapping, *, vocabulary: Vocabulary | None = None, splits: Collection[str] = SPLITS) -> Corpus:
    """Loads a corpus. The first call prepares it; later calls only map its ids into memory.

    If several processes need the same corpus, one prepares it and the others wait. A preparation that was stopped resumes.

    Args:
        data: the settings by name, see `Settings`; those left out keep their defaults.
        vocabulary: encode with this vocabulary, as when a trained model is evaluated. No train split is needed then.

    Raises:
        InputError: an unknown name, a missing or unreadable file, a word that the vocabulary cannot encode, a URL that holds
            another vocabulary.
    """
    for key in data:
        check_known(f"data.{key}", key, Settings._fields)
    settings = Settings(**data)
    corpus, path = settings.corpus, settings.path
    check_known(f"data.corpus={corpus!r}", corpus, CORPORA)
    check_known(f"data.tokeniser={settings.tokeniser!r}", settings.tokeniser, TOKENISERS)
    if settings.codes and (settings.threshold, settings.limit) != (1, 0):
        raise InputError(
            f"data.codes={settings.codes} needs data.threshold=1 and data.limit=0, not {settings.threshold} and "
            f"{settings.limit}: sub-word units can spell every word, so none becomes <unk>"
        )
    if "://" in path:
        return _stored(path, vocabulary, splits)
    needed = [s for s in SPLITS if s in splits or (s == "train" and vocabulary is None)]
    cache = Path(settings.cache).expanduser()
    texts = _texts(corpus, path, needed)
    home = cache / corpus / _source(corpus, texts, settings.tokeniser, settings.lower)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write data.cache={cache}: {error.strerror}; give a writable directory") from error

    published = functools.cache(lambda: texts or sources.published(corpus, cache / "published"))

    @functools.cache
    def shards(split):
        name, text = f"{corpus} {split}", lambda: published()[split]
        return _shards(home / "shards" / split, text, name, settings.tokeniser, settings.lower)

    if vocabulary is None:
        if not (home / COUNTS).exists():
            for split in reversed(needed):  # the train split last, so that errors in the short ones are found first
                shards(split)
        vocabulary = _vocabulary(home, lambda: shards("train"), settings)
    home /= vocabulary.digest
    ids = {s: _ids(home / f"{s}.npy", vocabulary, functools.partial(shards, s)) for s in SPLITS if s in splits}
    logger.info("%s: vocabulary %s, tokens %s", corpus, len(vocabulary), {split: len(i) for split, i in ids.items()})
    _compare_with_published(corpus, vocabulary, ids, home)
    return Corpus(vocabulary, ids)


def _stored(url, vocabulary, splits):
    corpus = storage.open(url, splits)
    if vocabulary is not None and vocabulary.digest != corpus.vocabulary.digest:
        raise InputError(
            f"{url} holds ids of another vocabulary, of {len(corpus.vocabulary):,} words, not of this one of {len(vocabulary):,}: "
            "give the text itself as data.path=DIR"
        )
    return corpus


def splits_of(corpus: str, path: str = "") -> tuple[str, ...]:
    """Returns the splits that a corpus has; for a local copy, those found there. Raises InputError as `load`."""
    return tuple(_texts(corpus, path, ()) or SPLITS)


def _texts(corpus, path, needed):
    """The text on this machine; {} for a published copy, which may have to be downloaded first."""
    found = sources.prepared_lm1b(Path(path or PREPARED_BY_TFDS).expanduser()) if corpus == "billion_word" else {}
    return found or (local_texts(corpus, path, needed) if path else {})


def _source(corpus, texts, *settings) -> str:
    """16 hexadecimal digits that change with the text and with the settings that turn it into words."""
    text = [texts[s].identity for s in SPLITS if s in texts] if texts else sources.version(corpus)
    return hashlib.sha256(repr((FORMAT, corpus, text, *settings)).encode()).hexdigest()[:16]


def _shards(directory: Path, text: Callable[[], Text], name: str, *settings) -> Shards:
    def make():
        found = text()
        logger.info("preparing %s from %s", name, found.files[0])
        with _bar(f"reading {name}") as show:
            Shards.make(found, directory, *settings, show)

    _once(directory / COMPLETE, make)
    return Shards(directory)


def _ids(path: Path, vocabulary: Vocabulary, shards: Callable[[], Shards]) -> np.ndarray:
    def make():
        made = shards()  # first: old versions of rich cannot draw one bar within another
        with _bar(f"encoding {path.stem}") as show:
            made.encode(vocabulary, path, show)

    _once(path, make)
    return np.load(path, mmap_mode="r")


def _vocabulary(home, shards: Callable[[], Shards], settings: Settings) -> Vocabulary:
    """The vocabulary of the train split. Counts and sub-word units are kept for the next time."""

    def count():
        made = shards()
        with _bar("counting words") as show:
            Vocabulary.build(made.counts(show)).write(home / COUNTS)

    def uncut():
        _once(home / COUNTS, count)
        return Vocabulary.read(home / COUNTS)

    if not settings.codes:
        return uncut().cut(settings.threshold, settings.limit)
    units = home / f"subwords-{subwords.FORMAT}-{settings.codes}" / "vocabulary.txt"

    def learn():
        words = uncut()
        counts = dict(zip(words.words, words.counts.tolist(), strict=True))
        subwords.Subwords.build(counts, settings.codes).write(units)

    _once(units, learn)
    return subwords.read_vocabulary(units)


def _once(path: Path, make: Callable[[], None]) -> None:
    """Calls `make` if its file is missing. If several processes want the file, one makes it and the others wait."""
    if path.exists():
        return
    # A spawned process that runs the script again would wait for its parent, which waits for it.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise InputError('in a script of your own load corpora under `if __name__ == "__main__":`')
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        logger.warning("another process is making %s; waiting for it", path)
        lock.acquire()
    try:
        if not path.exists():
            for unfinished in set(path.parent.glob(f".{path.name}.*")) - {Path(lock.lock_file)}:  # left by a killed process
                unfinished.unlink()
            make()
    finally:
        lock.release()


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[float], None]]:
    """Yields `show(share)`, which draws a progress bar with the time left if stderr is a terminal."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.update(task, completed=share)


def _compare_with_published(corpus: str, vocabulary: Vocabulary, ids: Mapping[str, np.ndarray], home: Path) -> None:
    """Warns if a copy is not the published text: perplexities would not compare."""
    published = CORPORA[corpus].words if CORPORA[corpus] else {}
    for split in ids.keys() & published.keys():
        count = _count_words(vocabulary, ids[split], home / f"{split}.words")
        if count != published[split]:
            message = "%s %s has %s words, <eos> included; the published one has %s"
            logger.warning(message, corpus, split, count, published[split])


def _count_words(vocabulary: Vocabulary, ids: np.ndarray, path: Path) -> int:
    """Words of a split. Counting those of sub-word units reads all ids, so the number is kept in a file."""
    if not isinstance(vocabulary, subwords.Subwords):
        return len(ids)

    def make():
        with replacing(path) as file:
            file.write(str(vocabulary.count_words(ids)).encode())

    _once(path, make)
    return int(path.read_text())
