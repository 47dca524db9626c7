"""Raw text becomes the tokens that the run's corpus has, and tokens become text again."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_jax.data.corpora.line_files import TextFiles
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.corpora.tokenise import tokeniser as tokeniser_of
from adaptive_jax.data.vocabulary.lines import Lines
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from tests import refuses

COUNTS = {
    "the": 9,
    "cat": 5,
    "<eos>": 4,
    "sat": 3,
    ",": 3,
    "(": 2,
    "’s": 2,
    ".": 2,
    "beth-el": 1,
    "’": 1,
    "2": 1,
    "“": 1,
    ")": 1,
}
TEXT = {"corpus": "text_files", "tokeniser": "none", "lower": False}
PLAIN = Lines.of(TEXT, Vocabulary.build(COUNTS))
UNITS = Subwords.build(
    {"low": 5, "lower": 2, "newest": 6, "widest": 3, "<unk>": 1, "<eos>": 4}, codes=10
)
SUBWORDS = Lines.of(TEXT, UNITS)


def words_of(lines, ids):
    return [lines.vocabulary.words[i] for i in ids]


def test_a_line_feed_is_an_eos():
    """Line feeds and `<eos>` stand for each other: a lost one would join two sentences."""
    ids = PLAIN.encode("the cat\n\n  sat ")
    assert ids.dtype == np.int32 and words_of(PLAIN, ids) == ["the", "cat", "<eos>", "<eos>", "sat"]
    assert PLAIN.decode(ids) == "the cat\n\nsat"
    assert PLAIN.encode("").tolist() == [] and PLAIN.decode([]) == ""
    assert PLAIN.decode(PLAIN.encode("the\n")) == "the\n"


@pytest.mark.parametrize(
    "tokeniser, lower", itertools.product(["none", "marks", "moses"], [False, True])
)
def test_lines_give_the_ids_that_the_corpus_has(tmp_path, tokeniser, lower):
    """Scored as text, a line is what training read."""
    text = "Mr. Smith's cat, \u00a0the \"old\" one, SAT.\n\nHe said: don't (ever) sit!\ta\x0bb c\n"
    text += "\ufeffThe <unk> sat, <unk>\n"  # <unk> became three words, the mark a part of one
    for split in "train", "valid", "test":
        (tmp_path / f"{split}.txt").write_text(text)
    data = {
        "corpus": "text_files",
        "path": str(tmp_path),
        "tokeniser": tokeniser,
        "lower": lower,
    }
    corpus = load(data)
    assert Lines.of(data, corpus.vocabulary).encode(text).tolist() == corpus.ids["train"].tolist()
    counts = dict(zip(corpus.vocabulary.words, corpus.vocabulary.counts, strict=True))
    assert counts["<unk>"] == 2 and counts["the" if lower else "The"] == 1 + lower
    assert tokeniser_of(tokeniser, lower)("<EOS> <eos>").split()[-1] == "<eos>"


@settings(max_examples=50)
@given(st.lists(st.sampled_from([word for word in COUNTS if word != "’s"])))
def test_words_of_the_quickstart_come_back(words):
    """Punctuation marks stand next to their words in text, and apart in the model."""
    bible = Lines.of(TEXT | {"tokeniser": "marks", "lower": True}, Vocabulary.build(COUNTS))
    ids = bible.tokens(words)[0]
    assert bible.encode(bible.decode(ids)).tolist() == ids.tolist()


def test_text_is_put_together_as_it_was_taken_apart():
    """Generated text would have blanks before its commas and inside its numbers."""
    bible = Lines.of(TEXT | {"tokeniser": "marks", "lower": True}, PLAIN.vocabulary)
    assert bible.words("2. Noah’s Ark, (he) said.") == [
        "2",
        ".",
        "noah’s",
        "ark",
        ",",
        "(",
        "he",
        ")",
        "said",
        ".",
    ]
    assert bible.join(bible.words("“Noah’s Ark, (he) said.”")) == "“noah’s ark, (he) said.”"
    moses = Lines.of(TEXT | {"tokeniser": "moses"}, PLAIN.vocabulary)
    for line in 'Mr. Smith\'s cat, the "old" one, sat (down).', "He said: well-known & so on":
        assert moses.join(moses.words(line)) == line
    wikitext = Lines.of(TEXT | {"corpus": "wikitext103"}, PLAIN.vocabulary)
    assert (
        wikitext.join(wikitext.words("a well @-@ known 1 @,@ 500 at 3 @.@ 5 , he"))
        == "a well-known 1,500 at 3.5, he"
    )
    assert wikitext.join([]) == ""
    with refuses("data.corpus='wikitext104'"):  # of a config.json that was written elsewhere
        Lines.of(TEXT | {"corpus": "wikitext104"}, PLAIN.vocabulary)


def test_words_are_put_together_from_units():
    """Units join to words, also over lines and from bytes; a word without its end gets no blank, so
    that text can go on inside it.
    """
    text = "lowest wider <unk>\n\nnewest ▁ Ж\n"
    ids = SUBWORDS.encode(text)
    assert len(ids) > 10 and SUBWORDS.decode(ids) == text
    assert SUBWORDS.decode(ids[:1]) == "low"  # the end of the word is still to come
    units = {word: i for i, word in enumerate(UNITS.words)}
    assert SUBWORDS.decode([units["low"], units["<eos>"], units["<0xD0>"]]) == "low\n\ufffd"


@settings(max_examples=50)
@given(st.lists(st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1)))
def test_any_words_come_back_from_units(words):
    """No word is lost or changed on its way through units, whatever its characters."""
    words = [word for word in words if word not in ("<eos>", "<unk>")]
    assert SUBWORDS.decode(SUBWORDS.tokens(words)[0]).split() == " ".join(words).split()


@pytest.mark.parametrize("ids", [[-1], [3, 99_999]])
@pytest.mark.parametrize("lines", [PLAIN, SUBWORDS])
def test_tokens_that_are_not_there(lines, ids):
    """A negative one is not counted from the end."""
    with refuses("tokens"):
        lines.decode(ids)
    assert lines.decode([]) == lines.decode(iter([])) == ""


def test_text_that_cannot_be_encoded():
    """An error names the unknown word or the encoding, not a place deep inside."""
    for text, name in ("cat dog", "'dog'"), ("a\0b", "UTF-8"), ("\udcff", "UTF-8"):
        with refuses(name):
            PLAIN.encode(text)


def test_words_of_a_prompt_that_the_run_does_not_know():
    """`generate` wrote on from a prompt of unknown words without a word about it."""
    assert [*PLAIN.unseen("the zebra\ncat")] == [False, True, False, False]
    assert not any(SUBWORDS.unseen("the zebra"))


def test_a_prompt_that_is_only_a_byte_order_mark():
    """It has no words, so no last unit: an IndexError ended `generate`."""
    ids, begun = SUBWORDS.encode_open("\ufeff")
    assert not len(ids) and begun == b""


def test_a_cell_of_a_table_may_be_long(tmp_path):
    """Python's csv refuses 131,073 characters, with a traceback."""
    path, text = tmp_path / "a.csv", "word " * 30_000
    path.write_text(f"text,n\n{text},1\n")
    assert [line.text for line in TextFiles([path]).texts("text")] == [text]


@pytest.mark.parametrize(
    "name, row",
    [
        ("a.csv", "abc\rdef,1"),  # was a traceback
        ("a.tsv", '"Hello," he said.\t1'),  # its quotes were left out in silence
        ("a.TSV", '"Hello," he said.\t1'),  # was split at commas
        ("a.csv", '"abc,1'),
    ],
)
def test_a_cell_that_is_not_as_written_is_refused(tmp_path, name, row):
    """The error names file and row: such a cell would be scored as another text."""
    path = tmp_path / name
    header = "text\tn" if name.lower().endswith(".tsv") else "text,n"
    path.write_bytes(f"{header}\nthe{header[4]}1\n{row}\n".encode())
    with refuses(f"{path}, row 2", "quotes"):
        list(TextFiles([path]).texts("text"))
