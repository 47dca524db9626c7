"""Ctrl-C, SIGTERM and a second training on the same workdir: what is saved, what is said, and
that nothing is lost.
"""

import contextlib
import json
import platform
import shutil
import signal
from concurrent.futures import Future

import pytest

from adaptive_jax.parallel import hosts
from adaptive_jax.runs.checkpoints import Checkpoints
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training import loop
from adaptive_jax.training.loop import train
from tests import refuses
from tests.conftest import until
from tests.training.test_metrics import metrics

LONG = {"steps": 5_000, "checkpoint_every": 20, "evaluate_every": 20, "log_every": 1}
LONG |= {"body.dropout": 0.1}
STOPPING = "stopping: this update is finished and saved first; Ctrl-C again stops at once\n"


def saved(workdir):
    """The steps of its complete checkpoints."""
    return [int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()]


@contextlib.contextmanager
def hosts_stop_at(update):
    """Within it, training is told to stop after this update, as several hosts are."""
    stop = contextlib.nullcontext(hosts.Stop(lambda step: step == update))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "stopping", lambda before_stop="": stop)
        yield


@pytest.fixture(scope="module")
def stopped(start, flags, config, tmp_path_factory):
    """`(workdir, exit status, stderr)` of a run stopped by Ctrl-C between checkpoints; while it
    ran, a second one was refused.
    """
    workdir = tmp_path_factory.mktemp("stopped") / "run"
    process = start("train.py", *flags(workdir, **LONG))
    try:
        until(lambda: saved(workdir), process)
        training = f"process {process.pid} on {platform.node()}"
        for _ in range(2):  # the one who is refused changes nothing
            with refuses(str(workdir), "in use", training):
                train(config(**LONG), workdir)
        assert evaluate(workdir, Request())["step"] >= 20
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert not (workdir / ".training").exists()
    return workdir, process.returncode, err


@pytest.mark.parametrize("successor", [None, "process 12 on there\nid\n"])
def test_a_workdir_that_is_removed_is_not_written_to(config, tmp_path, monkeypatch, successor):
    """A training whose workdir was deleted saved into that of the training that was begun in its
    place, which then resumed from another run's parameters in silence.
    """
    workdir, update = tmp_path / "run", loop.Training._update

    def removed(self, step, *arguments):
        if step == 3:
            shutil.rmtree(workdir)
            if successor:
                workdir.mkdir()
                (workdir / ".training").write_text(successor)
        return update(self, step, *arguments)

    monkeypatch.setattr(loop.Training, "_update", removed)
    with refuses(str(workdir), "process 12 on there" if successor else "was removed", "lost"):
        train(config(steps=4, checkpoint_every=4), workdir)
    assert not (workdir / "checkpoints").exists()
    assert (workdir / ".training").exists() == bool(successor)


def test_a_run_that_is_stopped_saves_and_says_where(stopped, config, capsys):
    """Status 75 and the update that was saved, at once and not at the next checkpoint; the run
    resumes from there.
    """
    workdir, status, err = stopped
    step = max(saved(workdir))
    assert (metrics(workdir)[-1]["step"], status) == (step, 75)
    saved_at = f"stopped after update {step:,} of 5,000, which is saved: the same command resumes\n"
    assert err == STOPPING + saved_at
    train(config(**LONG | {"steps": step + 1}), workdir)
    assert f"after {step:,} of {step + 1:,} updates" in capsys.readouterr().out


def test_compiling_does_not_delay_the_end(config, tmp_path, monkeypatch):
    """The first program may take minutes, longer than a machine is left to a run."""
    stop = hosts.Stop()

    class Compiling(loop.Programs):
        def begin(self, steps):
            stop.requested = True
            return 3

        def of(self, step):
            return Future()  # that is never done

    monkeypatch.setattr(loop, "Programs", Compiling)
    monkeypatch.setattr(hosts, "stopping", lambda before_stop="": contextlib.nullcontext(stop))
    with pytest.raises(loop.Stopped, match="stopped after update 0 of 5,000: the same command"):
        train(config(**LONG), tmp_path)
    assert not saved(tmp_path)


def test_a_run_that_began_meanwhile_is_not_overwritten(config, tmp_path, monkeypatch):
    """A second run that prepared its corpus while the first one trained is refused, and changes
    nothing.
    """
    settings, workdir = config(steps=2), tmp_path / "run"
    begin = loop.begin

    def late(*arguments):
        monkeypatch.setattr(loop, "begin", begin)
        begin(workdir, config(steps=2, seed=5), {}, arguments[3])
        begin(*arguments)

    monkeypatch.setattr(loop, "begin", late)
    with refuses(str(workdir), "another run", "seed", "5", "0"):
        train(settings, workdir)
    assert json.loads((workdir / "config.json").read_text())["seed"] == 5


TWICE = """
import os, signal, time
from adaptive_jax.parallel import hosts
with hosts.stopping("that is done first") as stop:
    for number in signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2:
        os.kill(os.getpid(), number)
    time.sleep(0.01)
    assert stop.requested and stop(1)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


def test_a_second_interruption_ends_at_once(quick_command):
    """Without a traceback; SIGTERM after SIGUSR1, which SLURM sends, is none, nor is SIGHUP; Ctrl-C
    after them is.
    """
    done = quick_command("-c", TWICE)
    assert done.returncode == 130
    assert (
        done.stderr == "stopping: that is done first; Ctrl-C again stops at once\n"
        "stopped at once: the same command resumes from the last checkpoint\n"
    )


def test_steps_below_those_done(config, stopped):
    """Both numbers and the cure; the run stays as it was."""
    workdir, _, _ = stopped
    step = max(saved(workdir))
    before = (workdir / "config.json").read_text()
    with refuses("steps=5", f"{step:,}", f"steps={step}"):
        train(config(**LONG | {"steps": 5}), workdir)
    assert max(saved(workdir)) == step and (workdir / "config.json").read_text() == before


def test_a_finished_run_says_so(trained, config, capsys):
    """Started again, it says that it is finished, with its best evaluation and what to type
    next, and changes no file.
    """
    checkpoints = Checkpoints(trained, read_only=True)
    assert checkpoints.latest() == 240
    checkpoints.close()
    before = {
        path: path.read_bytes()
        for path in trained.rglob("*")
        if path.is_file() and "tfevents" not in path.name
    }
    train(config(), trained)
    out = capsys.readouterr().out
    assert "finished: 240 updates; best validation perplexity" in out
    assert f"python -m adaptive_jax evaluate --workdir={trained} --split=test" in out
    assert all(path.read_bytes() == content for path, content in before.items())


def test_the_best_evaluation_is_saved(config, tmp_path):
    """Between checkpoints, too: its parameters were lost, and the closing line named its loss."""
    changes = {"optimizer.learning_rate": 7.0, "schedule.warmup_steps": 3}
    train(config(steps=6, evaluate_every=1, checkpoint_every=0, **changes), tmp_path / "run")
    lines = metrics(tmp_path / "run")
    losses = {x["step"]: x["validation/nll"] for x in lines if "validation/nll" in x}
    best = min(losses, key=losses.__getitem__)
    assert 1 < best < 6 and {*saved(tmp_path / "run")} == {best, 6}
    assert Checkpoints(tmp_path / "run", read_only=True).best() == best
