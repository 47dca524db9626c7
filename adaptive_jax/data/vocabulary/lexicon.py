"""What layers want to know about words: arrays that a model is given as its collection "lexicon", beside its parameters."""

from collections.abc import Mapping

from adaptive_jax.data.vocabulary.spelling import spelling
from adaptive_jax.data.vocabulary.words import Vocabulary

SOURCES = {"spelling": spelling}


def lexicon(vocabulary: Vocabulary, wants: Mapping) -> dict:
    """The arrays that `LanguageModel.wants` asks for, in the same tree.

    >>> lexicon(vocabulary, {"input": {"spelling": {"length": 50}}})
    {"input": {"spelling": {"letters": ..., "symbols": ..., "lengths": ..., "places": ...}}}

    They are arguments of a compiled program, never constants in it, so another vocabulary of the same size needs no new one.
    """
    return {
        name: SOURCES[name](vocabulary, **inner) if name in SOURCES else lexicon(vocabulary, inner)
        for name, inner in wants.items()
    }
