"""Training from end to end: the update's arithmetic, devices, resuming, and what a run writes."""

import json
import math
import signal
import struct
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tensorboardX.proto.event_pb2 import Event, SessionLog

from adaptive_jax.data.batches.batching import Batch, Rows
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.vocabulary.subwords import Subwords, read_vocabulary
from adaptive_jax.devices import sharding
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.scoring import evaluate
from adaptive_jax.model import build
from adaptive_jax.training import loop as training
from adaptive_jax.training import optim
from adaptive_jax.training.metrics import Metrics
from adaptive_jax.training.state import initial_state, shape_of_state
from adaptive_jax.training.update import make_update
from adaptive_jax.workdir.checkpoints import Checkpoints
from configs import penn_treebank

ROOT = Path(__file__).parents[1]
PTB = ROOT.parent / "shared" / "data" / "ptb"


def metrics(workdir, speeds=True):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    of_speed = () if speeds else ("train/words_per_second", "train/step_seconds", "train/data_wait")
    return [{key: value for key, value in line.items() if key not in of_speed} for line in lines]


def state_of(workdir, config, step=None):
    """The state in a checkpoint: the last, or that of a step."""
    model = build(config, config["data"]["vocabulary_size"])
    checkpoints = Checkpoints(workdir, config["keep"])
    like = shape_of_state(model, optim.from_config(config["optimizer"])[0], sharding.device_mesh())
    state = checkpoints.restore(step or checkpoints.latest(), like)
    checkpoints.close()
    return state


def assert_close(ours, theirs, tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), ours, theirs)


def random_batch(parts, rows, time):
    """Tokens of which a varying number of each row counts, as `[parts, rows, time]`."""
    bits = np.random.Generator(np.random.Philox(3))
    tokens = bits.integers(0, 122, (parts, rows, time + 1), dtype=np.int32)
    lengths = bits.integers(0, time + 1, (parts, rows, 1))
    lengths[0] = time
    return Batch(tokens[..., :-1], tokens[..., 1:], (np.arange(time) < lengths).astype(np.float32))


def start_update(config, optimizer=None):
    """`(model, state, update)` with which to make single updates."""
    mesh = sharding.device_mesh()
    model = build(config, config["data"]["vocabulary_size"])
    optimizer = optimizer or optim.from_config(config["optimizer"])[0]
    rate = optim.from_config(config["optimizer"])[1]
    return model, initial_state(model, optimizer, config["seed"], mesh), make_update(model, optimizer, rate, mesh, 0)


def test_one_batch_is_learned_by_heart(config):
    """The same 64 random words over and over cost almost nothing in the end, which no wrong gradient would reach."""
    _, state, update = start_update(config(**{"input.factor": 1, "optimizer.cycle_steps": 280}))
    batch = random_batch(1, 4, 16)._replace(weights=np.ones((1, 4, 16), np.float32))
    losses = []
    for _ in range(250):
        state, numbers = update(state, batch)
        losses.append(float(numbers["nll"]))
    assert losses[0] > 4
    assert losses[-1] < 0.02


@pytest.mark.parametrize("parts", [1, 4])
def test_an_update_weighs_every_token_alike(config, parts):
    """The gradient is that of the sum over all tokens divided by the sum of weights, in one batch or in uneven four.

    Plain descent at rate 1 shows the gradient; the mean of the parts' means would be another, and so would padding that counts.
    """
    model, state, update = start_update(config(), optax.sgd(1.0))
    batch = random_batch(4, 2, 16)
    flat = jax.tree.map(lambda a: a.reshape(8, 16), batch)

    @jax.jit
    def mean(params, batch):
        return model.apply({"params": params}, *batch)[0] / batch.weights.sum()

    before = jax.tree.map(np.array, state.params)
    loss, gradients = jax.value_and_grad(mean)(before, flat)
    state, numbers = update(state, jax.tree.map(lambda a: a.reshape(parts, 8 // parts, 16), batch))
    assert_close(jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params), gradients, 1e-6)
    assert numbers["tokens"] == batch.weights.sum() < batch.weights.size
    assert numbers["nll"] == pytest.approx(float(loss), rel=1e-6)

    means = [jax.grad(mean)(before, Batch(*part)) for part in zip(*batch[:3], strict=True)]
    gap = jax.tree.map(lambda whole, *each: np.abs(whole - sum(each) / 4).max(), gradients, *means)
    assert max(jax.tree.leaves(gap)) > 1e-3


def test_the_reported_norm_is_before_clipping(config):
    """`gradient_norm` is the norm of the raw gradient, while the step taken is clipped to `clip_norm`."""
    settings = config(**{"optimizer.clip_norm": 0.01, "optimizer.warmup_from": 0.5})
    model, state, update = start_update(settings)
    batch = random_batch(1, 4, 16)
    before = jax.tree.map(np.array, state.params)
    total = jax.jit(jax.grad(lambda params, batch: model.apply({"params": params}, *batch)[0]))
    gradients = jax.tree.map(lambda g: g / batch.weights.sum(), total(before, jax.tree.map(lambda a: a[0], batch)))
    state, numbers = update(state, batch)
    norm = float(optax.global_norm(gradients))
    assert norm > 0.1
    assert numbers["gradient_norm"] == pytest.approx(norm, rel=1e-5)
    change = jax.tree.map(lambda old, new: old - np.asarray(new), before, state.params)
    # Nesterov's first step is (1 + momentum) times the clipped gradient.
    assert float(optax.global_norm(change)) == pytest.approx(0.5 * 1.9 * 0.01, rel=1e-3)


def test_devices_and_accumulation_change_nothing(config, flags, command, tmp_path):
    """Five updates on 1 device, on 1 device in 8 parts, and on 8 devices end in the same parameters."""
    settings = config(steps=5, **{"optimizer.warmup_from": 0.3})
    training.train(settings, tmp_path / "one")
    training.train(settings | {"tokens_per_device": 64}, tmp_path / "parts")
    done = command("train.py", *flags(tmp_path / "eight", steps=5, **{"optimizer.warmup_from": 0.3}), devices=8)
    assert done.returncode == 0, done.stderr
    plans = {name: json.loads((tmp_path / name / "plan.json").read_text()) for name in ("one", "parts", "eight")}
    assert {name: (plan["devices"], plan["accumulation"], plan["rows_per_device"]) for name, plan in plans.items()} == {
        "one": (1, 1, 32), "parts": (1, 8, 4), "eight": (8, 1, 4)}

    one, parts, eight = (state_of(tmp_path / name, settings) for name in plans)
    model = build(settings, 122)
    start = initial_state(model, optim.from_config(settings["optimizer"])[0], 0, sharding.device_mesh())
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a) - np.asarray(b)).max(), one.params, start.params)
    assert max(jax.tree.leaves(moved)) > 0.05
    assert_close(parts, one, 1e-5)
    assert_close(eight, one, 1e-5)


RESUMED = {"steps": 120, "log_every": 7, "evaluate_every": 10, "checkpoint_every": 20, "tokens_per_device": 128,
           "body.dropout": 0.2, "body.attention_dropout": 0.1, "body.activation_dropout": 0.1, "output.tail_dropout": 0.2}


@pytest.fixture(scope="module")
def resumed(flags, start, command, tmp_path_factory):
    """Workdirs of a run that was never stopped, and of one killed on its way and started again; lines before the kill."""
    whole, killed = (tmp_path_factory.mktemp("resumed") / name for name in ("whole", "killed"))
    done = command("train.py", *flags(whole, **RESUMED))
    assert done.returncode == 0, done.stderr
    with start("train.py", *flags(killed, **RESUMED)) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            lines = (killed / "metrics.jsonl").read_text().splitlines() if (killed / "metrics.jsonl").exists() else []
            if (killed / "checkpoints" / "40").is_dir() and lines and json.loads(lines[-1])["step"] > 42:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    before = metrics(killed)
    assert 42 < before[-1]["step"] < 120
    done = command("train.py", *flags(killed, **RESUMED))
    assert done.returncode == 0, done.stderr
    assert f"continuing {killed} after" in done.stdout
    return whole, killed, before


def test_a_killed_run_ends_as_one_never_stopped(resumed):
    """Losses logged and the final evaluation agree digit for digit, with dropout everywhere and accumulation."""
    whole, killed, _ = resumed
    assert metrics(killed, speeds=False) == metrics(whole, speeds=False)
    for workdir in whole, killed:
        evaluate(workdir, split="test", window=16, context=8, checkpoint="latest", data_path=None)
    ours, theirs = ((workdir / "eval" / "test-16-8-120.json").read_bytes() for workdir in (killed, whole))
    assert ours == theirs


def test_each_step_stands_once_after_a_resume(resumed):
    """In metrics.jsonl, and in TensorBoard once it has purged what the restart makes void."""
    _, killed, before = resumed
    lines = [(line["step"], next(key for key in line if key != "step").split("/")[0]) for line in metrics(killed)]
    assert len(lines) == len(set(lines))
    assert lines == sorted(lines)
    due = [step for step in range(1, 121) if step % 7 == 0 or step % 10 == 0]
    assert [step for step, group in lines if group == "train"] == due
    assert [step for step, group in lines if group == "validation"] == list(range(10, 121, 10))
    assert before[-1]["step"] > 42

    logs = sorted(killed.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_ctime_ns)
    assert len(logs) == 2
    shown = scalars(*logs)
    assert shown == {
        (name, line["step"]): pytest.approx(value) for line in metrics(killed) for name, value in line.items() if name != "step"}


def test_starting_again_after_the_end_changes_nothing(config, tmp_path):
    """The run is over: its checkpoints and its metrics are byte for byte what they were."""
    workdir, settings = tmp_path / "run", config(steps=4, evaluate_every=2, checkpoint_every=2)
    training.train(settings, workdir)

    def files():
        return {path: path.read_bytes() for path in workdir.rglob("*") if path.is_file() and "tfevents" not in path.name}

    before = files()
    assert workdir / "metrics.jsonl" in before
    training.train(settings, workdir)
    assert files() == before


def test_a_run_can_be_lengthened(config, tmp_path):
    """More steps later give what as many at once give."""
    training.train(config(steps=3), tmp_path / "run")
    training.train(config(steps=5), tmp_path / "run")
    training.train(config(steps=5), tmp_path / "straight")
    assert_close(state_of(tmp_path / "run", config()), state_of(tmp_path / "straight", config()), 0)
    assert metrics(tmp_path / "run")[-1] == metrics(tmp_path / "straight")[-1]


@pytest.mark.parametrize("kind, says", [
    ("packed", "rows         362 examples in 122 rows of 64 tokens, padding 20.07%"),
    ("similar", "rows         362 examples in 376 rows of 8 to 64 tokens, padding")], ids=["packed", "similar"])
def test_sentences_are_continued_in_the_middle_of_an_epoch(config, tmp_path, capsys, kind, says):
    """A run that is stopped goes on with the update it would have made, and says how sentences lie in rows."""
    changes = {"data.block": 64, "data.break_mode": "eos", "data.rows": kind, "tokens_per_device": 256}
    for name, steps in ("run", 3), ("run", 5), ("straight", 5):
        training.train(config(steps=steps, **changes), tmp_path / name)
    ours, theirs = (state_of(tmp_path / name, config(**changes)) for name in ("run", "straight"))
    assert_close(ours, theirs, 0)
    ours, theirs = (metrics(tmp_path / name, speeds=False)[-1] for name in ("run", "straight"))
    assert ours == theirs
    assert capsys.readouterr().out.count(says) == 3


def test_waiting_for_data_is_measured(trained, monkeypatch):
    """The share of a window's time that the loop waited; of every window of a run it is one, from 0 to 1."""
    monkeypatch.setattr(training, "time", types.SimpleNamespace(perf_counter=iter([100.0, 108.0, 108.0]).__next__))
    window = training._Window(work=1e3)
    window.add(1, {"nll": 2.0, "loss": 2.0, "tokens": 3.0, "gradient_norm": 1.0, "learning_rate": 0.1}, 3)
    window.waited += 2.0
    report = window.close()
    assert (report["data_wait"], report["words_per_second"], report["step_seconds"]) == (0.25, 3 / 8, 8)
    assert "utilisation" not in report  # of a CPU
    assert window.waited == 0
    shares = [line["train/data_wait"] for line in metrics(trained) if "train/data_wait" in line]
    assert len(shares) > 30
    assert all(0 <= share <= 1 for share in shares)
    assert any(shares)


def test_waiting_is_shown_where_it_is_long(tmp_path, capsys):
    """On the terminal from 1 % on; in the files always."""
    shown = Metrics(tmp_path, 0, 9)
    for step, wait in (1, 0.0099), (2, 0.034):
        shown.write(step, "train", {"nll": 1.0, "data_wait": wait})
    shown.close()
    first, second = capsys.readouterr().out.splitlines()
    assert "waiting" not in first
    assert second.endswith("loss 1.000  waiting for data 3%")
    assert [line["train/data_wait"] for line in metrics(tmp_path)] == [0.0099, 0.034]


def test_an_error_in_the_background_ends_the_run(config, tmp_path, monkeypatch):
    """It comes out of `train`, the thread ends, and what was saved before is there."""
    batch = Rows.batch

    def fail(rows, seed, step, *share):
        if step == 5:
            raise OSError("the disk is gone")
        return batch(rows, seed, step, *share)

    monkeypatch.setattr(Rows, "batch", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        training.train(config(steps=9, checkpoint_every=2), tmp_path / "run")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
    assert Checkpoints(tmp_path / "run", 9).latest() == 4


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
    rate = optim.from_config(config()["optimizer"])[1]
    logged = {line["step"]: line["train/learning_rate"] for line in metrics(trained) if "train/nll" in line}
    assert len(logged) > 30
    # Absolute: at the foot of the cosine two float32 numbers near 1 cancel.
    assert logged == pytest.approx({step: float(rate(step - 1)) for step in logged}, rel=1e-6, abs=3e-8)
    assert len({round(value, 6) for value in logged.values()}) > 30


def test_logged_losses_are_means_over_words(config, text, tmp_path):
    """One line every 6 updates gives the mean over all their words, of which one update has fewer than the others."""
    for name, every in ("often", 1), ("seldom", 6):
        training.train(config(steps=12, log_every=every, evaluate_every=0, checkpoint_every=0), tmp_path / name)
    often, seldom = ([line["train/nll"] for line in metrics(tmp_path / name) if "train/nll" in line]
                     for name in ("often", "seldom"))
    settings = config()["data"]
    ids = corpora.from_config(settings).ids["train"]
    rows = Rows(ids, 0, block=settings["block"], break_mode="none", kind="packed", rows=32)
    words = [rows.batch(0, step).weights.sum() for step in range(12)]
    assert len(set(words)) == 2
    assert seldom == pytest.approx([np.average(often[k:k + 6], weights=words[k:k + 6]) for k in (0, 6)], rel=1e-6)
    assert len({round(loss, 5) for loss in often}) == 12


SUBWORDS = {"data.codes": 60, "data.vocabulary_size": 400, "evaluate_every": 4, "checkpoint_every": 4, "log_every": 1}


@pytest.fixture(scope="module")
def spelt(config, tmp_path_factory):
    """Config and workdir of a run of 8 updates over sub-word units, stopped after the fourth and continued."""
    workdir = tmp_path_factory.mktemp("spelt") / "run"
    for steps in 4, 8:
        training.train(config(steps=steps, **SUBWORDS), workdir)
    return config(steps=8, **SUBWORDS), workdir


def text_words(text, split):
    return [word for line in (text / f"{split}.txt").read_text().splitlines() for word in (*line.split(), "<eos>")]


def test_sub_words_are_continued_as_if_never_stopped(spelt, tmp_path):
    """Losses and parameters are those of 8 updates at once, and the workdir holds both halves of the vocabulary."""
    settings, workdir = spelt
    training.train(settings, tmp_path / "run")
    assert metrics(workdir, speeds=False) == metrics(tmp_path / "run", speeds=False)
    assert_close(state_of_units(workdir, settings).params, state_of_units(tmp_path / "run", settings).params, 0)
    vocabulary = read_vocabulary(workdir / "vocabulary.txt")
    assert isinstance(vocabulary, Subwords)
    assert vocabulary.digest == corpora.from_config(settings["data"]).vocabulary.digest
    with pytest.raises(InputError, match="data.codes was 60 and is now 61"):
        training.train(settings | {"data": settings["data"] | {"codes": 61}}, workdir)
    (tmp_path / "run" / "subwords.model").unlink()
    with pytest.raises(InputError, match="cannot read the model"):
        training.train(settings, tmp_path / "run")


def state_of_units(workdir, settings):
    size = len(read_vocabulary(workdir / "vocabulary.txt"))
    return state_of(workdir, settings | {"data": settings["data"] | {"vocabulary_size": size}})


def test_losses_of_sub_words_are_per_word_of_the_text(spelt, config, text):
    """The first update's loss is that of the untrained model, in nats over all units divided by the words they end."""
    settings, workdir = spelt
    vocabulary, ids = corpora.from_config(settings["data"])
    model = build(settings, vocabulary)
    params = initial_state(model, optim.from_config(settings["optimizer"])[0], 0, sharding.device_mesh()).params
    rows = Rows(ids["train"], vocabulary.eos, block=16, break_mode="none", kind="packed", rows=32)
    batch = jax.tree.map(lambda a: a[0], rows.batch(0, 0))
    nll = model.apply({"params": params}, *batch)[1]
    words = sum(vocabulary.words[i].endswith(("▁", "<eos>")) for i in batch.targets[batch.weights > 0])
    assert words < 0.9 * batch.weights.sum()
    first = metrics(workdir)[0]
    assert first["train/nll"] == pytest.approx(float((nll * batch.weights).sum()) / words, rel=1e-5)
    assert first["train/perplexity"] == pytest.approx(math.exp(first["train/nll"]))

    last = metrics(workdir)[-1]
    result = evaluate(workdir, split="validation", window=0, context=0, checkpoint="latest", data_path=None)
    assert (result["step"], result["words"]) == (8, len(text_words(text, "valid")))
    assert result["tokens"] == len(ids["validation"]) > 1.1 * result["words"]
    assert result["nll"] == pytest.approx(last["validation/nll"], rel=1e-6)


def test_words_a_second_are_words_of_the_text():
    """Of 7 units that end 3 words in two updates, 3 count."""
    window, before = training._Window(work=1e3), time.perf_counter()
    numbers = {"nll": 2.0, "loss": 2.0, "tokens": 3.0, "gradient_norm": 1.0, "learning_rate": 0.1}
    window.add(1, numbers, 1)
    window.add(2, numbers | {"nll": 1.5, "tokens": 4.0}, 2)
    time.sleep(0.05)
    least = time.perf_counter() - before
    report = window.close()
    assert 3 / (time.perf_counter() - before + 0.05) < report["words_per_second"] < 3 / least
    assert report["nll"] == pytest.approx((2 * 3 + 1.5 * 4) / 3)
    window.add(3, numbers, 0)
    assert window.close()["perplexity"] == math.inf


def test_a_model_of_sub_words_scores_open_text(spelt, tmp_path):
    """Words, characters and an <unk> that the train split never has; a model of words would have to refuse them."""
    _, workdir = spelt
    (tmp_path / "test.txt").write_text("the t0w0 unseen\n\n<unk> 💩 ▁\n")
    result = evaluate(workdir, split="test", window=0, context=0, checkpoint="best", data_path=str(tmp_path))
    assert result["words"] == 3 + 3 + 3
    assert result["tokens"] > 2 * 9
    assert math.isfinite(result["nll"])
    assert 1e6 < result["unigram_perplexity"] < math.inf


def test_the_latest_and_the_best_are_kept(tmp_path):
    """With keep=2: the two latest, and the best by validation however old; the same after opening the directory again."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, nll in enumerate([3.0, 1.0, 2.0, 4.0, 5.0], start=1):
        checkpoints.save(step, {"value": jnp.full(3, step)}, nll)
    checkpoints.close()
    again = Checkpoints(tmp_path, keep=2)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()} == {"2", "4", "5"}
    assert (again.latest(), again.best(), again.step("4")) == (5, 2, 4)
    assert again.restore(2, {"value": jnp.zeros(3, jnp.int32)})["value"].tolist() == [2, 2, 2]
    again.close()


def test_bfloat16_trains_on_float32_parameters(trained, config, tmp_path):
    """Products in bfloat16, parameters and momentum in float32, and a loss close to float32's."""
    settings = config(dtype="bfloat16")
    training.train(settings, tmp_path / "run")
    state = state_of(tmp_path / "run", settings)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.optimizer[1]))} == {np.dtype("float32")}
    half, full = (metrics(workdir)[-1]["validation/nll"] for workdir in (tmp_path / "run", trained))
    assert half != full
    assert half == pytest.approx(full, rel=0.03)


@pytest.fixture(scope="module")
def diverged(config, tmp_path_factory):
    """Workdir, config and error of a run whose third update is the first at an absurd rate."""
    workdir = tmp_path_factory.mktemp("diverged") / "run"
    settings = config(steps=20, log_every=1, evaluate_every=1, checkpoint_every=1, keep=20, **{
        "optimizer.learning_rate": 1e30, "optimizer.clip_norm": 1e30, "optimizer.warmup_steps": 2})
    with pytest.raises(InputError) as error:
        training.train(settings, workdir)
    return workdir, settings, str(error.value)


def test_a_loss_that_is_no_number_stops_the_run(diverged):
    """One line names the update and the cure."""
    _, _, message = diverged
    assert "\n" not in message
    assert "update " in message
    assert "lower optimizer.learning_rate" in message


def test_no_checkpoint_of_a_diverged_model(diverged):
    """What was saved before stays, and every checkpoint that is there gives a finite loss."""
    workdir, settings, _ = diverged
    saved = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.is_dir())
    assert saved[0] == 1
    losses = {line["step"]: line["validation/nll"] for line in metrics(workdir) if "validation/nll" in line}
    assert all(math.isfinite(losses[step]) for step in saved), (saved, losses)
    for step in saved:
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state_of(workdir, settings, step).params))


def test_the_cure_for_divergence_works(diverged, tmp_path):
    """Doing what the message says, a lower rate in a new workdir, ends finite; the old run refuses the other rate."""
    workdir, settings, _ = diverged
    lower = settings | {"optimizer": settings["optimizer"] | {"learning_rate": 0.1}}
    with pytest.raises(InputError, match="optimizer.learning_rate was"):
        training.train(lower, workdir)
    training.train(lower, tmp_path / "run")
    last = metrics(tmp_path / "run")[-1]
    assert last["step"] == 20
    assert math.isfinite(last["validation/nll"])


def test_training_needs_neither_tensorflow_nor_torch(config, tmp_path):
    """A run of two updates from raw text, and its evaluation, where neither can be imported."""
    settings = config(steps=2)
    settings["data"]["cache"] = str(tmp_path / "cache")
    script = (
        "import json, sys; from importlib.machinery import PathFinder; from pathlib import Path\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *more: None if name in ('tensorflow', 'torch') else find(name, *more)\n"
        "from adaptive_jax import training; from adaptive_jax.evaluation import scoring\n"
        "workdir = Path(sys.argv[2]); training.train(json.loads(sys.argv[1]), workdir)\n"
        "scoring.evaluate(workdir, split='test', window=0, context=0, checkpoint='best', data_path=None)\n"
        "assert not {'tensorflow', 'torch'} & set(sys.modules)")
    done = subprocess.run([sys.executable, "-c", script, json.dumps(settings), str(tmp_path / "run")],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run" / "eval").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.skipif(not PTB.is_dir(), reason="the Penn Treebank is not here")
def test_penn_treebank_is_learned(tmp_path):
    """The shipped config in small: each evaluation is better than the one before, and the last far below unigrams."""
    settings = penn_treebank.get_config()
    settings.update_from_flattened_dict({
        "steps": 300, "log_every": 50, "evaluate_every": 100, "checkpoint_every": 300, "tokens_per_update": 2048,
        "tokens_per_device": 2048, "data.path": str(PTB), "data.cache": str(tmp_path / "cache"), "data.block": 64,
        "body.layers": 2, "body.features": 64, "body.heads": 4, "body.feed_forward": 256, "body.dropout": 0.0,
        "body.attention_dropout": 0.0, "body.activation_dropout": 0.0, "output.tail_dropout": 0.0,
        "optimizer.learning_rate": 1.0, "optimizer.momentum": 0.9, "optimizer.clip_norm": 1.0, "optimizer.warmup_steps": 30,
        "optimizer.cycle_steps": 270, "optimizer.cycles": 1})
    training.train(settings.to_dict(), tmp_path / "run")
    losses = [line["validation/nll"] for line in metrics(tmp_path / "run") if "validation/nll" in line]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    result = evaluate(tmp_path / "run", split="test", window=0, context=0, checkpoint="best", data_path=None)
    assert result["words"] == 82_430
    assert result["perplexity"] < 0.6 * result["unigram_perplexity"]
