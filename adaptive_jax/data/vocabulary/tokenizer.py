"""A vocabulary from a tokenizer of the `tokenizers` library: its ids in order of frequency. Lines
of text are encoded whole, spaces included.

vocabulary.txt has the form of `TokenIds`, and tokenizer.json is beside it.
"""

import dataclasses
import functools
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from adaptive_jax.data.vocabulary.token_ids import TokenIds
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN
from adaptive_jax.errors import InputError, of_extra, one_line
from adaptive_jax.files import path_of

FILE = "tokenizer.json"
BATCH = 1024  # lines encoded together: the library needs some 200 bytes for each token
BYTE = re.compile("<0x([0-9A-F]{2})>")
# Characters that stand for bytes in byte-level tokenizers: printable ones stand for themselves, as
# in Latin-1, the others follow from 256 on (Radford et al. 2019).
PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
CHARACTERS = {chr(byte): byte for byte in PRINTED} | {
    chr(256 + n): byte for n, byte in enumerate(sorted({*range(256)} - {*PRINTED}))
}


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer(TokenIds):
    """Token ids with their tokenizer, which encodes and decodes text.

    model: the content of its tokenizer.json.
    """

    model: bytes = dataclasses.field(repr=False)
    spells, file = True, FILE

    @classmethod
    def build(cls, counts: Mapping[str, int], model: bytes, eos: int) -> "Tokenizer":
        """Makes the vocabulary of a training text.

        Args:
            counts: occurrences of each line; for `<eos>` the number of lines.
            model: content of a tokenizer.json.
            eos: the id that ends a line.
        """
        size = size_of(model)
        draft = cls.of(TokenIds.of_counts(np.zeros(size, np.int64), eos), model)
        totals, lines = np.zeros(size, np.int64), [*counts]
        for begin in range(0, len(lines), BATCH):
            batch = lines[begin : begin + BATCH]
            tokens, lengths = draft.encode_words(batch)
            times = np.repeat([counts[line] for line in batch], lengths)
            np.add.at(totals, draft.ids[tokens], times)
        return cls.of(TokenIds.of_counts(totals, eos), model)

    @classmethod
    def of(cls, ids: TokenIds, model: bytes) -> "Tokenizer":
        """Joins ids with their tokenizer.

        Raises:
            InputError: the tokenizer has more ids, or does not keep the spaces of a text.
        """
        if (size := size_of(model)) > len(ids):
            raise InputError(
                f"data.vocabulary_size={len(ids)} must be {size:,} or more, the ids of"
                " data.tokenizer"
            )
        if not _keeps_spaces(_loaded(model)):
            raise InputError(
                "data.tokenizer must keep the spaces of a text, which this"
                f" {type(_loaded(model).model).__name__} tokenizer drops"
            )
        return cls(ids.words, ids.counts, model)

    @classmethod
    def from_lines(cls, path: str | os.PathLike, counts: Mapping[str, int]) -> "Tokenizer":
        """See `Vocabulary.from_lines`."""
        return cls.of(TokenIds.from_lines(path, counts), read_model(path_of(path).with_name(FILE)))

    def split(self, line: str) -> list[str]:
        """The line as the only word; none if it is empty."""
        return [line] if line else []

    def encode_words(self, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the tokens of lines, int32 `[tokens]`, and the number of each line's tokens,
        int32 `[lines]`. `<eos>` is a line here.
        """
        encoded = self._program.encode_batch(list(words), add_special_tokens=False)
        units = [
            [self.eos] if word == EOS else self.entry_of_id[encoding.ids]
            for word, encoding in zip(words, encoded, strict=True)
        ]
        lengths = np.fromiter(map(len, units), np.int32, len(units))
        return np.fromiter(itertools.chain.from_iterable(units), np.int32, lengths.sum()), lengths

    def whole_words(self, ids: Iterable[int]) -> Iterator[str]:
        """The lines that tokens spell, and an `<eos>` for each token that ends a line."""
        for ends, line in itertools.groupby(ids, lambda i: self.words[i] == EOS):
            if ends:
                yield from (EOS for _ in line)
            else:
                yield self._program.decode(self.ids[list(line)].tolist(), skip_special_tokens=False)

    def border(self, text: str) -> int:
        """Index of the first character of the last line, whose tokens may change when text is
        appended.
        """
        return text.rfind("\n") + 1

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """The index of `TokenIds`, with the tokenizer's unknown token as `<unk>`."""
        index, model = super().index, json.loads(self._program.to_str())["model"]
        unknown = model.get("unk_id")
        if unknown is None:
            unknown = self._program.token_to_id(model.get("unk_token") or "")
        entry = None if unknown is None else int(self.entry_of_id[unknown])
        return index if entry in (None, index.get(EOS)) else index | {UNKNOWN: entry}

    @functools.cached_property
    def utf8(self) -> tuple[bytes, ...]:
        """The bytes of each token; empty for special tokens and ids that the tokenizer lacks."""
        settings = json.loads(self._program.to_str())  # older files lack some keys
        of_bytes = "ByteLevel" in json.dumps(settings["decoder"])
        added = self._program.get_added_tokens_decoder()

        def spelling(entry, i):
            if self.words[entry] == EOS:
                return EOS.encode()
            token = "" if entry in self.special else self._program.id_to_token(i) or ""
            if i in added:
                return token.encode()
            if of_bytes:
                is_spelt = CHARACTERS.keys() >= {*token}
                return bytes(map(CHARACTERS.get, token)) if is_spelt else token.encode()
            byte = BYTE.fullmatch(token)
            return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()

        return tuple(itertools.starmap(spelling, enumerate(self.ids.tolist())))

    @functools.cached_property
    def special(self) -> dict[int, str]:
        """The letters of special tokens but `<eos>`, which `utf8` lacks, by entry."""
        added = self._program.get_added_tokens_decoder().items()
        special = {int(self.entry_of_id[i]): token.content for i, token in added if token.special}
        return {i: text for i, text in special.items() if self.words[i] != EOS}

    @property
    def _program(self):
        return _loaded(self.model)


def read_model(path: str | os.PathLike) -> bytes:
    """Reads a tokenizer.json. Raises InputError if it cannot be read."""
    try:
        return path_of(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the tokenizer {path}: {error.strerror}") from error


def size_of(model: bytes) -> int:
    """The number of ids of a tokenizer.json."""
    return 1 + max(_loaded(model).get_vocab().values())


def _keeps_spaces(program):
    """False for a tokenizer that splits text at its spaces, or marks where words end or go on
    instead.
    """
    model, splitter = program.model, program.pre_tokenizer
    if any(getattr(model, f, None) for f in ("continuing_subword_prefix", "end_of_word_suffix")):
        return False
    return not splitter or len("".join(part for part, _ in splitter.pre_tokenize_str("a b"))) > 2


@functools.lru_cache(maxsize=2)
def _loaded(model):
    """The tokenizer in a tokenizer.json, without truncation and padding."""
    with of_extra("tokenizer"):
        import tokenizers
    try:
        program = tokenizers.Tokenizer.from_str(model.decode())
    except Exception as error:  # the library raises plain ones
        raise InputError(
            f"data.tokenizer must be a tokenizer.json of the tokenizers library: {one_line(error)}"
        ) from error
    program.no_truncation()
    program.no_padding()
    return program
