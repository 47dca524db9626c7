"""train.py and evaluate.py as a user meets them: plans, help, one clear line for bad input, and interruptions."""

import json
import os
import re
import shutil
import signal
import subprocess
import time

import jax
import jax.numpy as jnp
import pytest

from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.errors import InputError
from adaptive_jax.model import build
from adaptive_jax.training import loop as training
from adaptive_jax.workdir.checkpoints import uninterrupted


def files(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def the_error(done):
    """The one line that a command which met bad input has to say."""
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert re.fullmatch(r"error: .+\n", done.stderr), done.stderr
    assert "Traceback" not in done.stdout
    return done.stderr.removeprefix("error: ").rstrip("\n")


def test_a_dry_run_needs_no_corpus(command, flags, config, tmp_path):
    """It prints the plan, writes it alone, and counts the parameters that the model really has."""
    changes = {"data.path": "/nowhere", "body.layers": 2, "tokens_per_update": 1024, "tokens_per_device": 256}
    done = command("train.py", *flags(tmp_path / "run", **changes), "--dry_run")
    assert (done.returncode, done.stderr) == (0, "")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["plan.json"]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())

    ids = jnp.zeros((1, 2), jnp.int32)
    params = jax.jit(build(config(**changes), 122).init)(jax.random.key(0), ids, ids, jnp.ones((1, 2)))["params"]
    sizes = {part: sum(leaf.size for leaf in jax.tree.leaves(tree)) for part, tree in params.items()}
    assert plan["parameters"] == {"input": 0, "body": 0, "output": 0} | sizes | {"total": sum(sizes.values())}
    assert sizes["body"] > 2 * 12 * 32 * 16
    numbers = {key: plan[key] for key in ("vocabulary_size", "tokens_per_update", "devices", "accumulation")}
    assert numbers == {"vocabulary_size": 122, "tokens_per_update": 1024, "devices": 1, "accumulation": 4}
    assert plan["flops_per_token"]["training"] == 3 * plan["flops_per_token"]["forward"] > 2 * 3 * sizes["body"]
    assert plan["memory_per_device"]["total"] > 4 * 4 * sum(sizes.values())
    assert "1,024 tokens = 4 x 16 rows x 1 device(s)" in done.stdout
    assert "122 words" in done.stdout


@pytest.mark.parametrize("script, names", [
    ("train.py", ["--config", "--workdir", "--[no]dry_run"]),
    ("evaluate.py", ["--workdir", "--split", "--window", "--context", "--checkpoint", "--data_path"])])
def test_help_lists_the_flags(command, script, names):
    """--help shows the module's words and each flag, without a traceback."""
    done = command(script, "--help")
    assert "Traceback" not in done.stdout + done.stderr
    assert all(f"  {name}" in done.stdout for name in names)
    assert f"python {script} --" in done.stdout


@pytest.mark.parametrize("flag, says", [
    ("--config.body.layrs=3", ["layrs", 'Did you mean "layers"']),
    ("--config.body.layers=three", ["three", "layers"]),
    ("--stpes=3", ["stpes"]),
    ("steps=3", ["steps=3", "--flag=value"]),
    ("--config.body.name=transfromer", ["config.body.name='transfromer'", 'Did you mean "transformer"']),
    ("--config.data.corpus=penn_treebnk", ["penn_treebnk", 'Did you mean "penn_treebank"'])])
def test_a_wrong_flag(command, flags, tmp_path, flag, says):
    """One line with the value and the cure, and no workdir."""
    line = the_error(command("train.py", *flags(tmp_path / "run"), flag))
    assert all(part in line for part in says), line
    assert "\\n" not in line  # a newline that was quoted instead of printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("changes, says", [
    ({"input.cutoffs": (20, 122)}, ["122", "cutoff", "leave at least one word"]),
    ({"input.cutoffs": (20, 500)}, ["500", "cutoff", "leave at least one word"]),
    ({"input.cutoffs": (60, 20)}, ["(60, 20)", "increase"]),
    ({"body.heads": 5}, ["5 heads", "32 features", "choose body.heads"]),
    ({"tokens_per_update": 500}, ["tokens_per_update=500", "data.block=16", "take 496"]),
    ({"tokens_per_device": 8}, ["tokens_per_device=8", "take 16 or more"]),
    ({"data.block": 0}, ["block", "0"]),
    ({"dtype": "float23"}, ["float23", "float32"]),
    ({"steps": -5}, ["steps", "-5"]),
    ({"keep": 0}, ["keep", "0"]),
    ({"data.corpus": "wikitex2"}, ["data.corpus='wikitex2'", 'Did you mean "wikitext2"']),
    ({"body.layers": 0}, ["layers", "0"]),
    ({"body.dropout": 1.5}, ["dropout", "1.5"]),
])
def test_a_wrong_setting(config, tmp_path, changes, says):
    """An InputError, which the commands print as above, before anything is written."""
    with pytest.raises(InputError) as error:
        training.dry_run(config(**changes), tmp_path / "run", memory=int(16e9))
    assert "\n" not in str(error.value)
    assert all(part in str(error.value) for part in says), error.value
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("config, says", [
    ("configs/quickstart.py:adp_s", ["'adp_s'", 'Did you mean "adp_t"']),
    ("configs/quikstart.py", ["configs/quikstart.py", "--config=configs/NAME.py"])])
def test_a_wrong_config(command, tmp_path, config, says):
    """A misspelt row and a file that is not there."""
    line = the_error(command("train.py", f"--config={config}", f"--workdir={tmp_path / 'run'}", "--dry_run"))
    assert all(part in line for part in says), line
    assert not (tmp_path / "run").exists()


@pytest.fixture
def bad_text(text, tmp_path):
    """A copy of the corpus, to spoil."""
    return shutil.copytree(text, tmp_path / "bad")


@pytest.mark.parametrize("spoil, says", [
    (lambda directory: shutil.rmtree(directory), ["bad is not a directory"]),
    (lambda directory: (directory / "valid.txt").unlink(), ["no validation split", "valid.txt"]),
    (lambda directory: (directory / "valid.txt").write_bytes(b""), ["valid.txt", "no words"]),
    (lambda directory: (directory / "train.txt").write_bytes(b""), ["train.txt", "no words"]),
    (lambda directory: (directory / "train.txt").write_bytes(b"one\ntwo\n\xff\xfe\n"), ["train.txt", "line 3", "UTF-8"]),
    (lambda directory: (directory / "test.txt").write_text("the zebra\n"), ["zebra", "data.threshold"]),
], ids=["no directory", "no split", "empty split", "empty train", "not UTF-8", "unknown word"])
def test_a_wrong_corpus(command, flags, bad_text, tmp_path, spoil, says):
    """The line names what is wrong with which file, and no run is begun."""
    spoil(bad_text)
    changes = {"steps": 1, "data.path": str(bad_text), "data.cache": str(tmp_path / "cache")}
    line = the_error(command("train.py", *flags(tmp_path / "run", **changes)))
    assert all(part in line for part in says), line
    assert not (tmp_path / "run").exists()


def test_the_workdir_of_another_config(command, flags, trained):
    """Each setting that differs is named with both values, those that may change are not, and the run stays as it was."""
    before = files(trained)
    changes = {"body.layers": 2, "seed": 7, "steps": 500, "log_every": 1}
    for dry in [], ["--dry_run"]:
        line = the_error(command("train.py", *flags(trained, **changes), *dry))
        assert "body.layers was 1 and is now 2; seed was 0 and is now 7." in line
        assert "steps" not in line
    assert files(trained) == before


@pytest.mark.parametrize("arguments, says", [
    (["--split=foo"], ["foo", "test"]),
    (["--window=8", "--context=8"], ["context=8", "window=8"]),
    (["--window=-1"], ["-1"]),
    (["--checkpoint=oldest"], ["oldest", "240"]),
    (["--data_path=/nowhere"], ["/nowhere", "directory"])])
def test_a_wrong_evaluation(command, trained, arguments, says):
    """One line, and the run stays as it was."""
    before = files(trained)
    line = the_error(command("evaluate.py", f"--workdir={trained}", *arguments))
    assert all(part in line for part in says), line
    assert files(trained) == before


def test_evaluation_without_a_run(command, trained, tmp_path):
    """Neither a directory that is not there, nor one without a checkpoint, is filled with anything."""
    line = the_error(command("evaluate.py", f"--workdir={tmp_path / 'none'}"))
    assert "none holds no config.json" in line
    assert not (tmp_path / "none").exists()
    started = tmp_path / "started"
    started.mkdir()
    for name in "config.json", "vocabulary.txt":
        shutil.copy(trained / name, started)
    line = the_error(command("evaluate.py", f"--workdir={started}"))
    assert "no checkpoint yet" in line
    assert {path.name for path in started.iterdir()} == {"config.json", "vocabulary.txt"}


def test_a_damaged_checkpoint(command, flags, trained, tmp_path):
    """Evaluating and going on both name the checkpoint and the cure; the cure works."""
    workdir = shutil.copytree(trained, tmp_path / "run")
    for path in (workdir / "checkpoints" / "240").rglob("*"):
        if path.is_file() and path.stat().st_size > 500:
            path.write_bytes(path.read_bytes()[:100])
    before = files(workdir)
    for done in (command("evaluate.py", f"--workdir={workdir}", "--checkpoint=latest"), command("train.py", *flags(workdir))):
        line = the_error(done)
        assert str(workdir / "checkpoints" / "240") in line
        assert "move it away" in line
    assert files(workdir) == before
    shutil.move(workdir / "checkpoints" / "240", tmp_path / "240")
    done = command("train.py", *flags(workdir))
    assert done.returncode == 0, done.stderr
    assert "after 160 of 240 updates" in done.stdout


def test_a_damaged_run(command, flags, trained, tmp_path):
    """Half a config.json and half a vocabulary.txt are named, each in one line."""
    for name in "config.json", "vocabulary.txt":
        workdir = shutil.copytree(trained, tmp_path / name)
        (workdir / name).write_text((workdir / name).read_text()[:301])
        assert str(workdir / name) in the_error(command("evaluate.py", f"--workdir={workdir}"))
    assert "config.json" in the_error(command("train.py", *flags(tmp_path / "config.json")))


def test_a_full_disk(command, config, flags, small_disk):
    """A checkpoint that does not fit is an error in one line, and the same command goes on once it does."""
    corpora.from_config(config()["data"])  # now cached, elsewhere
    line = flags(small_disk / "run", steps=4, checkpoint_every=2, evaluate_every=2)
    message = the_error(command("train.py", *line))
    assert "No space left on device" in message
    assert str(small_disk) in message
    subprocess.run(["mount", "-o", "remount,size=5m", small_disk], check=True)
    done = command("train.py", *line)
    assert done.returncode == 0, done.stderr
    assert (small_disk / "run" / "checkpoints" / "4").is_dir()


def test_a_workdir_that_cannot_be_made(command, flags, tmp_path):
    """A workdir under a file: one line that names it."""
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in the_error(command("train.py", *flags(tmp_path / "file" / "run", steps=1)))


def test_an_interruption_waits_for_a_save():
    """Ctrl-C within `uninterrupted` comes once its block has ended, and works as before from then on."""
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        done.append(True)
    assert done
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def saved(workdir):
    """The steps of its whole checkpoints."""
    return [int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()]


def test_an_interruption(start, command, flags, tmp_path):
    """Ctrl-C ends a run with status 130 and one line, and the same command goes on from the last checkpoint."""
    steps = {"steps": 3_000, "checkpoint_every": 20, "evaluate_every": 20, "log_every": 1}
    with start("train.py", *flags(tmp_path / "run", **steps)) as process:
        deadline = time.monotonic() + 120
        # Any checkpoint: each is there for a short while only, and this process may sleep through one.
        while not saved(tmp_path / "run") and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err == "stopped; the same command goes on from the last checkpoint\n"
    last = max(saved(tmp_path / "run"))
    done = command("train.py", *flags(tmp_path / "run", **steps | {"steps": last + 1}))
    assert done.returncode == 0, done.stderr
    assert f"after {last} of {last + 1} updates" in done.stdout
