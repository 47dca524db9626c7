"""Scoring: every token once, seeing exactly what the window lets it see, and the JSON that says so."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.data.batches.examples import examples
from adaptive_jax.data.corpora import load as corpora
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.devices import sharding
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation import scoring
from adaptive_jax.evaluation.scoring import evaluate, score, summary
from adaptive_jax.model import build
from adaptive_jax.plans.costs import plan

EOS, SIZE = 3, 60


@pytest.fixture(scope="module")
def model(config):
    return build(config(**{"input.cutoffs": (10, 30), "body.features": 16, "body.feed_forward": 16}), SIZE)


@pytest.fixture(scope="module")
def params(model):
    ids = jnp.zeros((1, 2), jnp.int32)
    return jax.jit(model.init)(jax.random.key(0), ids, ids, jnp.ones((1, 2)))["params"]


@pytest.fixture(scope="module")
def log_probs(model):
    return jax.jit(lambda params, *arrays: model.apply({"params": params}, *arrays, method="log_probs"))


@pytest.fixture(scope="module")
def ids():
    return np.random.Generator(np.random.Philox(2)).integers(0, SIZE, 23, dtype=np.int32)


def score_blocks(model, params, ids, eos=EOS, mode="none", kind="packed", **how):
    return score(model, params, sharding.device_mesh(), ids, eos, break_mode=mode, kind=kind, **how)


@pytest.mark.parametrize("window, context, rows", [
    (4, 0, 2), (6, 4, 3), (7, 3, 1), (8, 7, 4), (23, 0, 2), (40, 0, 1), (40, 12, 2), (40, 39, 3)])
def test_each_token_is_scored_from_what_its_window_shows(model, params, log_probs, ids, window, context, rows):
    """The slow twin reads, for each token on its own, exactly the tokens of its window that stand before it."""
    slow = []
    for k, token in enumerate(ids):
        scored_from = k // (window - context) * (window - context)
        start = max(scored_from - context, 0)
        seen = [EOS if start == 0 else ids[start - 1], *ids[start:k]]
        last = len(seen) - 1
        slow.append(-log_probs(params, np.array([seen]), np.array([[last]]))[0, 0, token])
    nll = score_blocks(model, params, ids, window=window, context=context, rows=rows)
    assert nll.dtype == np.float32
    np.testing.assert_allclose(nll, slow, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode, kind, window, context", [
    ("eos", "packed", 9, 0), ("eos", "packed", 4, 0), ("eos", "similar", 9, 0), ("complete_doc", "packed", 7, 0),
    ("complete_doc", "similar", 40, 0), ("complete", "packed", 8, 0), ("complete", "packed", 8, 3)])
def test_examples_are_scored_from_themselves_and_their_context(model, params, log_probs, mode, kind, window, context):
    """The slow twin reads, for each token of an example on its own, what stands before it there and in the context."""
    ids = np.array([EOS, 7, 8, EOS, 9, EOS, EOS, EOS, 11, 12, 13, 14, 15, 40, 17, EOS, 4, EOS, 50, 51], np.int32)
    slow = np.full(len(ids), np.nan, np.float32)
    for start, length in zip(*examples(ids, EOS, mode, window - context), strict=True):
        begin = max(start - context, 0)
        for k in range(start, start + length):
            seen = [EOS if begin == 0 else ids[begin - 1], *ids[begin:k]]
            seen += [EOS] * (window - len(seen))  # one program; what comes after changes nothing
            slow[k] = -log_probs(params, np.array([seen]), np.array([[k - begin]]))[0, 0, ids[k]]
    assert np.isnan(slow).sum() == (3 if mode == "complete_doc" else 0)
    nll = score_blocks(model, params, ids, mode=mode, kind=kind, window=window, context=context, rows=2)
    np.testing.assert_allclose(nll, slow, rtol=1e-5, atol=1e-5)


def test_a_model_without_numbers_costs_infinitely_much(model, params, ids):
    """NaN would say that nothing was to be scored."""
    broken = jax.tree.map(lambda a: np.full_like(a, np.nan), params)
    assert (score_blocks(model, broken, ids, window=6, context=2, rows=2) == np.inf).all()


def test_rows_of_a_batch_do_not_matter(model, params, ids):
    """How many windows are read at a time changes no number."""
    one, five = (score_blocks(model, params, ids, window=6, context=2, rows=rows) for rows in (1, 5))
    np.testing.assert_allclose(one, five, rtol=1e-6)


@pytest.mark.parametrize("window, context", [(4, 4), (4, 5), (4, -1), (0, 0)])
def test_a_window_that_scores_nothing_is_refused(model, params, ids, window, context):
    """One line that names both numbers."""
    with pytest.raises(InputError, match=rf"window={window} .*context={context}") as error:
        score_blocks(model, params, ids, window=window, context=context, rows=2)
    assert "\n" not in str(error.value)


def test_an_empty_split_is_refused(model, params):
    """Nothing to score is an error, not a perplexity."""
    with pytest.raises(InputError, match="0 tokens"):
        score_blocks(model, params, np.zeros(0, np.int32), window=4, context=0, rows=2)


def test_summary_of_known_numbers():
    """Mean over the words that count, its exponential, and that of their unigram loss; beyond floats is infinite."""
    vocabulary, ids = Vocabulary.build({"a": 3, "<eos>": 1}), np.array([0, 1, 0, 1])
    result = summary(np.array([1, 2, 6, np.nan], np.float32), ids, vocabulary)
    assert result == {
        "nll": 3.0, "perplexity": math.exp(3.0), "words": 3, "tokens": 3,
        "unigram_perplexity": pytest.approx((4 / 3 * 4 * 4 / 3) ** (1 / 3))}
    assert summary(np.full(4, 1e4, np.float32), ids, vocabulary)["perplexity"] == math.inf


@pytest.fixture(scope="module")
def units():
    """Sub-word units, and lines that they take more tokens than words to spell."""
    vocabulary = Subwords.build({"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}, 9)
    return vocabulary, ["lowest new", "", "wider é low"]


def test_a_uniform_model_of_units(units):
    """Over V units it has perplexity V to the power of units per word."""
    vocabulary, lines = units
    ids = vocabulary.encode_lines(lines)
    words = vocabulary.count_words(ids)
    assert words == 5 + 3
    result = summary(np.full(len(ids), np.log(len(vocabulary))), ids, vocabulary)
    assert result["tokens"] > 1.5 * result["words"]
    assert result["perplexity"] == pytest.approx(len(vocabulary) ** (len(ids) / words))


def test_a_words_probability_is_the_product_of_its_units(config, units):
    """The slow twin walks through the words one by one, each unit read after those before it, none after it yet there."""
    vocabulary, lines = units
    model = build(config(**{"input.cutoffs": (10, 30), "body.features": 16, "body.feed_forward": 16}), vocabulary)
    ids = vocabulary.encode_lines(lines)
    dummy = jnp.zeros((1, 2), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(0), dummy, dummy, jnp.ones((1, 2)))["params"]
    log_probs = jax.jit(lambda seen, last: model.apply({"params": params}, seen, last, method="log_probs"))
    seen, last, chances = np.zeros((1, len(ids) + 1), np.int32), 0, []
    seen[0, 0] = vocabulary.eos
    for word in [word for line in lines for word in (*line.split(), "<eos>")]:
        chance = 1.0
        for unit in vocabulary.encode(word)[:-1]:
            chance *= math.exp(log_probs(seen, np.array([[last]]))[0, 0, unit])
            last += 1
            seen[0, last] = unit
        chances.append(chance)
    nll = score_blocks(model, params, ids, vocabulary.eos, window=len(ids), context=0, rows=1)
    result = summary(nll, ids, vocabulary)
    assert result["words"] == len(chances)
    assert result["perplexity"] == pytest.approx(math.prod(chances) ** (-1 / len(chances)), rel=1e-4)


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    """A copy of the trained run, to evaluate."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("evaluated") / "small")


def ask(run, **changes):
    return evaluate(run, **{"split": "test", "window": 0, "context": 0, "checkpoint": "latest", "data_path": None} | changes)


def test_the_json_of_an_evaluation(run, text, capsys):
    """workdir/eval/*.json holds the documented numbers, and they are those of the split's own words."""
    result = ask(run, window=12, context=4)
    saved = json.loads((run / "eval" / "test-12-4-240.json").read_text())
    assert saved == json.loads(json.dumps(result))
    tokens = [word for line in (text / "test.txt").read_text().splitlines() for word in (*line.split(), "<eos>")]
    train = [word for line in (text / "train.txt").read_text().splitlines() for word in (*line.split(), "<eos>")]
    unigram = -np.mean([math.log(train.count(word) / len(train)) for word in tokens])
    assert saved["words"] == saved["tokens"] == len(tokens)
    assert saved["unigram_perplexity"] == pytest.approx(math.exp(unigram))
    assert saved["perplexity"] == math.exp(saved["nll"])
    assert (saved["split"], saved["step"]) == ("test", 240)
    assert saved["settings"] == {
        "break_mode": "none", "window": 12, "context": 4, "checkpoint": "latest", "data_path": None,
        "config": json.loads((run / "config.json").read_text())}
    assert f"perplexity {saved['perplexity']:.2f}" in capsys.readouterr().out


def test_a_trained_model_gains_from_context(run):
    """It beats single words by far, and words it may look back for come cheaper still."""
    alone, informed = ask(run), ask(run, context=12)
    assert alone["perplexity"] < 0.5 * alone["unigram_perplexity"]
    assert informed["perplexity"] < 0.98 * alone["perplexity"]


def test_evaluation_finds_what_training_measured(run):
    """The validation loss in metrics.jsonl, again, from the checkpoint of that step: latest, best and by number."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["validation/nll"] for line in lines if "validation/nll" in line}
    saved = [int(path.name) for path in (run / "checkpoints").iterdir()]
    best = min(saved, key=measured.get)
    for name, step in ("160", 160), ("latest", 240), ("best", best):
        result = ask(run, split="validation", checkpoint=name)
        assert result["step"] == step
        assert result["nll"] == pytest.approx(measured[step], rel=1e-6)


@pytest.mark.parametrize("name", ["80", "7", "oldest", "-1", "²"])
def test_a_checkpoint_that_is_not_there(run, name):
    """The line names it and the steps that are there."""
    with pytest.raises(InputError, match=f"no checkpoint '{name}'.* 160, 240"):
        ask(run, checkpoint=name)


def test_a_run_of_an_older_version(run, tmp_path):
    """A config without a setting that is needed: the line names it."""
    config = json.loads((run / "config.json").read_text())
    del config["data"]["rows"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"config\.json has no data\.rows, as of an older version"):
        ask(tmp_path)


def test_evaluating_disturbs_nothing(run):
    """Only eval/ changes, not even a checkpoint that training is just then writing."""
    unfinished = run / "checkpoints" / "320.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "part").write_text("half")

    def files():
        return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and run / "eval" not in path.parents}

    before = files()
    ask(run)
    after = files()
    shutil.rmtree(unfinished, ignore_errors=True)
    assert after == before


def test_a_local_copy_of_the_corpus(run, text, tmp_path):
    """--data_path scores other text with the run's own vocabulary, and needs no train split."""
    (tmp_path / "test.txt").write_text("the t0w0\n")
    own = ask(run)
    result = ask(run, data_path=str(tmp_path))
    kept = json.loads((run / "eval" / "test-16-0-240.json").read_text())
    assert kept == json.loads(json.dumps(own)) != json.loads(json.dumps(result))
    assert result["settings"]["data_path"] == str(tmp_path)
    vocabulary = Vocabulary.read(run / "vocabulary.txt")
    ids = corpora.load("text_files", str(text), str(tmp_path / "cache")).vocabulary.encode("the t0w0")
    assert result["words"] == 3
    assert result["unigram_perplexity"] == pytest.approx(math.exp(vocabulary.unigram_nll(np.array(ids))))


def test_text_can_be_broken_otherwise_than_in_training(run, text, capsys):
    """--break_mode: whole sentences, or each alone, of a model of blocks; kept beside the result of the run's own way."""
    own = ask(run)
    alone, whole = (ask(run, break_mode=mode, window=32) for mode in ("eos", "complete"))
    assert "break_mode complete" in capsys.readouterr().out
    assert {result["words"] for result in (own, alone, whole)} == {own["words"]}
    assert alone["settings"]["break_mode"] == "eos"
    assert json.loads((run / "eval" / "test-32-0-240-eos.json").read_text()) == json.loads(json.dumps(alone))
    informed = ask(run, break_mode="complete", window=32, context=8)
    assert len({result["nll"] for result in (own, alone, whole, informed)}) == 4
    with pytest.raises(InputError, match="context=8 .*break_mode='eos'"):
        ask(run, break_mode="eos", window=32, context=8)
    with pytest.raises(InputError, match="break_mode='sentences' is not one of"):
        ask(run, break_mode="sentences")


def test_devices_that_hold_the_model_together(config, monkeypatch):
    """As many as one batch needs by the plan, all if none are enough, and what the config says where it says something."""
    sizes = {"input.cutoffs": (10, 30), "body.features": 64, "body.feed_forward": 512, "body.layers": 8}
    small = config(**sizes, tokens_per_device=16)
    batch = small | {"tokens_per_update": 8 * 16}
    alone, two = (1.4 * plan(batch | {"fsdp": cut}, SIZE, 8)["memory_per_device"]["total"] for cut in (1, 2))
    monkeypatch.setattr(scoring.jax, "device_count", lambda: 8)
    for given, memory, cut in (0, None, 1), (0, alone, 1), (0, alone - 1, 2), (0, two - 1, 4), (0, 1, 8), (4, 1, 4), (3, 1, 1):
        monkeypatch.setattr(scoring.accelerators, "memory", lambda memory=memory: memory)
        assert scoring._cut(small | {"fsdp": given}, SIZE) == cut


def test_eight_devices_score_alike(run, command):
    """evaluate.py on 8 devices gives the losses that 1 device gives."""
    one = ask(run, window=10, context=6)
    done = command("evaluate.py", f"--workdir={run}", "--window=10", "--context=6", "--checkpoint=latest", devices=8)
    assert done.returncode == 0, done.stderr
    eight = json.loads((run / "eval" / "test-10-6-240.json").read_text())
    assert eight["nll"] == pytest.approx(one["nll"], rel=1e-6)
    assert eight | {"nll": 0, "perplexity": 0} == json.loads(json.dumps(one)) | {"nll": 0, "perplexity": 0}
