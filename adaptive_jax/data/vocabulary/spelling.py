"""How the words of a vocabulary are spelt, for layers that read characters."""

import functools

import numpy as np

from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary

SYMBOLS = (EOS, UNKNOWN)  # words that have no letters


@functools.lru_cache(maxsize=2)
def spelling(vocabulary: Vocabulary, length: int) -> dict[str, np.ndarray]:
    """The first `length` UTF-8 bytes of every word, shortest words first.

    Returns:
        `letters`: uint8 `[words, length]`, bytes counted from 1, 0 after the end of the word.
        `symbols`: int8 `[words]`, 0 for `<eos>`, 1 for `<unk>`, -1 for a word that is spelt.
        `lengths`: int32 `[words]`, letters that are read.
        `places`: int32 `[words]`, for every word id its row in the other three, whose order is by length.

    >>> spelling(Vocabulary.build({"cat": 2, "<eos>": 1}), 4)["letters"]
    array([[  0,   0,   0,   0],
           [100,  98, 117,   0]], dtype=uint8)
    """
    letters = np.zeros((len(vocabulary), length), np.uint8)
    symbols = np.full(len(vocabulary), -1, np.int8)
    for number, (word, text) in enumerate(zip(vocabulary.words, vocabulary.spellings, strict=True)):
        if word in SYMBOLS:
            symbols[number] = SYMBOLS.index(word)
        else:
            read = np.frombuffer(text, np.uint8)[:length]
            letters[number, : len(read)] = np.minimum(read, 254) + 1  # no text in UTF-8 has the byte 255
    lengths = (letters > 0).sum(axis=1, dtype=np.int32)
    order = np.argsort(lengths, kind="stable")
    places = np.argsort(order, kind="stable").astype(np.int32)
    arrays = {"letters": letters[order], "symbols": symbols[order], "lengths": lengths[order], "places": places}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays
