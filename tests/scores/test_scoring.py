"""Scoring: every token once, seeing exactly what the window lets it see, and the JSON that says
so.
"""

import functools
import json
import math
import shutil

import jax
import numpy as np
import pytest

from adaptive_jax.data.batches.examples import examples
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.on_disk import read_vocabulary
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.runs.run import Run
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.scores import Scores
from adaptive_jax.scores.scoring import as_stream, score_split, scores
from tests import refuses
from tests.random_runs import log_probs_of, quiet, random_run

EOS, SIZE = 3, 60


WORDS = Vocabulary.build(
    {"<eos>": 57, "<unk>": 3} | {f"{'ab' * (n % 7)}{n}": 60 - n for n in range(58)}
)
CNN = {
    "name": "char_cnn",
    "width": 4,
    "filters": ((1, 6), (3, 8)),
    "highway_layers": 1,
    "length": 12,
}


def opened(config, layers, vocabulary=WORDS, scale=1.0, **changes):
    """A run of a small body with these layers."""
    settings = {"body.features": 16, "body.feed_forward": 16} | changes
    return random_run(config(**settings) | layers, vocabulary, scale)


@pytest.fixture(scope="module")
def run(config):
    """With an adaptive input and output."""
    return opened(config, {}, **{"input.cutoffs": (10, 30)})


@pytest.fixture(scope="module")
def log_probs(run):
    return log_probs_of(run)


@pytest.fixture(scope="module")
def ids():
    return np.random.Generator(np.random.Philox(2)).integers(0, SIZE, 23, dtype=np.int32)


def score(run, ids, window, context, rows, mode="none", layout="packed"):
    settings = Windows(window, context, mode, layout, rows)
    return score_split(run, ids, settings, quiet)[0]


@pytest.mark.parametrize(
    "window, context, rows",
    [(4, 0, 2), (8, 7, 4), (40, 12, 2)],
)
def test_each_token_is_scored_from_what_its_window_shows(
    run, log_probs, ids, window, context, rows
):
    """The slow twin reads, for each token on its own, exactly the tokens of its window that
    stand before it. tests/data/test_batches.py has the windows of any settings.
    """
    slow = []
    for k, token in enumerate(ids):
        scored_from = k // (window - context) * (window - context)
        start = max(scored_from - context, 0)
        seen = [EOS if start == 0 else ids[start - 1], *ids[start:k]]
        slow.append(-log_probs(seen)[token])
    nll = score(run, ids, window, context, rows)
    assert nll.dtype == np.float32
    np.testing.assert_allclose(nll, slow, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mode, layout, window, context",
    [
        ("eos", "similar", 9, 0),
        ("complete_doc", "packed", 7, 0),
        ("complete", "packed", 8, 3),
    ],
)
def test_examples_are_scored_from_themselves_and_their_context(
    run, log_probs, mode, layout, window, context
):
    """The slow twin reads, for each token of an example on its own, what stands before it there
    and in the context.
    """
    ids = np.array(
        [EOS, 7, 8, EOS, 9, EOS, EOS, EOS, 11, 12, 13, 14, 15, 40, 17, EOS, 4, EOS, 50, 51],
        np.int32,
    )
    slow = np.full(len(ids), np.nan, np.float32)
    for start, length in zip(*examples(ids, EOS, mode, window - context), strict=True):
        begin = max(start - context, 0)
        for k in range(start, start + length):
            seen = [EOS if begin == 0 else ids[begin - 1], *ids[begin:k]]
            slow[k] = -log_probs(seen)[ids[k]]
    assert np.isnan(slow).sum() == (3 if mode == "complete_doc" else 0)
    nll = score(run, ids, window, context, 2, mode, layout)
    np.testing.assert_allclose(nll, slow, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def convolution(config):
    """A gated convolution whose hidden states depend on 7 inputs: 1 + 2 + 2 before its own, and
    one more.
    """
    body = {
        "name": "gated_conv",
        "features": 16,
        "blocks": ((2, 3, 16), (1, 1, 8, 3, 16)),
        "form": "paper",
        "activation": "glu",
        "weight_norm": True,
        "dropout": 0.0,
        "output_width": 0,
    }
    # Its biases are not 0: what lies before the text is zeros in every layer, not what zeros give.
    return opened(config, {"body": body}, scale=3.0, **{"input.cutoffs": (10, 30)})


@pytest.mark.parametrize(
    "context, mode, carries", [(5, "none", False), (6, "none", True), (11, "complete", True)]
)
def test_convolutions_carry_on_where_the_context_covers_what_they_see(
    convolution, ids, context, mode, carries
):
    """The slow twin reads the whole text in one row. A context that is shorter by a token gives
    other numbers.
    """
    assert convolution.model.body.receptive_field == 7
    in_one_row = score(convolution, ids, len(ids), 0, 1)
    for rows in 1, 3:
        settings = Windows(12, context, mode, "packed", rows)
        assert (as_stream(convolution.model, settings, len(ids)).layout == "streams") == carries
        close = np.isclose(
            score(convolution, ids, 12, context, rows, mode), in_one_row, rtol=1e-5, atol=1e-5
        )
        assert close.all() if carries else close[:12].any() and not close.all()


def test_settings_that_carry_a_state(convolution, run):
    """Rows read little twice. Without a context, for examples that stand alone, and in
    transformers nothing is carried.
    """
    settings = Windows(40, 20, "none", "packed", 64)
    assert as_stream(convolution.model, settings, 4_800) == Windows(27, 6, "none", "streams", 64)
    assert as_stream(convolution.model, settings, 480) == Windows(27, 6, "none", "streams", 10)
    assert as_stream(convolution.model, settings._replace(multiple=8), 48) == Windows(
        12, 6, "none", "streams", 8, 8
    )
    assert as_stream(convolution.model, settings, 48) == Windows(24, 0, "none", "streams", 1)
    for other in (
        settings._replace(context=0),
        settings._replace(context=0, break_mode="eos"),
        settings._replace(context=5),
    ):
        assert as_stream(convolution.model, other, 480) == other
    assert as_stream(run.model, settings, 480) == settings


def test_scores_come_with_positions_and_hidden_states(run, convolution, ids):
    """Every position once; the hidden states, asked for, give the nll again, also of streams in
    several rows, whose batches are not in the order of the text.
    """
    nll = score(run, ids, 6, 2, 2)
    batches = list(scores(run, ids, Windows(6, 2, "none", "packed", 2), hidden=True))
    at = np.concatenate([batch.positions for batch in batches])
    np.testing.assert_array_equal(at, np.arange(len(ids)))
    np.testing.assert_array_equal(np.concatenate([batch.nll for batch in batches]), nll)
    hidden = np.concatenate([batch.hidden for batch in batches])
    streams = Windows(6, 0, "none", "streams", 3)
    of_streams = score_split(convolution, ids, streams, quiet, hidden=True)
    for each, expected, states in (run, nll, hidden), (convolution, *of_streams):
        nll_of = jax.jit(functools.partial(each.model.apply, method="nll"))
        again = nll_of({"params": each.params}, states, ids)
        np.testing.assert_allclose(again, expected, rtol=1e-5)
    assert next(scores(run, ids, Windows(6, 2, "none", "packed", 2))).hidden is None


@pytest.mark.parametrize(
    "output, table",
    [("softmax", {"name": "tied"}), ("adaptive", {"name": "own", "cutoffs": (10, 30)})],
)
def test_vectors_composed_once_score_as_those_composed_in_place(config, ids, output, table):
    """A character CNN under a table of its own, and under one tied to it; the slow twin
    composes for every token.
    """
    run = opened(config, {"input": CNN, "output": {"name": output, "table": table}})
    log_probs, nll = log_probs_of(run), score(run, ids, 40, 0, 1)
    seen = [run.vocabulary.eos, *ids]
    slow = [-log_probs(seen[: k + 1])[token] for k, token in enumerate(ids)]
    np.testing.assert_allclose(nll, slow, rtol=1e-5, atol=1e-5)


def test_summary_of_known_numbers():
    """Mean over the words that count, its exponential, and that of their unigram loss; beyond
    floats is infinite.
    """
    vocabulary, ids = Vocabulary.build({"a": 3, "<eos>": 1}), np.array([0, 1, 0, 1])
    result = Scores(ids, np.array([1, 2, 6, np.nan], np.float32)).summary(vocabulary)
    assert result == {
        "nll": 3.0,
        "perplexity": math.exp(3.0),
        "words": 3,
        "tokens": 3,
        "unigram_perplexity": pytest.approx((4 / 3 * 4 * 4 / 3) ** (1 / 3)),
        "unknown": 0.0,
        "known_perplexity": None,
        "characters": 3,
        "bytes": 3,
        "bits_per_character": pytest.approx(3 / math.log(2)),
        "bits_per_byte": pytest.approx(3 / math.log(2)),
    }
    assert Scores(ids, np.full(4, 1e4, np.float32)).summary(vocabulary)["perplexity"] == math.inf
    vocabulary = Vocabulary.build({"a": 3, "<eos>": 1, "<unk>": 2})
    scores = Scores(np.array([1, 0, 1, 2]), np.ones(4, np.float32))
    assert scores.summary(vocabulary)["unknown"] == 0.5


def test_a_words_probability_is_the_product_of_its_units(config):
    """The slow twin walks through the words one by one, each unit read after those before it,
    none after it yet there.
    """
    vocabulary = Subwords.build({"low": 5, "lower": 2, "newest": 6, "widest": 3, "<eos>": 4}, 9)
    lines = ["lowest new", "", "wider é low"]
    run = opened(config, {}, vocabulary, **{"input.cutoffs": (10, 30)})
    ids, log_probs = vocabulary.encode_lines(lines), log_probs_of(run)
    seen, chances = [vocabulary.eos], []
    for word in [word for line in lines for word in (*line.split(), "<eos>")]:
        chance = 1.0
        for unit in vocabulary.encode(word)[:-1]:
            chance *= math.exp(log_probs(seen)[unit])
            seen.append(unit)
        chances.append(chance)
    nll = score(run, ids, len(ids), 0, 1)
    result = Scores(ids, nll).summary(vocabulary)
    assert (result["words"], result["tokens"]) == (len(chances), len(ids))
    words = Scores(ids, nll).take(slice(0, -1)).words(vocabulary)  # the last word has no end
    np.testing.assert_allclose(words.nll, -np.log(chances[:-1]), rtol=1e-4)
    assert [vocabulary.encode_words([word])[1].item() for word in lines[0].split()] == np.diff(
        words.place[:3]
    ).tolist()
    assert result["perplexity"] == pytest.approx(
        math.prod(chances) ** (-1 / len(chances)), rel=1e-4
    )


@pytest.fixture(scope="module")
def ask(trained_copy):
    """`ask(window=12)`: the result of the trained run, of its last checkpoint."""
    return lambda **changes: evaluate(
        trained_copy, Request(checkpoint="latest")._replace(**changes)
    )


def read_result(path):
    """The numbers of a result's file, without the checksum of its losses, which it alone has."""
    result = json.loads(path.read_text())
    assert result.pop("checksum")
    return result


def test_the_json_of_an_evaluation(ask, trained_copy, text, capsys):
    """workdir/eval/*.json holds the documented numbers, and they are those of the split's own
    words.
    """
    result = ask(window=12, context=4)
    saved = read_result(trained_copy / "eval" / "test-12-4-240.json")
    assert saved == json.loads(json.dumps(result))
    tokens, train = (
        (text / f"{split}.txt").read_text().replace("\n", " <eos> ").split()
        for split in ("test", "train")
    )
    unigram = -np.mean([math.log(train.count(word) / len(train)) for word in tokens])
    assert saved["words"] == saved["tokens"] == len(tokens)
    assert saved["unigram_perplexity"] == pytest.approx(math.exp(unigram))
    assert saved["perplexity"] == math.exp(saved["nll"])
    assert (saved["split"], saved["step"]) == ("test", 240)
    assert saved["settings"] == {
        "break_mode": "none",
        "window": 12,
        "context": 4,
        "checkpoint": "latest",
        "data_path": None,
        "split": "test",
        "method": "plain",
        "config": json.loads((trained_copy / "config.json").read_text()),
    }
    assert saved["seconds"] > 0
    assert f"perplexity {saved['perplexity']:.2f}" in capsys.readouterr().out


def test_a_trained_model_gains_from_context(ask):
    """It beats single words by far, and words it may look back for come cheaper still."""
    alone, informed = ask(), ask(context=12)
    assert alone["perplexity"] < 0.5 * alone["unigram_perplexity"]
    assert informed["perplexity"] < 0.98 * alone["perplexity"]


def test_evaluation_finds_what_training_measured(ask, trained_copy):
    """The validation loss in metrics.jsonl, again, from the checkpoint of that step: latest,
    best and by number.
    """
    lines = [json.loads(line) for line in (trained_copy / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line["validation/nll"] for line in lines if "validation/nll" in line}
    saved = [int(path.name) for path in (trained_copy / "checkpoints").iterdir()]
    best = min(saved, key=measured.get)
    for name, step in ("200", 200), ("latest", 240), ("best", best):
        result = ask(split="validation", checkpoint=name)
        assert result["step"] == step
        assert result["nll"] == pytest.approx(measured[step], rel=1e-6)


def test_a_checkpoint_that_is_not_there(ask):
    """The line names it and the steps that are there."""
    for name in "80", "oldest", "-1", "²":
        with refuses(f"'{name}'", "200, 240"):
            ask(checkpoint=name)


def test_evaluating_disturbs_nothing(ask, trained_copy):
    """Only eval/ changes, not even a checkpoint that training is just then writing."""
    unfinished = trained_copy / "checkpoints" / "320.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "part").write_text("half")

    def files():
        return {
            path: path.read_bytes()
            for path in trained_copy.rglob("*")
            if path.is_file() and trained_copy / "eval" not in path.parents
        }

    before = files()
    ask()
    after = files()
    shutil.rmtree(unfinished, ignore_errors=True)
    assert after == before


def test_a_local_copy_of_the_corpus(ask, trained_copy, text, tmp_path):
    """--data_path scores other text with the run's own vocabulary, and needs no train split."""
    (tmp_path / "test.txt").write_text("the t0w0\n")
    own = ask()
    result = ask(data_path=str(tmp_path))
    kept = read_result(trained_copy / "eval" / "test-16-0-240.json")
    assert kept == json.loads(json.dumps(own)) != json.loads(json.dumps(result))
    assert result["settings"]["data_path"] == str(tmp_path)
    vocabulary = read_vocabulary(trained_copy / "vocabulary.txt")
    data = {"corpus": "text_files", "path": str(text)}
    ids = load(data).vocabulary.encode("the t0w0")
    assert result["words"] == 3
    assert result["unigram_perplexity"] == pytest.approx(
        math.exp(vocabulary.unigram_nll(np.array(ids)))
    )


def test_text_can_be_broken_otherwise_than_in_training(ask, trained_copy, capsys):
    """--break_mode: whole sentences, or each alone, of a model of blocks; kept beside the
    result of the run's own way.
    """
    own, alone = ask(), ask(break_mode="eos", window=32)
    whole = ask(break_mode="complete", window=32, context=8)
    assert "break_mode complete" in capsys.readouterr().out
    assert {result["words"] for result in (own, alone, whole)} == {own["words"]}
    assert len({result["nll"] for result in (own, alone, whole)}) == 3
    assert alone["settings"]["break_mode"] == "eos"
    kept = read_result(trained_copy / "eval" / "test-32-0-240-eos.json")
    assert kept == json.loads(json.dumps(alone))


def test_a_run_is_opened_with_its_parameters_alone(trained, tmp_path):
    """Whatever else a checkpoint holds is not read."""
    workdir = shutil.copytree(trained, tmp_path / "run")
    for item in "optimizer", "carry":
        shutil.rmtree(workdir / "checkpoints" / "240" / item, ignore_errors=True)
    run = Run.open(workdir, "latest")
    assert (run.step, len(run.vocabulary)) == (240, 122)


EVALUATE = """
import ast, pathlib, sys
from adaptive_jax.scores.evaluate import Request, evaluate
evaluate(pathlib.Path(sys.argv[1]), Request(**ast.literal_eval(sys.argv[2])))
"""
SHARDED = {"fsdp": 4, "shard_words": True}
METHODS = {
    "plain": {},
    "knn": {"neighbours": 8},
    "mix": {"other": ""},
    "cache": {"cache": "unbounded", "neighbours": 8},
    "dynamic": {"rule": "rms", "rate": 1e-3, "statistics": 20},
}


@pytest.mark.parametrize(
    "method, words", [("plain", {}), ("dynamic", {}), *((method, SHARDED) for method in METHODS)]
)
def test_eight_devices_score_alike(trained, eight, method, words, tmp_path):
    """8 devices give the losses that 1 device gives by every method, also where each has its own
    words.
    """
    workdir = shutil.copytree(trained, tmp_path / "run")
    path, options = workdir / "config.json", METHODS[method]
    path.write_text(json.dumps(json.loads(path.read_text()) | words))
    request = {"window": 10, "context": 6, "checkpoint": "latest", "method": method}
    request["options"] = options | ({"other": str(workdir)} if "other" in options else {})
    one = evaluate(workdir, Request(**request))
    shutil.rmtree(workdir / "eval")
    eight(EVALUATE, workdir, request)
    [result] = (workdir / "eval").glob("test-*.json")
    eight_devices = read_result(result)
    tolerance = 1e-6 if method == "plain" else 1e-5
    assert eight_devices["nll"] == pytest.approx(one["nll"], rel=tolerance)
    rounded = dict.fromkeys(
        ("nll", "perplexity", "seconds", "date", "bins", "bits_per_character", "bits_per_byte")
    )
    assert eight_devices | rounded == json.loads(json.dumps(one)) | rounded
