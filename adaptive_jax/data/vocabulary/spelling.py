"""How the words of a vocabulary are spelt, for layers that read characters."""

import functools
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary

SYMBOLS = (EOS, UNKNOWN)  # words that are not spelt


class Spelling(NamedTuple):
    """letters uint8 [words, length]: bytes counted from 1, 0 where there is none; symbol int8 [words]: of `<eos>` 0, of
    `<unk>` 1, of a word that is spelt -1."""

    letters: np.ndarray
    symbol: np.ndarray


@functools.lru_cache(maxsize=2)
def spell(vocabulary: Vocabulary | int, length: int) -> Spelling:
    """The first `length` UTF-8 bytes of every word, read-only. With only the number of words, all rows are empty.

    >>> spell(Vocabulary.build({"cat": 2, "<eos>": 1}), 4)
    Spelling(letters=array([[100,  98, 117,   0],
           [  0,   0,   0,   0]], dtype=uint8), symbol=array([-1,  0], dtype=int8))
    """
    known = () if isinstance(vocabulary, int) else zip(vocabulary.words, vocabulary.spellings, strict=True)
    size = vocabulary if isinstance(vocabulary, int) else len(vocabulary)
    letters = np.zeros((size, length), np.uint8)
    symbol = np.full(size, -1, np.int8)
    for number, (word, spelling) in enumerate(known):
        if word in SYMBOLS:
            symbol[number] = SYMBOLS.index(word)
        else:
            spelt = np.frombuffer(spelling, np.uint8)[:length]
            letters[number, : len(spelt)] = np.minimum(spelt, 254) + 1  # no text in UTF-8 has the byte 255
    letters.flags.writeable = symbol.flags.writeable = False
    return Spelling(letters, symbol)
