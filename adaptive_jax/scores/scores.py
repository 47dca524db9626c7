"""Scores of tokens: one table, its sums, and its groups."""

import codecs
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary


class Scores(NamedTuple):
    """Scored tokens of a text, a row for each.

    Attributes:
        ids: int32 `[tokens]`, an array or `LazyIds`.
        nll: float `[tokens]` in nats, NaN for tokens of no example.
        rank: `[tokens]`, one more than the words that are more probable; None if not computed.
        entropy: `[tokens]` in nats, of the predicting distribution; None if not computed.
        place: int64 `[tokens]`, positions in the text; None if the rows are all of its tokens, in
            order.
    """

    ids: np.ndarray
    nll: np.ndarray
    rank: np.ndarray | None = None
    entropy: np.ndarray | None = None
    place: np.ndarray | None = None

    def take(self, which: np.ndarray | slice) -> "Scores":
        """The rows that a mask, indices or a slice selects."""
        return Scores(*(None if column is None else column[which] for column in self))

    @classmethod
    def unscored(cls, ids: np.ndarray, rank_and_entropy: bool = False) -> "Scores":
        """A table of tokens that are not scored yet: nll and entropy NaN, float64, and rank 0."""
        nll, entropy = np.full((2, len(ids)), np.nan)
        optional = (np.zeros(len(ids), np.int64), entropy) if rank_and_entropy else ()
        return cls(ids, nll, *optional)

    @classmethod
    def concatenated(cls, tables: Sequence["Scores"]) -> "Scores":
        """The rows of tables that have the same columns."""
        columns = zip(*tables, strict=True)
        return cls(*(None if parts[0] is None else np.concatenate(parts) for parts in columns))

    def counted(self) -> "Scores":
        """The tokens that are part of an example: those whose nll is not NaN."""
        return self._replace(ids=self.ids[:]).take(~np.isnan(self.nll))

    def words(self, vocabulary: Vocabulary) -> "Scores":
        """A row for each word: the id of its last unit, the sum of its units' nll in float64, and
        the place of its first unit in this table. Units after the last complete word are left out.

        If words have several units, rank and entropy are None.
        """
        bounds = np.append(0, 1 + np.flatnonzero(vocabulary.ends_word[self.ids]))
        starts, end = bounds[:-1], bounds[-1]
        nll = np.add.reduceat(self.nll[:end].astype(np.float64), starts) if len(starts) else []
        ids, nll = self.ids[bounds[1:] - 1], np.asarray(nll, np.float64)
        if self.rank is None or len(starts) < end:
            return Scores(ids, nll, place=starts)
        return Scores(ids, nll, self.rank[:end], self.entropy[:end], starts)

    def part(self, which: np.ndarray) -> dict:
        """The `share` of all rows that a mask selects, and their `perplexity`; None without rows.

        which: bool `[tokens]`, such as the tokens of one frequency bin.
        """
        mean = float(np.mean(self.nll[which], dtype=np.float64)) if which.any() else None
        return {
            "share": float(np.mean(which)),
            "perplexity": None if mean is None else perplexity(mean),
        }

    def seen_and_unseen(self, trained_words: int) -> dict:
        """`part` of the counted tokens whose words are in the training vocabulary, "seen", and of
        all others, "unseen". Ids of the training vocabulary are below `trained_words`.
        """
        tokens = self.counted()
        new = tokens.ids >= trained_words
        return {"seen": tokens.part(~new), "unseen": tokens.part(new)}

    def summary(self, vocabulary: Vocabulary) -> dict:
        """Loss and perplexity per word of the text: the probability of a word is the product of
        those of its units.

        Returns:
            For the tokens that count: `nll` (nats a word), `perplexity`, `words`, `tokens`;
            `unigram_perplexity`, computed from the words' training counts alone; `unknown`, the
            share of words that are `<unk>`; `known_perplexity`, the perplexity of all other words,
            None if no word is `<unk>`; `characters`, `bytes`, `bits_per_character` and
            `bits_per_byte`, see `lengths_of`. For a tokenizer's ids also `text_words` and
            `perplexity_per_text_word`, see `text_words_of`.
        """
        ids, nll, *_ = self.counted()
        words = vocabulary.count_words(ids)
        total = float(np.sum(nll, dtype=np.float64))
        mean, bits = total / words if words else math.inf, total / math.log(2)
        unknown, known_perplexity = vocabulary.unk_rate(ids), None
        if 0 < unknown < 1:
            in_vocabulary = ids != vocabulary.index[UNKNOWN]
            of_known = np.sum(nll[in_vocabulary], dtype=np.float64)
            known_perplexity = perplexity(
                float(of_known / vocabulary.count_words(ids[in_vocabulary]))
            )
        characters, size = lengths_of(ids, vocabulary)
        return {
            "nll": mean,
            "perplexity": perplexity(mean),
            "words": words,
            "tokens": len(nll),
            "unigram_perplexity": perplexity(vocabulary.unigram_nll(ids)),
            "unknown": unknown,
            "known_perplexity": known_perplexity,
            "characters": characters,
            "bytes": size,
            "bits_per_character": None if characters is None else bits / characters,
            "bits_per_byte": None if size is None else bits / size,
        } | text_words_of(ids, total, vocabulary)


def lengths_of(ids: np.ndarray, vocabulary: Vocabulary) -> tuple[int | None, int | None]:
    """Number of characters and of UTF-8 bytes in a text as the model reads it: its words, a space
    between two words, and the end of each line.

    ids: int32 `[tokens]`.

    Returns:
        None if a word is `<unk>`, whose characters are unknown, or if ids have no tokenizer.
    """
    tokens = vocabulary.unit == "token"
    if not len(ids) or (tokens and not vocabulary.spells) or vocabulary.unk_rate(ids):
        return None, None
    if tokens:
        spaces = -_added_spaces(ids, vocabulary)
    else:
        words, is_eos = vocabulary.ends_word[ids], ids == vocabulary.eos
        spaces = np.sum(words[:-1] & ~is_eos[:-1] & ~is_eos[1:])
    characters, size = (int(np.sum(lengths[ids]) + spaces) for lengths in _lengths(vocabulary))
    return characters, size


def _added_spaces(ids, vocabulary):
    """Number of spaces that the tokenizer puts before the lines of a text."""
    spaced = np.array([letters.startswith(b" ") for letters in vocabulary.utf8])
    if not spaced[vocabulary.encode_words(["a"])[0][:1]].any():
        return 0
    line_end = vocabulary.index.get(EOS, -1)
    return np.sum(spaced[ids[np.append(True, ids[:-1] == line_end)]])


def word_names(ids: Sequence[int], vocabulary: Vocabulary) -> list[str]:
    """The words of a text as `score --words` prints them; for a tokenizer's ids, the tokens. A
    token that ends within a character is empty; the token that completes the character has it.
    """
    if vocabulary.unit == "token" and vocabulary.spells:
        decoder, names = codecs.getincrementaldecoder("utf-8")("replace"), []
        for i in ids:
            if i in vocabulary.special or vocabulary.words[i] == EOS:  # ends any open character
                decoder.reset()
            letters = vocabulary.special.get(i) or decoder.decode(vocabulary.utf8[i])
            names.append(letters.strip())
        return names
    return list(vocabulary.whole_words(ids))


def text_words_of(ids: np.ndarray, nll: float, vocabulary: Vocabulary) -> dict:
    """Number of white-space words and line ends in the text of a tokenizer's ids, `text_words`, and
    the perplexity per word; {} for other vocabularies, whose perplexity already is per word.

    ids: int32 `[tokens]`. nll: their sum in nats.
    """
    if vocabulary.unit != "token" or not vocabulary.spells:
        return {}
    line_end, spellings = vocabulary.index.get(EOS, -1), _spellings(vocabulary)
    text = b"".join(b"\n" if i == line_end else spellings[i] for i in ids.tolist())
    text = text.decode(errors="replace")
    words = len(text.split()) + text.count("\n")
    return {"text_words": words, "perplexity_per_text_word": perplexity(nll / max(1, words))}


@functools.lru_cache(maxsize=1)
def _lengths(vocabulary):
    """Number of characters and of bytes of each token, int64 `[2, V]`. The mark that ends a word's
    last unit is not a character of the text; `<eos>` is a line feed.
    """
    spellings, mark = _spellings(vocabulary), vocabulary.mark
    characters = [sum(byte & 0xC0 != 0x80 for byte in letters) for letters in spellings]
    lengths = np.array([characters, [len(letters) for letters in spellings]])
    lengths -= np.array([[bool(mark)], [len(mark)]]) * vocabulary.ends_word
    if EOS in vocabulary.index:
        lengths[:, vocabulary.eos] = 1
    return lengths


def _spellings(vocabulary):
    """The letters of each token, UTF-8, those of a tokenizer's special tokens included."""
    special = getattr(vocabulary, "special", {})
    return [special.get(i, "").encode() or letters for i, letters in enumerate(vocabulary.utf8)]


def perplexity_text(value: float, digits: int = 2) -> str:
    """Formats a perplexity: 1,234.56, or 1.2e+24 from a million on."""
    if math.isinf(value):
        return "above 1e+304"
    return f"{value:,.{digits}f}" if value < 1e6 else f"{value:.1e}"


def perplexity(nll: float) -> float:
    """e^nll, infinite where that overflows."""
    return math.exp(nll) if nll < 700 else math.inf
