"""A run that ends on its way and is started again is, bit for bit, one that never stopped."""

import os
import shutil
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from adaptive_jax.runs.checkpoints import ITEMS, Checkpoints, steps_in
from adaptive_jax.training import loop, sparse
from adaptive_jax.training.loop import train
from tests.training.conftest import RUNS
from tests.training.test_metrics import metrics, scalars
from tests.training.test_stopping import hosts_stop_at

EVALUATED = [2, 3, 4, 6, 8]  # every second update, and those with a checkpoint


def arrays_of(workdir):
    """All arrays of the last checkpoint by name, whatever it holds."""
    directory = (workdir / "checkpoints" / str(steps_in(workdir / "checkpoints")[0])).resolve()
    items = {
        name: ocp.PyTreeCheckpointer().restore(directory / name)
        for name in ITEMS
        if (directory / name).is_dir()
    }
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree.leaves_with_path(items)}


def check_ended_alike(workdir, uninterrupted):
    """Losses logged, and every array saved."""
    assert metrics(workdir, speeds=False) == metrics(uninterrupted, speeds=False)
    ours, theirs = arrays_of(workdir), arrays_of(uninterrupted)
    assert ours.keys() == theirs.keys() and len(ours) > 5
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def validated(workdir):
    return [line["step"] for line in metrics(workdir) if "validation/nll" in line]


NAMES = [
    pytest.param(name, marks=[pytest.mark.slow] * (name in ("sub-words", "similar")))
    for name in RUNS
]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_was_stopped(name, uninterrupted, run_config, tmp_path, capsys):
    """Between checkpoints, where an evaluation was due: the state is saved before the split is
    scored, and the run that goes on, to more updates than were asked for at first, scores it,
    once.
    """
    with pytest.raises(loop.Stopped), hosts_stop_at(4):
        train(run_config(name, steps=6), tmp_path)
    assert (steps_in(tmp_path / "checkpoints"), validated(tmp_path)) == ([4, 3, 2], [2, 3])
    train(run_config(name), tmp_path)
    printed = capsys.readouterr().out
    assert name != "similar" or "376 rows of 8 to 64 tokens, padding" in printed
    assert validated(tmp_path) == EVALUATED
    check_ended_alike(tmp_path, uninterrupted(name))
    losses = {
        line["step"]: line["validation/nll"]
        for line in metrics(tmp_path)
        if "validation/nll" in line
    }
    checkpoints = Checkpoints(tmp_path, read_only=True)
    assert checkpoints.evaluated(4) and checkpoints.best() == min(losses, key=losses.get)
    checkpoints.close()


def test_a_run_that_was_killed(uninterrupted, run_config, tmp_path, capsys):
    """It logged five more updates than the last checkpoint has, the last line not to its end.

    Each step stands once in metrics.jsonl, and in TensorBoard once that has purged what the restart
    makes void. tests/training/test_survival.py kills processes.
    """
    killed = shutil.copytree(uninterrupted("transformer"), tmp_path / "run")
    for step in steps_in(killed / "checkpoints"):
        if step > 3:
            shutil.rmtree(killed / "checkpoints" / str(step))
    file = killed / "metrics.jsonl"
    file.write_text(file.read_text()[:-9])
    train(run_config("transformer"), killed)
    assert f"continuing {killed} after 3 of 8 updates" in capsys.readouterr().out
    check_ended_alike(killed, uninterrupted("transformer"))
    logs = sorted(killed.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_ctime_ns)
    assert len(logs) == 2
    assert scalars(*logs) == {
        (key, line["step"]): pytest.approx(value)
        for line in metrics(killed)
        for key, value in line.items()
        if key != "step"
    }


def test_state_that_the_runs_remember(uninterrupted):
    """State that a run has to remember is not zero, or that it remembers it would not show."""
    assert [sparse.composes(7, step, 0.3) for step in range(1, 9)] == [
        step in (1, 4, 6) for step in range(1, 9)
    ]
    carry = {
        k: a for k, a in arrays_of(uninterrupted("streams")).items() if k.startswith("['carry']")
    }
    assert len(carry) >= 2 and all(np.abs(a).max() > 0.01 for a in carry.values())
    assert any(name.startswith("['tables']") for name in arrays_of(uninterrupted("sparse")))


def test_a_stop_in_the_middle_of_an_evaluation(uninterrupted, run_config, tmp_path, monkeypatch):
    """The state is saved without waiting for its end."""

    def interrupted(run, ids, windows, progress):
        def stop(batches, count):
            for number, batch in enumerate(batches):
                if number == 2:
                    os.kill(os.getpid(), signal.SIGINT)
                yield batch

        return score_split(
            run, ids, windows, lambda batches, count: progress(stop(batches, count), count)
        )

    score_split = loop.score_split
    with monkeypatch.context() as patch:
        patch.setattr(loop, "score_split", interrupted)
        with pytest.raises(loop.Stopped, match="stopped after update 2 of 8, which is saved"):
            train(run_config("transformer"), tmp_path)
    assert steps_in(tmp_path / "checkpoints") == [2]
    train(run_config("transformer"), tmp_path)
    check_ended_alike(tmp_path, uninterrupted("transformer"))
