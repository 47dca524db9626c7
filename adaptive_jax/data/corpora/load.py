"""Corpora by name: the vocabulary, and the ids of each split as memory-mapped arrays.

corpus = load("text_files", path="my_corpus", threshold=3)
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

from adaptive_jax.data.corpora import sources
from adaptive_jax.data.corpora.shards import WHOLE, Shards
from adaptive_jax.data.corpora.text import SPLITS, Text, local_texts
from adaptive_jax.data.corpora.tokenise import TOKENISERS
from adaptive_jax.data.vocabulary import subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError, check_known

logger = logging.getLogger(__name__)

COUNTS = "counts.txt"
PREPARED_BY_TFDS = "~/tensorflow_datasets"  # where lm1b is looked for if no path is given
FORMAT = 2  # part of every source's name: count it up when the same text is to give other shards or ids


class Published(NamedTuple):
    """What the literature gives of a corpus, `<eos>` included: words of the vocabulary (0: nothing) and, if known, per split."""

    vocabulary: int
    words: Mapping[str, int]


class Corpus(NamedTuple):
    """A vocabulary, and int32 [tokens] for each split, read-only and memory-mapped."""

    vocabulary: Vocabulary
    ids: dict[str, np.ndarray]


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


def load(
    corpus: str,
    path: str = "",
    cache: str = "~/.cache/adaptive_jax",
    threshold: int = 1,
    limit: int = 0,
    codes: int = 0,
    tokeniser: str = "none",
    lower: bool = False,
    vocabulary: Vocabulary | None = None,
    splits: Collection[str] = SPLITS,
) -> Corpus:
    """Vocabulary and ids of a corpus, prepared at first use and only mapped into memory after that.

    Several processes that need the same at once prepare it once: one does, the others wait. A preparation that was stopped
    goes on where it was.

    path: a local copy, see `local_texts`; of billion_word also a directory in which tensorflow-datasets prepared `lm1b`;
        empty: the published copy; or a URL to which a prepared corpus was copied, see `storage`: its vocabulary was chosen
        then, and the settings below choose nothing.
    threshold, limit: see `Vocabulary.build`; the train split is counted.
    codes: 0 for words; or the number of merges to learn from the train split for sub-word units, see `Subwords`.
    tokeniser: "none" for text whose words are set apart by spaces, or "moses"; lower: in lower case.
    vocabulary: encode with this one instead, as when a trained model is evaluated; no train split is needed then.
    Raises InputError for an unknown name, a missing or unreadable file, and a word the vocabulary cannot take.
    """
    check_known(f"data.corpus={corpus!r}", corpus, CORPORA)
    check_known(f"data.tokeniser={tokeniser!r}", tokeniser, TOKENISERS)
    if codes and (threshold, limit) != (1, 0):
        raise InputError(
            f"data.codes={codes} needs data.threshold=1 and data.limit=0, not {threshold} and {limit}: "
            "sub-word units spell every word, so none is folded"
        )
    if "://" in path:
        return _stored(path, vocabulary, splits)
    needed = [s for s in SPLITS if s in splits or (s == "train" and vocabulary is None)]
    cache = Path(cache).expanduser()
    texts = _texts(corpus, path, needed)
    home = cache / corpus / _source(corpus, texts, tokeniser, lower)
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write data.cache={cache}: {error.strerror}; give a writable directory") from error

    published = functools.cache(lambda: texts or sources.published(corpus, cache / "published"))

    @functools.cache
    def shards(split):
        return _shards(home / "shards" / split, lambda: published()[split], f"{corpus} {split}", tokeniser, lower)

    if vocabulary is None:
        if not (home / COUNTS).exists():
            for split in reversed(needed):  # the train split last: what is wrong with the short ones should not wait for it
                shards(split)
        vocabulary = _vocabulary(home, lambda: shards("train"), threshold, limit, codes)
    ids = {s: _ids(home / vocabulary.digest / f"{s}.npy", vocabulary, functools.partial(shards, s)) for s in SPLITS if s in splits}
    _report(corpus, vocabulary, ids)
    return Corpus(vocabulary, ids)


def _stored(url, vocabulary, splits):
    from adaptive_jax.data.corpora import storage

    corpus = storage.open(url, splits)
    if vocabulary is not None and vocabulary.digest != corpus.vocabulary.digest:
        raise InputError(
            f"{url} holds ids of another vocabulary, of {len(corpus.vocabulary):,} words, not of this one of {len(vocabulary):,}: "
            "give the text itself as data.path=DIR"
        )
    return corpus


def splits_of(corpus: str, path: str = "") -> tuple[str, ...]:
    """The splits that there are: of a local copy, those found there. InputError as `load`."""
    return tuple(_texts(corpus, path, ()) or SPLITS)


def _texts(corpus, path, needed):
    """What lies on this machine; {} where that is a published copy, which may be yet to download."""
    found = sources.prepared_lm1b(Path(path or PREPARED_BY_TFDS).expanduser()) if corpus == "billion_word" else {}
    return found or (local_texts(corpus, path, needed) if path else {})


def _source(corpus, texts, *settings) -> str:
    """16 hexadecimal digits that change with the text and what is made of it."""
    text = [texts[s].identity for s in SPLITS if s in texts] if texts else sources.version(corpus)
    return hashlib.sha256(repr((FORMAT, corpus, text, *settings)).encode()).hexdigest()[:16]


def _shards(directory: Path, text: Callable[[], Text], name: str, *settings) -> Shards:
    def make():
        found = text()
        logger.info("preparing %s from %s", name, found.files[0])
        with _bar(f"reading {name}") as show:
            Shards.make(found, directory, *settings, show)

    _once(directory / WHOLE, make)
    return Shards(directory)


def _ids(path: Path, vocabulary: Vocabulary, shards: Callable[[], Shards]) -> np.ndarray:
    def make():
        with _bar(f"encoding {path.stem}") as show:
            shards().encode(vocabulary, path, show)

    _once(path, make)
    return np.load(path, mmap_mode="r")


def _vocabulary(home, shards: Callable[[], Shards], threshold, limit, codes) -> Vocabulary:
    """Of the train split; its counts, and the units learnt from it, are kept for the next time."""

    @functools.cache
    def whole():
        fresh = []

        def count():
            with _bar("counting words") as show:
                fresh.append(Vocabulary.build(shards().counts(show)))
            fresh[0].write(home / COUNTS)

        _once(home / COUNTS, count)
        return fresh[0] if fresh else Vocabulary.read(home / COUNTS)

    if not codes:
        return whole().cut(threshold, limit)
    units = home / f"subwords-{subwords.FORMAT}-{codes}" / "vocabulary.txt"

    def learn():
        counts = dict(zip(whole().words, whole().counts.tolist(), strict=True))
        subwords.Subwords.build(counts, codes).write(units)

    _once(units, learn)
    return subwords.read_vocabulary(units)


def _once(path: Path, make: Callable[[], None]) -> None:
    """Has `make` make a file that is not there; of several processes that want it, one makes it and the others wait."""
    if path.exists():
        return
    # A process of ours that runs the script anew, as spawned ones do, would wait for the one that waits for it.
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
            for unfinished in set(path.parent.glob(f".{path.name}.*")) - {Path(lock.lock_file)}:  # of a process that was killed
                unfinished.unlink()
            make()
    finally:
        lock.release()


@contextlib.contextmanager
def _bar(what: str) -> Iterator[Callable[[float], None]]:
    """`show(share)` draws a progress bar on a terminal, with the time that is left."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=1.0)
        yield lambda share: progress.update(task, completed=share)


def _report(corpus: str, vocabulary: Vocabulary, ids: Mapping[str, np.ndarray]) -> None:
    """Logs the sizes, and warns if a local copy is not the published text: perplexities would not compare."""
    published = CORPORA[corpus]
    words = {split: vocabulary.count_words(tokens) for split, tokens in ids.items()}
    for split, count in words.items():
        if published and count != published.words.get(split, count):
            message = "%s %s has %s words, <eos> included, the published one %s"
            logger.warning(message, corpus, split, count, published.words[split])
    tokens = {split: len(i) for split, i in ids.items()}
    logger.info("%s: vocabulary %s, words %s, tokens %s", corpus, len(vocabulary), words, tokens)


def from_config(data: Mapping, **how) -> Corpus:
    """`load` with the settings of a config's group `data`; `how` are further arguments of `load`."""
    others = ("vocabulary_size", "block", "break_mode", "rows")
    return load(**{key: value for key, value in data.items() if key not in others}, **how)
