"""Vectors of words from text files such as GloVe's: each line has a word and its numbers, separated
by spaces.
"""

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from adaptive_jax.errors import InputError, one_line
from adaptive_jax.files import unpacked


def read_vectors(path: Path, words: Sequence[str]) -> tuple[np.ndarray, np.ndarray, int]:
    """Reads the vectors of words, which are looked up as they are, then in lower case.

    path: text, plain or packed as .gz, .xz or .bz2, or the only file of a .zip.

    Returns:
        ids int64 `[n]` of the words with vectors, ascending; their vectors, float32 `[n, width]`;
        the number of words that the file has in lower case only.

    Raises:
        InputError: no such file, a line that is not a word and its numbers, or none of the words.
    """
    entries: dict[str, list[tuple[int, bool]]] = {}
    for i, word in enumerate(words):
        for spelt in dict.fromkeys((word, word.lower())):
            entries.setdefault(spelt, []).append((i, spelt == word))
    vectors_by_id: dict[int, tuple[bool, np.ndarray]] = {}
    width = None
    with contextlib.closing(_lines(path)) as lines:
        for number, line in enumerate(lines, start=1):
            word, *values = line.rstrip().split(" ")
            if not word:
                continue
            if number == 1 and len(values) == 1:  # the header of word2vec: words and width
                continue
            width = width or len(values)
            if len(values) > width:  # GloVe 840B has words with spaces in them
                continue
            if word in entries or len(values) < width or not width:
                vector = _vector(values, width)
                if vector is None:
                    raise InputError(
                        f"{path}, line {number}: {line.strip()[:40]!r} must be a word and"
                        f" {width or 'its'} numbers, separated by spaces"
                    )
                for i, same_case in entries.get(word, ()):
                    if same_case or i not in vectors_by_id:
                        vectors_by_id[i] = same_case, vector
    if not vectors_by_id:
        raise InputError(
            f"{path} has none of the {len(words):,} words: use a text file of vectors, one word a"
            " line"
        )
    ids = np.sort(np.fromiter(vectors_by_id, np.int64))
    return (
        ids,
        np.stack([vectors_by_id[i][1] for i in ids]),
        sum(not same_case for same_case, _ in vectors_by_id.values()),
    )


def _vector(values, width):
    """The finite numbers that a line has after its word; None if they are not `width`."""
    try:
        with np.errstate(over="ignore"):
            vector = np.array(values, np.float32)
    except ValueError:
        return None
    return vector if len(vector) == width > 0 and np.isfinite(vector).all() else None


def _lines(path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            yield from io.TextIOWrapper(
                unpacked(file, str(path)), encoding="utf-8-sig", errors="replace", newline="\n"
            )
    except InputError:
        raise
    except Exception as error:  # each format has its own: zlib.error, LZMAError, BadZipFile …
        why = getattr(error, "strerror", None) or one_line(error)
        raise InputError(
            f"cannot read the vectors {path}: {why}; use text, plain or packed as .gz, .xz, .bz2 or"
            " .zip"
        ) from error
