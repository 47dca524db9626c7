"""Raw text to the tokens of a run, and back: words are split as the run's corpus was.

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
OPEN = 3  # units at the end of a text that what follows may change
OPENING, CLOSING = "([{“‘", ",.;:?!)]}”’"


class Lines(NamedTuple):
    """Conversion of a run's text to tokens and back.

    Attributes:
        vocabulary: of the run.
        split: separates the words of a line as the corpus was prepared.
        join: puts words together as running text has them where that is known, else with spaces.
    """

    vocabulary: Vocabulary
    split: Split
    join: Join

    @classmethod
    def of(cls, data: Mapping, vocabulary: Vocabulary) -> "Lines":
        """Those of a run. data: the group of its config.

        Raises:
            InputError: a corpus that does not exist.
        """
        lines = vocabulary.unit == "token" and vocabulary.spells  # its words are whole lines
        join = "".join if lines else _joiner(data)
        return cls(vocabulary, tokeniser(data["tokeniser"], data["lower"]), join)

    def words(self, text: str) -> list[str]:
        """The words of text, with an `<eos>` for each line feed; of ids none of which ends a
        document, with none.

        Raises:
            InputError: not a string, or one with characters that text never has: NUL, or bytes that
                were not UTF-8.
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
        """Tokens of words, int32 `[tokens]`, and how many each word has, int32 `[words]`. `<eos>`
        is a word here.

        Raises:
            InputError: a word that the run does not know, where it has no `<unk>`.
        """
        vocabulary = self.vocabulary
        if not vocabulary.spells and UNKNOWN not in vocabulary.index:
            missing = next((word for word in words if word not in vocabulary.index), None)
            if missing is not None:
                cure = f"which has no {UNKNOWN}: leave it out, or train with data.threshold=2"
                if vocabulary.unit == "token":
                    cure = f"which reads ids: use 0 to {len(vocabulary) - 1}, separated by spaces"
                raise InputError(
                    f"{missing[:60]!r} is not one of the {len(vocabulary):,} {vocabulary.unit}s of"
                    f" this run, {cure}"
                )
        return vocabulary.encode_words(words)

    def unseen(self, text: str) -> Iterator[bool]:
        """True for each word of text that the run does not know; False where units spell it."""
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
        white space, and where the vocabulary is of words, which are complete.
        """
        border = self.vocabulary.border(text)
        return text[:border], text[border:]

    def encode_open(self, text: str) -> tuple[np.ndarray, bytes]:
        """`encode` without the last `OPEN` units of a word that has no end, and what these spell,
        UTF-8: together with what follows the text, other units may spell it.
        """
        ids, lengths = self.tokens(self.words(text))
        if not len(ids) or not self.split_open_word(text)[1]:
            return ids, b""
        names, spells, end = self.vocabulary.words, self.vocabulary.utf8, len(ids)
        for i in ids[::-1][: min(OPEN, lengths[-1])]:
            if names[i] in (EOS, UNKNOWN) or not spells[i]:  # no letters of the text
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

        Words that `encode` does not change come back as they were; an unknown word is `<unk>`.
        Units of sub-words that end in the middle of a character give U+FFFD.

        Raises:
            InputError: a token that the vocabulary does not have, or one that is no whole number.
        """
        tokens = np.asarray(list(ids))
        if tokens.ndim > 1 or (len(tokens) and tokens.dtype.kind not in "iu"):
            raise InputError(
                f"tokens must be whole numbers in one dimension, got {tokens.dtype} of shape"
                f" {tokens.shape}"
            )
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
