"""examples/minimal.py, which people copy, learns a text and refuses what it cannot read."""

import importlib.util
import re

import pytest

from tests.pages import ROOT

PATH = ROOT / "examples" / "minimal.py"


@pytest.fixture
def minimal(monkeypatch):
    """The example as a module, with a model of few parameters."""
    spec = importlib.util.spec_from_file_location("minimal", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = {"WIDTH": 16, "LAYERS": 1, "HEADS": 2, "ROWS": 8, "TIME": 8}
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_the_minimal_example_learns(minimal, tmp_path, monkeypatch, capsys):
    """Each word tells the next one, so a model that sees the word before gets near perplexity 1;
    one whose targets, mask or order of words are wrong does not.
    """
    for name, lines in (("train.txt", 60), ("valid.txt", 20)):
        (tmp_path / name).write_text("a b c d e f g h i j k\n" * lines)
    files = [str(tmp_path / name) for name in ("train.txt", "valid.txt")]
    monkeypatch.setattr("sys.argv", ["minimal.py", *files, "--updates=200", "--rate=0.01"])
    minimal.main()
    printed = capsys.readouterr().out
    assert "13 words" in printed
    perplexities = [float(x) for x in re.findall(r"validation perplexity ([\d.]+)", printed)]
    assert len(perplexities) == 5 and perplexities[-1] < 1.1


def test_the_minimal_example_refuses_a_short_text(minimal, tmp_path, monkeypatch, capsys):
    """A text without a whole batch would end in a mean of nothing."""
    path = tmp_path / "short.txt"
    path.write_text("a b c\n")
    monkeypatch.setattr("sys.argv", ["minimal.py", str(path), str(path)])
    with pytest.raises(SystemExit):
        minimal.main()
    assert "must have at least 65 words" in capsys.readouterr().err


def test_the_minimal_example_is_one_short_file():
    """Its use is that a reader takes it in at once."""
    assert len(PATH.read_text().splitlines()) <= 150
