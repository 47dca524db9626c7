"""What layers want to know about words: arrays that a model is given as its collection
"lexicon", beside its parameters.
"""

import hashlib
import itertools
import re
from collections.abc import Mapping

import numpy as np

from adaptive_jax.data.vocabulary.entries import read_entries
from adaptive_jax.data.vocabulary.spelling import spelling
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError, check_at_least, check_known

FORMS = ("paper", "code")
WORDS = re.compile(r"\w+(?:['-]\w+)*")


def counts(vocabulary: Vocabulary) -> np.ndarray:
    """How often each word occurs, float32 `[words]`; 1 for a word that never does, so that
    every word can be drawn.
    """
    return np.maximum(vocabulary.counts, 1).astype(np.float32)


def relations(
    vocabulary: Vocabulary,
    path: str,
    most: int,
    form: str = "paper",
    share: float = 1.0,
    cache: str = "",
) -> dict[str, np.ndarray]:
    """The first `most` words related to each word: `words` int32 `[words, most]`, ids, -1 where
    there are fewer.

    A word is among its own synonyms, see `read_wordnet`. Words that are not in the vocabulary are
    passed over.

    path, cache: as `read_entries` takes them.
    form: "paper" (Pappas et al. 2020, section 3.1), synonyms, then hyponyms, in the lexicon's
        order; or "code", as its public code: synonyms only, in code point order.
    share: of the vocabulary's words, those that keep their related words, at most (Table 4,
        "coverage"). The spelling of words decides which ones: the same at training and at
        evaluation, and the larger share has all of the smaller.

    Raises:
        InputError: as `read_entries`; a number or name out of range.
    """
    check_known(f"form={form!r}", form, FORMS)
    found = {}
    for word, entry in read_entries(vocabulary, path, cache).items():
        found[word] = (
            sorted(set(entry.synonyms))
            if form == "code"
            else dict.fromkeys(entry.synonyms + entry.hyponyms)
        )
    return _first(vocabulary, found, "relations", most, share)


def definitions(
    vocabulary: Vocabulary,
    path: str,
    most: int,
    form: str = "paper",
    share: float = 1.0,
    cache: str = "",
) -> dict[str, np.ndarray]:
    """The first `most` words of each word's definition, as `relations`. Which words lose theirs is
    decided apart.

    form: "paper", the definitions of all senses, without punctuation; or "code", as the public
        code: that of the first sense, split at white space, so that a word with a comma after it is
        another word.
    """
    check_known(f"form={form!r}", form, FORMS)
    found = {}
    for word, entry in read_entries(vocabulary, path, cache).items():
        text = (
            " ".join(entry.definitions[:1]).split()
            if form == "code"
            else WORDS.findall("; ".join(entry.definitions))
        )
        found[word] = [each for each in text if each in vocabulary.index]
    return _first(vocabulary, found, "definitions", most, share)


SOURCES = {
    "spelling": spelling,
    "counts": counts,
    "relations": relations,
    "definitions": definitions,
}
READ = ("relations", "definitions")  # sources that read a lexicon


def lexicon(vocabulary: Vocabulary, wants: Mapping, cache: str = "") -> dict:
    """The arrays that `LanguageModel.wants` asks for, in the same tree.

    >>> lexicon(vocabulary, {"input": {"spelling": {"length": 50}}})
    {"input": {"spelling": {"letters": ..., "symbols": ..., "lengths": ..., "places": ...}}}

    They are arguments of a compiled program, never constants in it, so another vocabulary of the
    same size needs no new one.

    cache: a directory where what was read from WordNet is kept; empty: it is not.
    """
    made = {}
    for name, inner in wants.items():
        if name in READ:
            inner = {**inner, "cache": cache}
        made[name] = (
            SOURCES[name](vocabulary, **inner)
            if name in SOURCES
            else lexicon(vocabulary, inner, cache)
        )
    return made


def coverage(arrays: Mapping) -> dict[str, float]:
    """The share of words that have "relations" and "definitions" in what `lexicon` made; of the
    two, those that it has.
    """
    shares = {}
    for name, inner in arrays.items():
        if name in READ:
            shares[name] = float(np.mean(inner["words"][:, 0] >= 0))
        elif isinstance(inner, Mapping):
            shares |= coverage(inner)
    return shares


def _first(vocabulary, found, kind, most, share):
    """The first words of each list in `found`, word to words, as ids."""
    check_at_least(1, most=most)
    if not 0 <= share <= 1:
        raise InputError(
            f"share={share} must be from 0, no word has an entry, to 1, all entries are used"
        )
    words = [word for word, others in found.items() if others]
    if (allowed := round(share * len(vocabulary))) < len(words):
        words = sorted(words, key=lambda word: hashlib.sha256(f"{kind} {word}".encode()).digest())[
            :allowed
        ]
    ids = np.full((len(vocabulary), most), -1, np.int32)
    for word in words:
        first = [vocabulary.index[other] for other in itertools.islice(found[word], most)]
        ids[vocabulary.index[word], : len(first)] = first
    ids.flags.writeable = False
    return {"words": ids}
