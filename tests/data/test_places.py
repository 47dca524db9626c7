"""Places of words in their text."""

import hypothesis
import hypothesis.strategies as st
import numpy as np

from adaptive_jax.data.corpora.tokenise import tokeniser
from adaptive_jax.data.vocabulary.places import places, word_numbers
from adaptive_jax.scores.surprisal import ScoredLine

TEXTS = st.text(st.sampled_from("aBé İΣσ'’-.,“”_7\t\n本"), max_size=30)


@hypothesis.given(TEXTS, st.sampled_from(["none", "marks"]))
def test_places_are_those_of_the_original_form(text, name):
    """Whatever the tokeniser: the characters there are the word, but for its case."""
    split = tokeniser(name, True)
    words = [word for line in text.split("\n") for word in (*split(line).split(), "<eos>")]
    spans = places(text, words)
    ends_of_lines = [at for at, letter in enumerate(text) if letter == "\n"] + [len(text)]
    assert spans[[word == "<eos>" for word in words], 0].tolist() == ends_of_lines
    forms = [text[a:b] for a, b in spans if a < b]
    folded = "".join(word for word in words if word != "<eos>")
    assert "".join(forms).lower().replace("ς", "σ") == folded.replace("ς", "σ")
    assert (spans.ravel()[1:] >= spans.ravel()[:-1]).all()


def test_a_tokeniser_that_changes_characters():
    """A character that is dropped or replaced moves no other word."""
    text = "Mr “Smith\x07 saw.. it <unk> here"
    words = ["Mr", '"', "Smith", "saw", "..", "it", "<unk>", "here", "<eos>"]
    forms = [text[a:b] for a, b in places(text, words)]
    assert forms == ["Mr", "“", "Smith", "saw", "..", "it", "<unk>", "here", ""]


def test_tokens_without_letters():
    """Blanks, or the first bytes of a character, belong to the character that follows them in the
    line, or else to the one before: they got places of their own, and words after them wrong ones.
    """
    words = ("a", "", "", "😀", "b", "", "<eos>", "", "c", "<eos>")
    line = ScoredLine("a  😀 b \n c", words, -np.arange(1.0, 11.0), None, None)
    assert line.places.tolist() == [
        [0, 1], [3, 4], [3, 4], [3, 4], [5, 6], [6, 7], [7, 7], [9, 10], [9, 10], [10, 10],
    ]  # fmt: skip
    assert line.by_word().words == ("a", "😀", "b", "<eos>", "c", "<eos>")
    assert line.by_word().log_probs.tolist() == [-1, -9, -11, -7, -17, -10]


def test_a_line_of_blanks():
    """It has one end, and no place of another line."""
    words = ("a", "<eos>", "", "<eos>", "b", "<eos>")
    spans = [[0, 1], [1, 1], [3, 4], [4, 4], [5, 6], [6, 6]]
    assert places("a\n  \nb", words).tolist() == spans
    assert places("a\n\nb", words)[2].tolist() == [2, 2]
    line = ScoredLine("   ", ("", "<eos>"), -np.ones(2), None, None).by_word()
    assert line.words == ("", "<eos>")


def test_sums_over_white_space_words():
    """Punctuation belongs to the word that it stands beside; the end of the line to none."""
    words = ("noah", ",", "he", "said", "“", "so", "”", ".", "<eos>")
    logs = -np.arange(1.0, 10.0)
    unseen = np.arange(9) == 4
    line = ScoredLine("Noah, he  said “So”.", words, logs, unseen, np.arange(9)).by_word()
    assert line.words == ("Noah,", "he", "said", "“So”.", "<eos>")
    assert line.log_probs.tolist() == [-3, -3, -4, -26, -9] and line.log_prob == logs.sum()
    assert line.unseen.tolist() == [False, False, False, True, False]
    assert line.frequencies is None and line.text[slice(*line.places[3])] == "“So”."
    assert word_numbers("a  b", np.array([[0, 1], [3, 4], [4, 4]])).tolist() == [0, 1, -1]


def test_words_after_a_context_that_ends_in_a_word():
    """A token of the context alone keeps its name and an empty place: it was called `<eos>`, and
    the places of all words after it were those of other words.
    """
    words = ("beginning", "God", "created", "<eos>")
    line = ScoredLine(" God created", words, -np.ones(4), None, None, before="beginning").by_word()
    assert line.words == words
    assert line.places.tolist() == [[0, 0], [1, 4], [5, 12], [12, 12]]
