"""Downloads of published corpora, from a server on loopback."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from adaptive_jax.data.corpora.download import File, download
from adaptive_jax.data.corpora.published import Published
from adaptive_jax.errors import explain
from tests import refuses

CONTENT = b"the cat sat\n" * 1_000


@pytest.fixture
def files(served):
    """The folder that is served, and one file of it as a corpus names it."""
    folder, address = served
    (folder / "a.txt").write_bytes(CONTENT)
    return folder, {f"{address}/a.txt": File(len(CONTENT), hashlib.sha256(CONTENT).hexdigest())}


def test_a_download_is_verified_and_kept(files, tmp_path, capfd):
    """Another file of the same length is refused; what a stopped download left is removed; what was
    downloaded is not asked for again. Nothing is printed where there is no terminal.
    """
    served, published = files
    (served / "a.txt").write_bytes(CONTENT.upper())
    for _ in range(2):
        with refuses("toy", "a.txt", "data.path=DIR"):
            download("toy", published, tmp_path / "d")
        assert len(list((tmp_path / "d" / "toy").glob("*.tmp.*"))) == 1  # that of this try
    (served / "a.txt").write_bytes(CONTENT)
    [path] = download("toy", published, tmp_path / "d")
    assert path.read_bytes() == CONTENT
    assert not list((tmp_path / "d").rglob("*.tmp.*"))
    (served / "a.txt").unlink()
    assert download("toy", published, tmp_path / "d") == [path]
    assert capfd.readouterr() == ("", "")


def test_an_address_that_does_not_answer(files, tmp_path):
    """One line with the reason and the cure, soon: tensorflow-datasets would try for minutes."""
    _, published = files
    [address] = published
    for wrong, reason in (f"{address}x", "not found"), ("http://127.0.0.1:9/a.txt", "refused"):
        with refuses("toy", wrong, reason) as error:
            download("toy", {wrong: published[address]}, tmp_path / "d")
        assert len(str(error.value)) < 220 and "\n" not in str(error.value)


def test_a_folder_that_cannot_be_written(files):
    """The error begins with the folder that the user chose, not with a file inside it."""
    with pytest.raises(NotADirectoryError) as error:
        download("toy", files[1], Path("/dev/null/x"))
    assert explain(error.value).startswith("cannot use /dev/null/x: Not a directory")


def test_a_killed_draw_leaves_no_files(tmp_path):
    """Those of Europarl stayed for ever."""
    with zipfile.ZipFile(tmp_path / "text.zip", "w") as archive:
        archive.writestr("folder/all.en", "a line\n" * 50)
    (tmp_path / "splits").mkdir()
    (tmp_path / "splits" / ".train.txt.0123").write_text("half")
    published = Published(text_member="all.en", held_out=0.2)
    texts = published.splits([tmp_path / "text.zip"], tmp_path / "splits")
    assert sum(len([*text.lines()]) for text in texts.values()) == 50
    names = {path.name for path in (tmp_path / "splits").iterdir()} - {".complete.lock"}
    assert names == {"complete", "train.txt", "validation.txt", "test.txt"}
