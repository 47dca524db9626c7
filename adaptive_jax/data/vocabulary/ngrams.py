"""The most frequent n-grams of a text: counts from one pass over its ids, their file, and the
arrays in which a model looks them up.
"""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from adaptive_jax.config.keys import at
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.files import changed_file, path_of, replacing, write_checksums

CHUNK_TOKENS = 1 << 26  # tokens sorted at a time
PADDING = np.iinfo(np.int32).max  # after the last n-gram; larger than any id


def count(ids: np.ndarray, words: int, order: int, limit: int, min_count: int) -> np.ndarray:
    """Counts the n-grams of a text and returns the `limit` most frequent ones that occur
    `min_count` times or more; if there are none, those with the highest count. N-grams with equal
    counts are in the order of their ids.

    Counts are exact: each n-gram is one integer, the bits of its ids side by side. N-grams that
    cross segment borders are counted, too.

    ids: int32 `[tokens]`, a split of a corpus. words: size of the vocabulary.

    Returns:
        int64 `[n-grams, order + 1]`: the ids of the words of each n-gram, and its count.

    Raises:
        InputError: ids of an n-gram that take more than 64 bits.
    """
    bits = max(1, int(words - 1).bit_length())
    if bits * order > 64:
        raise InputError(
            f"input.orders must be up to {64 // bits} for {words:,} words, got {order}: the ids of"
            " an n-gram are counted as one number of 64 bits"
        )
    keys, counts = np.empty(0, np.uint64), np.empty(0, np.int64)
    for begin in range(0, len(ids) - order + 1, CHUNK_TOKENS):
        chunk = np.asarray(ids[begin : begin + CHUNK_TOKENS + order - 1])
        new = _counted(_packed(chunk, order, bits))
        keys, counts = _counted(*map(np.append, (keys, counts), new)) if begin else new
    frequent = np.flatnonzero(counts >= min(min_count, counts.max(initial=0)))
    first = frequent[np.argsort(-counts[frequent], kind="stable")[:limit]]
    shifts = bits * np.arange(order - 1, -1, -1, dtype=np.uint64)
    ngrams = keys[first, None] >> shifts & np.uint64(2**bits - 1)
    return np.column_stack([ngrams.astype(np.int64), counts[first]])


def _packed(ids, order, bits):
    """The n-grams of a text as integers of 32 or 64 bits, which sort as their ids do."""
    kind = np.uint32 if bits * order <= 32 else np.uint64
    keys = np.zeros(len(ids) - order + 1, kind)
    for i in range(order):
        keys <<= kind(bits)
        keys |= ids[i : len(ids) - order + 1 + i].astype(kind)
    return keys


def _counted(keys, counts=None):
    """Distinct keys in rising order, and the count of each, or the sum of its `counts`."""
    if counts is None:
        keys.sort()
    else:
        order = np.argsort(keys, kind="stable")
        keys, counts = keys[order], counts[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
    if counts is None:
        return keys[starts], np.diff(starts, append=len(keys))
    return keys[starts], np.add.reduceat(counts, starts)


def counted_settings(config: Mapping) -> Mapping:
    """The group `input` of a config whose model reads counted n-grams; {} for any other config."""
    group = at(config, "input")
    return group if group.get("kind") in ("counted", "banded") and "counts" in group else {}


def count_for(config: Mapping, vocabulary: Vocabulary, ids: np.ndarray) -> dict[int, np.ndarray]:
    """The n-grams of a config by order, as `count` returns them: from the file `input.counts`, or
    counted in `ids`.

    Raises:
        InputError: as `count` and `read`.
    """
    group = counted_settings(config)
    if group["counts"] or not len(ids):
        return read(group["counts"], vocabulary, group["orders"])
    sizes = group["rows"], group["least"]
    return {order: count(ids, len(vocabulary), order, *sizes) for order in group["orders"]}


def write(path: Path, vocabulary: Vocabulary, by_order: Mapping[int, np.ndarray]) -> None:
    """Writes n-grams of a vocabulary, and a checksum beside them."""
    arrays = {str(order): ngrams for order, ngrams in by_order.items()}
    with replacing(path) as file:
        np.savez(file, vocabulary=np.array(vocabulary.digest), **arrays)
    write_checksums(path.with_suffix(".sha256"), [path])


def read(path: str | Path, vocabulary: Vocabulary, orders: Sequence[int]) -> dict[int, np.ndarray]:
    """Reads a file that `write` wrote.

    Raises:
        InputError: a file that is missing, damaged, of another vocabulary, or without an order.
    """
    cure = "use the ngrams.npz of a run"
    if not path:
        raise InputError(f"input.counts is empty: {cure}")
    place = path_of(path)
    sums = place.with_suffix(".sha256")
    if sums.exists() and changed_file(sums):
        raise InputError(f"{place} is damaged: its checksum differs; restore it, or train anew")
    try:
        with place.open("rb") as file:
            arrays = dict(np.load(file).items())
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or "it holds no arrays"
        raise InputError(f"cannot read input.counts={str(path)!r}: {reason}; {cure}") from error
    if (digest := str(arrays.get("vocabulary"))) != vocabulary.digest:
        raise InputError(
            f"{place} counts n-grams of another vocabulary (digest {digest}, here"
            f" {len(vocabulary):,} words, {vocabulary.digest}): {cure} of these words"
        )
    if missing := {*map(str, orders)} - arrays.keys():
        raise InputError(f"{place} has no n-grams of {min(missing)} words: {cure} that counts them")
    return {order: arrays[str(order)] for order in orders}


def sorted_ngrams(
    vocabulary: Vocabulary, path: str, orders: Sequence[int], rows: int, least: int
) -> dict[str, np.ndarray]:
    """Returns for each order, a key such as "2", int32 `[rows, order + 1]`: n-grams in the order of
    their ids, and their ranks by frequency; padded with `PADDING`.

    path: as for `read`. least: minimal count of an n-gram.

    Raises:
        InputError: as `read`, or a file without such n-grams.
    """
    by_order = {}
    for order, counted in read(path, vocabulary, orders).items():
        ngrams = counted[counted[:, -1] >= least, :-1][:rows]
        if not len(ngrams):
            raise InputError(
                f"input.least={least} leaves no n-gram of {order} words of the train split: its"
                f" most frequent one occurs {counted[:, -1].max(initial=0)} times"
            )
        ranks = np.lexsort(ngrams.T[::-1])
        ranked, padding = np.column_stack([ngrams[ranks], ranks]), (0, rows - len(ngrams))
        ranked = np.pad(ranked, (padding, (0, 0)), constant_values=PADDING)
        by_order[str(order)] = ranked.astype(np.int32)
    return by_order
