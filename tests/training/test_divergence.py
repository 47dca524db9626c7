"""Updates that diverge: noticed, named, and left out if the config says so; early stopping."""

import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from adaptive_jax.config.keys import complete
from adaptive_jax.data.batches.pipeline import TrainingBatches
from adaptive_jax.model.language_model import build
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import sharding
from adaptive_jax.training.divergence import MOST_SKIPPED, Diverged, DivergenceMonitor
from adaptive_jax.training.ends import reason
from adaptive_jax.training.loop import Stopped, Training, train
from adaptive_jax.training.metrics import Metrics
from adaptive_jax.training.state import initial_state, parameter_names, shape_of_state
from adaptive_jax.training.update import UpdateOptions, make_update
from tests import refuses
from tests.training.test_metrics import metrics, settings
from tests.training.test_stopping import hosts_stop_at
from tests.training.test_update import random_batch

NAN, INF = math.nan, math.inf
NAMES = ["input/table", "body/blocks/query", "output/table"]


def report(nll=3.0, norm=1.0, squares=(1.0, 1.0, 1.0), **more):
    return {
        "nll": nll,
        "loss": nll,
        "gradient_norm": norm,
        "gradient_squares": np.array(squares),
    } | more


@pytest.mark.parametrize(
    "given, says",
    [
        ({"nll": NAN}, "loss nan nats a token, gradient norm 1: "),
        ({"nll": 1.6e10}, r"loss 1\.6e\+10"),
        ({"nll": 100.0}, "loss 100 "),
        (
            {"norm": INF, "squares": (1, INF, 1)},
            r"norm inf, not finite in body/blocks/query \(1 of 3 parameters\): ",
        ),
        (
            {"norm": NAN, "squares": (NAN, NAN, 1)},
            r"not finite in input/table \(2 of 3 parameters\): ",
        ),
        (
            {"norm": NAN, "squares": (NAN,) * 3},
            r"not finite in input/table \(3 of 3 parameters\): ",
        ),
    ],
)
def test_an_update_that_diverges(given, says):
    """It is named with its loss, its gradient and where that is not finite, and with what to do."""
    monitor = DivergenceMonitor(NAMES)
    monitor.check(1, report())
    says = f"^update 1,002 has .*{says}.*lower optimizer.learning_rate.*divergence=skip"
    with pytest.raises(Diverged, match=says) as error:
        monitor.check(1_002, report(**given))
    assert "\n" not in str(error.value)


def test_skipping_without_end(caplog):
    """Updates left out are warned of; too many in a row end the run."""
    monitor = DivergenceMonitor(NAMES)
    for start in 0, 50:
        for step in range(MOST_SKIPPED):
            monitor.check(start + step, report(NAN, skipped=True))
        if start == 0:
            monitor.check(40, report(skipped=False))
    with pytest.raises(Diverged) as error:
        monitor.check(99, report(NAN, skipped=True))
    assert "divergence=skip" not in str(error.value)  # which it is
    assert len(caplog.records) == 2 * MOST_SKIPPED
    assert caplog.records[0].getMessage().startswith("skipped update 0: it has loss nan")


@pytest.mark.parametrize("name", ["nag", "adam"])
def test_a_skipped_update_changes_nothing_but_the_count(config, name):
    """Parameters and moments stay bit for bit, and so does Adam's count, by which it corrects them;
    the step and the schedule's count go on; the next update works.
    """
    mesh, model = sharding.device_mesh(), build(config(), 122)
    optimizer = optim.from_config(complete({"optimizer.name": name}))
    shapes = shape_of_state(model, optimizer, mesh)
    update = make_update(model, optimizer, mesh, 0, shapes, UpdateOptions(skip_from=100.0))
    state, good = initial_state(model, optimizer, 0, shapes), random_batch(1, 4, 16)
    state, first = update(state, {}, good)
    before = jax.tree.map(np.array, state)
    bad = good._replace(weights=good.weights.copy())
    bad.weights[0, 0, 0] = np.inf
    state, second = update(state, {}, bad)
    assert (bool(first["skipped"]), bool(second["skipped"])) == (False, True)
    assert int(state.step) == 2
    after = jax.tree.map(np.array, state)
    pairs = list(zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True))
    floats = [(a, b) for a, b in pairs if a.dtype == np.float32]
    assert len(floats) > 20 and all((a == b).all() for a, b in floats)
    counts = [int(b - a) for a, b in pairs if a.dtype == np.int32]
    assert sum(counts) == 2 and len(counts) == (2 if name == "nag" else 3)
    state, third = update(state, {}, good)
    assert not third["skipped"]
    assert len(parameter_names(shapes.params)) == len(third["gradient_squares"])
    assert np.sqrt(third["gradient_squares"].sum()) == pytest.approx(
        float(third["gradient_norm"]), rel=1e-5
    )


STEADY = {  # a run that hardly learns
    "log_every": 1,
    "evaluate_every": 4,
    "checkpoint_every": 4,
    "tokens_per_update": 64,
    "tokens_per_device": 64,
    "optimizer.learning_rate": 1e-9,
    "schedule.min_learning_rate": 0.0,
    "schedule.warmup_from": 1e-9,
}


def test_skip_is_a_cure(config, tmp_path, caplog, monkeypatch):
    """A run that stopped resumes with the policy `skip`: the one update is left out and counted,
    and the losses of the others are those of a run that never diverged.
    """
    train(config(steps=12, **STEADY), tmp_path / "whole")
    batch = TrainingBatches.batch

    def diverges_at_7(batches, seed, step, *share):
        made = batch(batches, seed, step, *share)
        return made._replace(weights=made.weights * np.inf) if step + 1 == 7 else made

    monkeypatch.setattr(TrainingBatches, "batch", diverges_at_7)
    with refuses("update 7", "loss nan"):
        train(config(steps=12, **STEADY), tmp_path / "run")
    train(config(steps=12, divergence="skip", **STEADY), tmp_path / "run")
    losses, whole = (
        {line["step"]: line["train/nll"] for line in metrics(workdir) if "train/nll" in line}
        for workdir in (tmp_path / "run", tmp_path / "whole")
    )
    skipped = [line["step"] for line in metrics(tmp_path / "run") if line.get("train/skipped")]
    assert skipped == [7]
    assert sum("skipped" in record.getMessage() for record in caplog.records) == 1
    del whole[7]  # an update without words has no loss a word
    assert losses == pytest.approx(whole, abs=1e-4)


def test_early_stopping(config, tmp_path, capsys):
    """A run that no longer improves is saved, ends and says so; it stays ended, and goes on if
    given more patience. One that ends where it was stopped, between evaluations, is evaluated.
    """
    rates = {"optimizer.learning_rate": 1e-30, "schedule.warmup_from": 0.0}
    still = STEADY | rates | {"steps": 12, "evaluate_every": 2, "checkpoint_every": 0}
    for _ in range(2):
        train(config(early_stopping=2, **still), tmp_path / "run")
        assert "stopped early: 6 updates" in capsys.readouterr().out
        evaluated = [line["step"] for line in metrics(tmp_path / "run") if "validation/nll" in line]
        assert evaluated == [2, 4, 6]
        assert (tmp_path / "run" / "checkpoints" / "6").is_dir()
    train(config(early_stopping=4, **still), tmp_path / "run")
    assert "stopped early: 10 updates" in capsys.readouterr().out
    with hosts_stop_at(11), pytest.raises(Stopped):
        train(config(early_stopping=0, **still), tmp_path / "run")
    train(config(early_stopping=2, **still), tmp_path / "run")
    assert "stopped early: 11 updates" in capsys.readouterr().out
    assert "validation/nll" in metrics(tmp_path / "run")[-1]


@pytest.mark.parametrize(
    "losses, stops",
    [([3.0], False), ([3.0, 3.0], False), ([3.0, 3.0, 3.1], True), ([3.0, 3.1, 2.9], False)],
)
def test_patience(losses, stops):
    """Two evaluations without a lower loss end a run, and one with a lower loss starts anew."""
    config = {"steps": 9, "early_stopping": 2, "evaluate_every": 1, "checkpoint_every": 0}
    assert reason(config, 5, losses, False, False) == ("stopped early" if stops else None)


def test_patience_after_evaluations_became_rarer(tmp_path):
    """Better losses of evaluations that `evaluate_every` no longer asks for still count; that of a
    start that its hours limited does not, over any number of starts.
    """
    config = {"steps": 900, "early_stopping": 4, "evaluate_every": 20, "checkpoint_every": 0}
    losses = {10: 3.0, 20: 3.5, 30: 3.4, 35: 2.0, 40: 3.3, 50: 3.2, 60: 3.1}
    first = Metrics(tmp_path, 0, settings(900))
    for step, nll in losses.items():
        first.write(step, "validation", {"nll": nll} | ({"extra": 1} if step == 35 else {}))
    first.close()
    again = Metrics(tmp_path, 60, settings(900))
    again.close()
    run = SimpleNamespace(
        job=SimpleNamespace(config=config),
        metrics=again,
        state=SimpleNamespace(optimizer=()),
    )
    assert again.extra == {35} and Training._reason(run, 60, False) == "stopped early"
