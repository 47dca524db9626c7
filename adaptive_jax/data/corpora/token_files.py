"""Token ids of any tokenizer, in a file for each split: .npy, or .bin, which holds nothing but ids.

DIR holds train, valid (or validation, or val) and test, each as .npy or .bin. Flat .bin files are
little-endian. nanoGPT writes them as uint16, which holds the 50,257 ids of GPT-2; larger
vocabularies need uint32. llm.c writes a header of 1,024 bytes first, which is recognised and says
which of the two follows.

The files are mapped into memory and never copied. Cutoffs need frequent words first, so the ids
are counted once, and each id is read as its rank by frequency: see `TokenIds`.
"""

import hashlib
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.corpora.cached import bar, damaged, make_once
from adaptive_jax.data.corpora.corpus import Corpus, renumbered
from adaptive_jax.data.corpora.text import NAMES
from adaptive_jax.data.vocabulary.frequency import count_ids
from adaptive_jax.data.vocabulary.token_ids import TokenIds
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError, one_line
from adaptive_jax.files import replacing

DTYPES = ("", "uint8", "uint16", "uint32", "int32", "int64")
SUFFIXES = (".npy", ".bin")
HEADER = 1024  # bytes of the header of llm.c
LLM_C = {20240520: np.dtype("<u2"), 20240801: np.dtype("<u4")}  # by the first 4 bytes of the header
SAMPLE = 1000  # ids that are read to see whether an id has more bytes
WIDTHS = {8: "int64", 4: "uint32", 2: "uint16"}  # bytes of an id to its dtype


class Files(NamedTuple):
    """A directory of files of ids.

    vocabulary_size: size of the tokenizer's vocabulary.
    dtype: type of flat .bin files, one of `DTYPES`.
    """

    directory: Path
    vocabulary_size: int
    dtype: str = ""

    def present(self, split: str) -> list[str]:
        """Returns the names of the existing files of a split."""
        return [name for name in _names(split) if (self.directory / name).is_file()]

    def find(self, split: str) -> Path:
        """Returns the file of a split. InputError: there is none, or more than one."""
        if len(present := self.present(split)) == 1:
            return self.directory / present[0]
        fault = f"no {split} split; add one of {', '.join(_names(split))}"
        if present:
            fault = f"both {' and '.join(present[:2])}; keep one of them"
        raise InputError(f"data.path={self.directory} has {fault}")

    def ids(self, path: Path) -> np.ndarray:
        """Maps the ids of a file into memory: integers `[tokens]`, at least one, read-only.

        Raises:
            InputError: a file that cannot be read, is empty, or holds anything but ids.
        """
        try:
            ids = np.load(path, mmap_mode="r") if path.suffix == ".npy" else self._bin(path)
        except InputError:
            raise
        except (OSError, ValueError, EOFError) as error:
            raise InputError(
                f"cannot read {path}: {one_line(error)[:150]}; write the ids again"
            ) from error
        if ids.dtype.kind not in "iu" or ids.ndim != 1 or not len(ids):
            raise InputError(
                f"{path} must be one integer or more in one dimension, got {ids.dtype} of shape"
                f" {ids.shape}: write the ids of the tokenizer, one text after the other"
            )
        return ids

    def _bin(self, path):
        header = np.fromfile(path, "<i4", 3)
        if len(header) == 3 and (dtype := LLM_C.get(int(header[0]))) is not None:
            count = max(0, path.stat().st_size - HEADER) // dtype.itemsize
            if count != header[2]:
                raise ValueError(f"it has {count:,} ids and its header says {header[2]:,}")
            return np.memmap(path, dtype, "r", HEADER)
        small = self.vocabulary_size <= 1 << 16
        dtype = np.dtype(self.dtype or ("uint16" if small else "uint32"))
        ids = np.memmap(path, dtype.newbyteorder("<"), "r")
        if width := _true_width(ids):
            raise InputError(
                f"{path}, read as {dtype.name}, has the zeros of ids of {width} bytes: use"
                f" data.ids_dtype={WIDTHS[width]}, or a .npy file"
            )
        return ids

    def counts(self, path: Path, cache: Path) -> np.ndarray:
        """Counts the ids of a file once, and caches the counts, int64 `[vocabulary_size]`.

        Raises:
            InputError: as `ids`, and an id that is not below the size of the vocabulary.
        """
        ids, stat = self.ids(path), path.stat()
        about = (str(path.resolve()), stat.st_size, stat.st_mtime_ns, str(ids.dtype))
        name = hashlib.sha256(repr((*about, self.vocabulary_size)).encode()).hexdigest()[:16]
        file = cache / "ids" / f"{name}.npz"  # a .zip has checksums

        def count():
            try:
                with bar(f"counting {path.name}") as show:
                    counts = count_ids(ids, self.vocabulary_size, show)
            except InputError as error:
                raise InputError(
                    f"{path}: {error} (data.vocabulary_size in training); read as {ids.dtype},"
                    " which data.ids_dtype changes for .bin files"
                ) from None
            with replacing(file) as stream:
                np.savez(stream, counts=counts)

        make_once(file, count)
        try:
            return np.load(file)["counts"]
        except Exception as error:  # a damaged archive makes zipfile and NumPy fail in many ways
            raise damaged(file, error) from error


def _names(split):
    return [f"{name}{suffix}" for name in NAMES[split] for suffix in SUFFIXES]


def _true_width(ids):
    """Returns the bytes of an id if zeros after every read id show that it has more; else None."""
    for width in WIDTHS:
        share = width // ids.itemsize
        sample = ids[: SAMPLE * share]
        if share > 1 and len(sample) >= 2 * share:
            sample = sample[: len(sample) // share * share].reshape(-1, share)
            if sample[:, 0].any() and not sample[:, 1:].any():
                return width
    return None


def corpus_of(
    files: Files, eos: int, cache: Path, vocabulary: Vocabulary | None, splits: Collection[str]
) -> Corpus:
    """Loads a corpus from files of ids.

    eos: the id that ends a document; -1: none does.
    vocabulary: that of a trained model; None: that of the train split.

    Raises:
        InputError: a file that is missing, empty or holds other ids; a vocabulary of words.
    """
    if vocabulary is None:
        vocabulary = TokenIds.of_counts(files.counts(files.find("train"), cache), eos)
    elif vocabulary.unit != "token":
        raise InputError(
            f"data.corpus=ids needs a vocabulary of ids, and this one has {len(vocabulary):,}"
            " words: pass --data_path=DIR with text, or a run that was trained on ids"
        )
    files = files._replace(vocabulary_size=len(vocabulary))
    never = vocabulary.counts[vocabulary.entry_of_id] == 0
    ids, unseen = {}, {}
    for split in splits:
        path = files.find(split)
        counts = files.counts(path, cache)
        ids[split] = renumbered(files.ids(path), vocabulary.entry_of_id)
        unseen[split] = float(counts[never].sum() / counts.sum())
    return Corpus(vocabulary, ids, unseen)
