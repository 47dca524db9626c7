"""Ways to score, and their options: one is added by a class of options, a function and a line."""

from typing import Annotated, NamedTuple

import numpy as np
import pytest

from adaptive_jax.config.options import Option
from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.corpora.load import load as load_corpus
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.token_ids import TokenIds
from adaptive_jax.data.vocabulary.tokenizer import Tokenizer
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.scores import evaluate_command as command
from adaptive_jax.scores import mix
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.methods import METHODS, Method, with_options
from adaptive_jax.scores.mix import Mix, Run
from adaptive_jax.scores.scoring import Evaluation, composed
from adaptive_jax.text.load import LoadedModel, load
from tests import refuses
from tests.random_runs import quiet, random_run
from tests.training.test_finetuning import saved_run


class Toy(NamedTuple):
    """The options of a toy: the model's probabilities to several powers, normalised by nothing.

    Attributes:
        power: power of the probabilities.
        kind: what it is called.
        shift: added to the nll.
    """

    power: Annotated[tuple[float, ...], Option(within="(0, 2]")] = (1.0,)
    kind: Annotated[str, Option(among=("left", "right"))] = "left"
    shift: Annotated[float, Option(within="[0, inf)", only=("kind", "right"))] = 0.0


def score_toy(job, options):
    """Its label has keys that no other way to score has."""
    nll, _ = job.score()
    for power in options.power:
        yield {"power": power, "kind": options.kind}, nll * power + options.shift


def test_a_way_to_score_is_its_function_and_a_line(trained_copy, monkeypatch, capsys):
    """Its options are checked and stand in the lines and the JSON."""
    monkeypatch.setitem(METHODS, "toy", Method(score_toy, Toy))
    request = Request("validation", checkpoint="latest", method="toy")
    result = evaluate(trained_copy, request._replace(options={"power": (1.0, 0.5, 2.0)}))
    out = capsys.readouterr().out.splitlines()
    plain = evaluate(trained_copy, request._replace(method="plain"))
    assert [line["nll"] for line in result["grid"]] == pytest.approx(
        [power * plain["nll"] for power in (1.0, 0.5, 2.0)]
    )
    assert (result["power"], result["kind"]) == (0.5, "left")
    one = ["perplexity", f"{plain['perplexity']:.2f}", "power", "1,", "kind", "left"]
    assert out[0].split() == one
    assert out[3].endswith("; method toy, power 0.5, kind left")
    for options, names in [
        ({"power": (3.0,)}, ("--power", "3.0")),
        ({"power": ()}, ("--power", "none")),
        ({"kind": "up"}, ("kind='up'", "left", "right")),
        ({"shift": 1.0}, ("--shift", "--kind=left", "--kind=right")),
        ({"theta": (1.0,)}, ("--theta", "--method=toy", "--method=cache")),
    ]:
        with refuses(*names):
            with_options("toy", options)
    assert command.options_of_methods()["power"] == {"toy": Toy}


MIX = Request("validation", checkpoint="latest", method="mix")
WEIGHT = 0.3  # of the first of two models


def mixed_nll(lines, *models):
    """The nll a word of two models, the first with that weight."""
    how = {"context_from": "previous", "window": 16, "context": 8}
    one, other = (
        np.concatenate([line.log_probs for line in model.score(lines, **how)]) for model in models
    )
    assert np.abs(one - other).max() > 0.1
    return -np.mean(np.logaddexp(one + np.log(WEIGHT), other + np.log(1 - WEIGHT)))


def test_two_models_of_one_vocabulary(trained_copy, text):
    """Token by token, each with its weight; mixed with itself a model stays what it is."""
    plain = evaluate(trained_copy, MIX._replace(method="plain"))
    options = {"other": str(trained_copy), "model_weight": (0.25, 1.0)}
    result = evaluate(trained_copy, MIX._replace(options=options))
    assert [line["nll"] for line in result["grid"]] == pytest.approx([plain["nll"]] * 2, rel=1e-6)
    request = MIX._replace(checkpoint="200", window=16, context=8)
    result = evaluate(trained_copy, request._replace(options=options | {"model_weight": (WEIGHT,)}))
    models = load(trained_copy, 200), load(trained_copy)
    expected = mixed_nll((text / "valid.txt").read_text().splitlines(), *models)
    assert result["nll"] == pytest.approx(expected, rel=1e-5)
    for options in {}, {"other": "a", "scores": "b"}:
        with refuses("--other", "--scores"):
            evaluate(trained_copy, MIX._replace(options=options))


def test_a_model_with_the_scores_of_another_program(trained_copy, text, tmp_path, monkeypatch):
    """A table of the uniform distribution, in bits, gives what --uniform gives; a table of another
    text would have given a number.
    """
    vocabulary = load(trained_copy, "latest").run.vocabulary
    lines = (text / "valid.txt").read_text().splitlines()
    words = [word for line in lines for word in (*line.split(), "<eos>")]
    bits, path = f"{np.log2(len(vocabulary)):.9f}", tmp_path / "uniform.tsv"
    path.write_text("word\tsurprisal_bits\n" + "".join(f"{word}\t{bits}\n" for word in words))
    options = {"scores": str(path), "model_weight": (0.75,)}
    result = evaluate(trained_copy, MIX._replace(options=options))
    uniform = evaluate(trained_copy, MIX._replace(method="plain", uniform=0.25))
    assert result["nll"] == pytest.approx(uniform["nll"], rel=1e-6)
    for change, names in [
        (lambda table: table.replace("surprisal_bits", "surprisal"), ["surprisal_nats"]),
        (lambda table: table.replace(words[3], "other", 1), ["'other'", "line"]),
        (lambda table: table.rsplit("\n", 2)[0], [f"{len(words) - 1:,} words"]),
        (lambda table: table.replace(bits, "much", 1), ["surprisal_bits", "much"]),
        (lambda table: table.replace(bits, "nan", 2), ["surprisal_bits", "nan", "line 2"]),
    ]:
        (tmp_path / "wrong.tsv").write_text(change(path.read_text()))
        with refuses("wrong.tsv", *names):
            evaluate(trained_copy, MIX._replace(options={"scores": str(tmp_path / "wrong.tsv")}))
    # Each was a traceback, after the whole split had been scored.
    (tmp_path / "latin.tsv").write_bytes("word\tsurprisal_bits\ncaf\xe9\t1\n".encode("latin-1"))
    monkeypatch.setattr(Evaluation, "score", None)
    for option, name in ("scores", "none.tsv"), ("scores", "latin.tsv"), ("other", "none"):
        with refuses(name):
            evaluate(trained_copy, MIX._replace(options={option: str(tmp_path / name)}))


def test_sub_words_with_the_scores_of_another_program(config, tmp_path):
    """The words of a table were compared with the last unit of each word, and every table refused;
    a model mixed with its own scores is itself.
    """
    lines, counts = ["abab bab", "bab ab abab"], {"abab": 4, "bab": 3, "ab": 2, "<eos>": 2}
    vocabulary = Subwords.build(counts, 2)
    model = LoadedModel(random_run(config(**{"input.cutoffs": ()}), vocabulary))
    scored = list(model.score(lines, "previous", context=0))
    rows = [pair for line in scored for pair in zip(line.words, -line.log_probs, strict=True)]
    path = tmp_path / "scores.tsv"
    path.write_text("word\tsurprisal_nats\n" + "".join(f"{word}\t{nll}\n" for word, nll in rows))
    ids = model.encode("".join(f"{line}\n" for line in lines))
    job = Evaluation(
        run=model.run,
        ids=ids,
        windows=Windows.of(model.run.config),
        uniform=0.0,
        down_weight=1.0,
        train=lambda directory: ids,
        progress=lambda what: quiet,
        tables=lambda: composed(model.run, ids),
        encode=lambda run: ids,
    )
    ((_, nll),) = METHODS["mix"].score(job, Mix(scores=str(path)))
    assert len(ids) > len(rows) and nll.sum() == pytest.approx(sum(nll for _, nll in rows))
    path.write_text(path.read_text().replace("abab", "other", 1))
    with refuses("scores.tsv", "'other'"):
        list(METHODS["mix"].score(job, Mix(scores=str(path))))


def test_units_keep_the_scores_of_a_model_of_all_weight(config, tmp_path):
    """A cache and neighbours of sub-words count units, and perplexities are per word."""
    settings = config(**{"data.codes": 60, "data.vocabulary_size": 400})
    saved_run(tmp_path / "run", settings, load_corpus(settings["data"]).vocabulary)
    request = Request("validation", checkpoint="latest", window=16, context=8)
    plain = evaluate(tmp_path / "run", request)
    assert plain["tokens"] > 1.1 * plain["words"]
    for method in "cache", "knn":
        options = {"model_weight": (1.0, 0.5)}
        result = evaluate(tmp_path / "run", request._replace(method=method, options=options))
        alone, mixed = result["grid"]
        for key in "nll", "perplexity":
            assert alone[key] == pytest.approx(plain[key], rel=1e-6) != mixed[key]
        assert (result["words"], result["tokens"]) == (plain["words"], plain["tokens"])


@pytest.mark.parametrize(
    "break_mode, first, context", [("none", 8, 8), ("none", 32, 0), ("eos", 8, 0)]
)
def test_the_context_of_the_other_model(config, break_mode, first, context):
    """It is that of the first where it fits; examples that see nothing before them have none."""
    changes = {"input.cutoffs": (), "batches.sequence_length": 16}
    changes["batches.break_mode"] = break_mode
    other = random_run(config(**changes), Vocabulary.build({"<eos>": 2, "a": 1}))
    nothing = dict.fromkeys(Evaluation._fields)
    job = Evaluation(**nothing | {"windows": Windows(64, first, "none", "similar", 1)})
    windows = job.by(other, np.zeros(3, np.int32)).windows
    assert (windows.window, windows.context, windows.break_mode) == (16, context, break_mode)


def test_a_model_of_another_tokenizer(config, monkeypatch):
    """Its tokens are no words: two numbers of one token each were mixed if there were as many."""
    changes = {"input.cutoffs": (), "batches.sequence_length": 16}
    ids = TokenIds.of_counts(np.ones(9, np.int64), 0)
    models = (b"one", b"other")
    runs = [random_run(config(**changes), Tokenizer(ids.words, ids.counts, m)) for m in models]
    monkeypatch.setattr(Run, "open", lambda *_: runs[1])
    job = Evaluation(**dict.fromkeys(Evaluation._fields) | {"run": runs[0]})
    with refuses("--other", "tokenizer"):
        next(mix.score(job, Mix(other="o")))


def test_two_models_of_one_text(trained_copy, text, config, monkeypatch):
    """Words and sub-words meet at the ends of words."""
    lines = (text / "valid.txt").read_text().splitlines()
    counts = {word: 1 for line in lines for word in line.split()} | {"<eos>": len(lines)}
    small = {"input.cutoffs": (10, 30), "batches.sequence_length": 16}
    other = random_run(config(**small), Subwords.build(counts, 3))
    monkeypatch.setattr(Run, "open", lambda *_: other)
    options = {"other": "o", "model_weight": (WEIGHT,)}
    result = evaluate(trained_copy, MIX._replace(window=16, context=8, options=options))
    monkeypatch.undo()
    expected = mixed_nll(lines, load(trained_copy, "latest"), LoadedModel(other))
    assert result["nll"] == pytest.approx(expected, rel=1e-5)
