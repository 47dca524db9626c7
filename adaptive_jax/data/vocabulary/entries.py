"""What a lexicon says of the words of a vocabulary: related words and definitions.

A lexicon is a directory of WordNet or a file of JSON lines, for any language:

    {"word": "dog", "relations": ["hound", "cur"], "hyponyms": ["puppy"], "definition": "a
    domesticated animal, kept as a pet"}

Related words are in order of preference, hyponyms after the others. A definition is a text, or a
list of texts, one for each sense. Only `word` is needed.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from adaptive_jax.data.vocabulary.wordnet import FILES, check_wordnet, file_of, read_wordnet
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import changed_file, path_of, replacing, write_checksums

VERSION = "1"  # of what is kept in the cache
CURE = "give a directory of WordNet, or a .jsonl file, see docs/words.md"


class Entry(NamedTuple):
    """What a lexicon says of a word.

    synonyms, hyponyms: those that are words of the vocabulary, exactly as they are written there.
    definitions: texts, one for each sense.
    """

    synonyms: tuple[str, ...]
    hyponyms: tuple[str, ...]
    definitions: tuple[str, ...]


def lexicon_of(config: Mapping) -> str:
    """The path of the lexicon that a config's input reads; empty if it reads none."""
    given = config["input"]
    return (
        given["lexicon"]
        if "lexicon" in given and (given["relations"] or given["definition"])
        else ""
    )


def check_lexicon(path: str) -> None:
    """Checks that a lexicon is there, if there is a path, before a corpus is prepared. Raises
    InputError as `read_entries`.
    """
    source = path_of(path)
    if path and source.is_dir():
        check_wordnet(source)
    elif path and not source.is_file():
        raise InputError(f"there is no input.lexicon={path!r}: {CURE}")


@functools.lru_cache(maxsize=2)
def read_entries(vocabulary: Vocabulary, path: str, cache: str = "") -> Mapping[str, Entry]:
    """The entries of those words of a vocabulary that a lexicon has, in the vocabulary's order.

    path: a directory of WordNet, or a .jsonl file.
    cache: a directory where what was read from WordNet is kept for the next time; empty: it is not.

    Raises:
        InputError: no lexicon there, or one that cannot be read; a vocabulary of sub-words.
    """
    if not path:
        raise InputError(f"input.lexicon is empty: {CURE}")
    if not vocabulary.ends.all() or vocabulary.unit == "token":
        raise InputError(
            f"input.lexicon={path!r} says something of words, and the vocabulary has sub-words: set"
            " data.codes=0, or give text in place of data.corpus=ids"
        )
    source = path_of(path)
    if not source.is_dir():
        return _read_lines(source, vocabulary)
    if not cache:
        return _known(read_wordnet(source, vocabulary.words), vocabulary)
    digest = hashlib.sha256(
        f"{VERSION} {vocabulary.digest} {_fingerprint(source)}".encode()
    ).hexdigest()[:16]
    kept = path_of(cache) / "lexicon" / f"{digest}.jsonl"
    if kept.exists():
        try:
            return _read_lines(kept, vocabulary)
        except InputError:  # a damaged cache costs time only
            pass
    entries = _known(read_wordnet(source, vocabulary.words), vocabulary)
    write_entries(kept, entries)
    return entries


def write_entries(path: Path, entries: Mapping[str, Entry]) -> None:
    """Writes entries as JSON lines, which `read_entries` reads again, and their checksum beside
    them.
    """
    with replacing(path) as file:
        for word, entry in entries.items():
            line = {
                "word": word,
                "relations": entry.synonyms,
                "hyponyms": entry.hyponyms,
                "definition": entry.definitions,
            }
            file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
    write_checksums(path.with_suffix(".sha256"), [path])


def _known(found, vocabulary):
    index, made = vocabulary.index, {}
    for word, synonyms, hyponyms, definitions in found:
        if word in index:
            related = (
                tuple(each for each in words if each in index) for words in (synonyms, hyponyms)
            )
            made[word] = Entry(*related, tuple(definitions))
    return {word: made[word] for word in vocabulary.words if word in made}


def _read_lines(path, vocabulary):
    if changed_file(path.with_suffix(".sha256")):
        raise InputError(
            f"{path} is damaged: it is not what was written; restore it, or train anew"
        )
    try:
        with path.open("rb") as file:
            return _known(
                (
                    _parse(line, f"{path}, line {number}")
                    for number, line in enumerate(file, start=1)
                ),
                vocabulary,
            )
    except OSError as error:
        raise InputError(
            f"cannot read input.lexicon={str(path)!r}: {error.strerror}; {CURE}"
        ) from error


def _parse(line, where):
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or not isinstance(entry.get("word"), str):
        text = line.decode(errors="replace").strip()[:60]
        raise InputError(
            f'{where}: {text!r} must be like {{"word": "dog", "relations": ["hound"], "definition":'
            ' "an animal"}'
        )
    if isinstance(entry.get("definition"), str):
        entry["definition"] = [entry["definition"]]
    parts = [entry.get(name) or [] for name in ("relations", "hyponyms", "definition")]
    if not all(
        isinstance(part, list) and all(isinstance(text, str) for text in part) for part in parts
    ):
        raise InputError(
            f"{where}: relations, hyponyms and definition of {entry['word']!r} must be lists of"
            " texts"
        )
    return entry["word"], *parts


def _fingerprint(directory):
    digest = hashlib.sha256()
    for name in FILES:
        digest.update(file_of(directory, name).read_bytes())
    return digest.hexdigest()
