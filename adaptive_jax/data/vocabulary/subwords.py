"""Byte-pair encoding: words spelled in units learnt from the train split.

Baevski & Auli 2019, section 4.4, after Sennrich et al. 2016. The unit that ends a word carries a
mark, so a word's probability is the product of those of its units, and perplexity remains per word
of the text:

    lowest .    low  est▁  .▁  <eos>
"""

import collections
import dataclasses
import functools
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary, most_frequent_first
from adaptive_jax.errors import InputError, of_extra
from adaptive_jax.files import path_of

# Part of the path of learnt units: increase it when the same text and codes give other units
FORMAT = 3
MARK = "▁"  # U+2581
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
FILE = "subwords.model"
# The other characters are spelled in bytes: three units for one character in ten thousand cost
# nothing, and a unit for each would add thousands that are seen a few times.
COVERAGE = 0.9999
LONGEST = 512  # characters of a unit: the maximum of sentencepiece
# Learnt units must not read like fixed units, nor contain special characters of sentencepiece.
RESERVED = re.compile(f"{EOS}|{UNKNOWN}|<0x[0-9A-F]{{2}}>|[\0{MARK}\u2585]")


class TooManyCodes(InputError):
    """Error for a text that gives only `able` merges, the second argument."""

    def __init__(self, message: str, able: int):
        super().__init__(message)
        self.able = able


@dataclasses.dataclass(frozen=True, eq=False)
class Subwords(Vocabulary):
    """Units of words in the order of their ids. `build` puts the most frequent first, and units
    that the train split never uses last.

    >>> counts = {"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}
    >>> subwords = Subwords.build(counts, codes=10)
    >>> [subwords.words[i] for i in subwords.encode("lowest")]
    ['low', 'est▁', '<eos>']

    words: the units: learnt ones, characters, the mark "▁" alone, the 256 bytes "<0x00>" to
        "<0xFF>", `<eos>`, and `<unk>` if it is a word of the train split. The last two are never
        split.
    model: the sentencepiece model that finds the units of a word.
    """

    model: bytes = dataclasses.field(repr=False)
    spells, mark, file = True, MARK.encode(), FILE

    @classmethod
    def build(cls, counts: Mapping[str, int], codes: int) -> "Subwords":
        """Learns `codes` merges, each of the most frequent pair of neighbouring units at that time.

        counts: occurrences of each word; for `<eos>` the number of lines.
        codes: 1 or more.

        Raises:
            InputError: more merges than the words give.
        """
        model = _learn(counts, codes)
        names = (*_pieces(model), EOS, *([UNKNOWN] if UNKNOWN in counts else []))
        draft = cls(names, np.zeros(len(names), np.int64), model)
        times = dict.fromkeys(names, 0)
        for word, count in counts.items():
            for i in draft._units(word):
                times[names[i]] += count
        words, numbers = zip(*most_frequent_first(times), strict=True)
        return cls(words, np.array(numbers, np.int64), model)

    @classmethod
    def from_lines(cls, path: str | os.PathLike, counts: Mapping[str, int]) -> "Subwords":
        """See `Vocabulary.from_lines`."""
        plain, model = Vocabulary.from_lines(path, counts), path_of(path).with_name(FILE)
        return cls(plain.words, plain.counts, model.read_bytes())

    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the units of words, int32 `[units]`, and the number of each word's units, int32
        `[words]`.
        """
        units = list(map(self._units, words))
        lengths = np.fromiter(map(len, units), np.int32, len(units))
        return np.fromiter(itertools.chain.from_iterable(units), np.int32, lengths.sum()), lengths

    def whole_words(self, ids: Iterable[int]) -> Iterator[str]:
        """See `Vocabulary.whole_words`."""
        spelling = b""
        for token in ids:
            if self.words[token] in (EOS, UNKNOWN):
                if spelling:  # no text has this, but a model may write it
                    yield spelling.decode(errors="replace")
                yield self.words[token]
                spelling = b""
                continue
            spelling += self.utf8[token]
            if self.ends_word[token]:
                yield spelling.removesuffix(self.mark).decode(errors="replace")
                spelling = b""
        if spelling:
            yield spelling.decode(errors="replace")

    def border(self, text: str) -> int:
        """Index of the first character of the last word, unless white space ends it."""
        last = "" if text[-1:].isspace() or not text else text.split()[-1]
        return len(text) - len(last)

    @property
    def unigram_probs(self) -> np.ndarray:
        """float64 `[V]`: the probability of each unit by its count. One extra count is spread over
        all units, since open text may use any of them.
        """
        return (self.counts + 1 / len(self)) / (self.counts.sum() + 1)

    @functools.cached_property
    def ends_word(self) -> np.ndarray:
        """bool `[V]`: whether a unit ends a word."""
        return np.array([word.endswith(MARK) or word in (EOS, UNKNOWN) for word in self.words])

    @functools.cached_property
    def utf8(self) -> tuple[bytes, ...]:
        """The letters of each unit, UTF-8. The units of a word spell the word and one mark."""
        single = {name: bytes([byte]) for byte, name in enumerate(BYTES)}
        return tuple(single.get(word) or word.encode("utf-8") for word in self.words)

    @functools.cached_property
    def _units(self) -> Callable[[str], tuple[int, ...]]:
        """A function from a word to the ids of its units, which are computed once."""
        processor = _sentencepiece().SentencePieceProcessor(model_proto=self.model)
        pieces = map(processor.id_to_piece, range(processor.vocab_size()))
        ids_of_pieces = list(map(self.index.get, pieces))
        mark = MARK.encode("utf-8")

        @functools.cache
        def split(word: str) -> tuple[int, ...]:
            if word in (EOS, UNKNOWN) and word in self.index:
                return (self.index[word],)
            text = word.encode("utf-8")
            ids = tuple(ids_of_pieces[i] for i in processor.encode(word))
            if MARK not in word and b"".join(self.utf8[i] for i in ids) == text + mark:
                return ids
            # For example, sentencepiece takes a mark within the word for its end.
            return (*(self.index[BYTES[byte]] for byte in text), self.index[MARK])

        return split


def _learn(counts: Mapping[str, int], codes: int) -> bytes:
    """A sentencepiece model of `codes` merges."""
    parts: collections.Counter[str] = collections.Counter()
    for word, count in counts.items():
        if RESERVED.search(word):
            continue
        for start in range(0, len(word), LONGEST - 1):
            parts[word[start : start + LONGEST - 1]] += count
    characters: collections.Counter[str] = collections.Counter()
    for word, count in parts.items():
        for character in word:
            characters[character] += count
    ranked = most_frequent_first(characters)
    reached = np.cumsum([count for _, count in ranked])
    common = {c for c, _ in ranked[: 1 + np.searchsorted(reached, COVERAGE * reached[-1])]}
    words = {word: count for word, count in parts.items() if common.issuperset(word)}
    most = min(codes, sum(map(len, words)))  # each merge takes at least one character
    # Beside merges: sentencepiece's own <unk>, bytes, the mark, characters.
    fixed = 1 + len(BYTES) + 1 + len(set("".join(words)))
    model = _train(words, fixed + most)
    # After every word is one unit, sentencepiece learns pairs that do not occur.
    learnt = _pieces(model)[len(BYTES) : len(BYTES) + most]
    merges = {piece: number for number, piece in enumerate(learnt, start=1)}
    able = min(most, max(merges.get(word + MARK, codes) for word in words))
    if able < codes:
        raise TooManyCodes(
            f"data.codes={codes} is more than the train split gives: {able} merges make every word"
            f" one unit; set data.codes={able} or less, or 0 for a vocabulary of words",
            able,
        )
    return model


def _sentencepiece():
    """Imports the package, which vocabularies of words do not need."""
    with of_extra("train"):
        import sentencepiece
    return sentencepiece


def _train(words: Mapping[str, int], size: int) -> bytes:
    model = io.BytesIO()
    _sentencepiece().SentencePieceTrainer.train(
        sentence_iterator=(f"{word}\t{count}" for word, count in words.items()),
        input_format="tsv",
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        hard_vocab_limit=False,  # a text may have fewer pairs
        character_coverage=1.0,
        byte_fallback=True,
        treat_whitespace_as_suffix=True,
        normalization_rule_name="identity",
        split_by_unicode_script=False,
        max_sentencepiece_length=LONGEST,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        minloglevel=2,
    )
    return model.getvalue()


def _pieces(model: bytes) -> list[str]:
    """Bytes, merges in order, and characters of a model, without sentencepiece's `<unk>`."""
    processor = _sentencepiece().SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(1, processor.vocab_size())]
