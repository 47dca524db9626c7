"""Command lines with a mistake in them: one line `error: …` with the value and status 2.

Most run in this process; one row of train, evaluate and convert, and the benchmarks, run as a user
runs them, see `tests/forks.py`.
"""

import re
import shlex
import shutil
import subprocess
import sys
import time

import pytest

from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training.loop import train
from tests import refuses
from tests.conftest import ROOT
from tests.wrong_inputs import ACCEPTED, DIRECTORY, GENERATED, LINES, LINK, NOTHING, TABLE

SECONDS = 60


def place(path, content):
    """Puts the damage in its place."""
    before = path.read_bytes() if path.is_file() else None
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    if content == DIRECTORY:
        path.mkdir()
    elif content == LINK:
        path.symlink_to("/nowhere/at/all")
    elif content != NOTHING:
        path.write_bytes(content(before) if callable(content) else content)


def stamps(*directories):
    """The files of directories, with the times of changes."""
    return {
        path: path.lstat().st_mtime_ns for directory in directories for path in directory.rglob("*")
    }


@pytest.fixture
def places(text, trained, flags, tmp_path):
    """`places(row)`: what the names in braces stand for, after the row's damage is done."""

    def places(row):
        names = {"text": text, "tmp": tmp_path, "run": tmp_path / "run", "trained": trained}
        changes = {}
        if row.damage:
            file, content = row.damage
            if file.startswith("run"):
                shutil.copytree(trained, names["run"])
            if file.startswith("text/"):
                names["text"] = shutil.copytree(text, tmp_path / "text")
                changes = {"data.path": names["text"]}
            place(tmp_path / file, content)
        names["train"] = shlex.join(["train.py", *flags(names["run"], **changes)])
        return names | {name: line.format(**names) for name, line in LINES.items()}

    return places


@pytest.mark.parametrize("row", [*TABLE, *GENERATED], ids=lambda row: row.name[:120])
def test_a_wrong_input(in_process, quick_command, places, row, text, trained, tmp_path):
    """One line that says what is wrong and what helps, soon, and nothing written but below
    {tmp}, without a new workdir; by evaluation nothing at all.
    """
    words = shlex.split(row.line.format(**places(row)))
    kept = [text, trained, *[tmp_path] * row.line.startswith("evaluate.py")]
    before, began = stamps(*kept), (set(ROOT.iterdir()), (tmp_path / "run").exists())
    start = time.monotonic()
    done = (quick_command if row.by_process else in_process)(*words)
    assert time.monotonic() - start < SECONDS
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert re.fullmatch(r"(warning: .+\n)*error: .{20,}\n", done.stderr), done.stderr
    assert "Traceback" not in done.stdout
    line = done.stderr.splitlines()[-1]
    assert all(part in line for part in row.says), line
    assert "pybind" not in line and "object at 0x" not in line and "list index" not in line
    assert stamps(*kept) == before
    assert (set(ROOT.iterdir()), (tmp_path / "run").exists()) == began


@pytest.mark.parametrize("key, value", sorted(ACCEPTED))
def test_values_that_are_no_mistake(in_process, flags, tmp_path, key, value):
    """Numbers that look like one."""
    done = in_process("train.py", *flags(tmp_path / "run"), "--dry_run", f"--config.{key}={value}")
    assert (done.returncode, done.stderr) == (0, "")


def test_own_text_of_few_words(in_process, tmp_path):
    """It gives fewer merges than are chosen for its length; those that it gives are taken."""
    text = tmp_path / "all.txt"
    text.write_text("the cat sat\n" * 2000)
    places = (
        f"--workdir={tmp_path / 'run'}",
        f"--config.data.path={text}",
    )
    done = in_process("train.py", "--config=configs/own_text.py", "--dry_run", *places)
    assert done.returncode == 0 and "merges       only 7: " in done.stdout, (
        done.stdout,
        done.stderr,
    )


def test_names_of_workdirs(config, tmp_path):
    """Whatever a directory may be called, its checkpoints are found again."""
    workdir = tmp_path / "a b" / "ü 中?%41" / "#|{}$*"
    train(config(steps=1), workdir)
    assert evaluate(workdir, Request())["step"] == 1


@pytest.mark.parametrize("name", ["a\\b", "[a]", "\udcfc"])
def test_names_that_no_workdir_can_have(config, tmp_path, name):
    """Told before anything is written, as checkpoints would not be found again."""
    with refuses("name"):
        train(config(), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_closed_streams():
    """A command whose input and output are closed runs to its end."""
    line = ["train.py", "--config=configs/quickstart.py", "--explain"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&-', "sh", sys.executable, *line],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
