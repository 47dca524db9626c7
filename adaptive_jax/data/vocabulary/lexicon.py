"""What layers want to know about words: arrays that a model is given as its collection "lexicon", beside its parameters."""

from collections.abc import Mapping

import numpy as np

from adaptive_jax.data.vocabulary.clusters import in_order, order
from adaptive_jax.data.vocabulary.spelling import spelling
from adaptive_jax.data.vocabulary.words import Vocabulary


def counts(vocabulary: Vocabulary) -> np.ndarray:
    """How often each word occurs, float32 `[words]`; 1 for a word that never does, so that every word can be drawn."""
    return np.maximum(vocabulary.counts, 1).astype(np.float32)


SOURCES = {"spelling": spelling, "order": order, "counts": counts}


def lexicon(vocabulary: Vocabulary, wants: Mapping) -> dict:
    """The arrays that `LanguageModel.wants` asks for, in the same tree.

    >>> lexicon(vocabulary, {"input": {"spelling": {"length": 50}}})
    {"input": {"spelling": {"letters": ..., "symbols": ..., "lengths": ..., "places": ...}}}

    They are arguments of a compiled program, never constants in it, so another vocabulary of the same size needs no new one. Where
    the model orders words by clusters, the layers named in `wants["order"]["of"]` get the arrays of words by place.
    """
    made = {}
    for name, inner in wants.items():
        by_place = "order" in wants and name in wants["order"]["of"]
        words = in_order(vocabulary, wants["order"]["path"]) if by_place else vocabulary
        made[name] = SOURCES[name](words, **inner) if name in SOURCES else lexicon(words, inner)
    return made
