"""Evaluation over words that training never saw: the numbers of GroC's public code, and
probabilities that add up.
"""

import dataclasses
import json
import math
from pathlib import Path

import jax
import numpy as np
import pytest

from adaptive_jax.config.keys import complete
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.runs.run import Run, fits_any_vocabulary
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.open_words import vocabulary_to_score
from adaptive_jax.scores.scores import Scores
from adaptive_jax.scores.scoring import (
    mixed_with_uniform,
    score_split,
)
from tests import refuses
from tests.random_runs import quiet, random_run
from tests.scores.test_scoring import read_result
from tests.training.test_finetuning import saved_run

CNN = {
    "input.name": "char_cnn",
    "input.width": 4,
    "input.filters": ((1, 6), (3, 8)),
    "input.length": 12,
}
COMPOSED = CNN | {"output.name": "softmax", "output.table.name": "tied"}
GROC = COMPOSED | {
    "input.name": "groc",
    "input.strides": (1, 2),
    "input.relations": 2,
    "input.definition": 3,
    "output.table.name": "mapped",
    "output.table.depth": 0,
    "output.table.bias": "predicted",
}
BODY = {"body": (complete({"body.name": "lstm", "body.features": 8, "body.widths": (8,)})["body"])}
WINDOWS = Windows(1, 0, "none", "packed", 64)


def layers(changes):
    """The groups `input` and `output` of a config with these changes."""
    whole = complete(changes)
    return {group: whole[group] for group in ("input", "output")}


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A directory with a text half of whose words training never saw."""
    directory = tmp_path_factory.mktemp("other")
    (directory / "test.txt").write_text("the t0w0 the zebra\nzebra t1w0 quagga the\n")
    return directory


@pytest.fixture(scope="module")
def composed(config, tmp_path_factory):
    """A run of groc, of random parameters, whose lexicon knows a word that its vocabulary lacks."""
    directory = tmp_path_factory.mktemp("composed")
    entries = (
        {"word": "t0w0", "definition": "the t1w0"},
        {"word": "zebra", "relations": ["t0w0"], "definition": "the quagga"},
    )
    (directory / "words.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    groups = layers(GROC | {"input.lexicon": str(directory / "words.jsonl")}) | BODY
    given = config() | groups
    saved_run(directory / "run", given, load(given["data"]).vocabulary)
    return directory / "run"


def opened(workdir, other):
    """The run with the words of the other text."""
    saved = dataclasses.replace(Run.of(workdir), checkpoint="latest")
    data = saved.saved_config["data"] | {"path": str(other)}
    vocabulary = vocabulary_to_score(saved.vocabulary, "union", data, "test")
    return saved, dataclasses.replace(saved, vocabulary=vocabulary)


def chances(run, down_weight=1.0, uniform=0.0):
    """The probability of every word after "the", `[words]`."""
    words = len(run.vocabulary)
    ids = np.full((words, 2), run.vocabulary.index["the"], np.int32)
    ids[:, 1] = np.arange(words)
    nll, _ = score_split(run, ids.ravel(), WINDOWS, quiet, down_weight=down_weight)
    return np.exp(-mixed_with_uniform(nll, uniform, words)).reshape(words, 2)[:, 1]


def test_a_composed_model_over_words_it_never_saw(composed, other):
    """Its parameters are unchanged, and the probabilities of all words, new ones too, add up to
    1; down-weighted as well.
    """
    before, run = opened(composed, other)
    assert run.vocabulary.words == (*before.vocabulary.words, "zebra", "quagga")
    assert (run.num_known_words, len(run.vocabulary)) == (122, 124)
    assert run.predicts_new_words
    of_words = run.lexicon["input"]["definitions"]["words"]
    assert of_words[122].tolist() == [
        run.vocabulary.index["the"],
        123,
        -1,
    ]  # zebra, whose definition names quagga
    assert before.lexicon["input"]["definitions"]["words"].shape == (122, 3)
    jax.tree.map(np.testing.assert_array_equal, run.params, before.params)
    plain, less = chances(run), chances(run, 0.1)
    np.testing.assert_allclose([plain.sum(), less.sum()], 1.0, rtol=1e-5)
    assert (plain[-2:] > 1e-4).all()
    weights = np.where(np.arange(124) < 122, 1.0, 0.1)
    np.testing.assert_allclose(less, plain * weights / (plain @ weights), rtol=1e-4)


def test_a_model_without_vectors_of_new_words(trained_copy, other):
    """Its distribution is over its own words; mixed with the uniform one, it adds up to 1 over
    all.
    """
    _, run = opened(trained_copy, other)
    assert not run.predicts_new_words
    plain, mixed = chances(run), chances(run, uniform=0.01)
    np.testing.assert_allclose([plain.sum(), mixed.sum()], 1.0, rtol=1e-5)
    assert (plain[-2:] == 0).all()
    np.testing.assert_allclose(mixed, 0.99 * plain + 0.01 / 124, rtol=1e-5)


def test_a_composed_input_under_a_table_of_words(config, other):
    """Only the words that the output has are composed; new ones are zeros in the input, and
    without probability.
    """
    words = Vocabulary.build({"<eos>": 9, "the": 8, "a": 1, "b": 1, "c": 1})
    run = random_run(config() | layers(CNN | {"output.name": "softmax"}) | BODY, words)
    more = Vocabulary((*words.words, "zebra"), np.append(words.counts, 0))
    wider = run.with_parts(vocabulary=more)
    nll, _ = score_split(wider, np.array([1, 5, 2, 3], np.int32), WINDOWS, quiet)
    own, _ = score_split(run, np.array([1, 2, 2, 3], np.int32), WINDOWS, quiet)
    assert nll[1] == np.inf
    np.testing.assert_allclose(nll[[0, 3]], own[[0, 3]], rtol=1e-5)
    assert np.isfinite(nll[2])
    assert nll[2] != own[2]


@pytest.mark.parametrize(
    "changes, fits",
    [
        (COMPOSED, True),
        (COMPOSED | {"output.table.bias": True}, False),
        (CNN | {"output.name": "softmax"}, False),
        (COMPOSED | {"output.name": "adaptive", "output.table.cutoffs": (20,)}, True),
        (COMPOSED | {"output.name": "hierarchical", "output.classes": 5}, False),
        (GROC, True),
        ({"input.name": "lookup"}, False),
    ],
)
def test_models_that_fit_any_vocabulary(config, changes, fits):
    """Those all of whose parameters words share, and whose words stay in their bands."""
    assert fits_any_vocabulary(config() | layers(changes), 122) == fits


def test_an_evaluation_of_seen_and_unseen_words(composed, trained_copy, other, capsys):
    """Shares and perplexities apart, in the line and the JSON; both models over the same words."""
    results = {}
    for workdir in composed, trained_copy:
        request = Request(
            checkpoint="latest", data_path=str(other), vocabulary="union", window=1, rows=64
        )
        result = results[workdir] = evaluate(workdir, request)
        *_, line, path = [
            line for line in capsys.readouterr().out.splitlines() if not line.startswith("  ")
        ]
        seen, unseen = result["open"]["seen"], result["open"]["unseen"]
        assert (seen["share"], unseen["share"], result["words"]) == (0.7, 0.3, 10)
        together = 0.7 * math.log(seen["perplexity"]) + 0.3 * math.log(unseen["perplexity"])
        assert together == pytest.approx(result["nll"], rel=1e-6)
        assert (
            f"; seen words 70.0% of perplexity {seen['perplexity']:,.2f}; unseen words 30.0% of"
            " perplexity" in line
        )
        assert read_result(Path(path)) == json.loads(
            json.dumps(result | {"unigram_perplexity": None})
        )
    assert results[trained_copy]["open"]["unseen"]["perplexity"] == pytest.approx(124 / 0.01)
    assert results[composed]["open"]["unseen"]["perplexity"] < 1_000
    cached = evaluate(
        composed, request._replace(method="cache", options={"cache": "unigram"}, down_weight=0.1)
    )
    assert math.isfinite(cached["nll"])


EVALUATE = """
import json, pathlib, sys
from adaptive_jax.scores.evaluate import Request, evaluate
print(json.dumps(evaluate(pathlib.Path(sys.argv[1]), Request(**json.loads(sys.argv[2])))))
"""


@pytest.mark.parametrize("down_weight", [1.0, 0.5])
def test_eight_devices_score_unseen_words_alike(composed, other, eight, down_weight):
    """Vectors are composed on each device, and so is the probability of all new words summed."""
    request = {"checkpoint": "latest", "data_path": str(other), "vocabulary": "union", "window": 4}
    request["down_weight"] = down_weight
    one = evaluate(composed, Request(**request))
    result = json.loads(eight(EVALUATE, composed, json.dumps(request)).splitlines()[-1])
    for key in "seen", "unseen":
        assert result["open"][key] == pytest.approx(one["open"][key], rel=1e-5)
    assert result["nll"] == pytest.approx(one["nll"], rel=1e-6)


@pytest.mark.parametrize(
    "changes, flag",
    [
        ({"down_weight": 0.1}, "--down_weight=0.1"),
        ({"method": "dynamic"}, "--method=dynamic with --vocabulary=union"),
        ({"method": "mix", "options": {"other": "a"}}, "--method=mix with --vocabulary=union"),
    ],
)
def test_options_that_need_vectors_of_new_words(trained_copy, other, changes, flag):
    """They are refused in one line where the model has none."""
    request = Request(checkpoint="latest", data_path=str(other), vocabulary="union")
    with refuses(flag, "new words"):
        evaluate(trained_copy, request._replace(**changes))


def test_the_words_of_a_file(tmp_path, config):
    """The first word of every line that the run lacks, in the file's order; a list or another
    vocabulary.
    """
    own = Vocabulary.build({"<eos>": 2, "a": 1})
    (tmp_path / "words.txt").write_text("zebra 7\na 3\n\nb\nzebra\n", encoding="utf-8-sig")
    vocabulary = vocabulary_to_score(own, str(tmp_path / "words.txt"), {}, "test")
    assert vocabulary.words == ("<eos>", "a", "zebra", "b")
    assert vocabulary.counts.tolist() == [2, 1, 0, 0]
    (tmp_path / "words.txt").write_bytes(b"\xff\xfe")
    with refuses("--vocabulary", "UTF-8"):
        vocabulary_to_score(own, str(tmp_path / "words.txt"), {}, "test")
    with refuses("--vocabulary=union", "sub-word"):
        vocabulary_to_score(
            Subwords.build({"low": 5, "lower": 2, "<eos>": 4}, 3), "union", {}, "test"
        )
    with refuses("ids", "vocabulary"):
        vocabulary_to_score(
            own, "union", {"corpus": "ids", "path": "ids", "vocabulary_size": 9}, "test"
        )


def test_known_numbers():
    """Perplexities of seen and unseen words; of none it is None. The uniform share alone where
    the model gives nothing.
    """
    parts = Scores(np.array([0, 1, 9, 9]), np.array([1.0, 3.0, np.nan, 5.0])).seen_and_unseen(2)
    assert parts == {
        "seen": {"share": pytest.approx(2 / 3), "perplexity": pytest.approx(math.exp(2))},
        "unseen": {"share": pytest.approx(1 / 3), "perplexity": pytest.approx(math.exp(5))},
    }
    assert Scores(np.zeros(2), np.ones(2)).seen_and_unseen(2)["unseen"] == {
        "share": 0.0,
        "perplexity": None,
    }
