"""Workdirs on gs://: a server on this machine stands for Google's, and everything else is real."""

import json
import signal

import pytest

from adaptive_jax.errors import explain
from adaptive_jax.files import absolute, files_below, names_in, new_directory, path_of, replacing
from adaptive_jax.runs.checkpoints import Checkpoints, steps_in
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training.loop import train
from tests import refuses
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
    """The server's objects; libraries of this process and of those that it starts find the
    server.
    """
    with serving() as (objects, variables), pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        for package in "gcsfs", "google.cloud.storage":
            pytest.importorskip(package, reason="needs the extra gcs")
        objects.variables = variables
        yield objects


def test_paths(store):
    """As those of a disk: read, written anew, listed and deleted; a write that fails leaves what
    was there. A listing has what tensorstore just wrote, or a checkpoint seems to lack arrays.
    """
    import tensorstore

    root = path_of("gs://paths/a b/")
    assert absolute(root) == root and str(root) == "gs://paths/a b" and not root.exists()
    with replacing(root / "one.txt") as file:
        file.write(b"1")
    (root / "deep" / "er" / "two.txt").write_text("zwei ä")
    with pytest.raises(KeyError), replacing(root / "one.txt") as file:
        file.write(b"half")
        raise KeyError
    assert (root / "one.txt").read_text() == "1"
    assert (root / "deep" / "er" / "two.txt").read_bytes() == "zwei ä".encode()
    assert sorted(names_in(root)) == ["deep", "one.txt"] and names_in(root / "none") == []
    assert (root / "deep").is_dir() and not (root / "one.txt").is_dir()
    assert (root / "one.txt").exists() and not (root / "one").exists()
    with pytest.raises(FileNotFoundError):
        (root / "one").read_text()
    tensorstore.KvStore.open(f"{root}/").result().write("new", b"x").result()
    assert sorted(names_in(root)) == ["deep", "new", "one.txt"] and (root / "new").exists()
    below = sorted(path.relative_to(root).as_posix() for path in files_below(root))
    assert below == ["deep/er/two.txt", "new", "one.txt"]
    (root / "one.txt").unlink()
    assert store.names("paths") == ["a b/deep/er/two.txt", "a b/new"]


@pytest.mark.parametrize("place", ["s3://bucket/run", "gs://", "gs:///", "foo://x"])
def test_other_urls_are_refused(place):
    """A folder called s3: would appear in the current directory."""
    with refuses(place, "docs/runs.md"):
        path_of(place)


def test_directories_of_exports_are_on_a_disk(store):
    """They get their name once they are complete, which a bucket cannot do."""
    with (
        refuses("gs://bucket/new"),
        new_directory(path_of("gs://bucket/new")),
    ):
        pass


@pytest.mark.first
def test_a_run_killed_while_it_saves(store, flags, quick_command, in_process, config, tmp_path):
    """The same command on gs:// resumes from the checkpoint before, ends as a run on a disk digit
    for digit, and is evaluated.
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
    assert "runs/a/checkpoints/2/commit_success.txt" in names
    store.stop_at = None

    done = in_process(*run)  # with the programs of the run on a disk
    assert done.returncode == 0, done.stderr
    assert (
        f"continuing {url} after 2 of 6 updates" in done.stdout
        and f"--workdir={url} --split=test" in done.stdout
    )
    assert steps_in(path_of(url) / "checkpoints") == [6, 4]
    assert metrics(path_of(url), speeds=False) == metrics(tmp_path / "disk", speeds=False)

    done = in_process("evaluate.py", f"--workdir={url}")
    assert done.returncode == 0, done.stderr
    ours = json.loads((path_of(url) / "eval" / "test-16-0-6.json").read_text())
    assert ours["nll"] == evaluate(tmp_path / "disk", Request())["nll"]

    logs = [name for name in names_in(path_of(url)) if name.startswith("events.out.tfevents.")]
    for name in logs:
        (tmp_path / name).write_bytes((path_of(url) / name).read_bytes())
    seen = scalars(*sorted(tmp_path.glob("events*"), key=lambda path: path.name))
    assert seen["validation/nll", 6] == pytest.approx(validation_nll(tmp_path / "disk"), abs=1e-6)


def validation_nll(workdir):
    return [line["validation/nll"] for line in metrics(workdir) if "validation/nll" in line][-1]


def damage(store, such):
    """Flips a bit of objects by name."""
    for (bucket, name), (generation, content) in list(store.objects.items()):
        if such(name):
            middle = len(content) // 2
            flipped = content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :]
            store.objects[bucket, name] = generation, flipped


def test_a_run_in_a_bucket_is_read(store, config, tmp_path):
    """A run goes on; reading changes nothing, a copy on a disk is the same run, and checksums are
    compared, as a bucket may hold what was damaged on the way there.
    """
    settings, run = config(**RUN, **{"metrics.tensorboard": False}), path_of("gs://words/b")
    for steps in 4, 6:
        train(settings | {"steps": steps}, run)
        assert steps in steps_in(run / "checkpoints")
    result = evaluate(run, Request(checkpoint="latest"))
    assert result["step"] == 6
    before = store.names("words")
    reading = Checkpoints(run, read_only=True)
    assert reading.latest() == 6
    reading.close()
    assert store.names("words") == before
    for name in before:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(store.objects["words", name][1])
    assert evaluate(tmp_path / "b", Request(checkpoint="latest"))["nll"] == result["nll"]
    damage(store, lambda name: "6/params/" in name and "/d/" in name)
    with refuses("checkpoints/6"):
        evaluate(run, Request(checkpoint="latest"))
    train(settings, run)  # again from 4
    assert evaluate(run, Request(checkpoint="latest"))["nll"] == result["nll"]
    with refuses("gs://words/b", "seed"):
        train(settings | {"seed": 1}, run)
    (run / "config.json").unlink()
    with refuses("gs://words/b", "config.json"):
        train(settings, run)


@pytest.mark.parametrize(
    "place, line",
    [
        ("nobody/a", "gs://nobody/a holds no run (no config.json): use the --workdir"),
        ("private/a", "a bucket cannot be used (Forbidden: b/private/o no permission"),
    ],
)
def test_a_workdir_without_a_run(store, quick_command, place, line):
    """One line, as on a disk."""
    done = quick_command("evaluate.py", f"--workdir=gs://{place}", env=store.variables)
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(f"error: {line}")


def test_a_store_that_refuses(store, flags, quick_command):
    """One line where a checkpoint cannot be written or metrics not be read: a lookup that failed
    was an absence, and one at resume erased the metrics. Then the run goes on, although its first
    checkpoint was never finished.
    """
    url, runs = "gs://refusing/run", {"steps": 2, "evaluate_every": 2, "checkpoint_every": 2}
    run = "train.py", *flags(url, **runs)
    line = "error: a bucket cannot be used ("
    try:
        store.fault = "POST .*params", 401
        done = quick_command(*run, env=store.variables)
        assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(line), done.stderr
        store.fault = None
        assert quick_command(*run, env=store.variables).returncode == 0
        before = metrics(path_of(url))
        store.fault = "GET .*metrics.jsonl", 401
        done = quick_command(*run, env=store.variables)
        assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(line), done.stderr
    finally:
        store.fault = None
    assert before and metrics(path_of(url)) == before


def test_a_store_that_does_not_answer(store, monkeypatch):
    """It is an error in one line, after `files.TIMEOUT` seconds: nobody would wait for ever."""
    import fsspec

    path_of("gs://slow/run")
    settings = fsspec.config.conf["gcs"]
    assert 0 < settings["requests_timeout"] <= 60
    monkeypatch.setitem(settings, "requests_timeout", 0.5)
    monkeypatch.setattr(store, "fault", ("GET .*slow", 0))
    with pytest.raises(Exception) as raised:
        fsspec.filesystem("gs", skip_instance_cache=True).exists("slow/run/config.json")
    assert explain(raised.value).startswith("a bucket cannot be used")
