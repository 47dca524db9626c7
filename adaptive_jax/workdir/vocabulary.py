"""The words of a run: vocabulary.txt in its workdir, for sub-words with subwords.model, and vocabulary.sha256 of both."""

from pathlib import Path

from adaptive_jax.data.vocabulary.subwords import FILE, Subwords, read_vocabulary
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import changed_file, write_checksums

NAME, SUMS = "vocabulary.txt", "vocabulary.sha256"


def write_words(workdir: Path, vocabulary: Vocabulary) -> None:
    """Writes the vocabulary of a run and its checksums."""
    vocabulary.write(workdir / NAME)
    model = [workdir / FILE] if isinstance(vocabulary, Subwords) else []
    write_checksums(workdir / SUMS, [workdir / NAME, *model])


def read_words(workdir: Path) -> Vocabulary:
    """The vocabulary of a run. Runs of older versions have no checksums, and theirs is not checked.

    Raises:
        InputError: it is missing, damaged, or no longer what the run wrote.
    """
    if (workdir / NAME).exists() and (changed := changed_file(workdir / SUMS)):
        raise InputError(
            f"{workdir / changed} is damaged: it is not the file that the run wrote (see {SUMS}); restore it, or give another --workdir"
        )
    return read_vocabulary(workdir / NAME)
