"""Spelling of the words of a vocabulary, for layers that read characters."""

import functools

import numpy as np

from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary
from adaptive_jax.errors import InputError

SYMBOLS = (EOS, UNKNOWN)  # words without letters

# Character ids of ELMo (Peters et al. 2018): 1 + byte, and these
START, STOP, BEGIN, END, PADDING = 257, 258, 259, 260, 261
SENTENCES = {"<S>": START, "</S>": STOP}


@functools.lru_cache(maxsize=2)
def spelling(vocabulary: Vocabulary, length: int, marks: bool = False) -> dict[str, np.ndarray]:
    """The first `length` letters of every word, shortest words first.

    A letter is 1 + a UTF-8 byte, and padding is 0. With `marks`, letters are ELMo's: a mark begins
    and ends each word, padding is 261, `<S>` and `</S>` are one letter each, and `<eos>` and
    `<unk>` are spelled like other words.

    Returns:
        `letters`: uint8, with marks int16, `[words, length]`.
        `symbols`: int8 `[words]`, 0 for `<eos>`, 1 for `<unk>`, -1 for other words; not with marks.
        `lengths`: int32 `[words]`, the number of letters of each row.
        `row_of_word`: int32 `[words]`, the row of each word id in the other arrays, which are
            sorted by length.

    Raises:
        InputError: ids of a tokenizer, which have no letters.

    >>> spelling(Vocabulary.build({"cat": 2, "<eos>": 1}), 4)["letters"]
    array([[  0,   0,   0,   0],
           [100,  98, 117,   0]], dtype=uint8)
    """
    if vocabulary.unit == "token":
        raise InputError(
            "this input or table composes words from letters, which ids of a tokenizer"
            " (data.corpus=ids or data.tokenizer) do not have: pass --config.input.name=adaptive or"
            " lookup, and a table that is own or tied"
        )
    letters = np.full(
        (len(vocabulary), length), PADDING if marks else 0, np.int16 if marks else np.uint8
    )
    symbols = np.full(len(vocabulary), -1, np.int8)
    lengths = np.zeros(len(vocabulary), np.int32)
    for number, (word, text) in enumerate(zip(vocabulary.words, vocabulary.utf8, strict=True)):
        if word in SYMBOLS and not marks:
            symbols[number] = SYMBOLS.index(word)
            continue
        read = np.frombuffer(text, np.uint8)[:length].astype(np.int16) + 1
        if marks:
            inner = [SENTENCES[word]] if word in SENTENCES else read
            read = np.array([BEGIN, *inner, END])[:length]
        lengths[number] = len(read)
        # UTF-8 has no byte 255
        letters[number, : len(read)] = read if marks else np.minimum(read, 255)
    order = np.argsort(lengths, kind="stable")
    row_of_word = np.argsort(order, kind="stable").astype(np.int32)
    arrays = {"letters": letters[order], "lengths": lengths[order], "row_of_word": row_of_word}
    arrays |= {} if marks else {"symbols": symbols[order]}
    for array in arrays.values():
        array.flags.writeable = False
    return arrays
