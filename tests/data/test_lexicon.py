"""Entries of words in a lexicon: WordNet's files, JSON lines, arrays of them, and the tables of
GroC's public code.
"""

import collections
import json
import lzma
import unicodedata
from pathlib import Path

import numpy as np
import pytest

from adaptive_jax.data.vocabulary.lexicon import (
    check_lexicon,
    coverage,
    definitions,
    lexicon,
    read_entries,
    relations,
    write_entries,
)
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.files import write_checksums
from tests import refuses

REAL = Path(__file__).parents[3] / "shared" / "data"

# (part of speech, words, the synset above it by its number here, gloss)
SYNSETS = [
    ("noun", ("animal", "beast"), None, 'a living thing; "the animal slept"'),
    ("noun", ("dog", "Canis_familiaris", "cur"), 0, "a tame animal, kept by a man"),
    ("noun", ("puppy",), 1, "a dog that is small"),
    ("noun", ("frank", "dog", "banger"), None, "a small sausage"),
    ("verb", ("chase", "dog", "hunt"), None, "run after a man or an animal"),
    ("adj", ("small", "little"), None, "not large"),
    *(("noun", (f"kind{number}",), 0, "of an animal") for number in (3, 1, 6, 2, 5, 4)),
]
LETTERS = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
WORDS = (
    *("a", "animal", "small", "dog", "dogs", "puppy", "man", "hunt", "frank", "cur", "Frank"),
    *("chasings", "mice", "<unk>", "<eos>"),
)
UNITS = Subwords.build({"aa": 3, "ab": 2, "<eos>": 1}, 1)
VOCABULARY = Vocabulary(WORDS, np.arange(len(WORDS), 0, -1))


def synset_lines(part, offsets):
    """The lines of a data file; `offsets` are those of all synsets, known or not."""
    for number, (its, words, above, gloss) in enumerate(SYNSETS):
        if its == part:
            pointers = [("@", above)] if above is not None else []
            pointers += [
                ("~", below) for below, synset in enumerate(SYNSETS) if synset[2] == number
            ]
            fields = [
                f"{offsets[number]:08d} 05 {LETTERS[part]} {len(words):02x}",
                *(f"{word} 0" for word in words),
            ]
            fields += [f"{len(pointers):03d}"]
            fields += [
                f"{sign} {offsets[to]:08d} {LETTERS[SYNSETS[to][0]]} 0000" for sign, to in pointers
            ]
            yield (
                number,
                " ".join([*fields, *(["01 + 08 00"] if part == "verb" else []), "|", gloss])
                + "  \n",
            )


@pytest.fixture(scope="module")
def wordnet(tmp_path_factory):
    """A directory of WordNet's files with the words of `SYNSETS`."""
    directory, offsets = tmp_path_factory.mktemp("wordnet"), [0] * len(SYNSETS)
    for part in LETTERS:
        at = 0
        for number, line in synset_lines(part, [0] * len(SYNSETS)):
            offsets[number], at = at, at + len(line)
    files = {"lexnames": "".join(f"{i:02d}\tname{i}\t1\n" for i in range(45))}
    exceptions = {"noun": "mice mouse\ncurs nothing\n"}
    for part, letter in LETTERS.items():
        files[f"data.{part}"] = "".join(line for _, line in synset_lines(part, offsets))
        senses = collections.defaultdict(list)
        for number, (its, words, _, _) in enumerate(SYNSETS):
            for word in words if its == part else ():
                senses[word.lower()].append(f"{offsets[number]:08d}")
        files[f"index.{part}"] = "".join(
            f"{word} {letter} {len(found)} 0 {len(found)} 0 {' '.join(found)}  \n"
            for word, found in sorted(senses.items())
        )
        files[f"{part}.exc"] = exceptions.get(part, "")
    for name, content in files.items():
        (directory / name).write_text(content)
    return directory


def words_of(arrays, vocabulary=VOCABULARY):
    """The rows of `words` that are not empty, as words."""
    rows = arrays["words"]
    assert rows.dtype == np.int32 and rows.shape[0] == len(vocabulary)
    found = {
        word: [vocabulary.words[i] for i in row if i >= 0]
        for word, row in zip(vocabulary.words, rows, strict=True)
    }
    assert all(
        (row[len(found[word]) :] == -1).all()
        for word, row in zip(vocabulary.words, rows, strict=True)
    )
    return {word: others for word, others in found.items() if others}


RELATED = {
    "paper": (
        "animal: animal dog cur; small: small; dog: dog cur frank; dogs: dog cur frank;"
        " puppy: puppy; hunt: dog hunt; frank: frank dog; cur: dog cur puppy; Frank: frank dog;"
        " chasings: dog hunt"
    ),
    "code": (
        "animal: animal; small: small; dog: cur dog frank; dogs: cur dog frank; puppy: puppy;"
        " hunt: dog hunt; frank: dog frank; cur: cur dog; Frank: dog frank; chasings: dog hunt"
    ),
}
DEFINED = {
    "paper": (
        "animal: a; dog: a animal a man; dogs: a animal a man; puppy: a dog small;"
        " hunt: a man animal; frank: a small; cur: a animal a man; Frank: a small;"
        " chasings: a man animal"
    ),
    "code": (
        "animal: a; dog: a a man; dogs: a a man; puppy: a dog small; hunt: a man animal;"
        " frank: a small; cur: a a man; Frank: a small; chasings: a man animal"
    ),
}


def written(found):
    """`{"dog": ["a", "man"]}` as "dog: a man"."""
    return "; ".join(f"{word}: {' '.join(others)}" for word, others in found.items())


@pytest.mark.parametrize("form", RELATED)
def test_wordnet(wordnet, form):
    """Synonyms of all senses and parts of speech, hyponyms after them. Words are looked up in lower
    case and without endings; words that are not in the vocabulary are passed over; examples are no
    part of a definition. The first four words are taken.
    """
    assert written(words_of(relations(VOCABULARY, str(wordnet), 3, form))) == RELATED[form]
    assert written(words_of(definitions(VOCABULARY, str(wordnet), 4, form))) == DEFINED[form]


def test_hyponyms_have_an_order(wordnet):
    """NLTK's own went by the hashes of a process: arrays differed from start to start, and from
    host to host.
    """
    kinds = [f"kind{number}" for number in (5, 2, 6, 1, 4, 3)]
    words = Vocabulary(("animal", "dog", *kinds, "<eos>"), np.ones(9, np.int64))
    assert read_entries(words, str(wordnet))["animal"].hyponyms == ("dog", *sorted(kinds))


def test_an_exception_of_wordnet_ends_the_search(wordnet):
    """ "curs" is listed as an irregular form of a word that is not there: no rule takes off its
    s, as in NLTK.
    """
    words = Vocabulary(("curs", "cur", "<eos>"), np.ones(3, np.int64))
    assert read_entries(words, str(wordnet)).keys() == {"cur"}


def test_json_lines_say_the_same(wordnet, tmp_path):
    """Entries that were written and read again, with the definition that is read of each; a run of
    a version that read all is refused.
    """
    path = tmp_path / "own.jsonl"
    entries = read_entries(VOCABULARY, str(wordnet))
    write_entries(path, entries)
    first = {
        word: each._replace(definitions=each.definitions[:1]) for word, each in entries.items()
    }
    assert read_entries(VOCABULARY, str(path)) == first != entries
    assert list(entries) == [w for w in WORDS if w in entries]
    line = {"word": "dog", "definition": ["a tame animal", "a sausage"]}
    for path in tmp_path / "given.jsonl", tmp_path / "lexicon.jsonl":
        path.write_text(json.dumps(line))
    given = read_entries(VOCABULARY, str(tmp_path / "given.jsonl"))
    assert given["dog"].definitions == ("a tame animal", "a sausage")
    write_checksums(path.with_suffix(".sha256"), [path])
    with refuses("earlier", "anew"):
        read_entries(VOCABULARY, str(path))


def test_json_lines_in_another_language(tmp_path):
    """A definition is one text, or that of the first sense; what is left out is empty; words not in
    the vocabulary are passed over.
    """
    dog = {"relations": ["Köter", "Dogge", "Tier"], "definition": "ein Tier, das bellt"}
    lines = [
        {"word": "Hund"} | dog,
        {"word": "Köter", "hyponyms": ["Hund"], "definition": ["Hund", "ein Tier"]},
        {"word": "Esel", "relations": ["Tier"]},
        {"word": "Tier", "definition": None},
    ]
    path = tmp_path / "german.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    words = ("ein", "Tier", "Hund", "Köter", "<eos>")
    vocabulary = Vocabulary(words, np.ones(5, np.int64))
    assert words_of(relations(vocabulary, str(path), 2), vocabulary) == {
        "Hund": ["Köter", "Tier"],
        "Köter": ["Hund"],
    }
    defined = words_of(definitions(vocabulary, str(path), 9), vocabulary)
    assert defined == {"Hund": ["ein", "Tier"], "Köter": ["Hund"]}
    assert coverage(
        lexicon(vocabulary, {"input": {"relations": {"path": str(path), "most": 2}}})
    ) == {"relations": 0.4}


@pytest.mark.parametrize(
    "text, expected",
    [
        ("एक पालतू जानवर, जो भौंकता है", "एक पालतू जानवर जो भौंकता है"),
        ("ஒரு வீட்டு விலங்கு.", "ஒரு வீட்டு விலங்கு"),
        (unicodedata.normalize("NFD", "(für Käufer)"), unicodedata.normalize("NFD", "für Käufer")),
        ("the dog’s bark isn't muted--half-way", "the dog’s bark isn't muted half-way"),
    ],
    ids=["Hindi", "Tamil", "accents apart", "English"],
)
def test_a_definition_without_punctuation(text, expected, tmp_path):
    """Vowel signs and accents are parts of words: they were cut off, and the words were lost."""
    words = expected.split()
    vocabulary = Vocabulary((*words, "<eos>"), np.ones(len(words) + 1, np.int64))
    path = tmp_path / "given.jsonl"
    path.write_text(json.dumps({"word": words[0], "definition": text}))
    assert words_of(definitions(vocabulary, str(path), 9), vocabulary) == {words[0]: words}


def test_a_share_of_the_words_keeps_its_entries(tmp_path):
    """The words are drawn apart for relations and definitions; a larger share has all words of
    a smaller one; 1 has all entries.
    """
    words = (*(f"w{i}" for i in range(200)), "<eos>")
    vocabulary, path = Vocabulary(words, np.ones(201, np.int64)), tmp_path / "all.jsonl"
    said = {"relations": ["w1"], "definition": "w2"}
    path.write_text("\n".join(json.dumps({"word": word} | said) for word in words[:150]))
    found = {}
    for source in (relations, definitions):
        sets = [
            set(words_of(source(vocabulary, str(path), 3, share=share), vocabulary))
            for share in (0.0, 0.16, 0.48, 0.82, 1.0)
        ]
        assert [len(each) for each in sets] == [0, 32, 96, 150, 150] and sets[1] < sets[2] < sets[3]
        found[source] = sets[1]
    assert found[relations] != found[definitions]


LINE = '{"word": "dog"}\n'


@pytest.mark.parametrize(
    "content, names",
    [
        (LINE + "dog\n", ["line 2", "'dog'"]),
        (LINE + "[" * 100_000, ["line 2"]),
        (LINE + '{"relations": []}', ["line 2", '"word": "dog"']),
        (LINE + LINE, ["line 2", "'dog'"]),
        ('{"word": "dog", "relations": "cur"}', ["line 1"]),
        ('{"word": "dog", "definition": [3]}', ["line 1"]),
        ('{"word": "dog", "definition": "\\ud83d"}', ["line 1"]),
        (None, ["input.lexicon", "No such file", "docs/words.md"]),
    ],
)
def test_a_wrong_file_is_told(tmp_path, content, names):
    """With the line's number."""
    path = tmp_path / "lexicon.jsonl"
    if content is not None:
        path.write_text(content)
    with refuses("lexicon.jsonl", *names):
        read_entries(VOCABULARY, str(path))


@pytest.mark.parametrize(
    "wrong, name",
    [
        (lambda wordnet, tmp: check_lexicon(str(tmp / "none")), "none"),
        (lambda wordnet, tmp: check_lexicon(str(tmp)), "lexnames"),
        (lambda wordnet, tmp: read_entries(VOCABULARY, ""), "input.lexicon"),
        (lambda wordnet, tmp: read_entries(UNITS, str(wordnet)), "data.codes=0"),
    ],
)
def test_a_wrong_lexicon_is_told(wordnet, tmp_path, wrong, name):
    """With the value; a directory of WordNet that is there passes the check."""
    check_lexicon(str(wordnet))
    with refuses(name):
        wrong(wordnet, tmp_path)


@pytest.mark.parametrize(
    "corpus, shares",
    [
        ("ptb", {"code": [78.04, 85.79], "paper": [78.45, 85.85]}),
        pytest.param(
            "wikitext-2",
            {"code": [73.39, 76.25], "paper": [73.80, 76.26]},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_coverage_of_table_1(corpus, shares, real_wordnet):
    """78 and 86 % of the Penn Treebank, 73 and 76 % of WikiText-2, as the public code counts
    them, an empty word among them.
    """
    texts = [text.read_text() for text in sorted((REAL / "ptb").glob("*.txt"))]
    if corpus == "wikitext-2":
        texts = [lzma.decompress((REAL / corpus / "train.txt.xz").read_bytes()).decode()]
    words = tuple(sorted({*" ".join(texts).split(), "<eos>"}))
    vocabulary = Vocabulary(words, np.arange(len(words), 0, -1))
    for form, expected in shares.items():
        spec = {
            kind: {"path": str(real_wordnet), "most": 1, "form": form}
            for kind in ("relations", "definitions")
        }
        counted = len(words) / (len(words) + (form == "code"))
        coverages = coverage(lexicon(vocabulary, spec)).values()
        assert [round(100 * share * counted, 2) for share in coverages] == expected
