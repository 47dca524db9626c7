"""Clusters of words: a file with an order of the vocabulary's words and where it is cut.

    # clusters: method=kmeans seed=0 vocabulary=3f0a9c5d1b7e2468 sizes=3000,4000,3000
    the
    of
    …

The header states the sizes of the clusters and the vocabulary's `digest`. One word a line follows,
cluster after cluster. A word's line, counted from 0, is its place. Layers see places only, see
`adaptive_jax.model.language_model.LanguageModel`.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import changed_file, replacing, write_checksums
from adaptive_jax.stores import path_of

COMMAND = "python -m adaptive_jax clusters"
HEADER = re.compile(
    r"# clusters: method=(\w+) seed=(\d+) vocabulary=([0-9a-f]+) sizes=([1-9]\d*(?:,[1-9]\d*)*)"
)
OTHER_WORDS = f"make it for this vocabulary with {COMMAND}, or give another file"


class Header(NamedTuple):
    """The first line of a file: how it was made, the digest of its vocabulary, and the words in
    each cluster.
    """

    method: str
    seed: int
    vocabulary: str
    sizes: tuple[int, ...]

    def cutoffs(self) -> tuple[int, ...]:
        """The place of the first word of every cluster but the first."""
        return tuple(np.cumsum(self.sizes[:-1]).tolist())


def write_clusters(path: Path, header: Header, words: Sequence[str]) -> None:
    """Writes a header and words `[V]` in the order of the clusters."""
    sizes = ",".join(map(str, header.sizes))
    first = (
        f"# clusters: method={header.method} seed={header.seed} vocabulary={header.vocabulary}"
        f" sizes={sizes}"
    )
    with replacing(path) as file:
        file.write("\n".join([first, *words, ""]).encode())


def read_header(path: str | Path) -> Header:
    """The header of a file.

    Raises:
        InputError: no file there, or one without a header.
    """
    try:
        with path_of(path).open("rb") as file:
            line = file.readline().decode(errors="replace").rstrip("\n")
    except OSError as error:
        raise InputError(
            f"cannot read output.clusters={str(path)!r}: {error.strerror}; give another file, or"
            f" make it with {COMMAND} --method=… --output={path}"
        ) from None
    if not (found := HEADER.fullmatch(line)):
        raise InputError(
            f"{path}, line 1: {line[:80]!r} is no header of clusters; make the file with {COMMAND}"
        )
    return Header(found[1], int(found[2]), found[3], tuple(map(int, found[4].split(","))))


def expected_words(config: Mapping) -> int:
    """Words of the vocabulary, before it is read: those of the config's clusters, or
    `data.vocabulary_size`.
    """
    path = config["output"]["clusters"]
    return sum(read_header(path).sizes) if path else config["data"]["vocabulary_size"]


def read_clusters(path: str | Path, vocabulary: Vocabulary) -> tuple[Header, np.ndarray]:
    """The header and the word ids int32 `[V]` in the order of the clusters.

    Raises:
        InputError: as `read_header`; a file of another vocabulary, or one that is not what its
            checksum says.
    """
    header, path = read_header(path), path_of(path)
    if header.vocabulary != vocabulary.digest:
        raise InputError(
            f"{path} orders {sum(header.sizes):,} words of another vocabulary (digest"
            f" {header.vocabulary}, here {len(vocabulary):,} words, {vocabulary.digest}):"
            f" {OTHER_WORDS}"
        )
    if changed_file(path.with_suffix(".sha256")):
        raise InputError(
            f"{path} is damaged: it is not what was written; restore it, or train anew"
        )
    words = path.read_bytes().decode(errors="replace").removesuffix("\n").split("\n")[1:]
    ids = dict(zip(vocabulary.words, range(len(vocabulary)), strict=True))
    order = np.array([ids.get(word, -1) for word in words], np.int32)
    if sum(header.sizes) != len(ids) or not np.array_equal(np.sort(order), np.arange(len(ids))):
        raise InputError(
            f"{path} is damaged: it does not hold every word of the vocabulary once; {OTHER_WORDS}"
        )
    return header, order


def copy_clusters(path: str | Path, to: Path) -> None:
    """Copies a file of clusters and writes the copy's checksum beside it."""
    with replacing(to) as file:
        file.write(path_of(path).read_bytes())
    write_checksums(to.with_suffix(".sha256"), [to])


def order(vocabulary: Vocabulary, path: str, of: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """Places and words of a file of clusters: `places` int32 `[V]`, word id to place; `words` int32
    `[V]`, place to word id.

    of: the layers that know words by places, for `adaptive_jax.data.vocabulary.lexicon`.
    """
    _, words = read_clusters(path, vocabulary)
    return {"places": np.argsort(words).astype(np.int32), "words": words}


@functools.lru_cache(maxsize=2)
def in_order(vocabulary: Vocabulary, path: str) -> Vocabulary:
    """The vocabulary as layers see it that know words by their places: word and count of place
    0 first.
    """
    _, ids = read_clusters(path, vocabulary)
    words = tuple(vocabulary.words[i] for i in ids)
    return dataclasses.replace(vocabulary, words=words, counts=vocabulary.counts[ids])
