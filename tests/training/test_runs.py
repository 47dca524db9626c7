"""Runs from end to end: devices, what a workdir holds, sub-words, divergence."""

import json
import math
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from optax.tree_utils import tree_get

from adaptive_jax.config.keys import resolve, switch
from adaptive_jax.data.batches.pipeline import Layout, TrainingBatches
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.on_disk import read_vocabulary
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.model.language_model import build, init_params
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import sharding
from adaptive_jax.runs.checkpoints import Checkpoints
from adaptive_jax.runs.run import Run
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training.loop import train
from adaptive_jax.training.state import restored_state, shape_of_state
from configs import penn_treebank
from tests import refuses
from tests.training.test_metrics import metrics

ROOT = Path(__file__).parents[2]
PTB = ROOT.parent / "shared" / "data" / "ptb"


def state_of(workdir, config, step=None):
    """The state in a checkpoint: the last, or that of a step; its carry, if there is one, as
    that of one microbatch.
    """
    model = build(config, len(read_vocabulary(workdir / "vocabulary.txt")))
    checkpoints = Checkpoints(workdir, config["keep"])
    step = step or checkpoints.latest()
    streams = config["batches"]["layout"] == "streams"
    rows = (
        (1, json.loads((workdir / "plan.json").read_text())["rows_per_update"]) if streams else None
    )
    layout = shape_of_state(model, optim.from_config(config), sharding.device_mesh(), rows)
    state = restored_state(layout, step, lambda like: checkpoints.restore(step, like))
    checkpoints.close()
    return state


def assert_close(ours, theirs, tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), ours, theirs
    )


def test_an_error_in_the_background_ends_the_run(config, tmp_path, monkeypatch):
    """It comes out of `train`, the thread ends, and what was saved before is there."""
    batch = TrainingBatches.batch

    def fail(batches, seed, step, *share):
        if step == 5:
            raise OSError("the disk is gone")
        return batch(batches, seed, step, *share)

    monkeypatch.setattr(TrainingBatches, "batch", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        train(config(steps=9, checkpoint_every=2), tmp_path / "run")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ahead")]
    assert Checkpoints(tmp_path / "run", 9).latest() == 4


def text_words(text, split):
    return [
        word
        for line in (text / f"{split}.txt").read_text().splitlines()
        for word in (*line.split(), "<eos>")
    ]


def test_losses_of_sub_words_are_per_word_of_the_text(uninterrupted, run_config, text, tmp_path):
    """The first update's loss is that of the untrained model, in nats over all units divided by
    the words they end.
    """
    settings, workdir = run_config("sub-words"), uninterrupted("sub-words")
    corpus = load(settings["data"])
    vocabulary, ids = corpus.vocabulary, corpus.ids
    model = build(settings, len(vocabulary))
    batches = TrainingBatches(ids["train"], vocabulary.eos, Layout(**settings["batches"]), rows=32)
    batch = jax.tree.map(lambda a: a[0], batches.batch(0, 0))
    nll = jax.jit(lambda batch: model.apply({"params": init_params(model, 0)}, batch)[0].nll)(batch)
    words = sum(
        vocabulary.words[i].endswith(("▁", "<eos>")) for i in batch.targets[batch.weights > 0]
    )
    assert words < 0.9 * batch.weights.sum()
    first = metrics(workdir)[0]
    assert first["train/nll"] == pytest.approx(float((nll * batch.weights).sum()) / words, rel=1e-5)
    assert first["train/perplexity"] == pytest.approx(math.exp(first["train/nll"]))

    last = metrics(workdir)[-1]
    result = evaluate(
        shutil.copytree(workdir, tmp_path / "run"), Request("validation", 0, 0, "latest")
    )
    assert (result["step"], result["words"]) == (8, len(text_words(text, "valid")))
    assert result["tokens"] == len(ids["validation"]) > 1.1 * result["words"]
    assert result["nll"] == pytest.approx(last["validation/nll"], rel=1e-6)


def test_a_workdir_of_sub_words(uninterrupted, run_config, tmp_path):
    """Its model scores words, characters and an <unk> that the train split never has. It holds
    both halves of the vocabulary, which must be there and whole, and the same.
    """
    settings = run_config("sub-words")
    workdir = shutil.copytree(uninterrupted("sub-words"), tmp_path / "run")
    vocabulary = read_vocabulary(workdir / "vocabulary.txt")
    assert isinstance(vocabulary, Subwords)
    assert vocabulary.digest == load(settings["data"]).vocabulary.digest
    (tmp_path / "test.txt").write_text("the t0w0 unseen\n\n<unk> 💩 ▁\n")
    result = evaluate(workdir, Request(data_path=str(tmp_path)))
    assert result["words"] == 3 + 3 + 3 and result["tokens"] > 2 * 9
    assert math.isfinite(result["nll"]) and 1e6 < result["unigram_perplexity"] < math.inf
    with refuses("data.codes", "60", "61"):
        train(settings | {"data": settings["data"] | {"codes": 61}}, workdir)
    (workdir / "subwords.model").unlink()
    with refuses("subwords.model", "damaged"):
        train(settings, workdir)


def test_bfloat16_trains_on_float32_parameters(trained, config, tmp_path):
    """Products in bfloat16, parameters and momentum in float32, and a loss close to float32's."""
    settings = config(dtype="bfloat16", steps=40)
    train(settings, tmp_path / "run")
    state = state_of(tmp_path / "run", settings)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.params, state.optimizer.inner[1]))} == {
        np.dtype("float32")
    }
    half, full = (
        {line["step"]: line.get("validation/nll") for line in metrics(workdir)}[40]
        for workdir in (tmp_path / "run", trained)
    )
    assert half != full
    assert half == pytest.approx(full, rel=0.03)


def test_no_checkpoint_of_a_diverged_model(config, tmp_path):
    """The third update is the first at an absurd rate. One line names the update and the cure;
    what was saved before stays, and every checkpoint that is there gives a finite loss.
    """
    often = {"log_every": 1, "evaluate_every": 1, "checkpoint_every": 1, "keep": 20}
    wild = {"optimizer.learning_rate": 1e9, "optimizer.clip_norm": 1e9, "schedule.warmup_steps": 2}
    settings, workdir = config(steps=20, **often, **wild), tmp_path / "run"
    with refuses("update", "optimizer.learning_rate") as error:
        train(settings, workdir)
    assert "\n" not in str(error.value)
    saved = sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.is_dir())
    assert saved[0] == 1
    lines = [line for line in metrics(workdir) if "validation/nll" in line]
    losses = {line["step"]: line["validation/nll"] for line in lines}
    assert all(math.isfinite(losses[step]) for step in saved), (saved, losses)
    for step in saved:
        params = jax.tree.leaves(state_of(workdir, settings, step).params)
        assert all(np.isfinite(leaf).all() for leaf in params)


WITHOUT = """
import json, sys
from importlib.machinery import PathFinder
from pathlib import Path

without = {"tensorflow", "torch", "sentencepiece", "sacremoses", "pythonbible", "array_record"}
without |= {"tensorboardX", "matplotlib"}
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name in without else find(name, *more)

from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training.loop import train

train(json.loads(sys.argv[1]), Path(sys.argv[2]))
evaluate(Path(sys.argv[2]), Request())
assert not without & set(sys.modules)
"""


def test_training_on_words_needs_few_packages(config, tmp_path):
    """A run of one update from raw text, and its evaluation, where what sub-words, other texts and
    other programs need cannot be imported: a GPU machine may not have it.
    """
    settings = config(steps=1, **{"metrics.tensorboard": False})
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, json.dumps(settings), str(tmp_path / "run")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "run" / "eval").glob("*.json"))) == 1


@pytest.mark.slow
@pytest.mark.skipif(not PTB.is_dir(), reason="the Penn Treebank is not here")
def test_penn_treebank_is_learned(tmp_path):
    """The shipped config in small: each evaluation is better than the one before, and the last
    far below unigrams.
    """
    rates = {"learning_rate": 1.0, "momentum": 0.9, "clip_norm": 1.0}
    cycle = {"warmup_steps": 30, "cycle_steps": 270, "cycles": 1}
    body = {"layers": 2, "features": 64, "heads": 4, "feed_forward": 256, "dropout": 0.0}
    body |= {"attention_dropout": 0.0, "activation_dropout": 0.0}
    settings = penn_treebank.get_config()
    settings.update_from_flattened_dict(
        {"steps": 300, "log_every": 50, "evaluate_every": 100, "checkpoint_every": 300}
        | {"tokens_per_update": 2048, "tokens_per_device": 2048, "output.tail_dropout": 0.0}
        | {"data.path": str(PTB)}
        | {"batches.sequence_length": 64}
        | {f"optimizer.{key}": value for key, value in rates.items()}
        | {f"schedule.{key}": value for key, value in cycle.items()}
        | {f"body.{key}": value for key, value in body.items()}
    )
    train(resolve(settings), tmp_path / "run")
    result = evaluate(tmp_path / "run", Request("test", 0, 0, "best"))
    losses = [
        line["validation/nll"] for line in metrics(tmp_path / "run") if "validation/nll" in line
    ]
    assert len(losses) == 3
    assert losses == sorted(losses, reverse=True)
    assert result["words"] == 82_430
    assert result["perplexity"] < 0.6 * result["unigram_perplexity"]


def test_a_wrong_setting_is_found_before_the_corpus_is_prepared(config, tmp_path):
    """The error names a class that does not exist, even where there is no text."""
    settings = config(**{"data.path": str(tmp_path / "nowhere")})
    for group, name in ("body", "transfomer"), ("schedule", "cosine"):
        with refuses(f"config.{group}.name='{name}'"):
            train(settings | {group: settings[group] | {"name": name}}, tmp_path / "run")


def test_a_config_says_how_a_run_is_evaluated(config, tmp_path):
    """Validation and evaluate.py score whole sentences where training reads blocks that ignore
    them; otherwise the number in training is not the one that is reported.

    `data.vocabulary_size` is for plans made without the corpus: another size stops no run.
    """
    changes = {"evaluate_break_mode": "complete", "data.vocabulary_size": 12}
    train(config(steps=1, evaluate_every=1, **changes), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["vocabulary_size"] == 122
    last = [line for line in metrics(tmp_path / "run") if "validation/nll" in line][-1]
    whole = Request("validation", checkpoint="latest")
    found = [
        evaluate(tmp_path / "run", each) for each in (whole, whole._replace(break_mode="none"))
    ]
    assert [each["settings"]["break_mode"] for each in found] == ["complete", "none"]
    assert found[0]["nll"] == pytest.approx(last["validation/nll"], rel=1e-6)
    assert abs(found[1]["nll"] - last["validation/nll"]) > 1e-4
    names = {path.stem for path in (tmp_path / "run" / "eval").glob("*.json")}
    assert names == {"validation-16-0-1", "validation-16-0-1-none"}
    with refuses("evaluate_break_mode='line'"):
        train(config(evaluate_break_mode="line"), tmp_path / "other")


def test_a_wrong_workdir_is_found_before_the_corpus_is_prepared(config, trained, tmp_path, caplog):
    """A place that takes no files, a run to start from that has another model, and, with a warning,
    a folder of other files; although there is no text at all.
    """
    settings = config(**{"data.path": str(tmp_path / "nowhere")})
    for name in "tokenizer.json", "years.txt":  # the first is of a run that ended early
        (tmp_path / name).touch()
    with pytest.raises(NotADirectoryError, match=f"{tmp_path}/years.txt/run"):
        train(settings, tmp_path / "years.txt" / "run")
    other = {"init_from": str(trained), "body": settings["body"] | {"features": 64}}
    with refuses(str(trained), "model"):
        train(settings | other, tmp_path / "run")
    assert "other files" not in caplog.text and not (tmp_path / "run").exists()
    with refuses("nowhere"):
        train(settings, tmp_path)
    assert f"{tmp_path} holds other files, such as years.txt" in caplog.text


def test_an_optimizer_of_somebody_else_hears_of_each_evaluation(config, tmp_path):
    """A function by name has the keys of its arguments, learns of each validation loss, of the
    parameters that it chose, and its state is saved; without it none but ours could be used.
    """
    settings = config(steps=4, evaluate_every=2, checkpoint_every=4)
    settings = resolve(switch(settings, {"optimizer.name": "tests.toys:halving"})[0])
    assert settings["optimizer"] == {"name": "tests.toys:halving", "learning_rate": 0.3} | {
        "flip": False,
        "share": 0.5,
        "tables": "",
        "tables_scale": 1.0,
    }
    train(settings, tmp_path / "run")
    heard = tree_get(state_of(tmp_path / "run", settings).optimizer, "heard")
    losses = [
        line["validation/nll"] for line in metrics(tmp_path / "run") if "validation/nll" in line
    ]
    assert (float(heard.evaluations), len(losses)) == (2, 2)
    assert float(heard.last) == pytest.approx(losses[-1], rel=1e-6)
    evaluation = evaluate(tmp_path / "run", Request("validation", checkpoint="latest"))
    assert evaluation["nll"] == pytest.approx(losses[-1], rel=1e-6)
    raw = state_of(tmp_path / "run", settings).params
    chosen = Run.open(tmp_path / "run", "latest").params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 0.5 * b, rtol=1e-6), chosen, raw)


def test_an_optimizer_of_optax_trains_by_name_and_resumes_exactly(config, tmp_path):
    """From flags alone, with its own arguments and ours; the loss falls, and a run that was stopped
    ends bit for bit as the whole one. Otherwise its state is not what a checkpoint holds.
    """
    changes = {"steps": 16, "evaluate_every": 8, "checkpoint_every": 8, "keep": 9}
    flags = {"optimizer.name": "lion", "optimizer.learning_rate": 0.01}
    flags |= {"optimizer.b1": 0.8, "optimizer.clip_norm": 1}
    settings, [said] = switch(config(**changes), flags)
    settings = resolve(settings)
    assert said.startswith("config.optimizer.name=lion: ")
    train(settings, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "16")
    train(settings, tmp_path / "stopped")
    whole, resumed = (state_of(tmp_path / run, settings) for run in ("whole", "stopped"))
    assert_close(resumed, whole, 0)
    nll = [
        line["validation/nll"] for line in metrics(tmp_path / "whole") if "validation/nll" in line
    ]
    assert nll[1] < nll[0] < np.log(122)
    arrays = {a.shape for a in jax.tree.leaves(whole.params)}
    assert {a.shape for a in jax.tree.leaves(whole.optimizer.inner) if a.ndim} == arrays - {()}
