"""Vocabularies on the disk with their checksums: vocabulary.txt, for sub-words also
subwords.model, and vocabulary.sha256.
"""

from pathlib import Path

from adaptive_jax.data.vocabulary.subwords import read_vocabulary
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import changed_file, write_checksums


def checksums_of(path: Path) -> Path:
    """The checksums of a vocabulary's file. They are written last: where they are, all is."""
    return path.with_suffix(".sha256")


def write_with_checksums(vocabulary: Vocabulary, path: Path) -> None:
    """Writes a vocabulary, and its checksums beside it, as `sha256sum --check` reads them."""
    vocabulary.write(path)
    model = [path.with_name(vocabulary.file)] if vocabulary.file else []
    write_checksums(checksums_of(path), [path, *model])


def read_with_checksums(path: Path, cure: str) -> Vocabulary:
    """Reads what `write_with_checksums` wrote.

    cure: what to do about a damaged file, the end of the message.

    Raises:
        InputError: it or its checksums are missing, damaged, or other than they were written.
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
