"""Tokenisers: functions that separate the words of a line of running text by spaces."""

import functools
import re
from collections.abc import Callable

from adaptive_jax.data.vocabulary.words import BYTE_ORDER_MARK, EOS, UNKNOWN, combining_marks
from adaptive_jax.errors import check_known

SPECIAL = re.compile(rf"(?<!\S)({UNKNOWN}|{EOS})(?!\S)")


def marks() -> Callable[[str], str]:
    """Returns a tokeniser that separates words, numbers and punctuation marks: `"Noah’s ark, he
    said."` becomes `"Noah’s ark , he said ."`. Words keep inner hyphens and apostrophes.
    """
    letters = rf"[^\W\d_]+(?:[{combining_marks()}]+[^\W\d_]*)*"
    word_number_or_mark = re.compile(rf"{letters}(?:['’-]{letters})*|\d+|[^\w\s]|_")
    return lambda line: " ".join(word_number_or_mark.findall(line))


def moses() -> Callable[[str], str]:
    """Returns the tokeniser of Moses for English, as ported by sacremoses: `"Mr Smith's."`
    becomes `"Mr Smith 's ."`.
    """
    import sacremoses

    tokenizer = sacremoses.MosesTokenizer(lang="en")
    return lambda line: tokenizer.tokenize(line, return_str=True, escape=False)


TOKENISERS = {"none": lambda: str, "marks": marks, "moses": moses}


@functools.cache
def tokeniser(name: str, lower: bool) -> Callable[[str], str]:
    """Returns the tokeniser of this name, which also lower-cases its line if `lower` is set.

    Lower-casing comes last, because capitals tell a tokeniser where sentences begin. `<unk>` and
    `<eos>` stay words. A byte order mark at the start of a line is removed, since files that begin
    with one may have been joined; within a line it is a word of WikiText.

    Raises:
        InputError: an unknown name.
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
