"""The examples, which people copy: minimal.py learns a text and refuses what it cannot read,
tune.py finds a rate, next_item.py learns which item comes next.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from tests.pages import ROOT

PATH = ROOT / "examples" / "minimal.py"


def imported(path):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def minimal(monkeypatch):
    """The example as a module, with a model of few parameters."""
    module = imported(PATH)
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


def test_tuning_draws_trains_and_resumes(in_process, flags, tmp_path, monkeypatch, capsys):
    """The same command adds trials of other draws; each stands with its loss, the best one
    first, and with the flags that repeat it. A trial that diverges is left out.
    """
    tune = imported(ROOT / "examples" / "tune.py")
    run = lambda command: in_process(Path(command[1]).name, *command[2:])
    monkeypatch.setattr(tune.subprocess, "run", run)
    config, _, *settings = flags("", steps=2, evaluate_every=2, checkpoint_every=2)
    flags_of_tune = [
        "tune.py",
        f"--workdir={tmp_path / 'tune'}",
        "--hours=1e-4",
        "--tokens",
        "512",
        "1024",
    ]
    lines = []
    for rates in ("0.01", "0.3"), ("0.01", "0.3"), ("1e30", "1e31"):
        monkeypatch.setattr(
            "sys.argv", [*flags_of_tune, "--rates", *rates, "--", config, *settings]
        )
        tune.main()
        lines.append(capsys.readouterr().out.splitlines())
    assert [len(each) for each in lines] == [1, 2, 2] and lines[2] == lines[1]
    wrong = "tune.py", f"--workdir={tmp_path / 'wrong'}", "--hours=1", "--", "--config=no.py"
    monkeypatch.setattr("sys.argv", [*wrong])
    with pytest.raises(SystemExit, match="all 3 trials failed"):
        tune.main()  # it tried for ever
    line = r"validation loss +([\d.]+) .*/trial_\d  --config.optimizer.learning_rate=([\d.]+)"
    trials = [re.match(line, each).groups() for each in lines[1]]
    assert float(trials[0][0]) < float(trials[1][0]) and trials[0][1] != trials[1][1]


def test_the_next_item_is_learned(monkeypatch, capsys):
    """Better than popularity in nats and in recall, and never better than the source: targets that
    leak, rows that are not updated, or a sample that is not corrected for would show.
    """
    path = ROOT / "examples" / "next_item.py"
    assert len(path.read_text().splitlines()) <= 150
    next_item = imported(path)
    small = {"WIDTH": 16, "ROWS": 32, "TIME": 4, "SAMPLES": 64, "GROUPS": 12}
    for name, value in small.items():
        monkeypatch.setattr(next_item, name, value)
    monkeypatch.setattr("sys.argv", ["next_item.py", "--items=144", "--updates=400"])
    next_item.main()
    printed = capsys.readouterr().out
    lines = re.findall(
        r"^(\w+).* ([\d.]+) nats an item   recall@10 ([\d.]+)", printed, re.MULTILINE
    )
    nats, recall = ({name: float(row[i]) for name, *row in lines} for i in (0, 1))
    assert nats["the"] < nats["model"] < nats["popularity"] - 0.5
    assert 2 * recall["popularity"] < recall["model"] < recall["the"] + 0.1
