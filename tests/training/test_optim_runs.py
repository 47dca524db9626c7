"""Runs whose optimizer goes by validation losses, or that end before their last update: killed,
stopped, resumed.
"""

import shutil
import types

import jax
import numpy as np
import pytest
from optax.tree_utils import tree_get

from adaptive_jax.config.keys import complete
from adaptive_jax.optimizers.optim import params_to_evaluate
from adaptive_jax.parallel import hosts, sharding
from adaptive_jax.runs.checkpoints import Checkpoints
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training.dry_run import check_config
from adaptive_jax.training.ends import Clock
from adaptive_jax.training.loop import Stopped, train
from tests import refuses
from tests.training.test_metrics import metrics
from tests.training.test_runs import assert_close, state_of
from tests.training.test_stopping import hosts_stop_at, saved

RUN = {"steps": 10, "log_every": 1, "evaluate_every": 2, "checkpoint_every": 3, "keep": 20}
RUN |= {"batches.sequence_length": 8, "tokens_per_update": 64, "tokens_per_device": 64}
RUN |= {"body.name": "lstm", "body.features": 8, "body.widths": (8,), "body.dropout": 0.1}
RUN |= {"input.name": "lookup", "output.name": "softmax", "output.table.name": "tied"}
RUN |= {"metrics.tensorboard": False}
SWITCH = 6  # so fast that the loss rises: after this update averages begin and the rate is divided
AVERAGED = RUN | {"optimizer.name": "nt_asgd", "optimizer.nonmono": 1, "optimizer.form": "torch"}
AVERAGED |= {"optimizer.learning_rate": 60.0, "schedule.name": "plateau"}
AVERAGED |= {"schedule.warmup_steps": 1, "schedule.warmup_from": 0.1}


@pytest.fixture(scope="session")
def averaged(settings):
    """`averaged(steps=3)`: the config of a run of nt_asgd and plateau with these changes."""
    small = {key: value for key, value in settings().items() if key.startswith("data.")}
    return lambda **changes: complete(small | AVERAGED | changes)


@pytest.fixture(scope="module")
def uninterrupted(averaged, tmp_path_factory):
    """A run that was never stopped."""
    workdir = tmp_path_factory.mktemp("averaged") / "uninterrupted"
    train(averaged(), workdir)
    return workdir


def assert_same(workdir, uninterrupted, settings):
    assert metrics(workdir, speeds=False) == metrics(uninterrupted, speeds=False)
    assert_close(state_of(workdir, settings), state_of(uninterrupted, settings), 0)


def test_a_run_killed_after_the_switch(uninterrupted, averaged, tmp_path):
    """The averages and the divided rate are saved: it ends bit for bit as one never stopped."""
    for step in 3, SWITCH:
        state = state_of(uninterrupted, averaged(), step).optimizer
        seen = bool(tree_get(state, "switched")), int(tree_get(state, "divided")) > 0
        assert seen == (step >= SWITCH, step >= SWITCH)
    workdir = shutil.copytree(uninterrupted, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "9")
    shutil.rmtree(workdir / "checkpoints" / "10")
    train(averaged(), workdir)
    assert_same(workdir, uninterrupted, averaged())


def test_a_run_stopped_before_the_evaluation_that_switches(uninterrupted, averaged, tmp_path):
    """The optimizer hears of the evaluation, made up for by the next start, and again if that
    start is killed: once in all.
    """
    workdir = tmp_path / "run"
    for stop in SWITCH, SWITCH + 1:
        with pytest.raises(Stopped), hosts_stop_at(stop):
            train(averaged(), workdir)
    shutil.rmtree(workdir / "checkpoints" / str(SWITCH + 1))
    assert not tree_get(state_of(workdir, averaged()).optimizer, "switched")
    train(averaged(), workdir)
    assert_same(workdir, uninterrupted, averaged())


def test_averages_are_evaluated(uninterrupted, averaged):
    """By training and by evaluate.py alike; training goes on from other parameters."""
    state = state_of(uninterrupted, averaged())
    averages = params_to_evaluate(state.optimizer, state.params)
    gaps = jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, averages)
    assert max(jax.tree.leaves(gaps)) > 0.01
    last = metrics(uninterrupted)[-1]
    assert (last["step"], tree_get(state.optimizer, "averaged")) == (10, 10 - SWITCH)
    assert evaluate(uninterrupted, Request("validation", checkpoint="latest"))[
        "nll"
    ] == pytest.approx(last["validation/nll"], rel=1e-6)


def test_evaluations_that_change_updates_stay(uninterrupted, averaged):
    """Where losses change the updates, evaluate_every cannot; checkpoint_every, whose
    evaluations do not count, can.
    """
    with refuses("evaluate_every", "2", "3"):
        train(averaged(evaluate_every=3), uninterrupted)
    train(averaged(checkpoint_every=1), uninterrupted)
    with refuses("evaluate_every=0", "optimizer.name='nt_asgd'"):
        check_config(averaged(evaluate_every=0), None)


def test_evaluations_that_come_too_late(averaged, caplog):
    """A run that ends before the evaluation that its optimizer waits for says so."""
    check_config(averaged(evaluate_every=9), None)
    assert not caplog.text
    check_config(averaged(evaluate_every=10), None)
    assert (
        "evaluate_every=10 must be below steps=10 to affect optimizer.name='nt_asgd'" in caplog.text
    )


def test_a_schedule_that_ends_the_run(averaged, tmp_path, capsys):
    """The last division ends it, evaluated and saved; repeated, the command says so and does
    nothing.
    """
    settings, workdir = averaged(**{"schedule.divisions": 1}), tmp_path / "run"
    for _ in range(2):
        train(settings, workdir)
        assert f"finished by its schedule: {SWITCH} updates" in capsys.readouterr().out
        assert max(saved(workdir)) == metrics(workdir)[-1]["step"] == SWITCH


def test_hours_end_a_run(uninterrupted, averaged, tmp_path, capsys):
    """It is evaluated and saved, and says that it is finished, until it is given more; no
    update is another for it.
    """
    workdir = tmp_path / "run"
    for _ in range(2):
        train(averaged(hours=1e-9), workdir)
        assert "finished after 1e-09 hours: 1 updates" in capsys.readouterr().out
        assert saved(workdir) == [1]
        assert metrics(workdir)[-1].keys() > {"validation/nll", "validation/extra"}
    train(averaged(), workdir)
    assert_close(state_of(workdir, averaged()), state_of(uninterrupted, averaged()), 0)
    checkpoints = Checkpoints(workdir, read_only=True)
    before, after = checkpoints.hours(1), checkpoints.hours(10)
    checkpoints.close()
    assert 0 < before < after < 1
    (workdir / "metrics.jsonl").unlink()
    shutil.rmtree(workdir / "checkpoints" / "10")
    # The clock goes on where the last start of the run had come to.
    train(averaged(hours=before), workdir)
    assert "finished after " in capsys.readouterr().out and max(saved(workdir)) == 9


def test_the_first_host_decides_when_time_is_over(monkeypatch):
    """All hosts hear what its clock says, whatever their own say, and only where they meet."""
    several = types.SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setattr(jax, "distributed", several)
    said = []  # by this host
    monkeypatch.setattr(sharding, "sum_over_hosts", lambda own: said.append(own) or own)
    for first in True, False:
        monkeypatch.setattr(hosts, "first", lambda first=first: first)
        for trained in 0.5, 1.5:
            assert Clock(1.0, trained).over() == (first and trained > 1)
        assert not Clock(1.0, 1.5).over(together=False)
    assert said == [False, True, False, False]
