"""Updates that diverge: noticed, named, and left out or gone back from as the config says;
early stopping; norms by group.
"""

import json
import math

import jax
import numpy as np
import pytest

from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import build
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import sharding
from adaptive_jax.training.divergence import LEAST, SKIPPED, Diverged, Rewinds, Watch
from adaptive_jax.training.loop import train
from adaptive_jax.training.state import initial_state, parameter_names, shape_of_state
from adaptive_jax.training.update import Extras, make_update
from tests.training.test_metrics import metrics
from tests.training.test_update import random_batch

SETTINGS = {"policy": "stop", "loss": 50.0, "spike": 2.0, "rewinds": 3}
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
        ({"nll": math.nan}, "loss nan nats a token, gradient norm 1: "),
        ({"nll": math.inf}, "loss inf"),
        ({"nll": 1.6e10}, r"loss 1\.6e\+10"),
        ({"nll": 50.0}, "loss 50 "),
        (
            {"norm": math.inf, "squares": (1.0, math.inf, 1.0)},
            "gradient norm inf, not finite in body/blocks/query: ",
        ),
        (
            {"norm": math.nan, "squares": (math.nan, math.nan, 1.0)},
            "not finite in input/table and 1 other: ",
        ),
        ({"norm": math.nan, "squares": (math.nan,) * 3}, "not finite in any parameter: "),
    ],
)
def test_an_update_that_diverges(given, says):
    """It is named with its loss, its gradient and where that is not finite, and with what to do."""
    watch = Watch(SETTINGS, NAMES)
    assert watch.see(1, report()) == {"spikes": 0}
    with pytest.raises(
        Diverged,
        match=f"^update 1,002 gives .*{says}.*lower optimizer.learning_rate.*policy=rewind",
    ) as error:
        watch.see(1_002, report(**given))
    assert error.value.step == 1_002 and "\n" not in str(error.value)


def test_spikes(caplog):
    """A loss above the recent mean is counted, and warned of once a spell; the first updates
    and falling losses are none.
    """
    watch = Watch(SETTINGS, NAMES)
    falling = [watch.see(step, report(12 - 0.1 * step))["spikes"] for step in range(1, LEAST + 30)]
    assert not any(falling)
    counts = [
        watch.see(100 + i, report(nll))["spikes"] for i, nll in enumerate([13.0, 14.0, 8.0, 13.0])
    ]
    assert counts == [1, 1, 0, 1]
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "update 100",
        "update 103",
    ]
    assert Watch(SETTINGS, NAMES).see(1, report(40.0)) == {"spikes": 0}


def test_skipping_without_end(caplog):
    """Updates left out are counted and warned of; too many in a row end the run."""
    watch = Watch(SETTINGS | {"policy": "skip"}, NAMES)
    for step in range(SKIPPED):
        assert watch.see(step, report(math.nan, skipped=True)) == {"spikes": 0, "skipped": 1}
    assert watch.see(90, report(skipped=False)) == {"spikes": 0, "skipped": 0}
    for step in range(SKIPPED):
        watch.see(step, report(math.nan, skipped=True))
    with pytest.raises(Diverged):
        watch.see(99, report(math.nan, skipped=True))
    assert caplog.records[0].getMessage().endswith(": skipped")


def test_a_skipped_update_changes_nothing_but_the_count(config):
    """Parameters and momentum stay bit for bit; the step and the schedule's count go on; the
    next update works.
    """
    mesh, settings = sharding.device_mesh(), config()
    model, optimizer = build(settings, 122), optim.from_config(settings)
    shapes = shape_of_state(model, optimizer, mesh)
    update = make_update(model, optimizer, mesh, 0, shapes, Extras(skip_from=100.0, norms=True))
    state, good = initial_state(model, optimizer, 0, mesh), random_batch(1, 4, 16)
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
    counts = [(a, b) for a, b in pairs if a.dtype == np.int32]
    assert len(counts) >= 2 and all(b == a + 1 for a, b in counts)  # the step and the schedule's
    state, third = update(state, {}, good)
    assert not third["skipped"] and third["change_squares"].sum() > 0
    names = parameter_names(shapes.params)
    assert len(names) == len(third["gradient_squares"]) == len(third["change_squares"])
    assert np.sqrt(third["gradient_squares"].sum()) == pytest.approx(
        float(third["gradient_norm"]), rel=1e-5
    )


@pytest.fixture(scope="module")
def steady(config, tmp_path_factory):
    """Config of a run that hardly learns, losses of its 20 updates, and the update of the
    largest loss, not an early one.
    """
    flat = {f"schedule.{key}": 1e-9 for key in ("min_learning_rate", "warmup_from")} | {
        "optimizer.learning_rate": 1e-9
    }
    common = flat | {
        "log_every": 1,
        "evaluate_every": 4,
        "checkpoint_every": 4,
        "tokens_per_update": 64,
        "tokens_per_device": 64,
    }
    for seed in range(20):
        workdir = tmp_path_factory.mktemp("steady") / "run"
        train(config(steps=20, seed=seed, **common), workdir)
        losses = [line["train/nll"] for line in metrics(workdir) if "train/nll" in line]
        if 5 < (worst := 1 + int(np.argmax(losses))) < 12 and worst % 4:
            limit = float(np.mean(sorted(losses)[-2:]))
            return common | {"seed": seed, "divergence.loss": limit}, losses, worst
    raise AssertionError("no seed will do")


def divergent(config, settings, policy, **changes):
    """Its config: `train` takes nested groups."""
    return config(steps=12, **{**settings, "divergence.policy": policy} | changes)


def test_skip_trains_on(config, steady, tmp_path, caplog):
    """The one update is left out and counted, and the run ends; the losses of the others stand
    in the metrics.
    """
    settings, losses, worst = steady
    train(divergent(config, settings, "skip"), tmp_path / "run")
    lines = {line["step"]: line for line in metrics(tmp_path / "run") if "train/skipped" in line}
    assert [step for step, line in lines.items() if line["train/skipped"]] == [worst]
    assert sum("skipped" in record.getMessage() for record in caplog.records) == 1
    for step in range(1, 13):
        if step != worst:
            assert lines[step]["train/nll"] == pytest.approx(losses[step - 1], abs=1e-4)


def test_rewind_draws_other_batches(config, steady, tmp_path, caplog, capsys):
    """From the last checkpoint on, updates take the batches after the one that diverged;
    resuming keeps to it.
    """
    settings, losses, worst = steady
    train(divergent(config, settings, "rewind"), tmp_path / "run")
    resumed = worst // 4 * 4
    assert json.loads((tmp_path / "run" / "rewinds.json").read_text()) == {
        "rewinds": 1,
        "left_out": [[resumed, worst - resumed]],
    }
    assert (
        f"back to update {resumed}, without the batches of the {worst - resumed} updates since"
        in caplog.text
    )
    batches = [*range(1, resumed + 1), *range(worst + 1, worst + 1 + 12 - resumed)]
    found = [line["train/nll"] for line in metrics(tmp_path / "run") if "train/nll" in line]
    np.testing.assert_allclose(found, [losses[i - 1] for i in batches], atol=1e-4)
    assert f"continuing {tmp_path / 'run'} after {resumed} of 12" in capsys.readouterr().out

    more = Rewinds(tmp_path / "run")
    assert [more.left_out(step) for step in (1, resumed, resumed + 1, 99)] == [
        0,
        0,
        worst - resumed,
        worst - resumed,
    ]


def test_the_cure_is_to_resume_with_another_policy(config, steady, tmp_path):
    """A run that stopped goes on with another policy in the same workdir; rewinds have a limit."""
    settings, _, worst = steady
    for policy, rewinds in ("stop", 3), ("rewind", 0):
        with pytest.raises(InputError, match=f"^update {worst} gives loss"):
            train(
                divergent(config, settings, policy, **{"divergence.rewinds": rewinds}),
                tmp_path / "run",
            )
    train(divergent(config, settings, "rewind"), tmp_path / "run")
    assert metrics(tmp_path / "run")[-1]["step"] == 12


def test_damaged_rewinds(tmp_path):
    """One line."""
    gaps = (
        '{"rewinds": 1, "left_out": [[1, -2]]}',
        '{"rewinds": 1e999, "left_out": []}',
        '{"rewinds": 1, "left_out": [3]}',
    )
    for content in "", "{", "[1]", '{"rewinds": 1}', "[" * 100_000, *gaps:
        (tmp_path / "rewinds.json").write_text(content)
        with pytest.raises(InputError, match="rewinds.json is damaged"):
            Rewinds(tmp_path)


def test_early_stopping(config, steady, tmp_path, capsys):
    """A run that no longer improves is saved, ends and says so; it stays ended, and goes on if
    given more patience.
    """
    settings, _, _ = steady
    still = settings | {
        "divergence.loss": 100.0,
        "evaluate_every": 2,
        "checkpoint_every": 0,
        "optimizer.learning_rate": 1e-30,
        "schedule.min_learning_rate": 0.0,
        "schedule.warmup_from": 0.0,
    }
    for _ in range(2):
        train(config(steps=12, early_stopping=2, **still), tmp_path / "run")
        assert "stopped early: 6 updates" in capsys.readouterr().out
        assert [line["step"] for line in metrics(tmp_path / "run") if "validation/nll" in line] == [
            2,
            4,
            6,
        ]
        assert (tmp_path / "run" / "checkpoints" / "6").is_dir()
    train(config(steps=12, early_stopping=4, **still), tmp_path / "run")
    assert "stopped early: 10 updates" in capsys.readouterr().out
    train(config(steps=12, early_stopping=0, **still), tmp_path / "run")
    assert "finished: 12 updates" in capsys.readouterr().out


def test_a_run_that_improves_is_not_stopped(config, tmp_path, capsys):
    """Each evaluation lowers the loss."""
    train(
        config(steps=40, early_stopping=1, evaluate_every=20, checkpoint_every=0), tmp_path / "run"
    )
    assert "finished: 40 updates" in capsys.readouterr().out


def test_norms_by_group(config, tmp_path):
    """Logged where asked for, for gradients and changes; their squares add up to the norm of
    all.
    """
    train(config(steps=2, log_every=1, **{"metrics.norms": True}), tmp_path / "run")
    line = metrics(tmp_path / "run")[0]
    parts = {key: value for key, value in line.items() if key.startswith("train/gradient_norm/")}
    assert {"train/gradient_norm/body/blocks", "train/gradient_norm/input/table_0"} <= parts.keys()
    assert math.hypot(*parts.values()) == pytest.approx(line["train/gradient_norm"], rel=1e-5)
    assert {key.replace("gradient", "change") for key in parts} <= line.keys()
