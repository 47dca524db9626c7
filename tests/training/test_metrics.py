"""What a run writes of itself: metrics.jsonl, TensorBoard, lines on the terminal."""

import json
import math
import struct
import time
import types

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from adaptive_jax.data.batches.training import Layout, TrainingBatches
from adaptive_jax.data.corpora.load import load
from adaptive_jax.training import intervals as module
from adaptive_jax.training import optim
from adaptive_jax.training.intervals import Interval
from adaptive_jax.training.loop import train
from adaptive_jax.training.metrics import Metrics


def metrics(workdir, speeds=True):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    of_speed = () if speeds else ("train/words_per_second", "train/step_seconds", "train/data_wait")
    return [{key: value for key, value in line.items() if key not in of_speed} for line in lines]


def settings(steps=9, tensorboard=False, wandb=False):
    """What of a config metrics need."""
    return {"steps": steps, "metrics": {"tensorboard": tensorboard, "wandb": wandb}}


def test_waiting_for_data_is_measured(trained, monkeypatch):
    """The share of a window's time that the loop waited; of every window of a run it is one, from 0 to 1."""
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=iter([100.0, 108.0, 108.0]).__next__))
    interval = Interval(work=1e3)
    interval.add(1, {"nll": 2.0, "loss": 2.0, "tokens": 3.0, "gradient_norm": 1.0, "learning_rate": 0.1}, 3)
    interval.waited += 2.0
    report = interval.close()
    assert (report["data_wait"], report["words_per_second"], report["step_seconds"]) == (0.25, 3 / 8, 8)
    assert "utilisation" not in report  # of a CPU
    assert interval.waited == 0
    shares = [line["train/data_wait"] for line in metrics(trained) if "train/data_wait" in line]
    assert len(shares) > 30
    assert all(0 <= share <= 1 for share in shares)
    assert any(shares)


def test_waiting_is_shown_where_it_is_long(tmp_path, capsys):
    """On the terminal from 1 % on; in the files always."""
    shown = Metrics(tmp_path, 0, settings())
    for step, wait in (1, 0.0099), (2, 0.034):
        shown.write(step, "train", {"nll": 1.0, "data_wait": wait})
    shown.close()
    first, second = capsys.readouterr().out.splitlines()
    assert "waiting" not in first
    assert second.endswith("loss 1.000  waiting for data 3%")
    assert [line["train/data_wait"] for line in metrics(tmp_path)] == [0.0099, 0.034]


def scalars(*logs):
    """`{(name, step): value}` of TensorBoard event files in order, read by their record format."""
    values = {}
    for log in logs:
        data = log.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12:12 + size])
            data = data[12 + size + 4:]
            if event.session_log.status == SessionLog.START:
                values = {(name, step): value for (name, step), value in values.items() if step < event.step}
            for value in event.summary.value:
                assert (value.tag, event.step) not in values
                values[value.tag, event.step] = value.simple_value
    return values


def test_tensorboard_holds_the_metrics(trained):
    """Every number of metrics.jsonl stands in the event file, under its name and step."""
    (log,) = trained.glob("events.out.tfevents.*")
    expected = {(name, line["step"]): value for line in metrics(trained) for name, value in line.items() if name != "step"}
    assert {name for name, _ in expected} == {
        "train/nll", "train/perplexity", "train/words_per_second", "train/step_seconds", "train/data_wait", "train/learning_rate",
        "train/gradient_norm", "validation/nll", "validation/perplexity"}
    assert scalars(log) == pytest.approx(expected)


def test_the_logged_rate_is_the_schedule(trained, config):
    """The rate logged after update n is the one that update used, `schedule(n - 1)`."""
    rate = optim.from_config(config()).schedule
    logged = {line["step"]: line["train/learning_rate"] for line in metrics(trained) if "train/nll" in line}
    assert len(logged) > 30
    # Absolute: at the foot of the cosine two float32 metrics near 1 cancel.
    assert logged == pytest.approx({step: float(rate(step - 1)) for step in logged}, rel=1e-6, abs=3e-8)
    assert len({round(value, 6) for value in logged.values()}) > 30


def test_logged_losses_are_means_over_words(config, text, tmp_path):
    """One line every 6 updates gives the mean over all their words, of which one update has fewer than the others."""
    for name, every in ("often", 1), ("seldom", 6):
        train(config(steps=12, log_every=every, evaluate_every=0, checkpoint_every=0), tmp_path / name)
    often, seldom = ([line["train/nll"] for line in metrics(tmp_path / name) if "train/nll" in line]
                     for name in ("often", "seldom"))
    settings = config()
    batches = TrainingBatches(load(settings["data"]).ids["train"], 0, Layout(**settings["batches"]), rows=32)
    words = [batches.batch(0, step).weights.sum() for step in range(12)]
    assert len(set(words)) == 2
    assert seldom == pytest.approx([np.average(often[k:k + 6], weights=words[k:k + 6]) for k in (0, 6)], rel=1e-6)
    assert len({round(loss, 5) for loss in often}) == 12


def test_words_a_second_are_words_of_the_text():
    """Of 7 units that end 3 words in two updates, 3 count."""
    interval, before = Interval(work=1e3), time.perf_counter()
    metrics = {"nll": 2.0, "loss": 2.0, "tokens": 3.0, "gradient_norm": 1.0, "learning_rate": 0.1}
    interval.add(1, metrics, 1)
    interval.add(2, metrics | {"nll": 1.5, "tokens": 4.0}, 2)
    time.sleep(0.05)
    least = time.perf_counter() - before
    report = interval.close()
    assert 3 / (time.perf_counter() - before + 0.05) < report["words_per_second"] < 3 / least
    assert report["nll"] == pytest.approx((2 * 3 + 1.5 * 4) / 3)
    interval.add(3, metrics, 0)
    assert interval.close()["perplexity"] == math.inf




def test_an_evaluation_that_is_repeated_stands_once(tmp_path):
    """A run that is resumed twice from the same checkpoint scores again what was left out before it."""
    for _ in range(3):
        shown = Metrics(tmp_path, 4, settings())
        shown.write(4, "validation", {"nll": 1.0})
        shown.close()
    assert [line["step"] for line in metrics(tmp_path)] == [4]


def test_json_has_no_infinity(tmp_path):
    """An infinite perplexity is written as null, which every JSON reader knows, and a run that wrote one is resumed."""
    for first in 0, 1:
        shown = Metrics(tmp_path, first, settings(steps=2))
        shown.write(first + 1, "validation", {"nll": 1.0, "perplexity": math.inf})
        shown.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "Infinity" not in text
    assert [line["validation/perplexity"] for line in map(json.loads, text.splitlines())] == [None, None]
