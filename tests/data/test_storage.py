"""Ids under a URL against the same ids in a memory-mapped file, what a read transfers, and
incomplete copies.
"""

import http.server
import itertools
import json
import re
import threading
from pathlib import Path

import numpy as np
import pytest

from adaptive_jax import files
from adaptive_jax.data.corpora import stored
from adaptive_jax.data.corpora.corpus import Corpus
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError

VOCABULARY = Vocabulary.build({"the": 5, "cat": 2, "h␠at": 1, "<eos>": 3, "<unk>": 0})
UNITS = {"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}
CHUNK, SHARD = 16, 64


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(stored, "CHUNK", CHUNK)
    monkeypatch.setattr(stored, "SHARD", SHARD)


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    """A place of its own, in each of the two stores that need no network."""
    return f"{request.param}://{tmp_path}/a copy"


def ids_of(tokens, seed=0):
    return np.random.default_rng(seed).integers(0, 2**31 - 1, tokens, dtype=np.int32)


def mapped(ids, path):
    np.save(path, ids)
    return np.load(path, mmap_mode="r")


def indices(tokens):
    """Slices and integer arrays, at the edges of chunks, of shards and of the split."""
    edges = {at + by for at in (0, CHUNK, SHARD, tokens) for by in (-1, 0, 1)} | {2 * SHARD}
    inside = np.array(sorted(edge for edge in edges if 0 <= edge < tokens))
    yield from (slice(*ends) for ends in itertools.product((None, -1, *edges), repeat=2))
    yield from (inside, inside[::-1], np.zeros(3, np.int32), np.zeros((2, 0), np.int64))
    yield np.random.default_rng(1).integers(0, tokens, (3, 5, 2))
    yield np.array([[0], [tokens - 1]], np.uint16)


@pytest.mark.parametrize("tokens", [1, CHUNK, SHARD, 3 * SHARD + CHUNK + 3])
def test_indexed_like_a_mapped_file(url, tmp_path, tokens):
    """The same values, shapes and dtypes, for sizes that divide into chunks and shards and sizes
    that do not.
    """
    plain = mapped(ids_of(tokens), tmp_path / "ids.npy")
    stored.copy(Corpus(VOCABULARY, {"train": plain}), url)
    found = stored.open(url, splits=("train",)).ids["train"]
    assert (len(found), found.shape, found.dtype) == (tokens, plain.shape, plain.dtype)
    assert found.ndim == 1
    for index in indices(tokens):
        value = found[index]
        assert type(value) is np.ndarray and value.dtype == np.int32, index
        np.testing.assert_array_equal(value, plain[index], err_msg=str(index))
    np.testing.assert_array_equal(np.asarray(found), plain)
    np.testing.assert_array_equal(np.asarray(found, np.int64), plain)


@pytest.mark.parametrize(
    "vocabulary", [VOCABULARY, Subwords.build(UNITS, 10)], ids=["words", "sub-words"]
)
def test_the_vocabulary_comes_with_them(url, vocabulary):
    """Words and counts, and of sub-words the model, so that text is encoded the same way."""
    stored.copy(Corpus(vocabulary, {"train": ids_of(5)}), url)
    found = stored.open(url + "/", splits=()).vocabulary
    assert (type(found), found.digest) == (type(vocabulary), vocabulary.digest)
    assert found.encode("lowest the") == vocabulary.encode("lowest the")


def test_the_same_words_in_another_order(url):
    """Ids are renumbered as they are read, so that a run with clusters trains from a store."""
    stored.copy(Corpus(VOCABULARY, {"train": ids_of(70) % len(VOCABULARY)}), url)
    order = np.arange(len(VOCABULARY))[::-1]
    other = Vocabulary(tuple(VOCABULARY.words[i] for i in order), VOCABULARY.counts[order])
    data = {"corpus": "text_files", "path": url}
    corpus = load(data, vocabulary=other, splits=("train",))
    assert corpus.vocabulary is other
    for where in slice(3, 60), np.array([[5], [2]]):
        np.testing.assert_array_equal(
            corpus.ids["train"][where], order[(ids_of(70) % len(VOCABULARY))[where]]
        )
    with pytest.raises(InputError, match="holds ids of another vocabulary"):
        load(data, vocabulary=Vocabulary(other.words, other.counts + 1), splits=("train",))


def test_only_the_splits_asked_for(url):
    """A split that is empty or not asked for does no harm, one that is not there is named."""
    stored.copy(Corpus(VOCABULARY, {"train": ids_of(70), "validation": ids_of(0)}), url)
    assert list(stored.open(url, splits=("validation",)).ids) == ["validation"]
    assert stored.open(url, splits=("validation",)).ids["validation"][:].shape == (0,)
    with pytest.raises(InputError, match="has no test split, only train, validation"):
        stored.open(url)


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Files in byte ranges, as an object store gives them; each answer's path and size goes
    into `sent`.
    """

    protocol_version = "HTTP/1.1"
    sent: list

    def do_GET(self):
        path = Path(self.translate_path(self.path))
        content = path.read_bytes() if path.is_file() else None
        if content is None:
            self.send_error(404)
            return
        begin, end, status = 0, len(content), 200
        if asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            status = 206
            if asked[1]:
                begin, end = int(asked[1]), int(asked[2]) + 1 if asked[2] else end
            else:
                begin = end - int(asked[2])
        self.sent.append((path.name, end - begin))
        self.send_response(status)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        self.send_header("ETag", '"1"')
        self.end_headers()
        self.wfile.write(content[begin:end])

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    """The address of tmp_path, and the list of what was sent."""
    handler = type("Handler", (Ranges,), {"sent": []})
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *a: handler(*a, directory=str(tmp_path))
    ) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", handler.sent
        server.shutdown()
        thread.join()


def test_only_what_is_asked_for_travels(tmp_path, server, monkeypatch):
    """Opening reads no ids. A range takes the index of its shard and its chunk; a second one in
    the shard, its chunk alone.
    """
    monkeypatch.setattr(stored, "CHUNK", 1_024)
    monkeypatch.setattr(stored, "SHARD", 64 * 1_024)
    ids = ids_of(5 * 64 * 1_024 + 100)
    stored.copy(Corpus(VOCABULARY, {"train": ids}), f"file://{tmp_path}/c")
    address, sent = server
    found = stored.open(f"{address}/c", splits=("train",)).ids["train"]
    assert {name for name, _ in sent} == {"complete.json", "vocabulary.txt", "zarr.json"}

    def travels(index):
        sent.clear()
        np.testing.assert_array_equal(found[index], ids[index])
        return len(sent), sum(size for _, size in sent)

    index, chunk = 16 * 64 + 4, 4 * 1_024
    assert chunk <= travels(slice(70_000, 70_512))[1] <= chunk + index + 300
    requests, size = travels(slice(80_000, 80_512))
    assert requests == 1 and chunk <= size <= chunk + 300
    assert travels(slice(80_000, 80_512)) == (0, 0)
    # 40 rows of 513 ids, some within two chunks, from five shards, whose indices are to be read
    # once each.
    starts = np.random.default_rng(3).integers(0, len(ids) - 513, 40)
    rows = starts[:, None] + np.arange(513)
    requests, size = travels(rows)
    chunks = len(np.unique(rows // 1_024))
    assert requests <= chunks + 5
    assert size <= chunks * (chunk + 300) + 5 * index < ids.nbytes / 5


class Interrupted:
    """Ids that can be read up to the second shard."""

    def __len__(self):
        return 3 * SHARD

    def __getitem__(self, index):
        if index.start:
            raise KeyboardInterrupt
        return ids_of(3 * SHARD)[index]


def test_an_interrupted_copy_is_none(url):
    """It is not opened, and the next copy replaces it, shorter and with another vocabulary
    though it is.
    """
    with pytest.raises(KeyboardInterrupt):
        stored.copy(
            Corpus(Subwords.build(UNITS, 10), {"train": Interrupted(), "test": ids_of(5)}), url
        )
    with pytest.raises(InputError, match="no complete copy") as error:
        stored.open(url)
    assert url in str(error.value)
    ids = ids_of(10, seed=1)
    stored.copy(Corpus(VOCABULARY, {"train": ids}), url)
    corpus = stored.open(url, splits=("train",))
    assert corpus.vocabulary.digest == VOCABULARY.digest
    np.testing.assert_array_equal(corpus.ids["train"][:], ids)


def test_a_complete_copy_is_not_overwritten(url):
    """And ids of 0, which an array may leave out as its fill value, are not lost."""
    stored.copy(Corpus(VOCABULARY, {"train": np.zeros(3 * SHARD, np.int32)}), url)
    with pytest.raises(InputError, match="already holds a corpus: use another URL"):
        stored.copy(Corpus(VOCABULARY, {"train": ids_of(10, seed=1)}), url)
    np.testing.assert_array_equal(
        stored.open(url, splits=("train",)).ids["train"][:], np.zeros(3 * SHARD)
    )


def test_ids_that_were_lost_are_an_error(tmp_path):
    """Not ids of 0; what is left can be read."""
    ids = ids_of(3 * SHARD)
    stored.copy(Corpus(VOCABULARY, {"train": ids}), f"file://{tmp_path}/c")
    (tmp_path / "c/train/c/1").unlink()
    found = stored.open(f"file://{tmp_path}/c", splits=("train",)).ids["train"]
    np.testing.assert_array_equal(found[2 * SHARD :], ids[2 * SHARD :])
    with pytest.raises(InputError, match=r"cannot read file://.*/c: .*missing"):
        found[SHARD : SHARD + 2]


@pytest.mark.parametrize(
    "bad, says",
    [
        ("nosuch://bucket/x", "nosuch"),
        ("/tmp/x", "scheme"),
        ("", "URL"),
        ("file://x/y", "authority"),
        ("gs://Bad Bucket/x", "bucket name"),
    ],
)
def test_an_address_that_is_none(bad, says):
    """One line with the URL, what is wrong with it, and what it may be."""
    for call, what in (
        (lambda: stored.open(bad), "read"),
        (lambda: stored.copy(Corpus(VOCABULARY, {}), bad), "write"),
    ):
        with pytest.raises(
            InputError, match=rf"(?s)^cannot {what} {re.escape(bad)}: .*{says}.*gs://"
        ) as error:
            call()
        assert "\n" not in str(error.value)


def test_a_place_closed_to_writing(tmp_path, server):
    """A file in the way, and an address that can only be read."""
    (tmp_path / "file").write_text("")
    for closed in f"file://{tmp_path}/file/x", f"{server[0]}/x":
        with pytest.raises(InputError, match=rf"^cannot write {closed}: .*; use a URL"):
            stored.copy(Corpus(VOCABULARY, {"train": ids_of(5)}), closed)


def test_a_store_that_does_not_answer(monkeypatch):
    """Given up while tensorstore would try on."""
    monkeypatch.setattr(files, "PATIENCE", 0.2)
    with pytest.raises(
        InputError, match=r"cannot read http://127\.0\.0\.1:9/x: no answer within 0\.2 seconds"
    ):
        stored.open("http://127.0.0.1:9/x")


def test_a_copy_of_another_format(tmp_path):
    stored.copy(Corpus(VOCABULARY, {"train": ids_of(5)}), f"file://{tmp_path}/c")
    marker = tmp_path / "c" / stored.MARKER
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"format": 99}))
    with pytest.raises(InputError, match="format 99"):
        stored.open(f"file://{tmp_path}/c")
