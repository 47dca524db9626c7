"""Damaged files of every reader, by table and by hypothesis: one line with the cure, within
memory and time, nothing written.
"""

import contextlib
import gzip
import io
import lzma
import shutil
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adaptive_jax.config.cache import VARIABLE
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.corpora.cached import checksum, read_ids
from adaptive_jax.data.corpora.published import CORPORA
from adaptive_jax.data.corpora.shards import COMPLETE, Shards
from adaptive_jax.data.corpora.text import Text, local_texts
from adaptive_jax.data.vocabulary.on_disk import (
    read_vocabulary,
    read_with_checksums,
    write_with_checksums,
)
from adaptive_jax.data.vocabulary.subwords import FILE, Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from tests import refuses

fuzz = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
PATTERNS = CORPORA["wikitext2"].patterns
UNITS = Subwords.build({"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}, 10)
MEMORY = 64 << 20  # bytes that reading some kilobytes may take


@contextlib.contextmanager
def one_line_at_most(root):
    """Nothing or an InputError of one line; no file below `root` is made or changed, and no
    large memory taken.
    """
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    tracemalloc.start()
    try:
        yield
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) > 20
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert most < MEMORY
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before


@st.composite
def damaged(draw, content):
    """Content that is cut, lengthened, or has some bytes replaced; or any bytes."""
    kind = draw(st.sampled_from(["cut", "longer", "replaced", "any"]))
    if kind == "cut":
        return content[: draw(st.integers(0, len(content) - 1))]
    if kind == "longer":
        return content + draw(st.binary(min_size=1, max_size=40))
    if kind == "any":
        return draw(st.binary(max_size=300))
    content = bytearray(content)
    for at, value in draw(
        st.lists(
            st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), min_size=1, max_size=8
        )
    ):
        content[at] = value
    return bytes(content)


def saved(write):
    """The bytes that a function writes to a file."""
    stream = io.BytesIO()
    write(stream)
    return stream.getvalue()


def zipped(name, content=b"the cat\n"):
    def write(stream):
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            for split in "train", "valid", "test":
                archive.writestr(name.format(split), content if split == "test" else content[:9])

    return saved(write)


def tarred(name, content=b"the cat\n"):
    def write(stream):
        with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as archive:
            for split in "train", "valid", "test":
                member = tarfile.TarInfo(name.format(split))
                some = content if split == "test" else content[:9]
                member.size = len(some)
                archive.addfile(member, io.BytesIO(some))

    return saved(write)


def write_shards(directory):
    text = directory.with_name(f"{directory.name}.txt")
    text.write_text("the cat\nthe hat\n")
    Shards.make(Text((text,)), directory)


def read_shards(directory):
    assert Shards(directory).counts() == {"the": 2, "cat": 1, "hat": 1, "<eos>": 2}


def read_words(directory):
    check_words(read_vocabulary(directory / "vocabulary.txt"))


def read_units(directory):
    check_words(read_with_checksums(directory / "vocabulary.txt", "restore it"))


def check_words(vocabulary):
    assert len(vocabulary.digest) == 16 and len(vocabulary.unigram_probs) == len(vocabulary)
    vocabulary.encode("the cat")


def check_ids(directory):
    ids = read_ids(directory / "train.npy", checksum(IDS))
    assert ids.dtype == np.int32 and ids.tolist() == IDS.tolist()


def compressed(name, content, text=b"the cat\n"):
    """Functions that write and read compressed text, which is read as a stream."""

    def read(directory):
        place = directory / name if name.startswith("text") else directory
        found = local_texts(place, (), PATTERNS)["train"].chunks()
        assert b"".join(chunk.data for chunk in found) == text

    return lambda directory: (directory / name).write_bytes(content), read


IDS = np.arange(30, dtype="i4")
WORDS = Vocabulary.build({"the": 5, "<eos>": 3, "cat": 2})
KINDS = {  # functions that write the files of a kind to a directory, and that read them
    "words": (lambda directory: WORDS.write(directory / "vocabulary.txt"), read_words),
    "sub-words": (
        lambda directory: write_with_checksums(UNITS, directory / "vocabulary.txt"),
        read_units,
    ),
    "ids": (
        lambda directory: np.save(directory / "train.npy", IDS),
        check_ids,
    ),
    "shards": (write_shards, read_shards),
    "zip": compressed("text.zip", zipped("w/wiki.{}.tokens")),
    "tar": compressed("text.tar.gz", tarred("w/wiki.{}.tokens")),
    "xz": compressed("train.txt.xz", lzma.compress(b"the cat\n" * 9), b"the cat\n" * 9),
    "gz": compressed("train.txt.gz", gzip.compress(b"the cat\n" * 9), b"the cat\n" * 9),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A directory for each kind of files."""
    directory = tmp_path_factory.mktemp("whole")
    for kind, (write, read) in KINDS.items():
        (directory / kind).mkdir()
        write(directory / kind)
        read(directory / kind)
    return directory


@pytest.mark.parametrize("kind", KINDS)
@fuzz
@given(data=st.data())
def test_damaged_files(whole, kind, data, tmp_path_factory):
    """Files of which one is damaged are read as they were written, or refused."""
    files = sorted(path.relative_to(whole) for path in (whole / kind).rglob("*") if path.is_file())
    file = data.draw(st.sampled_from(files))
    root = tmp_path_factory.mktemp("damaged")
    shutil.copytree(whole / kind, root / kind)
    (root / file).write_bytes(data.draw(damaged((whole / file).read_bytes())))
    with one_line_at_most(root):
        KINDS[kind][1](root / kind)


@pytest.mark.parametrize(
    "descr, shape",
    [("<i4", (10**18,)), ("<i8", (3,)), ("|O", (3,)), ("<i4", (-5,)), ("<i4", (3, 3))],
)
def test_headers_of_ids(descr, shape, tmp_path):
    """A file that declares more than it has, or other numbers, is refused."""
    header = {"descr": descr, "shape": shape, "fortran_order": False}
    content = saved(lambda stream: np.lib.format.write_array_header_1_0(stream, header))
    (tmp_path / "train.npy").write_bytes(content + bytes(120))
    with one_line_at_most(tmp_path), refuses("train.npy", "damaged"):
        read_ids(tmp_path / "train.npy")


@pytest.mark.parametrize("make, name", [(zipped, "evil.zip"), (tarred, "evil.tar.gz")])
def test_archives_write_nothing(make, name, tmp_path):
    """Members are read where they are, whatever their names; one that unpacks to 100 MiB takes
    little memory.
    """
    place = tmp_path / "inner" / "place"
    place.mkdir(parents=True)
    (place / name).write_bytes(make("../../evil/wiki.{}.tokens", bytes(100 << 20)))
    with one_line_at_most(tmp_path):
        text = local_texts(place / name, (), PATTERNS)["test"]
        size = sum(len(chunk.data) for chunk in text.chunks())
    assert size == 100 << 20


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """A text and its cache, of words and of sub-words, and how to load it."""
    root = tmp_path_factory.mktemp("cached")
    lines = [" ".join(f"w{i % k}" for k in (3, 7, 31)) for i in range(90)]
    (root / "text").mkdir()
    for split, some in ("train", lines), ("valid", lines[:9]), ("test", lines[9:20]):
        (root / "text" / f"{split}.txt").write_text("\n".join(some) + "\n")
    data = {"corpus": "text_files", "path": str(root / "text"), "codes": 9}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(root / "cache"))
        corpora.load(data)
    return root, data


AGAIN = ", and the same command makes it again"


def a_byte(path):
    """Changes the byte in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a byte": a_byte,
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "a directory": lambda path: path.unlink() or path.mkdir(),
}


@pytest.mark.parametrize(
    "name, damage",
    [
        (name, damage)
        for name in (
            *("words/vocabulary.txt", "subwords-*/vocabulary.txt", FILE, "train.npy", "test.json"),
            *("train/000000.npz", f"train/{COMPLETE}"),
        )
        for damage in DAMAGES
        if (name, damage) != ("test.json", "a byte")  # which is short, and read as a whole
    ],
)
def test_a_damaged_cache(cached, own_cache, name, damage):
    """One line that names the file and says what to remove; when that is done, all is as before."""
    root, data = cached
    cache = shutil.copytree(root / "cache", own_cache)
    before = corpora.load(data)
    ids = {
        split: np.array(ids) for split, ids in before.ids.items()
    }  # a file that is in use must not be cut
    if name.startswith(("words/", "train/")):  # read only if what was made of them is missing
        for path in [*cache.rglob("subwords-*"), next(cache.rglob("train.npy")).parent]:
            shutil.rmtree(path)
    if name.startswith("train/"):
        shutil.rmtree(next(cache.rglob("words")))
    path = next(cache.rglob(name))
    DAMAGES[damage](path)
    if name == "test.json" and damage == "half":
        path.write_text('{"words": 12}')
    with refuses(str(path), "damaged", "remove") as error:
        corpora.load(data)
    assert "\n" not in str(error.value)
    remove = str(error.value).rpartition("remove ")[2].removesuffix(AGAIN)
    remove = path if remove == "it" else Path(remove)
    assert cache in remove.parents
    shutil.rmtree(remove) if remove.is_dir() else remove.unlink()
    after = corpora.load(data)
    assert after.vocabulary.digest == before.vocabulary.digest
    assert after.unseen == before.unseen
    assert all(np.array_equal(after.ids[split], ids[split]) for split in ids)


def test_words_that_were_not_learnt_from(cached, tmp_path, own_cache, monkeypatch):
    """Shares of a split for words and for sub-words; not known where the words of the train
    split are not.
    """
    root, data = cached
    text = shutil.copytree(root / "text", tmp_path / "text")
    (text / "test.txt").write_text("w0 new <unk> w0 new other\nw1\n")
    data = data | {"path": str(text)}
    units = corpora.load(data)
    assert units.unseen == {"train": 0.0, "validation": 0.0, "test": 3 / 9}
    assert corpora.load(data).unseen == units.unseen  # read from the cache
    words = corpora.load(data | {"codes": 0, "limit": 20})
    assert words.unseen["test"] == 3 / 9
    index, counts = words.vocabulary.index, words.vocabulary.counts
    assert words.unseen["train"] == counts[index["<unk>"]] / counts.sum()
    (text / "train.txt").unlink()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "other"))
    assert corpora.load(data, vocabulary=units.vocabulary, splits=("test",)).unseen == {}
    assert corpora.load(
        data, vocabulary=Vocabulary.build({"w0": 1, "<eos>": 1, "<unk>": 1}), splits=("test",)
    ).unseen == {"test": 4 / 9}
