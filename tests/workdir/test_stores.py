"""Runs in object storage: a server on this machine stands for gs:// and s3://, and everything
else is real.
"""

import json
import signal

import pytest
import tensorstore

from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.corpora.stored import copy
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.evaluate import Request, evaluate
from adaptive_jax.files import kvstore, names_in, new_directory, path_of, replacing
from adaptive_jax.training.loop import train
from adaptive_jax.workdir import lock
from adaptive_jax.workdir.checkpoints import Checkpoints, steps_in
from tests.object_server import serving
from tests.training.test_metrics import metrics, scalars

RUN = {
    "steps": 6,
    "log_every": 1,
    "evaluate_every": 2,
    "checkpoint_every": 2,
    "body.dropout": 0.2,
    "output.tail_dropout": 0.2,
}


@pytest.fixture(scope="module")
def store():
    """What the server keeps; tensorstore of this process and of those that it starts finds the
    server.
    """
    with serving() as (objects, variables), pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        objects.variables = variables
        yield objects


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_paths(store, scheme):
    """As those of a disk: read, written anew, listed and deleted; a write that fails leaves what
    was there. A listing has what tensorstore just wrote, or a checkpoint seems to lack arrays.
    """
    root = path_of(f"{scheme}://paths-{scheme}/a b")
    assert not root.exists()
    with replacing(root / "one.txt") as file:
        file.write(b"1")
    (root / "deep" / "er" / "two.txt").write_text("zwei ä")
    for opened in replacing(root / "one.txt"), (root / "one.txt").open("wb"):
        with pytest.raises(KeyError), opened as file:
            file.write(b"half")
            raise KeyError
    with pytest.raises(ValueError, match="mode must be r or w for .*one.txt"):
        (root / "one.txt").open("a")
    assert (root / "one.txt").read_text() == "1"
    assert (root / "deep" / "er" / "two.txt").read_bytes() == "zwei ä".encode()
    assert sorted(path.name for path in root.iterdir()) == ["deep", "one.txt"]
    assert (
        (root / "deep").is_dir() and not (root / "one.txt").is_dir() and (root / "one.txt").exists()
    )
    assert not (root / "dee").exists() and not (root / "one").exists()
    with pytest.raises(FileNotFoundError, match=r"one"):
        (root / "one").read_text()
    with pytest.raises(FileNotFoundError):
        (root / "one").unlink()
    for name in "new", "":  # "": what a store's own tools make for an empty folder
        tensorstore.KvStore.open(kvstore(f"{root}/")).result().write(name, b"").result()
    assert sorted(names_in(root)) == ["deep", "new", "one.txt"]
    (root / "one.txt").unlink()
    (root / "deep").rmtree()
    assert store.names(f"paths-{scheme}") == ["a b/", "a b/new"]
    root.rmtree()
    assert store.names(f"paths-{scheme}") == []


@pytest.mark.first
def test_a_run_killed_while_it_saves(store, flags, quick_command, in_process, config, tmp_path):
    """The same command on gs:// goes on from the checkpoint before, ends as a run on a disk
    digit for digit, and is evaluated.
    """
    train(config(**RUN), tmp_path / "disk")
    url = "gs://bucket/runs/a"
    store.stop_at = "checkpoints/4/commit_success.txt"

    def saving():
        assert store.stopped.wait(120)

    run = "train.py", *flags(url, **RUN)
    killed = quick_command(*run, env=store.variables, until=saving)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    names = store.names("bucket")
    assert any(name.startswith("runs/a/checkpoints/4/params/") for name in names)
    assert "runs/a/checkpoints/2/commit_success.txt" in names and "runs/a/.training" in names
    store.stop_at = None
    (path_of(url) / ".training").unlink()  # or the next training would wait for a sign of life

    done = quick_command(*run, env=store.variables)
    assert done.returncode == 0, done.stderr
    assert (
        f"continuing {url} after 2 of 6 updates" in done.stdout
        and f"--workdir={url} --split=test" in done.stdout
    )
    assert steps_in(path_of(url) / "checkpoints") == [6, 4]
    assert ".training" not in [path.name for path in path_of(url).iterdir()]
    assert metrics(path_of(url), speeds=False) == metrics(tmp_path / "disk", speeds=False)

    done = in_process("evaluate.py", f"--workdir={url}")
    assert done.returncode == 0, done.stderr
    ours = json.loads((path_of(url) / "eval" / "test-16-0-6.json").read_text())
    assert ours["nll"] == evaluate(tmp_path / "disk", Request())["nll"]

    logs = [path for path in path_of(url).iterdir() if path.name.startswith("events.out.tfevents.")]
    for path in logs:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    seen = scalars(*sorted(tmp_path.glob("events*"), key=lambda path: path.name))
    assert seen["validation/nll", 6] == pytest.approx(ours_at(tmp_path / "disk", 6), abs=1e-6)


def ours_at(workdir, step):
    return next(
        line["validation/nll"]
        for line in metrics(workdir)
        if line["step"] == step and "validation/nll" in line
    )


def damage(store, such):
    """Flips a bit of objects by name."""
    for (bucket, name), (generation, content) in list(store.objects.items()):
        if such(name):
            middle = len(content) // 2
            flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
            store.objects[bucket, name] = generation, flipped


def test_s3_with_prepared_ids(store, config, tmp_path):
    """On s3://: prepared ids; a run that goes on; reading changes nothing, and compares checksums,
    as a store may hold what was damaged on the way there.
    """
    data = config()["data"]
    copy(load(data), "s3://words/ids")
    settings = config(
        **RUN,
        **{"metrics.tensorboard": False, "data.path": "s3://words/ids"},
    )
    run = path_of("s3://runs/b")
    train(settings | {"steps": 4}, run)
    assert 4 in steps_in(run / "checkpoints")
    train(settings, run)
    assert 6 in steps_in(run / "checkpoints")
    result = evaluate(run, Request(checkpoint="latest"))
    assert result["step"] == 6
    before = store.names("runs")
    reading = Checkpoints(run, read_only=True)
    assert reading.latest() == 6
    reading.close()
    assert store.names("runs") == before
    for name in before:  # a copy on a disk is whole, too
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(store.objects["runs", name][1])
    assert evaluate(tmp_path / "b", Request(checkpoint="latest"))["nll"] == result["nll"]
    damage(store, lambda name: "6/params/" in name and "/d/" in name)
    with pytest.raises(InputError, match=r"b/checkpoints/6 cannot be read \(params/.* has changed"):
        evaluate(run, Request(checkpoint="latest"))
    with pytest.raises(
        InputError, match="s3://runs/b holds a run of another config: seed was 0 and is now 1"
    ):
        train(settings | {"seed": 1}, run)
    (run / "config.json").unlink()
    with pytest.raises(InputError, match="s3://runs/b has checkpoints and no config.json"):
        train(settings, run)


def test_a_workdir_without_a_run(store, quick_command):
    """One line, as on a disk."""
    done = quick_command("evaluate.py", "--workdir=gs://nobody/a", env=store.variables)
    line = (
        "error: gs://nobody/a holds no run (no config.json): use the --workdir of a run that"
        " train.py made"
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, line)


def test_a_directory_that_is_not_finished(store):
    """What fails leaves nothing, so that the same command may run again."""
    export = path_of("gs://exports/model")
    with pytest.raises(KeyboardInterrupt), new_directory(export) as directory:
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt
    assert store.names("exports") == []
    with new_directory(export) as directory:
        (directory / "config.json").write_text("{}")
    assert store.names("exports") == ["model/config.json"]


def test_one_training_at_a_time(store, tmp_path, monkeypatch):
    """A second is refused while the first gives signs of life, and takes over from one that
    gives none.
    """
    monkeypatch.setattr(lock, "BEAT", 0.05)
    monkeypatch.setattr(lock, "SILENT", 0.5)
    run = path_of("gs://leases/run")
    with lock.locked(run):
        with (
            pytest.raises(InputError, match=r"in use by the training of process \d+ on "),
            lock.locked(run),
        ):
            pass
        assert (run / ".training").read_text().startswith("process ")
    assert not (run / ".training").exists()
    (run / ".training").write_text("process 1 on another\n7\n")
    with lock.locked(run):
        assert "another" not in (run / ".training").read_text()
    assert store.names("leases") == []


def test_two_that_take_a_lease_at_once(tmp_path):
    """One of the two has it."""
    first, second = (lock.Lease(f"file://{tmp_path}/run") for _ in range(2))
    second.store = tensorstore.KvStore.open(f"file://{tmp_path}/run/").result()
    none = second._read().stamp.generation
    assert first.take() is None
    written = (tmp_path / "run" / ".training").read_text()
    assert not second._write(none)  # it had read that there is none
    assert (tmp_path / "run" / ".training").read_text() == written
    first.release()
    assert not (tmp_path / "run" / ".training").exists()
