"""Tokenisers: they separate the words of a line of running text by spaces."""

import functools
import re
from collections.abc import Callable

from adaptive_jax.data.vocabulary.words import BYTE_ORDER_MARK, EOS, UNKNOWN
from adaptive_jax.errors import check_known

LETTERS = r"(?:[^\W\d_][\u0300-\u036f]*)+"  # accents may be characters of their own
SPECIAL = re.compile(rf"(?<!\S)({UNKNOWN}|{EOS})(?!\S)")
MARKS = rf"{LETTERS}(?:['’-]{LETTERS})*|\d+|[^\w\s]|_"  # words, numbers, punctuation marks


def moses() -> Callable[[str], str]:
    """Returns the tokeniser of Moses for English, as ported by sacremoses: `"Mr Smith's."`
    becomes `"Mr Smith 's ."`.
    """
    import sacremoses

    tokenizer = sacremoses.MosesTokenizer(lang="en")
    return lambda line: tokenizer.tokenize(line, return_str=True, escape=False)


def separate_marks(line: str) -> str:
    """Separates words, numbers and punctuation marks: `"Noah’s ark, he said."` becomes
    `"Noah’s ark , he said ."`. Words keep inner hyphens and apostrophes.
    """
    return " ".join(re.findall(MARKS, line))


TOKENISERS = {"none": lambda: str, "marks": lambda: separate_marks, "moses": moses}


@functools.cache
def tokeniser(name: str, lower: bool) -> Callable[[str], str]:
    """Returns the function of this name from line to line, which lower-cases if asked to.
    InputError: an unknown name.

    It lower-cases last: capitals tell a tokeniser where sentences begin. `<unk>` and `<eos>` stay
    words, and a byte order mark at the start of a line is left out, where files that begin with one
    were joined; within a line it is a word of WikiText.
    """
    check_known(f"data.tokeniser={name!r}", name, TOKENISERS)
    split = TOKENISERS[name]()

    def words(line: str) -> str:
        line = line.removeprefix(BYTE_ORDER_MARK)
        if name != "none":
            parts = enumerate(SPECIAL.split(line))  # every second one is `<unk>` or `<eos>`
            line = " ".join(part if i % 2 else split(part) for i, part in parts)
        return line.lower() if lower else line

    return words
