"""Clusters of words: a file with an order of the vocabulary's words and the sizes of its clusters.

    # clusters: method=kmeans seed=0 vocabulary=3f0a9c5d1b7e2468 sizes=3000,4000,3000
    the
    of
    …

The header has the sizes of the clusters and the vocabulary's `digest`. The words follow, one a
line, cluster after cluster. A run with `output.clusters` numbers its words in this order, from 0.
Its table is cut where the clusters begin.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.config import keys
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import path_of, write_bytes

COMMAND = "python -m adaptive_jax clusters"
HEADER = "# clusters: method={} seed={} vocabulary={} sizes={}"
PATTERN = re.compile(HEADER.format(r"(\w+)", r"(\d+)", r"([0-9a-f]+)", r"([1-9]\d*(?:,[1-9]\d*)*)"))
OTHER_WORDS = f"make it for this vocabulary with {COMMAND}, or use another file"


class Header(NamedTuple):
    """The first line of a file: its method and seed, the digest of its vocabulary, and the number
    of words in each cluster.
    """

    method: str
    seed: int
    vocabulary: str
    sizes: tuple[int, ...]

    def cutoffs(self) -> tuple[int, ...]:
        """The position of the first word of every cluster but the first."""
        return tuple(np.cumsum(self.sizes[:-1]).tolist())


def write_clusters(path: Path, header: Header, words: Sequence[str]) -> None:
    """Writes a header and words `[V]` in the order of the clusters."""
    first = HEADER.format(*header[:3], ",".join(map(str, header.sizes)))
    write_bytes(path, "\n".join([first, *words, ""]).encode())


def read_header(path: str | Path) -> Header:
    """Reads the header of a file.

    Raises:
        InputError: a file that is missing or has no header.
    """
    try:
        with path_of(path).open("rb") as file:
            line = file.readline().decode(errors="replace").rstrip("\n")
    except OSError as error:
        raise InputError(
            f"cannot read output.clusters={str(path)!r}: {error.strerror}; use another file, or"
            f" make it with {COMMAND} --method=… --output={path}"
        ) from None
    if not (match := PATTERN.fullmatch(line)):
        raise InputError(
            f"{path}, line 1: {line[:80]!r} is not a header of clusters; make the file with"
            f" {COMMAND}"
        )
    return Header(match[1], int(match[2]), match[3], tuple(map(int, match[4].split(","))))


def with_clusters(config: Mapping) -> dict:
    """Returns the config with the cutoffs and the number of words of its clusters, or as it is if
    it has none. Reads only the first line of the file.

    clusters: file with an order of the words and the sizes of clusters, which replace the table's
        cutoffs; see docs/words.md. Empty: words are in order of frequency.

    Raises:
        InputError: as `read_header`; an input or an output that clusters do not fit.
    """
    if not (path := config["output"].get("clusters")):
        return dict(config)
    name, table = config["output"].get("name"), config["output"]["table"].get("name")
    if not getattr(keys.maker("output", name), "many_bands", False) or table not in ("own", "tied"):
        raise InputError(
            f"config.output.clusters={path!r} does not fit output.name={name!r} with"
            f" output.table.name={table!r}: leave it empty, or use an output that takes a table of"
            " several bands, such as hierarchical, with own or tied"
        )
    if table == "own" and (cutoffs := keys.at(config, keys.word_group(config)).get("cutoffs")):
        raise InputError(
            f"config.output.clusters={path!r} also orders the words of the input, and"
            f" input.cutoffs={tuple(cutoffs)} are for words in order of frequency: use"
            " output.table.name=tied, input.cutoffs=() or another input"
        )
    header = read_header(path)
    return with_cutoffs(config, header.cutoffs(), sum(header.sizes))


def with_cutoffs(config: Mapping, cutoffs: Sequence[int], words: int) -> dict:
    """Returns the config with these cutoffs of its output's table, and this number of words."""
    new = {**config, "data": {**config["data"], "vocabulary_size": words}}
    if _cut_by_input(config):
        return keys.with_words(new, cutoffs=tuple(cutoffs))
    table = {**config["output"]["table"], "cutoffs": tuple(cutoffs)}
    return new | {"output": {**config["output"], "table": table}}


def cutoffs_of(config: Mapping) -> tuple[int, ...]:
    """The cutoffs of a config's output, which may be those of its input."""
    source, table = keys.at(config, keys.word_group(config)), config["output"]["table"]
    group = source if _cut_by_input(config) else table
    return tuple(group["cutoffs"])


def in_clusters(config: Mapping, vocabulary: Vocabulary) -> tuple[dict, Vocabulary]:
    """Returns a config and the words of its corpus as `build` takes them: with the cutoffs of the
    clusters, and in their order. Without clusters both stay as they are.

    Raises:
        InputError: as `with_clusters` and `in_order`.
    """
    if not (path := config["output"].get("clusters")):
        return dict(config), vocabulary
    new = with_clusters(config)
    return new | {"output": new["output"] | {"clusters": ""}}, in_order(vocabulary, path)


def in_order(vocabulary: Vocabulary, path: str | Path) -> Vocabulary:
    """Returns the vocabulary with its words and counts in the order of a file of clusters.

    Raises:
        InputError: as `read_header`; a file of another vocabulary, or one that lacks words.
    """
    header, path = read_header(path), path_of(path)
    if header.vocabulary != vocabulary.digest:
        raise InputError(
            f"{path} orders {sum(header.sizes):,} words of another vocabulary (digest"
            f" {header.vocabulary}, here {len(vocabulary):,} words, {vocabulary.digest}):"
            f" {OTHER_WORDS}"
        )
    words = path.read_bytes().decode(errors="replace").removesuffix("\n").split("\n")[1:]
    is_complete = sum(header.sizes) == len(words) == len(vocabulary)
    if not is_complete or {*words} != {*vocabulary.words}:
        raise InputError(
            f"{path} is damaged: it does not hold every word of the vocabulary once; {OTHER_WORDS}"
        )
    ids = [vocabulary.index[word] for word in words]
    return dataclasses.replace(vocabulary, words=tuple(words), counts=vocabulary.counts[ids])


def _cut_by_input(config):
    """True if the output shares a table that the input's cutoffs cut."""
    source = keys.at(config, keys.word_group(config))
    return config["output"]["table"]["name"] == "tied" and "cutoffs" in source
