"""Byte-pair encoding: words spelt in units learnt from the train split, a vocabulary like any other.

Baevski & Auli 2019, section 4.4, after Sennrich et al. 2016. The unit that ends a word carries a mark, so a word's
probability is the product of those of its units, and perplexity stays per word of the text:

    lowest .    low  est▁  .▁  <eos>
"""

import collections
import dataclasses
import functools
import hashlib
import io
import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import sentencepiece

from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary, most_frequent_first
from adaptive_jax.errors import InputError
from adaptive_jax.files import replacing

FORMAT = 1  # part of where learnt units are kept: count it up when the same text and codes are to give others
MARK = "▁"  # U+2581
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
FILE = "subwords.model"
SEAL = bytes([0xC2, 0x0C, 32])  # of a protocol buffer: 32 bytes follow, as field 200
# Three units for one character in ten thousand cost nothing; a unit for each would be thousands, seen a few times.
COVERAGE = 0.9999
LONGEST = 512  # characters of a unit: the most that sentencepiece takes
# No unit may read like one of those that are not learnt, nor hold what sentencepiece gives a meaning of its own.
RESERVED = re.compile(f"{EOS}|{UNKNOWN}|<0x[0-9A-F]{{2}}>|[\0{MARK}\u2585]")


class _Spelt(dict[str, tuple[int, ...]]):
    """Word to the ids of its units, worked out once."""

    def __init__(self, spell: Callable[[str], tuple[int, ...]]):
        self.spell = spell

    def __missing__(self, word: str) -> tuple[int, ...]:
        self[word] = ids = self.spell(word)
        return ids


@dataclasses.dataclass(frozen=True, eq=False)
class Subwords(Vocabulary):
    """Units of words, most frequent first, those that the train split never needs last.

    >>> subwords = Subwords.build({"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}, codes=10)
    >>> [subwords.words[i] for i in subwords.encode("lowest")]
    ['low', 'est▁', '<eos>']

    words: the units: learnt ones, characters, the mark "▁" alone, the 256 bytes "<0x00>" to "<0xFF>", `<eos>`, and
        `<unk>` if the train split has it as a word; these two are never spelt, and any other text can be.
    model: learnt by sentencepiece, which finds the units of a word.
    """

    model: bytes = dataclasses.field(repr=False)

    @classmethod
    def build(cls, counts: Mapping[str, int], codes: int) -> "Subwords":
        """Learns `codes` merges of neighbouring units, each the most frequent pair of its time, or all that there are.

        counts: occurrences of each word; that of `<eos>` is the number of lines.
        Raises InputError for codes < 1, and where no word can be learnt from.
        """
        if codes < 1:
            raise InputError(f"data.codes={codes} must be 1 or more, or 0 for a vocabulary of words")
        model = _learn(counts, codes)
        names = (*_pieces(model), EOS, *([UNKNOWN] if UNKNOWN in counts else []))
        draft = cls(names, np.zeros(len(names), np.int64), model)
        times = [0] * len(names)
        for word, count in counts.items():
            for i in draft._spelt[word]:
                times[i] += count
        words, numbers = zip(*most_frequent_first(dict(zip(names, times, strict=True))), strict=True)
        return cls(words, np.array(numbers, np.int64), model)

    @classmethod
    def read(cls, path: str | os.PathLike) -> "Subwords":
        """Reads what `write` wrote. Raises InputError for anything else."""
        plain = Vocabulary.read(path)
        file = Path(path).with_name(FILE)
        cure = f"restore it, or remove it and {path} to have both made again from the corpus"
        try:
            model = file.read_bytes()
        except OSError as error:
            raise InputError(f"cannot read the model of {path}, {file}: {error.strerror}; {cure}") from error
        if model != _sealed(model[: -len(SEAL) - 32]):
            raise InputError(f"the model of {path}, {file}, is damaged; {cure}")
        if {*_pieces(model), EOS} != set(plain.words) - {UNKNOWN}:
            raise InputError(f"the model of {path}, {file}, has other units; {cure}")
        return cls(plain.words, plain.counts, model)

    def write(self, path: str | os.PathLike) -> None:
        """Writes one `unit count` a line, UTF-8, most frequent first, and the model beside it as subwords.model."""
        with replacing(Path(path).with_name(FILE)) as file:
            file.write(self.model)
        super().write(path)  # last: where it is, the model is too

    def encode(self, line: str) -> list[int]:
        """Ids of the units of the words of a line, `<eos>` last."""
        return [i for word in (*line.split(), EOS) for i in self._spelt[word]]

    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The units of words, one word after another, int32 [units], and how many each has, int32 [words]."""
        spelt = list(map(self._spelt.__getitem__, words))
        lengths = np.fromiter(map(len, spelt), np.int32, len(spelt))
        return np.fromiter(itertools.chain.from_iterable(spelt), np.int32, lengths.sum()), lengths

    @property
    def chances(self) -> np.ndarray:
        """float64 [V]: how likely each unit is by its count. All share one more: open text may need a unit never used."""
        return (self.counts + 1 / len(self)) / (self.counts.sum() + 1)

    def count_words(self, ids: np.ndarray) -> int:
        """How many words of the text, `<eos>` included, end in ids [tokens]."""
        part = 1 << 20  # a split may be larger than memory
        return sum(int(self.ends[ids[i : i + part]].sum()) for i in range(0, len(ids), part))

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """bool [V]: whether a unit ends a word."""
        return np.array([word.endswith(MARK) or word in (EOS, UNKNOWN) for word in self.words])

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """Id of each unit."""
        return {word: i for i, word in enumerate(self.words)}

    @functools.cached_property
    def spellings(self) -> tuple[bytes, ...]:
        """What each unit spells, UTF-8 with the mark: joined over a word, that word and one mark."""
        single = {name: bytes([byte]) for byte, name in enumerate(BYTES)}
        return tuple(single.get(word) or word.encode("utf-8") for word in self.words)

    @functools.cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that differ when a unit, a count, the order or the model differs."""
        return hashlib.sha256(self._text.encode("utf-8") + self.model).hexdigest()[:16]

    @functools.cached_property
    def _spelt(self) -> dict[str, tuple[int, ...]]:
        processor = sentencepiece.SentencePieceProcessor(model_proto=self.model)
        places = [self.index.get(processor.id_to_piece(i)) for i in range(processor.vocab_size())]
        whole = {word: (self.index[word],) for word in (EOS, UNKNOWN) if word in self.index}

        def spell(word: str) -> tuple[int, ...]:
            if word in whole:
                return whole[word]
            text, mark = word.encode("utf-8"), MARK.encode("utf-8")
            ids = tuple(places[i] for i in processor.encode(word))
            if MARK not in word and b"".join(self.spellings[i] for i in ids) == text + mark:
                return ids
            # Such as a mark within the word, which sentencepiece takes for the end of one.
            return (*(self.index[BYTES[byte]] for byte in text), self.index[MARK])

        return _Spelt(spell)


def read_vocabulary(path: str | os.PathLike) -> Vocabulary:
    """Reads a vocabulary of words or of sub-word units, whichever was written. Raises InputError for anything else."""
    plain = Vocabulary.read(path)
    # Told by its units, not by the model beside it: a model that is missing is an error, one left over is not.
    return Subwords.read(path) if all(name in plain.index for name in (MARK, *BYTES)) else plain


def _learn(counts: Mapping[str, int], codes: int) -> bytes:
    """A sentencepiece model of `codes` merges, or of all that there are."""
    words = {w: n for w, n in counts.items() if len(w) < LONGEST and not RESERVED.search(w)}
    characters: collections.Counter[str] = collections.Counter()
    for word, count in words.items():
        for character in word:
            characters[character] += count
    if not words:
        raise InputError(f"the train split has no words to learn data.codes={codes} from; set data.codes=0")
    ranked = most_frequent_first(characters)
    reached = np.cumsum([count for _, count in ranked])
    common = {c for c, _ in ranked[: 1 + np.searchsorted(reached, COVERAGE * reached[-1])]}
    words = {w: n for w, n in words.items() if common.issuperset(w)}
    codes = min(codes, sum(map(len, words)))  # each merge takes one character or more
    others = 1 + len(BYTES) + 1 + len(set("".join(words)))  # sentencepiece's own <unk>, bytes, mark, characters
    model = _train(words, others + codes)
    # Once every word is whole, sentencepiece goes on with pairs that no longer occur.
    merges = {piece: k for k, piece in enumerate(_pieces(model)[len(BYTES) : len(BYTES) + codes], start=1)}
    needed = [merges.get(word + MARK, codes) for word in words]
    return model if max(needed) == codes else _train(words, others + max(needed))


def _train(words: Mapping[str, int], size: int) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
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
    return _sealed(model.getvalue())


def _pieces(model: bytes) -> list[str]:
    """Bytes, merges in order and characters of a model, without sentencepiece's own <unk>."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [processor.id_to_piece(i) for i in range(1, processor.vocab_size())]


def _sealed(model: bytes) -> bytes:
    """The model followed by its SHA-256, as an extension field of its format: other programs pass over it."""
    return model + SEAL + hashlib.sha256(model).digest()
