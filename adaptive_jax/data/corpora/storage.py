"""Prepared ids in object storage, read range by range: for a corpus larger than one machine's disk.

    copy(load("text_files", path="my_corpus"), "gs://bucket/my_corpus")
    corpus = open("gs://bucket/my_corpus", splits=("train",))
    corpus.ids["train"][1_000:1_512]    # int32 [512]; one or two chunks of 8,192 tokens travel

A URL is one that tensorstore knows: gs://bucket/…, s3://bucket/…, file:///…, http:// or https://… (only to be read), and
memory://…, which lasts as long as the process. Under it lie vocabulary.txt (of sub-words, subwords.model too), a zarr3 array
for each split and, written last, complete.json.
"""

import contextlib
import functools
import json
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import tensorstore

from adaptive_jax.data.corpora.corpus import SPLITS, Corpus
from adaptive_jax.data.vocabulary import subwords
from adaptive_jax.errors import InputError

FORMAT = 1  # of a copy: count it up when this module writes what its older self cannot read
MARKER = "complete.json"
VOCABULARY = "vocabulary.txt"
CHUNK = 1 << 13  # tokens that travel together: some 10 KB, for which a store takes as long as for a few bytes
SHARD = 1 << 22  # tokens of an object: some 5 MB, and 8 KB that say where its chunks lie
CACHE = 1 << 27  # bytes: where the chunks of each shard lie is to be fetched once, not at every read
PATIENCE = 60.0  # seconds for the first answer; tensorstore alone would try for a quarter of an hour


class Ids:
    """One split: int32 [tokens], indexed like a `numpy.memmap` by whole numbers, slices and integer arrays of any shape.

    An index reads the chunks that hold what it asks for, and returns an array of its own; `numpy.asarray` reads it all.
    Raises InputError where the store does not give what it should.
    """

    dtype = np.dtype(np.int32)
    ndim = 1

    def __init__(self, array: tensorstore.TensorStore, url: str):
        self._array, self._url = array, url
        self.shape = tuple(array.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int | slice | np.ndarray) -> np.ndarray:
        if isinstance(index, slice):
            begin, end, step = index.indices(len(self))
            if step == 1:
                return self._read(slice(begin, max(begin, end)))
            index = np.arange(begin, end, step)
        places = np.asarray(index)
        if isinstance(index, tuple) or places.dtype.kind not in "iu":
            raise IndexError(f"ids in {self._url} take whole numbers, slices and integer arrays, not {index!r}")
        places = places.astype(np.int64)
        outside = (places < -len(self)) | (places >= len(self))
        if outside.any():
            raise IndexError(f"index {places[outside][0]} is outside the {len(self):,} ids in {self._url}")
        # tensorstore does not count from the end.
        return self._read(np.where(places < 0, places + len(self), places).reshape(-1)).reshape(places.shape)[()]

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"the ids in {self._url} cannot be an array without a copy")
        return np.asarray(self[:], dtype)

    def _read(self, where: slice | np.ndarray) -> np.ndarray:
        with _one_line("read", self._url):
            return self._array[where].read().result()


def copy(corpus: Corpus, url: str) -> None:
    """Writes a prepared corpus under a URL; a copy that was broken off before is written anew.

    Raises InputError for a URL that is unknown, closed to writing, or holds a whole copy already.
    """
    with _one_line("write", url):
        store = _store(url)
        if store.read(MARKER).result(timeout=PATIENCE).state == "value":
            raise InputError(f"{url} holds a corpus already: give another URL, or remove that one")
        with tempfile.TemporaryDirectory() as directory:
            corpus.vocabulary.write(Path(directory) / VOCABULARY)
            for file in Path(directory).iterdir():
                store.write(file.name, file.read_bytes()).result()
        for split, ids in corpus.ids.items():
            array = _array(url, split, create=True, delete_existing=True, schema=_schema(len(ids)))
            for begin in range(0, len(ids), SHARD):
                part = np.asarray(ids[begin : begin + SHARD])
                array[begin : begin + len(part)].write(part).result()
        facts = {"format": FORMAT, "tokens": {split: len(ids) for split, ids in corpus.ids.items()}}
        store.write(MARKER, json.dumps(facts).encode()).result()


def open(url: str, splits: Collection[str] = SPLITS) -> Corpus:
    """The corpus that `copy` wrote under a URL, with `Ids` of these splits; nothing of them is read yet.

    Raises InputError for a URL that cannot be read, that holds no whole copy, or lacks one of the splits.
    """
    with _one_line("read", url):
        store = _store(url)
        marker = store.read(MARKER).result(timeout=PATIENCE)
        if marker.state != "value":
            raise InputError(f"{url} holds no whole copy of a corpus ({MARKER} is missing): write it once more")
        facts = json.loads(marker.value)
        if facts["format"] != FORMAT:
            raise InputError(f"{url} is a copy of format {facts['format']}, not {FORMAT}: write it with this version")
        if missing := [split for split in splits if split not in facts["tokens"]]:
            raise InputError(f"{url} has no {missing[0]} split, only {', '.join(facts['tokens'])}: write one with it")
        with tempfile.TemporaryDirectory() as directory:
            for name in VOCABULARY, subwords.FILE:
                file = store.read(name).result()
                if file.state == "value":
                    (Path(directory) / name).write_bytes(file.value)
            vocabulary = subwords.read_vocabulary(Path(directory) / VOCABULARY)
        return Corpus(vocabulary, {split: Ids(_array(url, split, open=True, read=True), url) for split in splits})


@functools.cache
def _context() -> tensorstore.Context:
    """Shared, so that memory:// is one place and the cache one."""
    return tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE}})


def _store(url: str) -> tensorstore.KvStore:
    return tensorstore.KvStore.open(url.rstrip("/") + "/", context=_context()).result()


def _array(url: str, split: str, **how) -> tensorstore.TensorStore:
    spec = {
        "driver": "zarr3",
        "kvstore": f"{url.rstrip('/')}/{split}/",
        # A shard that was lost is to be an error, not ids of 0.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        # A whole copy does not change: what is cached need not be asked for again.
        "recheck_cached_data": "open",
        "recheck_cached_metadata": "open",
    }
    return tensorstore.open(spec, context=_context(), **how).result()


def _schema(tokens: int) -> tensorstore.Schema:
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}},
              {"name": "blosc", "configuration": {"cname": "zstd", "clevel": 5, "shuffle": "shuffle"}}]  # fmt: skip
    sharding = {"name": "sharding_indexed", "configuration": {"chunk_shape": [CHUNK], "codecs": codecs}}
    return tensorstore.Schema(
        dtype=tensorstore.int32,
        shape=[tokens],
        chunk_layout=tensorstore.ChunkLayout(write_chunk_shape=[SHARD], read_chunk_shape=[CHUNK]),
        codec=tensorstore.CodecSpec({"driver": "zarr3", "codecs": [sharding]}),
    )


@contextlib.contextmanager
def _one_line(what: str, url: str) -> Iterator[None]:
    """Makes an InputError of what tensorstore raises."""
    cure = f"give a URL of gs://, s3:// or file:/// that you may {what}"
    try:
        yield
    except InputError:
        raise
    except TimeoutError as error:
        raise InputError(f"cannot {what} {url}: no answer within {PATIENCE:g} seconds; {cure}") from error
    except (ValueError, NotImplementedError) as error:
        raise InputError(f"cannot {what} {url}: {' '.join(str(error).split())}; {cure}") from error
