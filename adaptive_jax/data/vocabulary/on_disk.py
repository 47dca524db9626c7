"""Vocabularies on disk with their checksums: vocabulary.txt, vocabulary.sha256, and subwords.model
or the tokenizer.json of a tokenizer.
"""

import os
from pathlib import Path

from adaptive_jax.data.vocabulary import tokenizer
from adaptive_jax.data.vocabulary.subwords import BYTES, MARK, Subwords
from adaptive_jax.data.vocabulary.token_ids import TokenIds, holds_ids
from adaptive_jax.data.vocabulary.tokenizer import Tokenizer
from adaptive_jax.data.vocabulary.words import Vocabulary, read_counts
from adaptive_jax.errors import InputError
from adaptive_jax.files import changed_file, path_of, write_checksums


def read_vocabulary(path: str | os.PathLike) -> Vocabulary:
    """Reads a vocabulary of words, of sub-word units or of token ids. Raises InputError for any
    other file.
    """
    counts = read_counts(path)
    kind = Vocabulary
    if holds_ids(counts):  # words would have `<eos>` among them
        kind = Tokenizer if path_of(path).with_name(tokenizer.FILE).exists() else TokenIds
    # The units decide: a missing model is an error, one left by another vocabulary is not.
    elif all(name in counts for name in (MARK, *BYTES)):
        kind = Subwords
    return kind.from_lines(path, counts)


def checksums_of(path: Path) -> Path:
    """Path of the checksums of a vocabulary. They are written last: if they exist, all files do."""
    return path.with_suffix(".sha256")


def write_with_checksums(vocabulary: Vocabulary, path: Path) -> None:
    """Writes a vocabulary, and its checksums beside it, as `sha256sum --check` reads them."""
    vocabulary.write(path)
    model = [path.with_name(vocabulary.file)] if vocabulary.file else []
    write_checksums(checksums_of(path), [path, *model])


def read_with_checksums(path: Path, cure: str) -> Vocabulary:
    """Reads a vocabulary that `write_with_checksums` wrote.

    cure: the end of the message about a damaged file.

    Raises:
        InputError: the files or their checksums are missing or have changed.
    """
    sums = checksums_of(path)
    try:
        if path.exists() and not sums.exists():
            raise InputError(f"{sums}, with the checksum of {path.name}, is missing")
        if path.exists() and (changed := changed_file(sums)):
            raise InputError(
                f"{path.with_name(changed)} is damaged: its checksum differs (see {sums.name})"
            )
        return read_vocabulary(path)
    except InputError as error:
        raise InputError(f"{error}; {cure}") from error
