"""Evaluation over words that training never saw.

A vocabulary for evaluation has the words of the run first, with their ids, and new words after
them. A model that composes all word vectors reads and predicts any word: its parameters fit every
vocabulary. Any other model reads zeros for a new word and gives it no probability, as in the public
code of GroC (2020); its distribution is mixed with the uniform one (section 5.1), so that no loss
is infinite:

    p(w) = (1 − u) p_model(w) + u / V
"""

from collections.abc import Mapping

from adaptive_jax.data.corpora.load import count_words
from adaptive_jax.data.vocabulary.words import Vocabulary, most_frequent_first
from adaptive_jax.errors import InputError
from adaptive_jax.files import path_of

TRAIN, UNION = "train", "union"
# Default u for a model that gives new words no probability: that of GroC's public code, as the
# paper states none
UNIFORM = 0.01


def vocabulary_to_score(vocabulary: Vocabulary, name: str, data: Mapping, split: str) -> Vocabulary:
    """The vocabulary that --vocabulary names: "train", the run's own; "union", with the words of
    the split; or with those of a file, one a line. New words have count 0.

    Raises:
        InputError: a file that cannot be read, a run of sub-words or tokens, and as `count_words`.
    """
    if name == TRAIN:
        return vocabulary
    if type(vocabulary) is not Vocabulary:
        raise InputError(
            f"--vocabulary={name} is for words, and this run has sub-word units, which spell every"
            " word, or ids of a tokenizer: leave it out"
        )
    words = (
        [word for word, _ in most_frequent_first(count_words(data, split))]
        if name == UNION
        else _read(name)
    )
    return vocabulary.with_words(words)


def _read(path):
    """The first word of every line."""
    try:
        lines = path_of(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise InputError(
            f"cannot read --vocabulary={path}: {reason}; use train, union, or a file with a word a"
            " line"
        ) from None
    return [line.split()[0] for line in lines if line.strip()]
