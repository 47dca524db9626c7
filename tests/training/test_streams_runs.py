"""Runs on streams: the carry over updates, and in evaluation."""

import json

import jax
import numpy as np
import pytest

from adaptive_jax.data.batches.pipeline import Layout, TrainingBatches
from adaptive_jax.data.corpora.load import load
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.runs.run import Run
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training.loop import train
from tests import refuses
from tests.training.conftest import RUNS
from tests.training.test_metrics import metrics

ROWS = 8
CHANGES = RUNS["streams"] | {"steps": 60, "tokens_per_update": ROWS * 60}


@pytest.fixture(scope="module")
def streams(with_layers):
    """`streams(steps=3)`: the config of a small run on streams."""
    return lambda **changes: with_layers(CHANGES | changes)


@pytest.fixture(scope="module")
def learned(streams, tmp_path_factory):
    """The workdir of a run of 60 updates."""
    workdir = tmp_path_factory.mktemp("streams") / "learned"
    train(streams(), workdir)
    return workdir


def test_a_run_on_streams_learns_and_scales_its_rate(learned, streams):
    """Its loss falls, and an update's rate is that of the schedule times its window over the
    usual one.
    """
    lines = metrics(learned)
    assert lines[-1]["validation/nll"] < lines[0]["train/nll"] - 1.5
    config = streams()
    batches = TrainingBatches(
        load(config["data"]).ids["train"], 0, Layout(**config["batches"]), ROWS
    )
    rates = {
        line["step"]: line["train/learning_rate"] for line in lines if "train/learning_rate" in line
    }
    expected = {
        step: 0.1 * batches.batch(config["seed"], step - 1).inputs.shape[-1] / 60 for step in rates
    }
    assert rates == pytest.approx(expected, rel=1e-6)
    assert len(set(expected.values())) > 2


def test_evaluation_carries_the_state_through_the_split(learned, capsys):
    """One row equals the whole split in one window; any window gives the same; 4 rows lose what
    came before three of them.
    """
    run, corpus = Run.open(learned), load(json.loads((learned / "config.json").read_text())["data"])
    ids = np.asarray(corpus.ids["test"])
    inputs = np.append(run.vocabulary.eos, ids[:-1])[None]
    batch = Batch(inputs, ids[None], np.ones(inputs.shape, np.float32), np.zeros(1, np.int32))
    expected = float(jax.jit(run.model.apply)({"params": run.params}, batch)[0].nll.mean())
    results = {window: evaluate(learned, Request(window=window)) for window in (0, 7, len(ids))}
    for result in results.values():
        assert result["nll"] == pytest.approx(expected, rel=1e-6)
    assert "each token sees the whole text before it" in capsys.readouterr().out
    rows = evaluate(learned, Request(rows=4))
    assert "context 0, in 4 rows (--rows=1 scores exactly)" in capsys.readouterr().out
    assert 1e-4 < abs(rows["nll"] - expected) < 0.1
    assert len(list((learned / "eval").glob("*.json"))) == 4
    # The result would state rows that were not there.
    with refuses("rows=9999", str(len(ids) - 3)):
        evaluate(learned, Request(rows=9999, context=3))
