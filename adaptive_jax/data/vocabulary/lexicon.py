"""Arrays that describe words to layers: a model's collection "lexicon", beside its parameters.

Related words and definitions come from a lexicon: a directory of WordNet, read by NLTK, or a file
of JSON lines, for any language:

    {"word": "dog", "relations": ["hound", "cur"], "hyponyms": ["puppy"],
     "definition": "a domesticated animal, kept as a pet"}

Relations are in order of preference, and hyponyms come after them. A definition is a text, or a
list of texts, one for each sense. Only `word` is required.
"""

import functools
import hashlib
import importlib.util
import itertools
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.config.keys import at, word_group
from adaptive_jax.data.vocabulary.ngrams import sorted_ngrams
from adaptive_jax.data.vocabulary.spelling import spelling
from adaptive_jax.data.vocabulary.words import Vocabulary, combining_marks
from adaptive_jax.errors import InputError
from adaptive_jax.files import changed_file, path_of, replacing, write_checksums

CURE = "use a directory of WordNet, or a .jsonl file, see docs/words.md"
NO_NLTK = "NLTK reads WordNet: run `pip install nltk`, or use input.lexicon as a .jsonl file"


class Entry(NamedTuple):
    """Entry of a lexicon for one word.

    synonyms, hyponyms: only words that the vocabulary has, in the same spelling.
    definitions: texts, one for each sense.
    """

    synonyms: tuple[str, ...]
    hyponyms: tuple[str, ...]
    definitions: tuple[str, ...]


def lexicon_of(config: Mapping) -> str:
    """Path of the lexicon that a config's input reads; empty if it reads none."""
    group = at(config, word_group(config))
    reads = "lexicon" in group and (group["relations"] or group["definition"])
    return group["lexicon"] if reads else ""


def check_lexicon(path: str) -> None:
    """Checks that a lexicon exists, unless its path is empty, before a corpus is prepared.

    Raises:
        InputError: as `read_entries`.
    """
    source = path_of(path)
    if path and source.is_dir():
        _check_wordnet(source)
    elif path and not source.is_file():
        raise InputError(f"input.lexicon={path!r} does not exist: {CURE}")


@functools.lru_cache(maxsize=2)  # relations and definitions are read one after the other
def read_entries(vocabulary: Vocabulary, path: str) -> Mapping[str, Entry]:
    """Reads the entries of the words of a vocabulary, in the vocabulary's order.

    path: a directory of WordNet, or a .jsonl file.

    Raises:
        InputError: the lexicon does not exist or cannot be read; a vocabulary of sub-words.
    """
    if not path:
        raise InputError(f"input.lexicon is empty: {CURE}")
    if not vocabulary.ends_word.all() or vocabulary.unit == "token":
        raise InputError(
            f"input.lexicon={path!r} describes words, and the vocabulary has sub-words: set"
            " data.codes=0, and use text without data.tokenizer instead of data.corpus=ids"
        )
    source, index, entries = path_of(path), vocabulary.index, {}
    lines = _read_wordnet(source, vocabulary.words) if source.is_dir() else _read_lines(source)
    for word, synonyms, hyponyms, definitions in lines:
        if word in index:
            synonyms, hyponyms = (
                tuple(name for name in words if name in index) for words in (synonyms, hyponyms)
            )
            entries[word] = Entry(synonyms, hyponyms, tuple(definitions))
    return {word: entries[word] for word in vocabulary.words if word in entries}


def write_entries(path: Path, entries: Mapping[str, Entry]) -> None:
    """Writes entries as JSON lines for `read_entries`, with the definition of the first sense only,
    and a checksum beside them.
    """
    with replacing(path) as file:
        for word, entry in entries.items():
            entry = entry._replace(definitions=entry.definitions[:1])
            names = ("word", "relations", "hyponyms", "definition")
            line = dict(zip(names, (word, *entry), strict=True))
            file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
    write_checksums(path.with_suffix(".sha256"), [path])


def check_same_entries(vocabulary: Vocabulary, path: str, copy: str) -> None:
    """Checks that a lexicon has the entries of a run's copy for the run's words, in any order:
    earlier versions read hyponyms of WordNet in another order at each start.

    path, copy: paths of the lexicon and of the copy, see `write_entries`.

    Raises:
        InputError: the entries differ, or as `read_entries`.
    """
    entries, entries_of_run = (
        {
            word: (set(entry.synonyms), set(entry.hyponyms), entry.definitions[:1])
            for word, entry in read_entries(vocabulary, place).items()
        }
        for place in (path, copy)
    )
    if entries != entries_of_run:
        raise InputError(
            f"input.lexicon={path!r} is not the lexicon that the run was trained with: restore it,"
            " or, if the path is relative, evaluate in the directory where the run was started"
        )


def _read_lines(path):
    sums = path.with_suffix(".sha256")
    of_run = path.name == "lexicon.jsonl" and sums.exists()
    if of_run and changed_file(sums):
        raise InputError(f"{path} is damaged: its checksum differs; restore it, or train anew")
    words = set()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                word, *entry = _parse(line, place := f"{path}, line {number}")
                if word in words:
                    raise InputError(f"{place}: {word!r} already has a line: join the two")
                words.add(word)
                if of_run and len(entry[-1]) > 1:
                    raise InputError(
                        f"{path} is of an earlier version, whose runs read the definitions of all"
                        " senses: train anew"
                    )
                yield word, *entry
    except OSError as error:
        raise InputError(
            f"cannot read input.lexicon={str(path)!r}: {error.strerror}; {CURE}"
        ) from error


def _parse(line, place):
    try:
        entry = json.loads(line)
        parts = [entry.get(name) or [] for name in ("relations", "hyponyms", "definition")]
        if isinstance(parts[2], str):
            parts[2] = [parts[2]]
        if all(isinstance(part, list) for part in parts):
            # Fails for a lone surrogate
            "".join([entry["word"], *itertools.chain(*parts)]).encode()
            return entry["word"], *parts
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        pass
    example = '{"word": "dog", "relations": ["hound"], "definition": "an animal"}'
    text = line.decode(errors="replace").strip()[:60]
    raise InputError(f"{place}: {text!r} must be like {example}")


def _check_wordnet(directory: Path) -> None:
    """Raises InputError for a directory that is not WordNet's, and if NLTK is missing."""
    if not (directory / "lexnames").is_file():
        raise InputError(
            f"{directory} has no lexnames: use a directory with the files of WordNet, unpacked,"
            " such as ~/nltk_data/corpora/wordnet, or a .jsonl file"
        )
    if not importlib.util.find_spec("nltk"):
        raise InputError(NO_NLTK)


def _read_wordnet(
    directory: Path, words: Iterable[str]
) -> Iterator[tuple[str, dict[str, None], dict[str, None], list[str]]]:
    """Yields (word, synonyms, hyponyms, definitions) for each of `words` that WordNet has, in its
    order of senses: nouns, verbs, adjectives, adverbs, the most frequent first in each. NLTK keeps
    the hyponyms of a sense in no order; here they are sorted by the names of their synsets.

    A word is one of its own synonyms, as in the coverage that Pappas et al. 2020 print. Words are
    looked up in lower case, with and without their endings.
    """
    wordnet = _open_wordnet(directory)
    for word in words:
        if senses := wordnet.synsets(word):
            below = (sorted(sense.hyponyms(), key=lambda synset: synset.name()) for sense in senses)
            synonyms, hyponyms = (
                dict.fromkeys(name for synset in synsets for name in synset.lemma_names())
                for synsets in (senses, itertools.chain.from_iterable(below))
            )
            yield word, synonyms, hyponyms, [sense.definition() for sense in senses]


def _open_wordnet(directory):
    _check_wordnet(directory)
    import nltk
    from nltk.corpus.reader.wordnet import WordNetCorpusReader

    class Reader(WordNetCorpusReader):
        def map_wn(self, version="wordnet"):
            """Skips the map to other versions, which only other languages need."""

        def _morphy(self, form, pos, check_exceptions=True):
            """The forms of a word that WordNet has, by the rules of NLTK 3.5: later versions
            apply the rules only once.
            """

            def existing(forms):
                offsets = self._lemma_pos_offset_map
                return [each for each in dict.fromkeys(forms) if pos in offsets.get(each, ())]

            if check_exceptions and form in self._exception_map[pos]:
                return existing([form, *self._exception_map[pos][form]])
            shorter, bases, rules = [form], [], self.MORPHOLOGICAL_SUBSTITUTIONS[pos]
            while shorter and not bases:
                shorter = [
                    each.removesuffix(old) + new
                    for each in shorter
                    for old, new in rules
                    if each.endswith(old)
                ]
                bases = existing([form, *shorter])
            return bases

    root = str(directory.resolve())
    if root not in nltk.data.path:
        nltk.data.path.insert(0, root)  # NLTK opens no files outside its own directories
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about missing other languages
        return Reader(nltk.data.FileSystemPathPointer(root), None)


def counts(vocabulary: Vocabulary) -> np.ndarray:
    """Counts of the words, float32 `[words]`, at least 1, so that every word can be drawn."""
    return np.maximum(vocabulary.counts, 1).astype(np.float32)


def relations(
    vocabulary: Vocabulary, path: str, most: int, form: str = "paper", share: float = 1.0
) -> dict[str, np.ndarray]:
    """The first `most` words related to each word: `words` int32 `[words, most]`, ids, padded with
    -1. Words that are not in the vocabulary are skipped.

    path: as for `read_entries`.
    form: "paper" (Pappas et al. 2020, section 3.1): synonyms, then hyponyms, in the lexicon's
        order; or "code", as in the public code: synonyms only, in code point order.
    share: maximal share of the vocabulary's words that keep their related words (Table 4,
        "coverage"). The spelling of words decides which ones, so that the same vocabulary gives the
        same words; with more words (`--vocabulary=union`) other words may keep theirs.

    Raises:
        InputError: as `read_entries`.
    """
    words_of = {}
    for word, entry in read_entries(vocabulary, path).items():
        if form == "code":
            words_of[word] = sorted(set(entry.synonyms))
        else:
            words_of[word] = dict.fromkeys(entry.synonyms + entry.hyponyms)
    return _first(vocabulary, words_of, "relations", most, share)


def definitions(
    vocabulary: Vocabulary, path: str, most: int, form: str = "paper", share: float = 1.0
) -> dict[str, np.ndarray]:
    """The first `most` words of each word's definition, as `relations` returns related words. The
    words that lose their definitions are chosen independently.

    form: "paper": the definition of the first sense, without punctuation; or "code", as in the
        public code: the same, split at white space, so that a word with a comma is another word.
    """
    words_of = {}
    for word, entry in read_entries(vocabulary, path).items():
        text = " ".join(entry.definitions[:1])
        text = text.split() if form == "code" else _word_pattern().findall(text)
        words_of[word] = [name for name in text if name in vocabulary.index]
    return _first(vocabulary, words_of, "definitions", most, share)


def _word_pattern() -> re.Pattern:
    """A regular expression for words without punctuation."""
    letter = rf"[\w{combining_marks()}]"
    return re.compile(rf"{letter}+(?:['’-]{letter}+)*")


SOURCES = {
    "spelling": spelling,
    "counts": counts,
    "relations": relations,
    "definitions": definitions,
    "ngrams": sorted_ngrams,
}
FROM_LEXICON = ("relations", "definitions")  # sources that read a lexicon


def lexicon(vocabulary: Vocabulary, spec: Mapping) -> dict:
    """Makes the arrays that `LanguageModel.lexicon_spec` describes, in the same tree.

    >>> lexicon(vocabulary, {"input": {"spelling": {"length": 50}}})
    {"input": {"spelling": {"letters": ..., "symbols": ..., "lengths": ..., "row_of_word": ...}}}

    They are arguments of a compiled program, not constants in it, so that another vocabulary of the
    same size does not need another program.

    Raises:
        InputError: a lexicon that cannot be read.
    """
    return {
        name: SOURCES[name](vocabulary, **inner) if name in SOURCES else lexicon(vocabulary, inner)
        for name, inner in spec.items()
    }


def coverage(arrays: Mapping) -> dict[str, float]:
    """The shares of words with "relations" and with "definitions" in the arrays of `lexicon`, as
    far as they exist.
    """
    shares = {}
    for name, inner in arrays.items():
        if name in FROM_LEXICON:
            shares[name] = float(np.mean(inner["words"][:, 0] >= 0))
        elif isinstance(inner, Mapping):
            shares |= coverage(inner)
    return shares


def _first(vocabulary, lists, kind, most, share):
    """The first words of each list of `lists`, word to words, as ids."""
    words = [word for word, list_of_word in lists.items() if list_of_word]
    if (allowed := round(share * len(vocabulary))) < len(words):
        words.sort(key=lambda word: hashlib.sha256(f"{kind} {word}".encode()).digest())
        words = words[:allowed]
    ids = np.full((len(vocabulary), most), -1, np.int32)
    for word in words:
        first = [vocabulary.index[other] for other in itertools.islice(lists[word], most)]
        ids[vocabulary.index[word], : len(first)] = first
    ids.flags.writeable = False
    return {"words": ids}
