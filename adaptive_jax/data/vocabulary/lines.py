"""Conversion of raw text to the tokens of a run, and back. Words are split as in the run's corpus.

lines = Lines.of(run.config["data"], run.vocabulary)
lines.words("Noah’s ark, he said.")     # ["noah’s", "ark", ",", "he", "said", "."]
lines.encode("And God said,\\n")         # int32 [5]: four words and <eos>
lines.decode(ids)                        # "and god said,\\n"
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.corpora.published import CORPORA
from adaptive_jax.data.corpora.tokenise import tokeniser
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary
from adaptive_jax.errors import InputError, check_known

Split = Callable[[str], str]  # separates the words of a line by spaces
Join = Callable[[Sequence[str]], str]  # words of a line to running text

NOT_TEXT = re.compile("[\0\ud800-\udfff]")  # surrogates stand for bytes that are not UTF-8
OPEN = 3  # units at the end of a text that may change when text is appended
OPENING, CLOSING = "([{“‘", ",.;:?!)]}”’"


class Lines(NamedTuple):
    """Conversion of a run's text to tokens and back.

    Attributes:
        vocabulary: the vocabulary of the run.
        split: separates the words of a line, as when the corpus was prepared.
        join: joins words to running text if the corpus says how, else with spaces.
    """

    vocabulary: Vocabulary
    split: Split
    join: Join

    @classmethod
    def of(cls, data: Mapping, vocabulary: Vocabulary) -> "Lines":
        """Makes the conversion of a run.

        data: the group of its config.

        Raises:
            InputError: a corpus that does not exist.
        """
        lines = vocabulary.unit == "token" and vocabulary.spells  # words are whole lines
        join = "".join if lines else _joiner(data)
        return cls(vocabulary, tokeniser(data["tokeniser"], data["lower"]), join)

    def words(self, text: str) -> list[str]:
        """The words of text, with an `<eos>` for each line feed if the vocabulary has one.

        Raises:
            InputError: not a string, or a string with NUL or bytes that were not UTF-8.
        """
        if not isinstance(text, str):
            raise InputError(f"text must be a string, got {text!r:.40}")
        if NOT_TEXT.search(text):
            raise InputError(f"text must be UTF-8 without NUL bytes, got {text[:40]!r}")
        lines = text.replace("\r\n", "\n").split("\n")  # as in a corpus
        first, *rest = (self.vocabulary.split(self.split(line)) for line in lines)
        words, end = first, [EOS] * (EOS in self.vocabulary.index)
        for line in rest:
            words += end + line
        return words

    def tokens(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of words, int32 `[tokens]`, and the number of each word's tokens, int32
        `[words]`. `<eos>` is a word here.

        Raises:
            InputError: an unknown word, if the run has no `<unk>`.
        """
        return self.vocabulary.encode_words(words)

    def unseen(self, text: str) -> Iterator[bool]:
        """True for each word of text that the run does not know; False if units spell it."""
        index, spells = self.vocabulary.index, self.vocabulary.spells
        return (not spells and word not in index for word in self.words(text))

    def encode(self, text: str) -> np.ndarray:
        """Tokens of text, int32 `[tokens]`: the words of each line, and an `<eos>` for each line
        feed.

        A text that does not end with a line feed is a line that has begun. Raises InputError as
        `words` and `tokens`.
        """
        return self.tokens(self.words(text))[0]

    def split_open_word(self, text: str) -> tuple[str, str]:
        """Splits text before its last, possibly unfinished word. The second part is empty after
        white space, and for a vocabulary of words, which are always complete.
        """
        border = self.vocabulary.border(text)
        return text[:border], text[border:]

    def encode_open(self, text: str) -> tuple[np.ndarray, bytes]:
        """Encodes text without the last `OPEN` units of an unfinished word, and returns the tokens
        and the letters of these units, UTF-8, which other units may spell when text is appended.
        """
        ids, lengths = self.tokens(self.words(text))
        if not len(ids) or not self.split_open_word(text)[1]:
            return ids, b""
        names, spells, end = self.vocabulary.words, self.vocabulary.utf8, len(ids)
        for i in ids[::-1][: min(OPEN, lengths[-1])]:
            if names[i] in (EOS, UNKNOWN) or not spells[i]:  # not letters of the text
                break
            end -= 1
        spelling = b"".join(spells[i] for i in ids[end:])
        return ids[:end], spelling.removesuffix(self.vocabulary.mark)

    def units_within(self, ids: np.ndarray, begun: str) -> int:
        """Number of leading tokens that lie within `begun`, a prefix of their text."""
        spells, before = self.vocabulary.utf8, self.encode(begun)
        spelling = b"".join(spells[i] for i in before).removesuffix(self.vocabulary.mark)
        special = [i for i in before if not spells[i]]  # these have no letters
        number = end = 0
        for i in ids:
            if not spells[i] and special[:1] == [i]:
                del special[0]
            elif not spells[i] or not spelling.startswith(spells[i], end):
                break
            number, end = number + 1, end + len(spells[i])
        return number

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens, with a line feed for each `<eos>`.

        Unknown words become `<unk>`. Sub-word units that end in the middle of a character give
        U+FFFD.

        Raises:
            InputError: a token that the vocabulary does not have.
        """
        tokens = np.asarray(list(ids))
        invalid = tokens[(tokens < 0) | (tokens >= len(self.vocabulary))]
        if len(invalid):
            raise InputError(
                f"tokens must be from 0 to {len(self.vocabulary) - 1:,}, got {invalid[0]}"
            )
        lines: list[list[str]] = [[]]
        for word in self.vocabulary.whole_words(tokens.tolist()):
            lines.append([]) if word == EOS else lines[-1].append(word)
        return "\n".join(map(self.join, lines))


def _joiner(data) -> Join:
    name = data["tokeniser"]
    check_known(f"data.corpus={data['corpus']!r}", data["corpus"], CORPORA)
    if name == "none":
        name = CORPORA[data["corpus"]].join
    return {
        "spaces": " ".join,
        "marks": _attached,
        "moses": lambda words: _moses()(words) if words else "",
    }[name]


def _attached(words):
    """Joins words that the tokeniser `marks` has separated."""
    text = " ".join(words)
    text = re.sub(rf" (?=[{re.escape(CLOSING)}])", "", text)
    return re.sub(rf"(?<=[{re.escape(OPENING)}]) ", "", text)


@functools.cache
def _moses() -> Join:
    """The detokeniser of Moses for English, for text that Moses tokenised. WikiText also has
    `@,@` and `@.@` within numbers.
    """
    import sacremoses

    detokenizer = sacremoses.MosesDetokenizer(lang="en")
    return lambda words: detokenizer.detokenize(
        re.sub(" @([.,])@ ", r"\1", " ".join(words)).split(), unescape=False
    )
