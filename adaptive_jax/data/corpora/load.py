"""Loads corpora by name: the vocabulary, and the ids of each split as memory-mapped arrays.

corpus = load({"corpus": "text_files", "path": "my_corpus", "threshold": 3})
corpus.ids["train"]            # int32 [tokens], one <eos> after each line
corpus.vocabulary.words[0]     # the most frequent word
"""

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from typing import Annotated, NamedTuple

from adaptive_jax.config import cache
from adaptive_jax.config.options import NonNegativeInt, Option, PositiveInt, check
from adaptive_jax.data.corpora import token_files
from adaptive_jax.data.corpora.cached import bar, checksum, damaged, make_once, read_ids
from adaptive_jax.data.corpora.corpus import SPLITS, Corpus
from adaptive_jax.data.corpora.published import CORPORA
from adaptive_jax.data.corpora.shards import COMPLETE, Shards
from adaptive_jax.data.corpora.text import Text, local_texts
from adaptive_jax.data.corpora.tokenise import TOKENISERS
from adaptive_jax.data.vocabulary import subwords
from adaptive_jax.data.vocabulary.on_disk import (
    checksums_of,
    read_vocabulary,
    read_with_checksums,
    write_with_checksums,
)
from adaptive_jax.data.vocabulary.tokenizer import Tokenizer, read_model
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary, read_words
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.files import local_directory, write_bytes

logger = logging.getLogger(__name__)

# Part of the names of directories in the cache: increase it when the same text gives other ids
FORMAT = 4


class Settings(NamedTuple):
    """The group `data` of a config.

    corpus: a name in the table of docs/corpora.md; text_files and ids are your own data.
    path: a local copy (see docs/own_data.md, also for ids); empty for the published copy.
    threshold: occurrences in the train split that a word of the vocabulary needs; rarer words
        become `<unk>`.
    limit: maximal size of the vocabulary, which keeps the most frequent words; 0: no limit.
    words: path of a file with the words of the vocabulary, one a line, such as a recogniser's
        lexicon; all other words become `<unk>`. Empty: the words of the train split.
    codes: 0 for words, or the number of byte-pair merges to learn from the train split for sub-word
        units, see docs/rows.md.
    tokeniser: "none" for text whose words are separated by spaces; "marks" separates words and
        punctuation marks of running text; "moses" as the tokeniser of Moses for English.
    lower: whether to lower-case the text.
    vocabulary_size: size of the vocabulary, for plans made before the corpus is read; 0: unknown.
        Ignored when a text is loaded; for `corpus=ids`, the size of the tokenizer's vocabulary.
    tokenizer: path of a tokenizer.json of the `tokenizers` library, which turns text into ids, and
        ids of data.corpus=ids into text; see docs/own_data.md. Empty: none.
    eos: the id that ends a document of data.corpus=ids, or a line of text that a tokenizer encodes;
        -1: none does.
    ids_dtype: type of the ids in flat .bin files: uint8, uint16, uint32, int32 or int64; empty:
        uint16 if it holds all ids, else uint32.
    """

    corpus: str = ""
    path: str = ""
    threshold: PositiveInt = 1
    limit: NonNegativeInt = 0
    words: str = ""
    codes: NonNegativeInt = 0
    tokeniser: Annotated[str, Option(among=TOKENISERS)] = "none"
    lower: bool = False
    vocabulary_size: NonNegativeInt = 0
    eos: int = -1
    tokenizer: str = ""
    ids_dtype: Annotated[str, Option(among=token_files.DTYPES)] = ""


def load(
    data: Mapping, *, vocabulary: Vocabulary | None = None, splits: Collection[str] | None = None
) -> Corpus:
    """Loads a corpus. The first call prepares it; later calls only map its ids into memory.

    It is prepared in `adaptive_jax.config.cache.directory()`. If several processes need the same
    corpus, one prepares it and the others wait. After an interruption the next call keeps finished
    shards.

    Args:
        data: the settings by name, see `Settings`; missing ones have their defaults.
        vocabulary: that of a trained model, to encode with; the train split is not needed then.
            None: that of the train split.
        splits: the splits to read; None: all, but a local copy may lack the test split.

    Raises:
        InputError: an unknown name, a missing or unreadable file, or a word that the vocabulary
            cannot encode.
    """
    settings = checked_settings(data)
    optional, splits = splits is None, SPLITS if splits is None else splits
    splits = [split for split in SPLITS if split in splits]
    if settings.corpus == "ids":
        directory, place = local_directory(settings.path, "data.path"), cache.directory()
        files = token_files.Files(directory, settings.vocabulary_size, settings.ids_dtype)
        if optional and not files.present("test"):
            splits.remove("test")
        corpus = token_files.corpus_of(files, settings.eos, place, vocabulary, splits)
        if vocabulary is None and settings.tokenizer:
            of_text = Tokenizer.of(corpus.vocabulary, read_model(settings.tokenizer))
            corpus = corpus._replace(vocabulary=of_text)
        return corpus
    required = {*splits} | ({"train"} if vocabulary is None else set())
    text = PreparedText(settings, required - ({"test"} if optional else set()))
    return text.corpus(vocabulary, [split for split in splits if text.has(split)])


def count_words(data: Mapping, split: str) -> dict[str, int]:
    """Counts the words of a split, whether or not a vocabulary has them, and `<eos>` once a line.
    With a tokenizer, counts the lines.

    data: as for `load`.

    Raises:
        InputError: as `load`, and for ids, which are not text.
    """
    settings = checked_settings(data)
    if settings.corpus == "ids":
        raise InputError(
            f"{settings.path} holds ids of one vocabulary: for the words of a text use the text"
            " itself as --data_path=DIR"
        )
    return PreparedText(settings, [split]).count_words(split)


def count_prepared(data: Mapping, splits: Collection[str] = SPLITS) -> dict[str, dict[str, int]]:
    """Counts the words of each split, train first, and `<eos>` once a line; {} unless train and
    these splits are prepared on this machine.

    data: as for `load`.

    Raises:
        InputError: as `load`.
    """
    settings = checked_settings(data)
    try:
        text = PreparedText(settings, ())
    except InputError:  # no such text or package on this machine
        return {}
    return text.counts(splits)


def checked_settings(data: Mapping) -> Settings:
    """Returns the group `data` of a config after the checks that need no text.

    Raises:
        InputError: an unknown name, or a value out of range.
    """
    for key in data.keys() - Settings._fields:
        check_known(f"data.{key}={data[key]!r}", key, Settings._fields)
    settings = Settings(**data)
    check(settings, prefix="data.")
    check_known(f"data.corpus={settings.corpus!r}", settings.corpus, CORPORA)
    if settings.limit in (1, 2):
        raise InputError(
            f"data.limit={settings.limit} must be 0 (no limit), or 3 or more: {EOS}, {UNKNOWN} and"
            " a word"
        )
    ids, tokenizer = settings.corpus == "ids", bool(settings.tokenizer)
    corpus = f"data.corpus={settings.corpus}" + " with data.tokenizer" * tokenizer
    words, codes = f"data.words={settings.words!r}", f"data.codes={settings.codes}"
    for applies, cause, unused in (
        (ids or tokenizer, corpus, "threshold limit words codes tokeniser lower"),
        (settings.words, words, "threshold limit codes"),
        (settings.codes, codes, "threshold limit"),
        (not ids and not tokenizer, corpus, "eos"),
        (not ids, corpus, "ids_dtype"),
    ):
        for key in unused.split() if applies else ():
            value, default = getattr(settings, key), Settings._field_defaults[key]
            if value != default:
                raise InputError(
                    f"data.{key}={value!r} has no effect with {cause}: set data.{key}={default}"
                )
    if tokenizer and not ids and settings.eos < 0:
        raise InputError(
            f"data.eos={settings.eos} must be the id of data.tokenizer={settings.tokenizer} that"
            " ends a line of text, such as that of <|endoftext|>"
        )
    if ids and settings.vocabulary_size < 2:
        raise InputError(
            f"data.vocabulary_size={settings.vocabulary_size} must be 2 or more for"
            " data.corpus=ids: use the size of the tokenizer's whole vocabulary"
        )
    return settings


class PreparedText:
    """The text of a corpus and the files made from it. The cache has a directory for each split,
    named by a hash of the identity of its text and of the settings that turn it into words:

        shards/SPLIT/                          see `Shards`
        words/vocabulary.txt                   of the train split: its words
        subwords-FORMAT-CODES/vocabulary.txt   of the train split: sub-word units
        tokenizer-HASH/vocabulary.txt          of the train split: a tokenizer's ids; shards then
                                               hold lines instead of words
        DIGEST/SPLIT.npy                       ids, by the digest of their vocabulary
        DIGEST/SPLIT.json                      numbers of words and of unseen words

    splits: the splits that a local copy must have.
    """

    def __init__(self, settings: Settings, splits: Collection[str]):
        self.settings, self.cache = settings, cache.directory()
        self._texts: Mapping[str, Text] = {}  # empty: of a published copy
        if settings.path:
            place = local_directory(settings.path, "data.path")
            self._texts = local_texts(place, splits, CORPORA[settings.corpus].patterns)
        self._tokenisation = "" if settings.tokenizer else settings.tokeniser, settings.lower
        units = f"subwords-{subwords.FORMAT}-{settings.codes}"
        self._all_words = self._home("train") / "words" / "vocabulary.txt"
        self._units = self._home("train") / units / "vocabulary.txt"

    def _home(self, split):
        """The directory of the files made from a split."""
        corpus, text = self.settings.corpus, self._texts.get(split)
        identity = text.identity if text else CORPORA[corpus].version()
        source = repr((FORMAT, corpus, split, identity, *self._tokenisation))
        return self.cache / corpus / hashlib.sha256(source.encode()).hexdigest()[:16]

    def has(self, split: str) -> bool:
        """True for a published copy, and for a local one with this split."""
        return not self._texts or split in self._texts

    def corpus(self, vocabulary: Vocabulary | None, splits: Collection[str]) -> Corpus:
        """The ids of these splits, encoded with a vocabulary; None: that of the train split."""
        if vocabulary is None:
            if not checksums_of(self._vocabulary_path()).exists():
                # The train split comes last, so that errors in the short ones are found early.
                for split in reversed(SPLITS):
                    if split in splits or split == "train":
                        self.shards(split)
            vocabulary = self.vocabulary()
        name, published, ids, unseen = self.settings.corpus, CORPORA[self.settings.corpus], {}, {}
        for split in splits:
            ids[split], words, new = self._ids(split, vocabulary)
            if new is not None:
                unseen[split] = new / max(1, words)
            if vocabulary.unit == "word" and words != published.words.get(split, words):
                # Perplexities would not compare.
                message = "%s %s has %s words, <eos> included; the published one has %s"
                logger.warning(message, name, split, words, published.words[split])
        tokens = {split: len(ids_of_split) for split, ids_of_split in ids.items()}
        logger.info("%s: vocabulary %s, tokens %s", name, len(vocabulary), tokens)
        return Corpus(vocabulary, ids, unseen)

    def counts(self, splits: Collection[str]) -> dict[str, dict[str, int]]:
        """`count_words` of train and of these splits; {} if one is not prepared."""
        splits = [split for split in splits if self.has(split)]
        prepared = (self._home(split) / "shards" / split / COMPLETE for split in splits)
        if not all(path.exists() for path in (checksums_of(self._all_words), *prepared)):
            return {}
        counts = {"train": self._words().counts_by_word}
        return counts | {split: self.count_words(split) for split in splits if split != "train"}

    def count_words(self, split: str) -> dict[str, int]:
        """Counts of the words of a split, `<eos>` once a line."""
        shards = self.shards(split)
        with bar("counting words") as show:
            return shards.counts(show)

    def shards(self, split: str) -> Shards:
        """The shards of a split; made if they are missing."""
        directory = self._home(split) / "shards" / split

        def make():
            name = self.settings.corpus
            texts = self._texts or CORPORA[name].texts(name, self.cache / "published")
            logger.info("preparing %s %s from %s", name, split, texts[split].files[0])
            with bar(f"reading {name} {split}") as show:
                Shards.make(texts[split], directory, *self._tokenisation, show)

        make_once(directory / COMPLETE, make)
        return Shards(directory)

    def _vocabulary_path(self):
        """The file of all words of the train split, of its sub-word units, or of its ids."""
        settings = self.settings
        if settings.tokenizer:
            content = read_model(settings.tokenizer) + repr(settings.eos).encode()
            name = f"tokenizer-{hashlib.sha256(content).hexdigest()[:16]}"
            return self._home("train") / name / "vocabulary.txt"
        return self._units if settings.codes else self._all_words

    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the train split: words, sub-word units, or ids of a tokenizer."""
        settings = self.settings
        if settings.words:
            return self._words().only(read_words(settings.words))
        if not settings.tokenizer and not settings.codes:
            return self._words().cut(settings.threshold, settings.limit)

        def build():
            if settings.codes:
                return subwords.Subwords.build(self._words().counts_by_word, settings.codes)
            model = read_model(settings.tokenizer)
            return Tokenizer.build(self.count_words("train"), model, settings.eos)

        return self._once(self._vocabulary_path(), build)

    def _words(self):
        """All words of the train split."""
        return self._once(self._all_words, lambda: Vocabulary.build(self.count_words("train")))

    def _once(self, path, build):
        """Reads a vocabulary, which is built first if its file or its checksums are missing."""
        make_once(checksums_of(path), lambda: write_with_checksums(build(), path))
        return read_with_checksums(
            path, f"remove {path.parent}, and the same command makes it again"
        )

    def _learnt_from(self, vocabulary):
        """The words that a model of this vocabulary has learnt from, including `<unk>`; None if
        this cache does not have them.
        """
        if vocabulary.unit == "token":
            return None
        if not vocabulary.mark:
            return {*vocabulary.words, UNKNOWN}
        if not all(checksums_of(path).exists() for path in (self._units, self._all_words)):
            return None
        same = vocabulary.same_words(read_vocabulary(self._units))
        return {*self._words().words, UNKNOWN} if same else None

    def _ids(self, split, vocabulary):
        """The ids of a split, its number of words, `<eos>` included, and the number of those that
        the vocabulary was not learnt from, None if unknown.
        """
        path = self._home(split) / vocabulary.digest / f"{split}.npy"
        numbers = path.with_suffix(".json")

        def make():
            shards, learnt_from = self.shards(split), self._learnt_from(vocabulary)
            with bar(f"encoding {split}") as show:
                words, unseen = shards.encode(vocabulary, path, learnt_from or (), show)
            numbers_of_text = {"words": words, "unseen": None if learnt_from is None else unseen}
            numbers_of_text["checksum"] = checksum(read_ids(path))
            # Written last: where this file exists, the ids do
            write_bytes(numbers, json.dumps(numbers_of_text).encode())

        make_once(numbers, make)
        try:
            numbers_of_split = json.loads(numbers.read_text())
            words, unseen, stored = (
                numbers_of_split[key] for key in ("words", "unseen", "checksum")
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise damaged(numbers, error) from error
        return read_ids(path, stored), words, unseen
