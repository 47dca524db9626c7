"""Corpora as data sets of tensorflow-datasets, which download from a server of the test's own."""

import collections
import dataclasses
import hashlib
import io
import itertools
import sys
import tarfile
import zipfile

import pytest

from adaptive_jax.data.corpora import published
from adaptive_jax.data.corpora.download import File
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.words import Vocabulary

tfds = pytest.importorskip("tensorflow_datasets")
tfds_builders = pytest.importorskip("adaptive_jax.data.corpora.tfds_builders")

TEXTS = {"train": b" the cat \n\n sat \xc3\xa9 .", "valid": b"b\nc\n", "test": b"d\n"}
LINES = {
    "train": [b" the cat ", b"", " sat \u00e9 .".encode()],
    "validation": [b"b", b"c"],
    "test": [b"d"],
}


def write_published(name, folder):
    """Files of the names that the corpus has, with these texts."""
    files, entry = [], published.CORPORA[name]
    if name == "penn_treebank":
        for pattern, text in zip(entry.patterns, TEXTS.values(), strict=True):
            files.append(folder / pattern)
            files[-1].write_bytes(text)
        return files
    address = next(iter(entry.files))
    files = [folder / address.rsplit("/", 1)[-1]]
    members = {
        f"corpus/{pattern.replace('*', '00001')}": text
        for pattern, text in zip(entry.patterns, TEXTS.values(), strict=True)
    }
    if files[0].suffix == ".zip":
        with zipfile.ZipFile(files[0], "w") as archive:
            for member, text in members.items():
                archive.writestr(member, text)
    else:
        with tarfile.open(files[0], "w:gz") as archive:
            for member, text in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(text)
                archive.addfile(info, io.BytesIO(text))
    return files


def file_of(path):
    """Size and SHA-256 of a file."""
    content = path.read_bytes()
    return File(len(content), hashlib.sha256(content).hexdigest())


def read(name, folder, split):
    """The lines of a split; the data set is downloaded into the folder."""
    source = tfds.data_source(
        name,
        data_dir=folder,
        split=split,
        builder_kwargs={"file_format": "array_record"},
    )
    return [record["text"] for record in source]


@pytest.mark.parametrize("name", ["penn_treebank", "wikitext2", "billion_word"])
def test_lines_are_those_of_the_published_files(name, served, tmp_path, monkeypatch):
    """Every line in order, blank ones and spaces too, by tensorflow-datasets' public interface
    and without TensorFlow; a shuffled text would be no text. A damaged file is refused.
    """
    folder, address = served
    files = write_published(name, folder)
    of_server = {f"{address}/{file.name}": file_of(file) for file in files}
    entry = dataclasses.replace(published.CORPORA[name], files=of_server)
    monkeypatch.setitem(published.CORPORA, name, entry)
    whole = files[-1].read_bytes()
    files[-1].write_bytes(whole + b" ")
    with pytest.raises(tfds.download.download_manager.NonMatchingChecksumError):
        read(name, tmp_path, "train")
    files[-1].write_bytes(whole)
    assert {split: read(name, tmp_path, split) for split in LINES} == LINES
    assert "tensorflow" not in sys.modules
    info = tfds.builder(name, data_dir=tmp_path).info
    assert info.disable_shuffling and info.homepage and info.description


def test_europarl_is_divided_at_random(served, tmp_path, monkeypatch, own_cache):
    """Of 4,000 lines some 20 validate and 20 test, no line is in two splits or in none, and
    another run draws the same ones; training reads the same splits, in order.
    """
    folder, address = served
    lines = [f"Line {i} ." for i in range(4_000)]
    content = "\n".join(lines).encode() + b"\n"
    with tarfile.open(folder / "europarl.tgz", "w:gz") as archive:
        info = tarfile.TarInfo("training/europarl-v7.fr-en.en")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    files = {f"{address}/europarl.tgz": file_of(folder / "europarl.tgz")}
    entry = dataclasses.replace(published.CORPORA["europarl"], files=files)
    monkeypatch.setitem(published.CORPORA, "europarl", entry)
    runs = [{split: read("europarl", tmp_path / run, split) for split in LINES} for run in "ab"]
    assert runs[0] == runs[1]
    drawn = {split: [line.decode() for line in texts] for split, texts in runs[0].items()}
    assert sorted(itertools.chain(*drawn.values())) == sorted(lines)
    assert drawn["train"] != sorted(drawn["train"], key=lines.index)  # shuffled
    assert all(10 <= len(drawn[split]) <= 30 for split in ("validation", "test"))
    numbers = {line: i for i, line in enumerate(lines)}
    vocabulary = Vocabulary.build(collections.Counter(" <eos> ".join([*lines, ""]).split()))
    corpus = load({"corpus": "europarl"}, vocabulary=vocabulary)
    for split, texts in drawn.items():
        words = " <eos> ".join([*sorted(texts, key=numbers.__getitem__), ""]).split()
        assert [vocabulary.words[i] for i in corpus.ids[split]] == words
