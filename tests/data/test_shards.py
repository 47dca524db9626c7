"""From bytes to shards to ids: nothing lost or repeated at any cut, kill or fault, and what the
errors say.
"""

import gzip
import hashlib
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_jax.config.cache import VARIABLE
from adaptive_jax.data.corpora import line_files, published, shards
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.corpora import text as text_module
from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.text import Chunk, Text, local_texts
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from tests import refuses

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the real corpora are not here")
properties = settings(max_examples=30)
WORDS = st.sampled_from(["a", "bb", "the", "é", "日本", "x" * 7])
LINE = st.lists(WORDS, max_size=6).map(" ".join)
SUBWORDS = Subwords.build({"the": 5, "bb": 3, "<eos>": 1}, 2)


def load(corpus, path, *, vocabulary=None, **settings):
    return corpora.load({"corpus": corpus, "path": str(path), **settings}, vocabulary=vocabulary)


def spelt(corpus):
    """The words of each split."""
    return {
        split: " ".join(corpus.vocabulary.words[i] for i in ids)
        for split, ids in corpus.ids.items()
    }


def ended(text):
    """A file's text with its last line ended."""
    return text if not text or text.endswith(b"\n") else text + b"\n"


@properties
@given(
    files=st.lists(st.tuples(st.lists(LINE), st.sampled_from(["", "\n"])), max_size=4),
    step=st.integers(1, 40),
    size=st.integers(22, 90),
)
def test_pieces_lose_and_repeat_nothing(files, step, size):
    """Whatever the sizes of files, chunks and pieces; lines are cut between words if at all."""
    texts = [("\n".join(lines) + end).encode() for lines, end in files]
    chunks = [
        Chunk(f"f{i}", text[j : j + step], 0.0)
        for i, text in enumerate(texts)
        for j in range(0, len(text), step)
    ]
    made = [piece for piece, _ in shards.pieces(chunks, size)]
    assert b"".join(made) == b"".join(map(ended, texts))
    assert all(0 < len(piece) <= size for piece in made)
    assert all(
        piece.endswith(b"\n") or (piece.endswith(b" ") and b"\n" not in piece) for piece in made
    )


@properties
@given(lines=st.lists(LINE, min_size=1, max_size=12), size=st.integers(22, 90))
def test_ids_are_those_of_a_plain_loop(lines, size, tmp_path_factory):
    """Counts and ids over any number of shards, of words and of sub-word units, against the
    vocabulary's own `encode`.
    """
    directory = tmp_path_factory.mktemp("shards")
    (directory / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    lines = "\n".join(lines).removesuffix("\n").split("\n") if "\n".join(lines) else []
    expected = [word for line in lines for word in (*line.split(), "<eos>")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "CHUNK_BYTES", size)
        patch.setattr(
            shards, "_processes", lambda: shards.contextlib.nullcontext(shards.operator.call)
        )
        if not {*expected} - {"<eos>"}:
            with refuses("words"):
                shards.Shards.make(Text((directory / "text.txt",)), directory / "made")
            return
        made = shards.Shards.make(Text((directory / "text.txt",)), directory / "made")
    counts = {word: expected.count(word) for word in expected}
    assert made.counts() == counts
    for vocabulary in (
        Vocabulary.build(counts),
        Vocabulary.build(counts | {"<unk>": 0}, 2),
        SUBWORDS,
    ):
        made.encode(vocabulary, directory / "ids.npy")
        ids = np.load(directory / "ids.npy")
        assert ids.dtype == np.int32
        assert ids.tolist() == [i for line in lines for i in vocabulary.encode(line)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A directory with a corpus of 60 lines in two files, not to be changed."""
    directory = tmp_path_factory.mktemp("text")
    lines = [f"the w{i % 7}  w{i} ." for i in range(60)]
    for split, part in ("train", lines), ("valid", lines[:5]), ("test", lines[5:9]):
        (directory / split).mkdir()
        for number, some in enumerate((part[: len(part) // 2], part[len(part) // 2 :])):
            (directory / split / f"{number}.txt").write_text("\n".join(some) + "\n")
    return directory


@pytest.fixture
def own_text(text, tmp_path):
    """A copy of this corpus, which may be changed."""
    return shutil.copytree(text, tmp_path / "text")


def made_of(content, tmp_path):
    """Counts of the shards of one file with these bytes."""
    (tmp_path / "text.txt").write_bytes(content)
    return shards.Shards.make(Text((tmp_path / "text.txt",)), tmp_path / "made").counts()


def test_a_giant_line(tmp_path, monkeypatch):
    """Is cut between words, whatever separates them, and ends once; a giant word is no text."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 1 << 15)
    others = dict.fromkeys(["cat", "sat", "on", "mat"], 10_000)
    for name, space in ("spaces", b" "), ("tabs", b"\t"), ("returns", b"\r"):
        (directory := tmp_path / name).mkdir()
        counts = made_of(b"the cat sat on the mat ".replace(b" ", space) * 10_000, directory)
        assert counts == {"the": 20_000, "<eos>": 1} | others
        assert len(list((directory / "made").glob("*.npz"))) == 8
    with refuses("text.txt", "32,768 bytes"):
        made_of(b"a" * (3 << 15), tmp_path)


def test_ends_of_lines(tmp_path):
    """CRLF counts as one end, as does the end of the file; empty lines count; a lone carriage
    return is white space.
    """
    assert made_of(b"a b\r\n\r\nb\n\n  \na\rb", tmp_path) == {"a": 2, "b": 3, "<eos>": 6}


def test_files_of_a_directory_end_their_last_lines(tmp_path):
    """Where a line feed is missing, the next file still begins a line; a byte order mark is no
    letter; an editor's backup is not read; JSON and parquet are not taken for text.
    """
    for name in ("train", "valid", "test"):
        (tmp_path / name).mkdir()
        for i in range(3):
            content = "\ufeff" * (i == 1) + f"{name} {i}"
            (tmp_path / name / f"{i}.txt").write_text(content)
        (tmp_path / name / "1.txt~").write_text("as it was")
    texts = local_texts(tmp_path, ("train", "test"))
    assert list(texts["train"].lines()) == [b"train 0\n", b"train 1\n", b"train 2\n"]
    (tmp_path / "train" / "1.txt").write_text("\ufeff")  # which became a line without words
    [(piece, _)] = shards.pieces(texts["train"].chunks(), shards.CHUNK_BYTES)
    assert piece == b"train 0\ntrain 2\n"
    for name in "0.jsonl", "0.parquet":
        next((tmp_path / "train").glob("0.*")).rename(tmp_path / "train" / name)
        with refuses(f"train/{name}", "JSON", "parquet"):
            next(local_texts(tmp_path, ("train",))["train"].lines())
        with refuses(f"train/{name}", "JSON", "parquet"):  # which was scored, braces and all
            line_files.TextFiles([tmp_path / "train" / name])


@pytest.mark.parametrize(
    "content, names",
    [
        (b"fine\n\nthe \xff\n", ["line 3", "UTF-8"]),
        (b"fine\nthe\0cat\n", ["line 2", "NUL"]),
        ("the\n".encode("utf-16"), ["line 1", "UTF-16"]),
        ("the\n".encode("utf-16-le"), ["line 1", "NUL"]),
        (b"\nthe <eos>\na cat <eos>\n", ["<eos>", "sed"]),
        (b"\n \n", ["words"]),
        (b"", ["words"]),
    ],
)
def test_files_that_are_no_text(content, names, tmp_path):
    """Each with file and line; nothing is left that could be read."""
    with refuses("text.txt", *names):
        made_of(content, tmp_path)
    assert not (tmp_path / "made" / shards.COMPLETE).exists()


def test_the_line_of_a_fault_far_in(tmp_path, monkeypatch):
    """Counted over pieces and files, in other processes too."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 64)
    files = []
    for i in range(3):
        files.append(tmp_path / f"{i}.txt")
        files[-1].write_bytes(b"some words\n" * 30 + b"\xff\n" * (i == 2))
    with refuses("2.txt", "line 31", "UTF-8"):
        shards.Shards.make(Text(tuple(files)), tmp_path / "made")


def test_an_end_of_sentence_of_its_own(tmp_path, monkeypatch):
    """Refused where the text has more than one in two lines, whatever a single piece has."""
    monkeypatch.setattr(shards, "CHUNK_BYTES", 64)
    clean = b"some words\n" * 30
    assert made_of(clean + b"the end <eos>\n", tmp_path)["<eos>"] == 32
    (tmp_path / "more.txt").write_bytes(clean + b"the end <EOS>\n" * 31)
    with refuses("<eos>"):
        shards.Shards.make(Text((tmp_path / "more.txt",)), tmp_path / "lower", lower=True)


@pytest.mark.parametrize("line", [b"word " * 2_000_000, b"w" * 10_000_000])
def test_an_endless_line_is_not_held(line, tmp_path, monkeypatch):
    """A packed file of some kB that unpacks to a line without end took all memory, in scores and
    in own text. Training, which cuts lines, reads it if it has words.
    """
    monkeypatch.setattr(text_module, "LINE", 100_000)
    monkeypatch.setattr(line_files, "LINE", 100_000)
    path = tmp_path / "text.txt.gz"
    path.write_bytes(gzip.compress(line, 1))
    for read in Text((path,)).lines, line_files.TextFiles([path]).__iter__:
        tracemalloc.start()
        try:
            with refuses("text.txt.gz", "line 1", "a line of", "100,000"):
                list(read())
            assert tracemalloc.get_traced_memory()[1] < 8e6
        finally:
            tracemalloc.stop()
    if b" " in line:
        made = shards.Shards.make(Text((path,)), tmp_path / "made")
        assert made.counts() == {"word": 2_000_000, "<eos>": 1}


def test_an_endless_word_is_not_held(tmp_path, monkeypatch):
    """Of a line that may be held whole; words up to the limit are text."""
    monkeypatch.setattr(text_module, "WORD", 10)
    path = tmp_path / "text.txt"
    for word, fits in ("0123456789", True), ("0123456789a", False):
        path.write_text(f"some words\nand {word} {word} more\n")
        for read in Text((path,)).lines, line_files.TextFiles([path]).__iter__:
            if fits:
                assert len(list(read())) == 2
                continue
            with refuses("text.txt", "line 2", "word", "10"):
                list(read())


def test_a_process_that_is_killed():
    """An error in one line, not a wait without end."""
    with refuses("killed"), shards._processes() as submit:
        submit(os._exit, 3)


def test_tokens_of_words():
    """A word may have none, and another two, so that there are as many tokens as words."""
    tokens, lengths = np.array([7, 8, 9]), np.array([0, 2, 1])
    ids = np.array([0, 2, 1, 2])
    assert shards._tokens_of_words(tokens, lengths, ids).tolist() == [9, 7, 8, 9]
    assert shards._tokens_of_words(tokens, np.ones(3, int), ids).tolist() == [7, 9, 8, 9]


def test_a_script_without_a_guard(text, tmp_path):
    """Its processes run it anew: an error that says so, not a wait without end."""
    script = tmp_path / "script.py"
    data = {"corpus": "text_files", "path": str(text)}
    script.write_text(
        "from adaptive_jax.data.corpora import load, shards\nshards.CHUNK_BYTES = 64\n"
        f"load.load({data})\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1
    assert 'load corpora under `if __name__ == "__main__":`' in run.stderr.splitlines()[-1]


SCRIPT = """
import logging, sys
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.corpora import text as text_module
from adaptive_jax.data.corpora import shards
shards.CHUNK_BYTES = 64
if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        corpus = corpora.load({"corpus": "text_files", "path": sys.argv[1]})
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
    print(corpus.vocabulary.digest, sum(map(len, corpus.ids.values())))
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """`start(text, cache)`: a process that prepares a corpus in pieces of 64 bytes."""
    script = tmp_path_factory.mktemp("script") / "script.py"
    script.write_text(SCRIPT)

    def start(text, cache):
        return subprocess.Popen(
            [sys.executable, script, text],
            env=os.environ | {"PYTHONPATH": str(ROOT), VARIABLE: str(cache)},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


def files_of(cache):
    """Name and SHA-256 of all that was prepared, but for the locks."""
    files = [path for path in cache.rglob("*") if path.is_file() and not path.name.startswith(".")]
    digest = hashlib.sha256
    return {str(file.relative_to(cache)): digest(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture(scope="module")
def undisturbed(start, text, tmp_path_factory):
    """The files that two processes leave, which nothing stops: all lines in their order, from many
    shards. One prepares, the other waits and reads what the first has made.
    """
    cache = tmp_path_factory.mktemp("undisturbed")
    with start(text, cache) as one, start(text, cache) as two:
        outputs = [process.communicate(timeout=120) for process in (one, two)]
    assert outputs[0][0] == outputs[1][0] != "", outputs
    said = outputs[0][1] + outputs[1][1]
    made = [line.split()[2] for line in said.splitlines() if line.startswith("preparing")]
    assert sorted(made) == ["test", "train", "validation"]
    files = files_of(cache)
    assert len(files) > 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(cache))
        assert spelt(load("text_files", text))["train"] == " ".join(
            f"the w{i % 7} w{i} . <eos>" for i in range(60)
        )
    return files


def test_killed_at_any_moment_it_resumes(start, text, tmp_path, undisturbed):
    """The same bytes in the end, no file twice, and no process left behind."""
    cache = tmp_path / "cache"
    before = {}
    for most in (1, 9):
        with start(text, cache) as process:
            while process.poll() is None and len(list(cache.rglob("*.npz"))) < most:
                time.sleep(0.002)
            alive = process.poll() is None
            workers = psutil.Process(process.pid).children(recursive=True) if alive else []
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
        assert not psutil.wait_procs(workers, timeout=20)[1]
        times = {path: path.stat().st_mtime_ns for path in cache.rglob("[!.]*.npz")}
        assert times.items() >= before.items()  # what was there is not made again
        before = times
    with start(text, cache) as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert files_of(cache) == undisturbed
    assert {path.suffix for path in cache.rglob(".*")} == {".lock"}  # nothing unfinished lies about


def test_a_full_disk(start, own_text, small_disk):
    """One error with the file; the same command resumes once there is room."""
    (own_text / "train" / "2.txt").write_text("".join(f"word{i} word{2 * i}\n" for i in range(200)))
    with start(own_text, small_disk / "cache") as process:
        _, err = process.communicate(timeout=120)
    said = rf"No space left on device: .{small_disk}/cache/"
    assert re.search(said, err)
    assert not list(small_disk.rglob("*.npy"))
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    with start(own_text, small_disk / "cache") as process:
        _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err


def test_tokenisers(tmp_path):
    """Moses sets words and marks apart, knows abbreviations, and is asked before the case is
    lowered. The key of the cache has both settings.
    """
    (tmp_path / "text.txt").write_text("Mr. Smith's dog (a U.S. dog) isn't here.\n")
    text = Text((tmp_path / "text.txt",))
    cased = shards.Shards.make(text, tmp_path / "cased", "moses").counts()
    assert " ".join(cased) == "Mr. Smith 's dog ( a U.S. ) isn 't here . <eos>"
    lowered = shards.Shards.make(text, tmp_path / "lowered", "moses", lower=True).counts()
    assert lowered == {word.lower(): count for word, count in cased.items()}
    (tmp_path / "text").mkdir()
    for split in "train", "valid", "test":
        shutil.copy(tmp_path / "text.txt", tmp_path / "text" / f"{split}.txt")
    settings = {}, {"lower": True}, {"tokeniser": "moses"}
    vocabularies = {
        load("text_files", tmp_path / "text", **how).vocabulary.words for how in settings
    }
    assert len(vocabularies) == len(settings)


NAMES = {
    "train": "1b/training-monolingual.tokenized.shuffled/news.en-0000{}-of-00100",
    "held-out": "1b/heldout-monolingual.tokenized.shuffled/news.en.heldout-0000{}-of-00050",
}


def test_billion_word_as_it_is_published(tmp_path):
    """From the archive and from its directory: training shards in order, held-out shard 0 is
    test and 1 validation.
    """
    for name, numbers in ("train", (1, 2)), ("held-out", (0, 1, 2)):
        for number in numbers:
            file = tmp_path / NAMES[name].format(number)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{'held-out 0 ' * (name == 'train')}{name} of {number}\n")
    with tarfile.open(tmp_path / "1b.tar.gz", "w:gz") as archive:
        for file in sorted((tmp_path / "1b").rglob("news*")):
            archive.add(file, file.relative_to(tmp_path))
    for path in tmp_path / "1b.tar.gz", tmp_path / "1b":
        assert spelt(load("billion_word", path)) == {
            "train": "held-out 0 train of 1 <eos> held-out 0 train of 2 <eos>",
            "validation": "held-out of 1 <eos>",
            "test": "held-out of 0 <eos>",
        }
    with tarfile.open(tmp_path / "other.tgz", "w:gz") as archive:
        archive.add(tmp_path / "1b.tar.gz", "1b.tar.gz")
    with refuses("news.en"):
        load("billion_word", tmp_path / "other.tgz")


def test_two_copies_of_a_split(own_text, tmp_path):
    """A split that is there twice, or not there, as an empty directory is: named, with the cure."""
    (own_text / "valid.txt.xz").write_bytes(lzma.compress(b"a\n"))
    with refuses("valid.txt.xz", "valid/"):
        local_texts(own_text, ())
    (own_text / "valid.txt.xz").unlink()
    for file in (own_text / "test").iterdir():
        file.unlink()
    with refuses("test.txt", "test/"):
        local_texts(own_text, SPLITS)
    with refuses("wiki.test.raw"):
        local_texts(own_text, SPLITS, published.CORPORA["wikitext2_raw"].patterns)
    (tmp_path / "mine.tar.gz").touch()
    with refuses("mine.tar.gz", "is an archive: unpack it", "test.txt"):
        local_texts(tmp_path / "mine.tar.gz", ("test",))
    for needed, names in ((), "train.txt, valid.txt, test.txt"), (("test",), "test.txt"):
        with refuses("nowhere", names):
            local_texts(tmp_path / "nowhere", needed)


@needs_real
@pytest.mark.parametrize(
    "corpus, folder, validation, test",
    [  # ../shared/data/README.md: tokens and distinct words
        ("europarl", "europarl", (551_575, 28_100), (672_289, 31_088)),
        ("wikitext2_raw", "wikitext-2-raw", (217_646, 19_882), (245_569, 21_141)),
        ("billion_word", "lm1b-heldout", (322_706, 32_785), (318_286, 32_210)),
    ],
)
def test_counts_of_the_held_out_text(corpus, folder, validation, test, tmp_path):
    """Real text has the counts of shared/data/README.md; words lost between pieces of a file would
    change them.
    """
    texts = local_texts(REAL / folder, (), published.CORPORA[corpus].patterns)
    for split, expected in ("validation", validation), ("test", test):
        counts = shards.Shards.make(texts[split], tmp_path / split).counts()
        assert (sum(counts.values()), len(counts) - 1) == expected
