"""Character offsets of words in the text they came from."""

import re
from collections.abc import Sequence

import numpy as np

from adaptive_jax.data.vocabulary.words import EOS

BLANKS, BLANKS_OF_LINE = re.compile(r"\s*"), re.compile(r"[^\S\n]*")
DROPPED = 2  # characters that a tokeniser may drop before the next one


def places(text: str, words: Sequence[str]) -> np.ndarray:
    """Returns the start and the end of each word in its text, in characters: int64 `[words, 2]`.

    A tokeniser may change the case of letters, drop characters or replace one by another. `<eos>`
    is the line feed, or nothing at the end of the text. A token of blanks, or of the first bytes of
    a character, is "" and has the place of the next character in its line, or else of the last one.
    """
    lowered = [letter.lower() for letter in text]  # one letter or two
    letters, lengths = "".join(lowered), [*map(len, lowered)]
    spans, place = np.zeros((len(words), 2), np.int64), 0
    for number, word in enumerate(words):
        place = BLANKS_OF_LINE.match(letters, place).end()
        ends_line = letters[place : place + 1] in ("", "\n")
        if word == EOS and ends_line:
            spans[number], place = place, min(place + 1, len(letters))
            continue
        if not word:
            spans[number] = place, place + 1
            if ends_line:  # the last character of the line, if it has one
                spans[number] = place - (letters[place - 1 : place] not in ("", "\n")), place
            continue
        place, start = BLANKS.match(letters, place).end(), -1
        for letter in "".join(letter.lower() for letter in word):
            ahead = letters.find(letter, place, place + 1 + DROPPED)
            place = place if ahead < 0 else ahead
            start = place if start < 0 else start
            place = min(len(letters), place + 1)
        spans[number] = start, place
    characters = np.append(np.repeat(np.arange(len(text)), lengths), len(text))
    starts, ends = spans.T
    after = np.where(ends > starts, 1 + characters[np.maximum(ends, 1) - 1], characters[ends])
    return np.stack([characters[starts], after], axis=1)


def word_numbers(text: str, spans: np.ndarray) -> np.ndarray:
    """Returns the number of the white-space word in which each span begins, int64 `[spans]`; -1 for
    spans without characters, such as `<eos>`.
    """
    starts = np.array([match.start() for match in re.finditer(r"\S+", text)], np.int64)
    numbers = np.searchsorted(starts, spans[:, 0], side="right") - 1
    return np.where(spans[:, 1] > spans[:, 0], numbers, -1)
