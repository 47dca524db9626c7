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

from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.corpora import stored
from adaptive_jax.data.corpora.cached import read_ids
from adaptive_jax.data.corpora.corpus import Corpus
from adaptive_jax.data.corpora.known import CORPORA
from adaptive_jax.data.corpora.shards import COMPLETE, Shards
from adaptive_jax.data.corpora.text import Text, local_texts
from adaptive_jax.data.vocabulary.subwords import FILE, Subwords, read_vocabulary
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError

fuzz = settings(
    deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
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


TEXT = st.one_of(
    damaged(b"the 5\n<eos> 3\ncat 2\n"),
    st.lists(st.tuples(st.text(max_size=5), st.integers(-(10**30), 10**30)), max_size=9).map(
        lambda lines: "".join(f"{word} {count}\n" for word, count in lines).encode(
            "utf-8", "surrogatepass"
        )
    ),
)


@fuzz
@given(content=TEXT)
def test_vocabularies(content, tmp_path_factory):
    """Of words. What is read has a digest, unigram probabilities and encodes a line."""
    path = tmp_path_factory.mktemp("words") / "vocabulary.txt"
    path.write_bytes(content)
    with one_line_at_most(path.parent):
        vocabulary = read_vocabulary(path)
        assert len(vocabulary.digest) == 16 and len(vocabulary.unigram_probs) == len(vocabulary)
        vocabulary.encode("the cat")


@fuzz
@given(
    words=st.none() | damaged(UNITS._text.encode()),
    model=damaged(UNITS.model),
)
def test_sub_words(words, model, tmp_path_factory):
    """Units and their model; the checksums beside them are `read_with_checksums`'s to compare."""
    path = tmp_path_factory.mktemp("units") / "vocabulary.txt"
    path.write_bytes(UNITS._text.encode() if words is None else words)
    path.with_name(FILE).write_bytes(model)
    with one_line_at_most(path.parent):
        read_vocabulary(path)


IDS = saved(lambda stream: np.save(stream, np.arange(30, dtype=np.int32)))
HEADER = st.builds(
    lambda descr, shape, order: saved(
        lambda stream: np.lib.format.write_array_header_1_0(
            stream, {"descr": descr, "shape": shape, "fortran_order": order}
        )
    ),
    st.sampled_from(["<i4", "<i8", "|O", "<U9", ">i4", "<f4"]),
    st.lists(st.integers(-5, 10**18), max_size=3).map(tuple),
    st.booleans(),
)


@fuzz
@given(content=damaged(IDS) | HEADER.map(lambda header: header + bytes(120)))
def test_ids(content, tmp_path_factory):
    """Of a cache. A file that declares more than it has, or other numbers, is refused."""
    path = tmp_path_factory.mktemp("ids") / "train.npy"
    path.write_bytes(content)
    with one_line_at_most(path.parent):
        ids = read_ids(path, 30)
        assert (ids.dtype, ids.ndim) == (np.int32, 1) and len(ids) <= len(content) // 4
        assert not len(ids) or 0 <= ids.min() <= ids.max() < 30


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The shards of a small text."""
    directory = tmp_path_factory.mktemp("made")
    (directory / "text.txt").write_text("the cat\nthe hat\n")
    return Shards.make(Text((directory / "text.txt",)), directory / "shards").directory


@fuzz
@given(data=st.data(), name=st.sampled_from(["000000.npz", COMPLETE]))
def test_shards(made, data, name, tmp_path_factory):
    """An archive of arrays, and the file that says how many there are."""
    directory = shutil.copytree(made, tmp_path_factory.mktemp("shards") / "made")
    (directory / name).write_bytes(data.draw(damaged((made / name).read_bytes())))
    with one_line_at_most(directory):
        assert Shards(directory).counts() == {"the": 2, "cat": 1, "hat": 1, "<eos>": 2}


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


PLACES = {"text.zip": zipped("w/wiki.{}.tokens"), "text.tar.gz": tarred("w/wiki.{}.tokens")}
FILES = {
    "train.txt.xz": lzma.compress(b"the cat\n" * 9),
    "train.txt.gz": gzip.compress(b"the cat\n" * 9),
}


@fuzz
@given(data=st.data(), name=st.sampled_from([*PLACES, *FILES]))
def test_compressed_text(data, name, tmp_path_factory):
    """Compressed files and archives are read as a stream."""
    directory = tmp_path_factory.mktemp("text")
    (directory / name).write_bytes(data.draw(damaged((PLACES | FILES)[name])))
    place = directory / name if name in PLACES else directory
    with one_line_at_most(directory):
        text = local_texts(str(place), (), PATTERNS)["train"]
        assert sum(len(chunk.data) for chunk in text.chunks()) < 1_000


@pytest.mark.parametrize("make, name", [(zipped, "evil.zip"), (tarred, "evil.tar.gz")])
def test_archives_write_nothing(make, name, tmp_path):
    """Members are read where they are, whatever their names; one that unpacks to 100 MiB takes
    little memory.
    """
    place = tmp_path / "inner" / "place"
    place.mkdir(parents=True)
    (place / name).write_bytes(make("../../evil/wiki.{}.tokens", bytes(100 << 20)))
    with one_line_at_most(tmp_path):
        text = local_texts(str(place / name), (), PATTERNS)["test"]
        assert sum(len(chunk.data) for chunk in text.chunks()) == 100 << 20


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A corpus in a store."""
    place = tmp_path_factory.mktemp("store") / "copy"
    stored.copy(
        Corpus(UNITS, {"train": np.arange(20, dtype=np.int32)}, {"train": 0.25}), f"file://{place}"
    )
    return place


@fuzz
@given(data=st.data())
def test_copies(copied, data, tmp_path_factory):
    """Any file of a copy in object stored. Ids that are read are those that were written."""
    files = sorted(path.relative_to(copied) for path in copied.rglob("*") if path.is_file())
    name = data.draw(st.sampled_from(files))
    place = shutil.copytree(copied, tmp_path_factory.mktemp("store") / "copy")
    (place / name).write_bytes(data.draw(damaged((copied / name).read_bytes())))
    with one_line_at_most(place):
        found = stored.open(f"file://{place}", ("train",))
        assert (
            np.array_equal(found.ids["train"][:], np.arange(20))
            and found.vocabulary.digest == UNITS.digest
        )


REST = f'"unseen": {{}}, "vocabulary": "{UNITS.digest}"'


@pytest.mark.parametrize(
    "marker",
    [
        "[]",
        "3",
        "null",
        '{"format": 1}',
        '{"format": 1, "tokens": {"train": 20}}',
        f'{{"format": 1, "tokens": [], {REST}}}',
        f'{{"format": 1, "tokens": {{"train": null}}, {REST}}}',
        f'{{"format": 1, "tokens": {{"train": 21}}, {REST}}}',
        f'{{"format": 1, "tokens": {{"train": 1e99}}, {REST}}}',
        "[" * 100_000,
        '{"format": 1, "tokens": {"train": 20}, "unseen": {}, "vocabulary": "0"}',
        f'{{"format": 1, "tokens": {{"train": 20}}, {REST}, "unseen": 3}}',
    ],
)
def test_markers(copied, marker, tmp_path):
    """Well-formed JSON that is no marker of this corpus."""
    place = shutil.copytree(copied, tmp_path / "copy")
    (place / stored.MARKER).write_text(marker)
    with pytest.raises(InputError, match="is damaged: .*; remove it and write it again"):
        stored.open(f"file://{place}", ("train",))


@pytest.fixture(scope="module")
def cached(tmp_path_factory):
    """A text and its cache, of words and of sub-words, and how to load it."""
    root = tmp_path_factory.mktemp("cached")
    lines = [" ".join(f"w{i % k}" for k in (3, 7, 31)) for i in range(90)]
    (root / "text").mkdir()
    for split, some in ("train", lines), ("valid", lines[:9]), ("test", lines[9:20]):
        (root / "text" / f"{split}.txt").write_text("\n".join(some) + "\n")
    data = {
        "corpus": "text_files",
        "path": str(root / "text"),
        "cache": str(root / "cache"),
        "codes": 9,
    }
    corpora.load(data)
    return root, data


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "other bytes": lambda path: path.write_bytes(np.random.default_rng(0).bytes(200)),
    "a directory": lambda path: path.unlink() or path.mkdir(),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "name",
    [
        "words/vocabulary.txt",
        "subwords-*/vocabulary.txt",
        FILE,
        "train.npy",
        "test.json",
        "train/000000.npz",
        f"train/{COMPLETE}",
    ],
)
def test_a_damaged_cache(cached, tmp_path, name, damage):
    """One line that names the file and says what to remove; when that is done, all is as before."""
    root, data = cached
    cache, data = tmp_path / "cache", data | {"cache": str(tmp_path / "cache")}
    shutil.copytree(root / "cache", cache)
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
    with pytest.raises(
        InputError, match=rf"{path}.* is damaged.*; remove (\S+) to have it made again$"
    ) as error:
        corpora.load(data)
    assert "\n" not in str(error.value)
    remove = str(error.value).rpartition("remove ")[2].removesuffix(" to have it made again")
    remove = path if remove == "it" else Path(remove)
    assert cache in remove.parents
    shutil.rmtree(remove) if remove.is_dir() else remove.unlink()
    after = corpora.load(data)
    assert after.vocabulary.digest == before.vocabulary.digest
    assert after.unseen == before.unseen
    assert all(np.array_equal(after.ids[split], ids[split]) for split in ids)


@pytest.mark.parametrize(
    "cache, reason",
    [
        ("/proc/nothing", "No such file or directory"),
        ("/dev/null", "Not a directory"),
        ("TEXT/train.txt", "Not a directory"),
        ("/" + "x" * 300, "File name too long"),
        ("~no_such_user_anywhere/x", "must be a directory"),
        ("", "must be a directory"),
    ],
)
def test_a_cache_that_cannot_be_one(cached, cache, reason):
    """One line with the setting, the reason and the cure."""
    root, data = cached
    cache = cache.replace("TEXT", str(root / "text"))
    with pytest.raises(InputError, match=rf"data\.cache='?{cache}.*{reason}"):
        corpora.load(data | {"cache": cache})


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"threshold": 0}, "data.threshold=0 must be 1"),
        ({"threshold": "2"}, "data.threshold='2' must be of type int"),
        ({"threshold": 1.5}, "data.threshold=1.5 must be of type int"),
        ({"limit": -1}, "data.limit=-1 must be 0"),
        ({"limit": 2}, "data.limit=2 must be 0 .* or 3 or more"),
        ({"codes": -1}, "data.codes=-1 must be 0 or more"),
        (
            {"codes": 10**6},
            "data.codes=1000000 is more than the train split gives: .* set data.codes=\\d+ or less",
        ),
        ({"lower": "yes"}, "data.lower='yes' must be of type bool"),
        ({"path": None}, "data.path=None must be of type str"),
        ({"path": "x" * 300}, "cannot read data.path=x+: File name too long"),
        ({"corpus": ""}, "data.corpus='' is not one of"),
        (
            {"path": "~no_such_user_anywhere"},
            "data.path='~no_such_user_anywhere' must be a directory",
        ),
    ],
)
def test_wrong_settings(cached, changes, says):
    """Refused with the value and the cure, however much is in the cache already."""
    _, data = cached
    with pytest.raises(InputError, match=says) as error:
        corpora.load(data | {"codes": 0} | changes)
    assert "\n" not in str(error.value)


def test_words_that_were_not_learnt_from(cached, tmp_path):
    """Shares of a split for words and for sub-words; not known where the words of the train
    split are not.
    """
    root, data = cached
    text = shutil.copytree(root / "text", tmp_path / "text")
    (text / "test.txt").write_text("w0 new <unk> w0 new other\nw1\n")
    data = data | {"path": str(text), "cache": str(tmp_path / "cache")}
    units = corpora.load(data)
    assert units.unseen == {"train": 0.0, "validation": 0.0, "test": 3 / 9}
    assert corpora.load(data).unseen == units.unseen  # read from the cache
    words = corpora.load(data | {"codes": 0, "limit": 20})
    assert words.unseen["test"] == 3 / 9
    index, counts = words.vocabulary.index, words.vocabulary.counts
    assert words.unseen["train"] == counts[index["<unk>"]] / counts.sum()
    (text / "train.txt").unlink()
    alone = data | {"path": str(text), "cache": str(tmp_path / "other")}
    assert corpora.load(alone, vocabulary=units.vocabulary, splits=("test",)).unseen == {}
    assert corpora.load(
        alone, vocabulary=Vocabulary.build({"w0": 1, "<eos>": 1, "<unk>": 1}), splits=("test",)
    ).unseen == {"test": 4 / 9}
