"""Byte-pair encoding: words written in units learnt from the train split, a vocabulary like any
other.

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

# Part of the path of learnt units: increase it when the same text and codes are to give others
FORMAT = 3
MARK = "▁"  # U+2581
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
FILE = "subwords.model"
# Three units for one character in ten thousand cost nothing. A unit for each would add thousands
# that are seen a few times.
COVERAGE = 0.9999
LONGEST = 512  # characters of a unit: the most that sentencepiece takes
# No learnt unit may read like one of the fixed units, or contain what sentencepiece gives a meaning
# of its own.
RESERVED = re.compile(f"{EOS}|{UNKNOWN}|<0x[0-9A-F]{{2}}>|[\0{MARK}\u2585]")


class TooManyCodes(InputError):
    """A text gives fewer merges than asked for: `able` of them, its second argument."""

    def __init__(self, message: str, able: int):
        super().__init__(message)
        self.able = able


@dataclasses.dataclass(frozen=True, eq=False)
class Subwords(Vocabulary):
    """Units of words in the order of their ids. `build` puts the most frequent first; units that
    the train split never uses are last.

    >>> counts = {"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}
    >>> subwords = Subwords.build(counts, codes=10)
    >>> [subwords.words[i] for i in subwords.encode("lowest")]
    ['low', 'est▁', '<eos>']

    words: the units: learnt ones, characters, the mark "▁" alone, the 256 bytes "<0x00>" to
        "<0xFF>", `<eos>`, and `<unk>` if it is a word of the train split. These two are never
        split; all other text can be.
    model: the model of sentencepiece that finds the units of a word.
    """

    model: bytes = dataclasses.field(repr=False)
    spells, mark, file = True, MARK.encode(), FILE

    @classmethod
    def build(cls, counts: Mapping[str, int], codes: int) -> "Subwords":
        """Learns `codes` merges, each of the neighbouring units that are most frequent at that
        time.

        counts: occurrences of each word; for `<eos>` the number of lines.
        Raises InputError for codes < 1, for more than the words give, and if there is no word to
        learn from.
        """
        if codes < 1:
            raise InputError(
                f"data.codes={codes} must be 1 or more, or 0 for a vocabulary of words"
            )
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
        """See `Vocabulary.from_lines`. Raises InputError if the model is not there, too."""
        plain, file = Vocabulary.from_lines(path, counts), path_of(path).with_name(FILE)
        try:
            return cls(plain.words, plain.counts, file.read_bytes())
        except OSError as error:
            raise InputError(
                f"cannot read {file}, the model of {path}: {error.strerror}; restore it"
            ) from error

    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the units of words, int32 `[units]`, and how many each word has, int32
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
        """The first character of the last word, unless white space ends it."""
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
        """The letters of each unit, UTF-8 with the mark. Those of a word's units give that word
        and one mark.
        """
        single = {name: bytes([byte]) for byte, name in enumerate(BYTES)}
        return tuple(single.get(word) or word.encode("utf-8") for word in self.words)

    @functools.cached_property
    def _units(self) -> Callable[[str], tuple[int, ...]]:
        """A function from a word to the ids of its units, computed once a word."""
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
            # For example a mark within the word, which sentencepiece takes for the end of one.
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
    words = dict(parts)
    if not words:
        raise InputError(
            f"the train split has no words to learn data.codes={codes} from; set data.codes=0"
        )
    characters: collections.Counter[str] = collections.Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    ranked = most_frequent_first(characters)
    reached = np.cumsum([count for _, count in ranked])
    common = {c for c, _ in ranked[: 1 + np.searchsorted(reached, COVERAGE * reached[-1])]}
    words = {w: n for w, n in words.items() if common.issuperset(w)}
    most = min(codes, sum(map(len, words)))  # each merge takes at least one character
    # Beside merges: sentencepiece's own <unk>, bytes, the mark, characters.
    fixed = 1 + len(BYTES) + 1 + len(set("".join(words)))
    model = _train(words, fixed + most)
    # When every word is one unit, sentencepiece goes on with pairs that no longer occur.
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
    """The package; whole words do without it."""
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
    """Bytes, merges in order and characters of a model, without sentencepiece's own <unk>."""
    processor = _sentencepiece().SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(1, processor.vocab_size())]
