"""Messages of evaluate.py about its input, and its result: unknown words, windows, damaged
runs, disks without permission.
"""

import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from adaptive_jax.data.batches.windows import Windows, windows
from adaptive_jax.data.corpora.corpus import Corpus
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.runs.checkpoints import Checkpoints
from adaptive_jax.runs.run import Run
from adaptive_jax.scores.evaluate import Request, _train_ids, evaluate
from adaptive_jax.scores.unseen import describe_words
from adaptive_jax.training.loop import train
from tests import refuses

FIXTURES = Path(__file__).parents[1] / "fixtures" / "fairseq"


def test_a_file_to_be_scored_is_no_train_text(tmp_path):
    """A converted model names no text of its own, so statistics were read from the file."""
    (tmp_path / "test.txt").write_text("a b\n")
    data = {"corpus": "text_files", "path": ""}
    run = SimpleNamespace(workdir=tmp_path, saved_config={"data": data})
    with refuses("--data_path=DIR", "train.txt"):
        _train_ids(Request(data_path=str(tmp_path / "test.txt")), run, None)


@pytest.fixture(scope="module")
def folding(config, text, tmp_path_factory):
    """A run whose vocabulary is cut to 100 words, so it has <unk>, and what training printed. Its
    validation split has words that the vocabulary lacks.
    """
    directory = tmp_path_factory.mktemp("folding")
    own = shutil.copytree(text, directory / "text")
    (own / "valid.txt").write_text("the quick t0w0\n" * 30)
    changes = {"data.path": str(own), "data.limit": 100, "data.vocabulary_size": 100}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        train(config(**changes, steps=1, evaluate_every=1, checkpoint_every=1), directory / "run")
    return directory / "run", out.getvalue()


def test_training_says_it_at_its_start(folding):
    """Before the first update: what validation will be measured on."""
    _, out = folding
    says = "words        of the validation split: <unk> 25.0%, unseen words 25.0%"
    assert out.index(says) < out.index("step 1/1")


@pytest.mark.parametrize(
    "line, unknown, unseen",
    [
        ("the t0w0 t1w0", 0.0, 0.0),
        ("news of another kind the <unk> end", 6 / 8, 5 / 8),
        ("the <unk> t1w0", 1 / 4, 0.0),  # as WikiText-2 and the Penn Treebank have it: no warning
    ],
)
def test_words_that_the_model_does_not_know(
    folding, tmp_path, caplog, capsys, line, unknown, unseen
):
    """Their shares stand in the line and the JSON; above 5 % a warning. A literal <unk> is
    unknown, but not unseen.
    """
    folding, _ = folding
    (tmp_path / "mine.txt").write_text(f"{line}\n")
    result = evaluate(folding, Request(data_path=str(tmp_path / "mine.txt")))
    out = capsys.readouterr().out
    assert f"; <unk> {unknown:.1%}, unseen words {unseen:.1%}; step 1," in out
    saved = json.loads((folding / "eval" / out.splitlines()[-1].split("/")[-1]).read_text())
    assert (
        (saved["unknown"], saved["unseen"])
        == (result["unknown"], result["unseen"])
        == (unknown, unseen)
    )
    words, known = [*line.split(), "<eos>"], Run.of(folding).vocabulary.index
    others = [word in known and word != "<unk>" for word in words]
    nll = np.load((folding / "eval" / out.splitlines()[-1].split("/")[-1]).with_suffix(".npy"))
    expected = None if all(others) else pytest.approx(np.exp(nll[others].mean()))
    assert result["known_perplexity"] == expected
    assert (", without <unk> " in out) == (expected is not None)
    warnings = [
        record.getMessage() for record in caplog.records if record.name.startswith("adaptive_jax")
    ]
    assert len(warnings) == (unseen > 0.05)
    assert all("says little about the text" in warning for warning in warnings)


@pytest.mark.parametrize(
    "request_, names",
    [
        (Request(window=10_000), ("window=10000", "426")),
        (Request(context=16), ("window=16", "context=16")),
        (Request(context=4, break_mode="eos"), ("context=4", "batches.break_mode='eos'")),
        (Request(break_mode="lines"), ("batches.break_mode='lines'",)),
        (Request(split="valid"), ("split='valid'", '"validation"')),
        (Request(method="cash"), ("method='cash'", "cache", "dynamic")),
        (Request(options={"theta": (0.5,)}), ("--theta", "--method=plain", "--method=cache")),
        (Request(uniform=1.0), ("--uniform", "1.0")),
        (Request(share=2.0), ("--share", "2.0")),
        (Request(down_weight=0.1), ("--down_weight=0.1", "--vocabulary=union")),
        (Request(down_weight=0.0, vocabulary="union"), ("--down_weight", "0.0")),
        (
            Request(down_weight=0.1, vocabulary="union", method="dynamic"),
            ("--down_weight=0.1", "dynamic"),
        ),
        (Request(vocabulary="/nowhere"), ("--vocabulary=/nowhere", "train", "union")),
        (Request(data_path="/nowhere"), ("data.path=/nowhere",)),
        *(
            (Request(method=method, options=options), names)
            for method, options, names in (
                ("cache", {"cache": "lokal"}, ("cache='lokal'", '"local"')),
                ("cache", {"cache": "unigram", "theta": (0.5,)}, ("--theta", "--cache=unigram")),
                ("cache", {"neighbours": 5}, ("--neighbours", "--cache=local")),
                ("cache", {"model_weight": (0.5, 0.0)}, ("--model_weight", "0.5, 0.0")),
                ("cache", {"theta": (-1.0,)}, ("--theta", "-1.0")),
                ("cache", {"theta": (math.inf,)}, ("--theta", "inf")),
                ("cache", {"theta": (0.1, 0.2)}, ("--theta", "--split=validation")),
                ("cache", {"cache_size": -1}, ("--cache_size", "-1")),
                ("knn", {"neighbours": 0}, ("--neighbours", "0")),
                ("knn", {"temperature": (0.0,)}, ("--temperature", "0.0")),
                ("dynamic", {"cache": "local"}, ("--cache", "--method=dynamic")),
                ("dynamic", {"rule": "adam"}, ("rule='adam'", "sgd")),
                ("dynamic", {"decay": 1.0}, ("--decay", "1.0")),
                ("dynamic", {"rule": "sgd", "statistics": 9}, ("--statistics", "--rule=sgd")),
            )
        ),
    ],
)
def test_a_wrong_request(trained, request_, names, monkeypatch):
    """The error names the values before a model is opened."""
    opened = property(lambda run: pytest.fail("opened the model"))
    monkeypatch.setattr(Run, "saved", opened)
    with refuses(*names):
        evaluate(trained, request_)


def test_a_run_that_names_no_text(trained, text, tmp_path):
    """As a converted one: the train text that some methods read is that beside the scored text,
    and a line says so where there is none.
    """
    workdir = shutil.copytree(trained, tmp_path / "run")
    config = json.loads((workdir / "config.json").read_text())
    config["data"]["path"] = ""
    (workdir / "config.json").write_text(json.dumps(config))
    (tmp_path / "text").mkdir()
    shutil.copy(text / "test.txt", tmp_path / "text")
    with refuses("--data_path=DIR", "test.txt"):
        evaluate(workdir, Request())
    request = Request(data_path=str(tmp_path / "text"), checkpoint="latest")
    for method in "dynamic", "knn":
        with refuses(f"--method={method}", f"data.path={tmp_path / 'text'}", "train"):
            evaluate(workdir, request._replace(method=method))
    shutil.copy(text / "train.txt", tmp_path / "text")
    knn = request._replace(method="knn", options={"neighbours": 8})
    assert math.isfinite(evaluate(workdir, knn)["nll"])


def test_units_spell_every_word(caplog):
    """No warning about unseen words: sub-word units can spell every word."""
    units = Subwords.build({"low": 5, "lower": 2, "<eos>": 4}, 3)
    ids = {"test": units.encode_lines(["lowest"])}
    assert "unseen words 7.0%" in describe_words(Corpus(units, ids, {"test": 0.07}), "test")
    assert not caplog.records


def test_a_share_of_words_whose_units_are_several():
    """`<unk>` is one word of four, and of more units."""
    units = Subwords.build({"low": 5, "lower": 2, "<unk>": 1, "<eos>": 4}, 3)
    ids = units.encode_lines(["lowest <unk> slow"])
    assert len(ids) > 4 and units.unk_rate(ids) == 0.25


@pytest.mark.parametrize(
    "break_mode, layout",
    [("none", "packed"), ("complete", "packed"), ("eos", "packed"), ("eos", "similar")],
)
def test_rows_are_no_longer_than_the_split(break_mode, layout):
    """However long the window is."""
    ids = np.array([5, 6, 0, 7, 0, 8, 9, 6, 0], np.int32)
    count, batches = windows(ids, 0, Windows(1 << 40, 0, break_mode, layout, 1))
    shapes, at = zip(*((batch.batch.inputs.shape, at) for batch, at in batches), strict=True)
    assert count == len(shapes)
    assert all(time <= len(ids) for _, time in shapes)
    assert sorted(np.concatenate(at)) == list(range(len(ids)))


def test_a_disk_that_cannot_be_written(trained, small_disk, quick_command):
    """A run of somebody else's is evaluated all the same: the result is printed, and a line says
    that it is written nowhere.
    """
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    shutil.copytree(trained, small_disk / "run", ignore=shutil.ignore_patterns("eval"))
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    done = quick_command("evaluate.py", f"--workdir={small_disk / 'run'}", "--checkpoint=latest")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"test: perplexity \d+\.\d\d .*; <unk> 0\.0%, unseen words 0\.0%; step 240, .*\n(  .*\n)+",
        done.stdout,
    )
    folder = small_disk / "run" / "eval"
    line = f"warning: {folder} is read-only: the result is printed, not written\n"
    assert done.stderr == line


def cut_at_a_line(path):
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:30]))


def other_count(path):
    path.write_text(re.sub(r" \d+\n\Z", " 0\n", path.read_text()))


@pytest.mark.parametrize(
    "damage",
    [
        cut_at_a_line,
        other_count,
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink() or path.mkdir(),
    ],
    ids=["cut at a line", "a count", "empty", "a directory"],
)
def test_a_damaged_vocabulary(trained, config, tmp_path, damage):
    """Evaluation, `Run.open` and a resume say that it is damaged; without its checksums, which
    would show damage, no run is read.
    """
    workdir = shutil.copytree(trained, tmp_path / "run")
    lines = (workdir / "vocabulary.sha256").read_text()
    assert re.fullmatch(r"[0-9a-f]{64}  vocabulary\.txt\n", lines)
    damage(workdir / "vocabulary.txt")
    for call in (
        (lambda: evaluate(workdir, Request())),
        (lambda: Run.open(workdir)),
        (lambda: train(config(), workdir)),
    ):
        with refuses("run/vocabulary.txt", "damaged", "restore"):
            call()
    shutil.rmtree(workdir)
    shutil.copytree(trained, workdir)
    (workdir / "vocabulary.sha256").unlink()
    with refuses("vocabulary.sha256", "missing", "restore"):
        Run.open(workdir, "latest")


def test_a_checkpoint_that_training_deletes_while_it_is_read(trained, tmp_path, monkeypatch):
    """The one that it kept instead is read; one asked for by its number is missed in one line."""
    workdir = shutil.copytree(trained, tmp_path / "run")
    step = Run.open(workdir, "latest").step
    saved = workdir / "checkpoints" / str(step)
    plain = Checkpoints.restore

    def late(checkpoints, at, like):
        if at == step + 1:
            shutil.rmtree(workdir / "checkpoints" / str(at))
        return plain(checkpoints, at, like)

    monkeypatch.setattr(Checkpoints, "restore", late)
    shutil.copytree(saved, workdir / "checkpoints" / str(step + 1))
    assert Run.open(workdir, "latest").step == step
    shutil.copytree(saved, workdir / "checkpoints" / str(step + 1))
    with refuses(f"'{step + 1}'", "steps"):
        Run.open(workdir, str(step + 1))


def test_a_share_of_no_ids():
    """Words without `<unk>`, and an empty split, have none of it."""
    assert Vocabulary.build({"a": 1, "<eos>": 1}).unk_rate(np.zeros(3, np.int32)) == 0.0
    assert Vocabulary.build({"a": 1, "<eos>": 1, "<unk>": 1}).unk_rate(np.zeros(0, np.int32)) == 0.0


def interrupted(process, begun):
    """Status and stderr of a process that gets Ctrl-C once `begun()`."""
    while process.poll() is None and not begun():
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_an_interrupted_evaluation(trained, start, tmp_path):
    """Says its own line, and writes nothing."""
    workdir = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    process = start("evaluate.py", f"--workdir={workdir}", "--window=20")
    maps = Path(f"/proc/{process.pid}/maps")
    done = interrupted(process, lambda: "test.npy" in maps.read_text())  # its ids are in use
    says = "stopped: printed results are kept; the same command evaluates again\n"
    assert done == (130, says)
    assert not (workdir / "eval").exists()


def test_an_interrupted_conversion(start, tmp_path):
    """Says its own line, and leaves neither a workdir nor a part of one. Its dict.txt is a pipe
    that never ends.
    """
    os.mkfifo(tmp_path / "dict.txt")

    def reads():
        try:
            return pipes.append(os.open(tmp_path / "dict.txt", os.O_WRONLY | os.O_NONBLOCK)) or True
        except OSError:  # nobody reads yet
            return False

    pipes = []
    files = FIXTURES / "lm_post_norm.pt", tmp_path / "dict.txt", tmp_path / "run"
    done = interrupted(start("-m", "adaptive_jax", "convert", *files), reads)
    assert done == (
        130,
        "stopped: nothing was written; the same command converts the checkpoint anew\n",
    )
    assert [path.name for path in tmp_path.iterdir()] == ["dict.txt"]
    os.close(pipes[0])


def test_a_result_that_cannot_be_written(trained, in_process, tmp_path):
    """It is printed first: scoring may have taken hours."""
    run = shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("eval"))
    (run / "eval").touch()
    done = in_process("evaluate.py", f"--workdir={run}", "--checkpoint=latest")
    assert done.returncode == 2 and done.stdout.startswith("test: perplexity ")
    assert re.fullmatch(r"error: cannot use .*run/eval/.*: Not a directory; .*\n", done.stderr)
