"""Prepared ids in object storage, read range by range: for a corpus larger than one machine's disk.

    copy(load({"corpus": "text_files", "path": "my_corpus"}), "gs://bucket/my_corpus")
    corpus = open("gs://bucket/my_corpus", splits=("train",))
    corpus.ids["train"][1_000:1_512]    # int32 [512]; reads one or two chunks of 8,192 tokens

A URL is one that tensorstore knows: gs://bucket/…, s3://bucket/…, file:///…, http:// or https://…
(read-only), and memory://…, which ends with the process. Under it are vocabulary.txt (for sub-words
also subwords.model), a zarr3 array for each split and, written last, complete.json.
"""

import contextlib
import functools
import json
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np
import tensorstore

from adaptive_jax import files
from adaptive_jax.data.corpora.corpus import SPLITS, Corpus, LazyIds
from adaptive_jax.data.vocabulary import subwords
from adaptive_jax.errors import InputError

FORMAT = 1  # of a copy: increase it when this module writes what its older self cannot read
MARKER = "complete.json"
VOCABULARY = "vocabulary.txt"
CHUNK = 1 << 13  # tokens read together: some 10 KB, which take a store as long as a few bytes
SHARD = 1 << 22  # tokens of an object: some 5 MB, and 8 KB that say where its chunks are
CACHE = 1 << 27  # bytes: keeps the index of every shard, so that it is read once


def _read(array: tensorstore.TensorStore, url: str, index: slice | np.ndarray) -> np.ndarray:
    """Reads the chunks that an index touches, as `LazyIds` asks for them."""
    if isinstance(index, slice):
        begin, end, _ = index.indices(array.shape[0])
        index = slice(begin, max(begin, end))  # tensorstore takes no bounds outside of the array
    with _one_line("read", url):
        return array[index].read().result()


def check_destination(url: str) -> None:
    """Finds before a long preparation that `copy` cannot write under a URL. Raises as `copy`."""
    with _one_line("write", url):
        store = _store(url)
        if store.read(MARKER).result(timeout=files.PATIENCE).state == "value":
            raise InputError(f"{url} already holds a corpus: use another URL, or remove that one")
        for content in b"", None:  # written and deleted
            store.write("writable", content).result(timeout=files.PATIENCE)


def copy(corpus: Corpus, url: str) -> None:
    """Writes a prepared corpus under a URL. An interrupted copy is replaced.

    Raises InputError for a URL that is unknown, read-only, or already holds a complete copy.
    """
    check_destination(url)
    with _one_line("write", url):
        store = _store(url)
        with tempfile.TemporaryDirectory() as directory:
            corpus.vocabulary.write(Path(directory) / VOCABULARY)
            for file in Path(directory).iterdir():
                store.write(file.name, file.read_bytes()).result()
        for split, ids in corpus.ids.items():
            array = _array(url, split, create=True, delete_existing=True, schema=_schema(len(ids)))
            for begin in range(0, len(ids), SHARD):
                part = np.asarray(ids[begin : begin + SHARD])
                array[begin : begin + len(part)].write(part).result()
        facts = {
            "format": FORMAT,
            "tokens": {split: len(ids) for split, ids in corpus.ids.items()},
            "unseen": dict(corpus.unseen),
            "vocabulary": corpus.vocabulary.digest,
        }
        store.write(MARKER, json.dumps(facts).encode()).result()


def open(url: str, splits: Collection[str] = SPLITS) -> Corpus:
    """Opens the corpus that `copy` wrote under a URL. No ids are read yet.

    Raises InputError for a URL that cannot be read, that holds no complete copy, or lacks one of
    the splits.
    """
    with _one_line("read", url):
        store = _store(url)
        marker = store.read(MARKER).result(timeout=files.PATIENCE)
        if marker.state != "value":
            raise InputError(
                f"{url} holds no complete copy of a corpus ({MARKER} is missing): write it again"
            )
        try:
            facts = json.loads(marker.value)
            version, digest = facts["format"], facts["vocabulary"]
            tokens = {split: int(number) for split, number in facts["tokens"].items()}
            unseen = {split: float(share) for split, share in facts["unseen"].items()}
        except Exception as error:  # any JSON may stand there
            raise _damaged(url, f"{MARKER} is malformed ({type(error).__name__})") from error
        if version != FORMAT:
            raise InputError(
                f"{url} is a copy of format {version}, not {FORMAT}: write it with this version"
            )
        if missing := [split for split in splits if split not in tokens]:
            raise InputError(
                f"{url} has no {missing[0]} split, only {', '.join(tokens)}: write one with it"
            )
        vocabulary, ids = _vocabulary(store, url), {}
        if vocabulary.digest != digest:
            raise _damaged(url, "its vocabulary differs from the one that was written")
        for split in splits:
            array = _array(url, split, open=True, read=True)
            if (array.dtype, array.shape) != (tensorstore.int32, (tokens[split],)):
                raise _damaged(url, f"the number of tokens of {split} differs from {MARKER}")
            ids[split] = LazyIds(functools.partial(_read, array, url), tokens[split])
    return Corpus(vocabulary, ids, {split: unseen[split] for split in splits if split in unseen})


def _damaged(url, what):
    return InputError(f"{url} is damaged: {what}; remove it and write it again")


def _vocabulary(store, url):
    with tempfile.TemporaryDirectory() as directory:
        for name in VOCABULARY, subwords.FILE:
            file = store.read(name).result()
            if file.state == "value":
                (Path(directory) / name).write_bytes(file.value)
        try:
            return subwords.read_vocabulary(Path(directory) / VOCABULARY)
        except InputError as error:
            wrong = str(error).replace(directory, url.rstrip("/")).partition(";")[0]
            raise _damaged(url, wrong) from error


@functools.cache
def _context() -> tensorstore.Context:
    """One for all arrays, so that they share memory:// and the cache."""
    return tensorstore.Context({"cache_pool": {"total_bytes_limit": CACHE}})


def _store(url: str) -> tensorstore.KvStore:
    spec = files.kvstore(url.rstrip("/") + "/")
    return tensorstore.KvStore.open(spec, context=_context()).result()


def _array(url: str, split: str, **how) -> tensorstore.TensorStore:
    spec = {
        "driver": "zarr3",
        "kvstore": files.kvstore(f"{url.rstrip('/')}/{split}/"),
        # A lost shard must be an error, not ids of 0.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        # A complete copy never changes, so cached data need no second request.
        "recheck_cached_data": "open",
        "recheck_cached_metadata": "open",
    }
    return tensorstore.open(spec, context=_context(), **how).result()


def _schema(tokens: int) -> tensorstore.Schema:
    codecs = [
        {"name": "bytes", "configuration": {"endian": "little"}},
        {"name": "blosc", "configuration": {"cname": "zstd", "clevel": 5, "shuffle": "shuffle"}},
        {"name": "crc32c"},
    ]
    sharding = {
        "name": "sharding_indexed",
        "configuration": {"chunk_shape": [CHUNK], "codecs": codecs},
    }
    return tensorstore.Schema(
        dtype=tensorstore.int32,
        shape=[tokens],
        chunk_layout=tensorstore.ChunkLayout(write_chunk_shape=[SHARD], read_chunk_shape=[CHUNK]),
        codec=tensorstore.CodecSpec({"driver": "zarr3", "codecs": [sharding]}),
    )


@contextlib.contextmanager
def _one_line(what: str, url: str) -> Iterator[None]:
    """Turns errors of tensorstore into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (ValueError, NotImplementedError, TimeoutError) as error:
        reason = files.reason(error)
        cure = (
            "remove it and write it again"
            if "DATA_LOSS" in reason or "shard entry" in reason  # lost or cut short
            else f"use a URL of gs://, s3:// or file:/// that you may {what}"
        )
        raise InputError(f"cannot {what} {url}: {reason}; {cure}") from error
