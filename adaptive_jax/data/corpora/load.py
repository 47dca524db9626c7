"""Corpora by name: the vocabulary, and the ids of each split as memory-mapped arrays.

corpus = load({"corpus": "text_files", "path": "my_corpus", "threshold": 3})
corpus.ids["train"]            # int32 [tokens], one <eos> after each line
corpus.vocabulary.words[0]     # the most frequent word
"""

import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.corpora import kept, known, token_files
from adaptive_jax.data.corpora.corpus import SPLITS, Corpus, Renumbered
from adaptive_jax.data.corpora.kept import cache_of, home_of
from adaptive_jax.data.corpora.shards import COMPLETE, Shards
from adaptive_jax.data.corpora.text import Text, local_texts
from adaptive_jax.data.corpora.tokenise import TOKENISERS
from adaptive_jax.data.vocabulary import subwords
from adaptive_jax.data.vocabulary.sealed import read_sealed, write_sealed
from adaptive_jax.data.vocabulary.words import UNKNOWN, Vocabulary, check_cut
from adaptive_jax.errors import InputError, check_at_least, check_known

logger = logging.getLogger(__name__)

COUNTS = "counts.txt"
PREPARED_BY_TFDS = "~/tensorflow_datasets"  # where to look for lm1b without a path
FORMAT = (
    2  # part of every source's name: increase it when the same text is to give other shards or ids
)


class Published(NamedTuple):
    """What the literature says of a corpus: words of the vocabulary (0 if nothing) and words of
    each split, `<eos>` included.
    """

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
    "ids": None,
    "embedded": None,
}
# Other names in use, for suggestions.
ALIASES = {
    **dict.fromkeys(("ptb", "penn", "treebank", "penntreebank"), "penn_treebank"),
    **dict.fromkeys(("wt2", "wiki2", "wikitext-2-v1"), "wikitext2"),
    **dict.fromkeys(("wt103", "wiki103", "wikitext", "wikitext-103-v1"), "wikitext103"),
    "wikitext-2-raw-v1": "wikitext2_raw",
    "wikitext-103-raw-v1": "wikitext103_raw",
    **dict.fromkeys(
        ("lm1b", "1b", "1blm", "gbw", "one_billion", "one_billion_words", "1billion"),
        "billion_word",
    ),
    **dict.fromkeys(("europarl-v7", "europarl7", "wmt"), "europarl"),
    **dict.fromkeys(("text", "own", "own_text", "files", "txt", "custom"), "text_files"),
    **dict.fromkeys(("tokens", "token_ids", "own_ids", "npy", "bin", "binary"), "ids"),
    **dict.fromkeys(("bible", "asv", "quickstart"), "embedded"),
}


class Settings(NamedTuple):
    """The group `data` of a config.

    corpus: one of `CORPORA`.
    path: a local copy, see `local_texts`, of ids `token_files`; for billion_word also where
        tensorflow-datasets prepared `lm1b`; or empty, for the published copy; or a URL that holds a
        prepared corpus, see `stored`, where the settings below have no effect.
    cache: the directory for what is prepared. gs:// and s3:// keep compiled programs; then corpora
        are in ~/.cache/adaptive_jax.
    threshold: occurrences in the train split that a word of the vocabulary needs; rarer words
        become `<unk>`.
    limit: words in the vocabulary at most, the most frequent ones; 0: no limit.
    codes: 0 for words, or the number of byte-pair merges to learn from the train split for sub-word
        units, see `Subwords`.
    tokeniser: "none" for text whose words are separated by spaces, or "moses".
    lower: whether to lower-case the text.
    vocabulary_size: words of the vocabulary, for plans made before the corpus is read; 0: unknown.
        Not used to load it, but for ids: the size of the tokenizer's whole vocabulary.
    eos: for ids: the id that ends a document; -1: none does.
    ids_dtype: for ids in flat .bin files: uint8, uint16, uint32, int32 or int64; empty: uint16 if
        it holds all ids, else uint32.
    """

    corpus: str = ""
    path: str = ""
    cache: str = kept.CACHE
    threshold: int = 1
    limit: int = 0
    codes: int = 0
    tokeniser: str = "none"
    lower: bool = False
    vocabulary_size: int = 0
    eos: int = -1
    ids_dtype: str = ""


def load(
    data: Mapping, *, vocabulary: Vocabulary | None = None, splits: Collection[str] = SPLITS
) -> Corpus:
    """Loads a corpus. The first call prepares it; later calls only map its ids into memory.

    If several processes need the same corpus, one prepares it and the others wait. A preparation
    that was stopped resumes.

    Args:
        data: the settings by name, see `Settings`; those left out keep their defaults.
        vocabulary: encode with this vocabulary, as when a trained model is evaluated. No train
            split is needed then.

    Raises:
        InputError: an unknown name, a missing or unreadable file, a word that the vocabulary cannot
            encode, a URL that holds another vocabulary.
    """
    settings = checked_settings(data)
    corpus, path = settings[:2]
    if "://" in path:
        return _stored(path, vocabulary, splits)
    if corpus == "ids":
        directory = home_of(path, "data.path")
        files = token_files.Files(directory, settings.vocabulary_size, settings.ids_dtype)
        with kept.usable(cache := cache_of(settings.cache)):
            return token_files.corpus_of(files, settings.eos, cache, vocabulary, splits)
    needed = [s for s in SPLITS if s in splits or (s == "train" and vocabulary is None)]
    cache = cache_of(settings.cache)
    texts = texts_of(corpus, path, needed)
    home = cache / corpus / source_of(corpus, texts, settings.tokeniser, settings.lower)
    with kept.usable(cache):
        home.mkdir(parents=True, exist_ok=True)
        return _prepared(settings, home, texts, vocabulary, splits)


def checked_settings(data):
    """The group `data` of a config, after the checks that need no text.

    Raises:
        InputError: an unknown key or name, or a value out of range.
    """
    for key in data:
        check_known(f"data.{key}", key, Settings._fields)
    settings = Settings(**{"corpus": ""} | dict(data))
    for key, kind in Settings.__annotations__.items():
        if type(value := getattr(settings, key)) is not kind:
            raise InputError(f"data.{key}={value!r} must be of type {kind.__name__}")
    check_known(f"data.corpus={settings.corpus!r}", settings.corpus, CORPORA, ALIASES)
    check_known(f"data.tokeniser={settings.tokeniser!r}", settings.tokeniser, TOKENISERS)
    check_at_least(0, **{"data.codes": settings.codes})
    check_cut(settings.threshold, settings.limit)
    if settings.codes and (settings.threshold, settings.limit) != (1, 0):
        raise InputError(
            f"data.codes={settings.codes} needs data.threshold=1 and data.limit=0, not"
            f" {settings.threshold} and {settings.limit}: sub-word units can spell every word, so"
            " none becomes <unk>"
        )
    _check_of_ids(settings)
    return settings


def _check_of_ids(settings):
    """Checks that settings of text are not given for ids, nor those of ids for text."""
    ids, default = settings.corpus == "ids", Settings()
    of_text = ("threshold", "limit", "codes", "tokeniser", "lower")
    for key in of_text if ids else ("eos", "ids_dtype"):
        if (value := getattr(settings, key)) != (left_out := getattr(default, key)):
            raise InputError(
                f"data.{key}={value!r} does not fit data.corpus={settings.corpus}: leave it"
                f" {left_out!r}"
            )
    if ids and "://" not in settings.path and settings.vocabulary_size < 2:
        raise InputError(
            f"data.vocabulary_size={settings.vocabulary_size} must be 2 or more for"
            " data.corpus=ids: give the size of the tokenizer's whole vocabulary"
        )
    check_known(f"data.ids_dtype={settings.ids_dtype!r}", settings.ids_dtype, token_files.DTYPES)


def _prepared(settings, home, texts, vocabulary, splits):
    """The corpus whose shards, counts and ids are or will be in `home`."""
    corpus, learnt = settings.corpus, vocabulary is None
    published = functools.cache(
        lambda: texts or known.published(corpus, home.parents[1] / "published")
    )

    @functools.cache
    def shards(split):
        name, text = f"{corpus} {split}", lambda: published()[split]
        return shards_of(home / "shards" / split, text, name, settings.tokeniser, settings.lower)

    if learnt:
        if not (home / COUNTS).exists():
            # The train split last, so that errors in the short ones are found first.
            for split in reversed(
                [split for split in SPLITS if split in splits or split == "train"]
            ):
                shards(split)
        vocabulary = _vocabulary(home, lambda: shards("train"), settings)
    in_vocabulary = functools.cache(functools.partial(_known, home, settings.codes, vocabulary))
    ids, counted = {}, {}
    for split in [split for split in SPLITS if split in splits]:
        path, of_split = home / vocabulary.digest / f"{split}.npy", functools.partial(shards, split)
        ids[split] = _ids(path, vocabulary, of_split)
        if (
            path.with_suffix(".words").exists() or (home / "shards" / split / COMPLETE).exists()
        ):  # shards may be deleted
            counted[split] = _count_words(path.with_suffix(".words"), of_split, in_vocabulary)
    logger.info(
        "%s: vocabulary %s, tokens %s",
        corpus,
        len(vocabulary),
        {split: len(i) for split, i in ids.items()},
    )
    _compare_with_published(corpus, {split: numbers[0] for split, numbers in counted.items()})
    unseen = {
        split: numbers[1] / max(1, numbers[0])
        for split, numbers in counted.items()
        if len(numbers) > 1
    }
    return Corpus(vocabulary, ids, unseen)


def _stored(url, vocabulary, splits):
    from adaptive_jax.data.corpora import stored  # tensorstore, which text on a disk does not need

    corpus = stored.open(url, splits)
    if vocabulary is None or vocabulary.digest == corpus.vocabulary.digest:
        return corpus
    if not vocabulary.same_words(corpus.vocabulary):
        raise InputError(
            f"{url} holds ids of another vocabulary, of {len(corpus.vocabulary):,} words, not of"
            f" this one of {len(vocabulary):,}: give the text itself as data.path=DIR"
        )
    new = np.array([vocabulary.index[word] for word in corpus.vocabulary.words], np.int32)
    ids = {split: Renumbered(each, new) for split, each in corpus.ids.items()}
    return corpus._replace(vocabulary=vocabulary, ids=ids)


def splits_of(corpus: str, path: str = "") -> tuple[str, ...]:
    """Returns the splits that a corpus has; for a local copy, those found there. Raises
    InputError as `load`.
    """
    return tuple(texts_of(corpus, path, ()) or SPLITS)


def texts_of(corpus: str, path: str, needed: Collection[str]) -> dict[str, Text]:
    """The text on this machine; {} for a published copy, which may have to be downloaded first.
    Raises InputError as `load`.
    """
    try:
        found = (
            known.prepared_lm1b(home_of(path or PREPARED_BY_TFDS, "data.path"))
            if corpus == "billion_word"
            else {}
        )
        return found or (
            local_texts(corpus, str(home_of(path, "data.path")), needed) if path else {}
        )
    except OSError as error:
        raise InputError(
            f"cannot read data.path={path}: {error.strerror}; give a directory that you may read"
        ) from error


def source_of(corpus: str, texts: Mapping[str, Text], *settings: object) -> str:
    """16 hexadecimal digits that change with the text and with the settings that turn it into
    words.
    """
    text = [texts[s].identity for s in SPLITS if s in texts] if texts else known.version(corpus)
    return hashlib.sha256(repr((FORMAT, corpus, text, *settings)).encode()).hexdigest()[:16]


def shards_of(directory: Path, text: Callable[[], Text], name: str, *settings: object) -> Shards:
    """The shards of a split in `directory`; made if they are missing. name: of the split.
    settings: tokeniser and lower.
    """

    def make():
        logger.info("preparing %s from %s", name, (found := text()).files[0])
        with kept.bar(f"reading {name}") as show:
            Shards.make(found, directory, *settings, show)

    kept.once(directory / COMPLETE, make)
    return Shards(directory)


def _ids(path: Path, vocabulary: Vocabulary, shards: Callable[[], Shards]) -> np.ndarray:
    def make():
        made = shards()  # first: old versions of rich cannot draw one bar within another
        with kept.bar(f"encoding {path.stem}") as show:
            made.encode(vocabulary, path, show)

    kept.once(path, make)
    return kept.read_ids(path, len(vocabulary))


def _vocabulary(home, shards: Callable[[], Shards], settings: Settings) -> Vocabulary:
    """The vocabulary of the train split. Counts and sub-word units are kept for the next time."""

    def count():
        made = shards()
        with kept.bar("counting words") as show:
            write_sealed(Vocabulary.build(made.counts(show)), home / COUNTS)

    def uncut():
        kept.once(home / COUNTS, count)
        return read_sealed(home / COUNTS, f"remove {home / COUNTS} to have it made again")

    if not settings.codes:
        return uncut().cut(settings.threshold, settings.limit)
    units = _units(home, settings.codes)

    def learn():
        words = uncut()
        counts = dict(zip(words.words, words.counts.tolist(), strict=True))
        write_sealed(subwords.Subwords.build(counts, settings.codes), units)

    kept.once(units, learn)
    return read_sealed(units, f"remove {units.parent} to have it made again")


def _units(home, codes):
    """The file of learnt sub-word units."""
    return home / f"subwords-{subwords.FORMAT}-{codes}" / "vocabulary.txt"


def _known(home, codes, vocabulary):
    """The words that a model of this vocabulary has learnt from, `<unk>` among them; None if
    that is not known here.
    """
    if not isinstance(vocabulary, subwords.Subwords):
        return {*vocabulary.words, UNKNOWN}
    units, counts = _units(home, codes), home / COUNTS
    if not (units.exists() and counts.exists()) or not vocabulary.same_words(
        subwords.read_vocabulary(units)
    ):
        return None
    return {*Vocabulary.read(counts).words, UNKNOWN}


def _count_words(
    path: Path, shards: Callable[[], Shards], known: Callable[[], Collection[str] | None]
) -> list[int]:
    """Words of a split, `<eos>` included, and how many of them are not known; without the second if
    nothing says which are.

    Counting reads all shards, so the numbers are kept in a file.
    """

    def make():
        words, made = known(), shards()
        with kept.bar("counting words") as show:
            total, unseen = made.count(words or (), show)
        kept.write_numbers(path, *([total] if words is None else [total, unseen]))

    kept.once(path, make)
    return kept.read_numbers(path)


def _compare_with_published(corpus: str, words: Mapping[str, int]) -> None:
    """Warns if a copy is not the published text: perplexities would not compare."""
    published = CORPORA[corpus].words if CORPORA[corpus] else {}
    for split in words.keys() & published.keys():
        if words[split] != published[split]:
            message = "%s %s has %s words, <eos> included; the published one has %s"
            logger.warning(message, corpus, split, words[split], published[split])
