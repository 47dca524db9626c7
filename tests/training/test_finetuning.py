"""Runs that start from the parameters of another one, with another corpus and vocabulary."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.config.keys import complete
from adaptive_jax.data.corpora.corpus import Corpus
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.clusters import Header, in_clusters, write_clusters
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.ngrams import count, read
from adaptive_jax.data.vocabulary.on_disk import write_with_checksums
from adaptive_jax.data.vocabulary.token_ids import TokenIds
from adaptive_jax.data.vocabulary.tokenizer import Tokenizer
from adaptive_jax.data.vocabulary.words import EOS, UNKNOWN, Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.interop.export import export
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import sharding
from adaptive_jax.runs.checkpoints import Checkpoints
from adaptive_jax.runs.lock import locked
from adaptive_jax.runs.run import Run
from adaptive_jax.runs.start import begin
from adaptive_jax.training import finetuning as module
from adaptive_jax.training.finetuning import check_fits, check_origin, finetuned, vocabulary_for
from adaptive_jax.training.loop import train
from adaptive_jax.training.state import State, shape_of_state
from tests import refuses
from tests.toys import random_params

OLD = Vocabulary.build({f"w{n}": 100 - n for n in range(19)} | {"<eos>": 200})
NEW = Vocabulary.build(
    {f"w{n}": 100 + n for n in range(3, 19)}
    | {f"new{n}": 20 - n for n in range(8)}
    | {"<eos>": 200}
)
BODY = {"body.name": "lstm", "body.features": 8, "body.widths": (8,)}
LEXICON = str(Path(__file__).parents[1] / "fixtures" / "lexicon.jsonl")
LETTERS = {"width": 3, "filters": ((1, 4), (2, 4)), "length": 5}
CNN = {f"input.{key}": value for key, value in LETTERS.items()} | {"input.name": "char_cnn"}
# A body with a bias as long as the new vocabulary, which is none of words.
GATED = {"body.name": "gated_conv", "body.features": 8, "body.blocks": ((1, 2, 25), (1, 2, 8))}
OWN = {"input.name": "lookup", "output.table.name": "own", "output.table.bias": True}
TIED = {"input.name": "lookup", "output.table.name": "tied"}
CUT = {"output.table.cutoffs": (5, 12), "output.table.factor": 2}
ADAPTIVE = {"input.name": "adaptive", "input.cutoffs": (5, 12), "input.factor": 2}
GROC = {"input.name": "groc", "input.strides": (1, 2), "input.lexicon": LEXICON}
MAPPED = {"output.table.name": "mapped", "output.table.bias": "predicted"}
COMPOSED = {"output.table.name": "composed", "output.table.correction": 2}
SOFTMAX = {"output.name": "softmax"}
MODELS = {
    "tied": TIED | SOFTMAX | {"output.table.bias": True},
    "bands": ADAPTIVE | {"output.table.name": "tied"},
    "weight norm": OWN | CUT | {"output.table.weight_norm": True},
    "many bands": OWN
    | {
        "output.name": "adaptive",
        "output.table.cutoffs": (2, 4, 6, 8, 10, 12, 14),
        "output.table.factor": 1,
        "output.table.weight_norm": True,
    },
    "own head": TIED | {"output.table.cutoffs": (18,), "output.table.own_head": True},
    "clusters": OWN | {"output.name": "adaptive", "output.table.factor": 2},
    "composed": (
        {f"output.table.cnn.{key}": value for key, value in LETTERS.items()}
        | {"input.name": "lookup"}
        | COMPOSED
        | SOFTMAX
    ),
    "groc": GATED | CNN | GROC | MAPPED | SOFTMAX,
    "groc with biases": GATED | CNN | GROC | SOFTMAX | MAPPED | {"output.table.bias": "own"},
}
BANDED = "bands", "weight norm", "many bands", "clusters"  # whose vectors depend on the band


def config_of(name, clusters="", **changes):
    more = {"output.clusters": clusters} if clusters else {}
    return complete({} if name.startswith("groc") else BODY, MODELS[name], more, changes)


def saved_run(workdir, config, vocabulary):
    """A workdir with a checkpoint of random parameters."""
    begin(workdir, config, {}, Corpus(vocabulary, {}))
    checkpoints, shapes = Checkpoints(workdir), parameter_shapes(build(config, len(vocabulary)))
    checkpoints.save(5, {"params": random_params(shapes, seed=3)}, 1.0)
    checkpoints.close()


def started(config, vocabulary):
    """The model, fresh parameters, and those with which a run begins."""
    model, optimizer, mesh = (
        build(config, len(vocabulary)),
        optim.from_config(config),
        sharding.device_mesh(),
    )
    fresh = jax.device_put(random_params(parameter_shapes(model)), sharding.replicated(mesh))
    state = State(jnp.int32(0), fresh, shape_of_state(model, optimizer, mesh).optimizer)
    return model, fresh, finetuned(config, state, model, optimizer, vocabulary, mesh).params


def vectors(model, params, vocabulary):
    """By group: each word's vector `[features]` with its bias, and the number of its band."""

    def bands(model):
        return {"input": model.input.bands(), "output": model.output.bands()}

    variables = {"params": params, "lexicon": lexicon(vocabulary, model.lexicon_spec())}
    by_group = {}
    for group, made in jax.jit(lambda known: model.apply(known, method=bands))(variables).items():
        rows = [b.table if b.projection is None else b.table @ b.projection for b in made]
        biases = [np.zeros(len(b.table)) if b.bias is None else b.bias for b in made]
        words = np.concatenate(
            [np.concatenate([r, b[:, None]], axis=1) for r, b in zip(rows, biases, strict=True)]
        )
        which = [i for i, b in enumerate(made) for _ in b.table]
        by_group[group] = {word: (words[i], which[i]) for i, word in enumerate(vocabulary.words)}
    return by_group


def test_ngrams_are_carried_over_where_words_keep_their_ids(tmp_path):
    """They are hashed by ids: rows of a table of n-grams were taken for those of words."""
    changes = {"input.name": "ngrams", "input.words.name": "lookup", "input.rows": len(NEW)}
    config = complete(BODY, TIED | SOFTMAX, changes)
    saved_run(tmp_path, config, OLD)
    config = complete(BODY, TIED | SOFTMAX, changes, {"init_from": str(tmp_path)})
    saved = random_params(parameter_shapes(build(config, len(OLD))), seed=3)["input"]
    both = OLD.with_words(NEW.words)
    for vocabulary, kept in (OLD, True), (NEW, False), (both, both.words[: len(OLD)] == OLD.words):
        _, fresh, params = started(config, vocabulary)
        expected = (saved if kept else fresh["input"])["ngrams_2"]
        jax.tree.map(np.testing.assert_array_equal, params["input"]["ngrams_2"], expected)
        same = vocabulary.index["w3"], OLD.index["w3"]
        tables = params["input"]["words"]["table"], saved["words"]["table"]
        np.testing.assert_array_equal(tables[0][same[0]], tables[1][same[1]])


def test_ids_keep_their_vectors(tmp_path):
    """The id that ends documents has its vector with and without data.eos; words that are spelt as
    ids are other entries.
    """
    counts = np.arange(25)
    ids, ending = (TokenIds.of_counts(counts, eos) for eos in (-1, 3))
    config = config_of("bands")
    words = Vocabulary(("7", "<eos>", *(f"w{n}" for n in range(23))), counts)
    for i, old in enumerate((ids, words)):
        saved_run(tmp_path / str(i), config, old)
        run = Run.open(tmp_path / str(i))
        _, fresh, params = started(config | {"init_from": str(tmp_path / str(i))}, ending)
        expected = run.params if old is ids else fresh | {"body": run.params["body"]}
        for name in ("table_0", "table_1"):
            np.testing.assert_array_equal(params["input"][name], expected["input"][name])


def test_another_tokenizer_has_other_ids(tmp_path):
    """Id 7 of two tokenizers is not one token: all rows were carried over by their numbers."""
    from tests.data import test_tokenizer

    config = config_of("tied")
    models = (json.dumps(test_tokenizer.made(kind)).encode() for kind in ("bytes", "spaces"))
    ids = TokenIds.of_counts(np.zeros(600, np.int64), eos=0)
    old, new = (Tokenizer.of(ids, model) for model in models)
    saved_run(tmp_path, config, old)
    for vocabulary, carried in (old, True), (new, False):
        _, fresh, params = started(config | {"init_from": str(tmp_path)}, vocabulary)
        same = np.array_equal(params["input"]["table"], fresh["input"]["table"])
        assert same != carried


def clusters_for(tmp_path, vocabulary, seed):
    ordered = [
        vocabulary.words[i] for i in np.random.default_rng(seed).permutation(len(vocabulary))
    ]
    path = tmp_path / f"clusters{seed}.txt"
    write_clusters(
        path, Header("kmeans", seed, vocabulary.digest, (6, 7, len(vocabulary) - 13)), ordered
    )
    return str(path)


@pytest.mark.parametrize("name", MODELS)
def test_words_of_both_vocabularies_keep_their_vectors(name, tmp_path, capsys):
    """Vectors and biases by word, at input and output; new words, and those that changed bands,
    are as in a fresh model.
    """
    (config, old_words), (new_config, new_words) = (
        in_clusters(
            config_of(name, clusters_for(tmp_path, words, i) if name == "clusters" else ""), words
        )
        for i, words in enumerate((OLD, NEW))
    )
    saved_run(tmp_path / "run", config, old_words)
    run = Run.open(tmp_path / "run")
    model, fresh, params = started(new_config | {"init_from": str(tmp_path / "run")}, new_words)
    printed = capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, params["body"], run.params["body"])
    if "clusters" in params["output"]:
        kept = (tree["output"]["clusters"] for tree in (params, run.params))
        np.testing.assert_array_equal(*kept)
    both = set(OLD.words) & set(NEW.words)
    assert len(both) == 17
    if name.startswith("groc"):
        assert "all word vectors are composed" in printed
        if name == "groc with biases":  # the only rows of words
            biases = (tree["output"]["table"].pop("bias") for tree in (params, run.params))
            new, old = (
                np.asarray(bias)[[words.index[word] for word in sorted(both)]]
                for bias, words in zip(biases, (NEW, OLD), strict=True)
            )
            np.testing.assert_array_equal(new, old)
        jax.tree.map(np.testing.assert_array_equal, params, run.params)
        return
    says = (
        rf"init_from +{tmp_path / 'run'} after 5 updates: vectors of (\d+) of 25 words carried"
        r" over; 8 new words and (\d+) that moved to another band start at random"
    )
    carried, apart = map(int, re.search(says, printed).groups())
    assert carried + apart == 17 and (name in BANDED or not apart)
    if name == "composed":  # two tables have rows of words; the rest serves all words
        kept = []
        for tree, words in (run.params, OLD), (params, NEW):
            rows = np.array([words.index[word] for word in sorted(both)])
            tables = tree["input"].pop("table"), tree["output"]["table"].pop("corrections")
            kept.append([np.asarray(table)[rows] for table in tables])
        jax.tree.map(np.testing.assert_array_equal, (kept[1], params), (kept[0], run.params))
        return
    before, after = vectors(run.model, run.params, old_words), vectors(model, params, new_words)
    moved = 0
    for group in before:
        for word in both:
            (old, band), (new, now) = before[group][word], after[group][word]
            if band == now or name not in (*BANDED, "own head"):
                np.testing.assert_allclose(new, old, rtol=0, atol=1e-6)
            elif name in BANDED:
                moved += group == ("input" if name == "bands" else "output")
                assert new[-1] == old[-1]  # biases
                assert abs(new - old)[:-1].max() > 1e-2
    assert bool(moved) == (name in BANDED)
    if name == "tied":
        new = np.array([NEW.index[word] for word in NEW.words if word not in both])
        np.testing.assert_array_equal(params["input"]["table"][new], fresh["input"]["table"][new])


def test_another_model_is_refused(tmp_path):
    """One line names the first parameter that differs, before anything is trained."""
    saved_run(tmp_path / "run", config_of("tied"), OLD)
    run = {"init_from": str(tmp_path / "run")}
    for changes, names in (
        ({"body.widths": (9, 8)}, ("parameter body", "shape", "vocabulary")),
        ({"output.table.bias": False}, ("parameter output/table/bias", "(20,)", "missing")),
    ):
        config = config_of("tied", **run, **changes)
        with refuses(*names):
            check_fits(config, tmp_path / "new", build(config, len(NEW)))
    for changes, names in (
        (run | {"init_checkpoint": "77"}, ("'77'", "5")),
        ({"init_checkpoint": "latest"}, ("init_checkpoint=latest", "init_from")),
        ({"init_words": "both"}, ("init_words=both", "init_from")),
    ):
        with refuses(*names):
            check_origin(config_of("tied", **changes), tmp_path / "new")
    with refuses(str(tmp_path), "no run"):
        check_origin(config_of("tied", init_from=str(tmp_path)), tmp_path / "new")


def test_layers_that_compute_something_else(tmp_path, caplog):
    """Parameters of the same shapes under other settings are warned of; dropout is none of them."""
    heads = TIED | SOFTMAX | {"body.features": 8, "body.heads": 2, "body.dropout": 0.1}
    saved_run(tmp_path / "run", complete(heads), OLD)
    for changes, says in (
        ({"body.dropout": 0.2}, []),
        ({"body.heads": 4}, ["heads was 2 and is now 4"]),
    ):
        config = complete(heads, changes, {"init_from": str(tmp_path / "run")})
        check_fits(config, tmp_path / "new", build(config, len(NEW)))
        assert [line[-len(says[0]) :] for line in caplog.messages] == says


def test_counts_of_ngrams_are_no_other_layers(caplog):
    """Where the n-grams are counted, and from how many on, was warned of as another computation."""
    ngrams = complete({"input.name": "ngrams", "input.words.name": "lookup"})
    other = {"counts": "ngrams.npz", "least": ngrams["input"]["least"] + 1}
    module._warn_of_other_settings(ngrams | {"input": ngrams["input"] | other}, ngrams)
    assert not caplog.messages


SMALL = {
    "steps": 6,
    "evaluate_every": 0,
    "checkpoint_every": 0,
    "tokens_per_update": 128,
    "tokens_per_device": 128,
    "batches.sequence_length": 16,
    "optimizer.learning_rate": 0.3,
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
}


@pytest.fixture(scope="module")
def small(settings, tmp_path_factory):
    """`small(steps=3)`: the config of a short run; with `path="other"`, on a text that has half
    of the words and new ones.
    """
    other = tmp_path_factory.mktemp("other")
    for split, lines in ("train", 60), ("valid", 8), ("test", 8):
        text = [
            " ".join(f"the t{(i + k) % 6}w{k} n{(i * k) % 9}" for k in range(6))
            for i in range(lines)
        ]
        (other / f"{split}.txt").write_text("\n".join(text) + "\n")

    def small(path="", **changes):
        data = {key: value for key, value in settings().items() if key.startswith("data.")}
        data |= {"data.path": str(other), "data.vocabulary_size": 0} if path else {}
        return config_of("bands", **SMALL | data | {"output.table.name": "tied"} | changes)

    return small


def test_a_run_goes_on_with_another_text(small, tmp_path):
    """It begins with what the first run learned, resumes without the flag and without that run,
    exactly, and refuses another.
    """
    train(small(), tmp_path / "first")
    origin = {"init_from": str(tmp_path / "first"), "init_checkpoint": "latest"}
    changes = {"path": "other", "steps": 4, "seed": 5}
    train(small(**changes, **origin), tmp_path / "whole")
    train(small(**changes | {"steps": 2}, **origin), tmp_path / "stopped")
    with refuses("init_from", str(tmp_path / "first"), str(tmp_path / "elsewhere")):
        train(small(**changes | {"init_from": str(tmp_path / "elsewhere")}), tmp_path / "stopped")
    first = Run.open(tmp_path / "first", "latest")
    shutil.move(tmp_path / "first", tmp_path / "elsewhere")
    train(small(**changes), tmp_path / "stopped")
    whole, stopped = (Run.open(tmp_path / name, "latest") for name in ("whole", "stopped"))
    jax.tree.map(np.testing.assert_array_equal, stopped.params, whole.params)
    assert stopped.config["init_from"] == str(tmp_path / "first")
    before, after = (
        np.concatenate([np.ravel(a) for a in jax.tree.leaves(run.params["body"])])
        for run in (first, whole)
    )
    assert np.corrcoef(before, after)[0, 1] > 0.9  # 0 of fresh ones, of another seed

    train(
        small(path="other", steps=1, init_words="both", init_from=str(tmp_path / "elsewhere")),
        tmp_path / "both",
    )
    shutil.move(tmp_path / "elsewhere", tmp_path / "again")
    train(small(path="other", steps=2, init_words="both"), tmp_path / "both")  # resumes without it
    again = small(path="other", steps=2, init_from=f"{tmp_path / 'elsewhere'}/")  # and with it
    train(again, tmp_path / "both")
    words, alone = Run.open(tmp_path / "both").vocabulary, whole.vocabulary
    assert words.words[: len(alone)] == alone.words
    assert set(words.words) == {*alone.words, *first.vocabulary.words} > set(alone.words)
    assert not words.counts[len(alone) :].any()


def test_words_of_both_runs_have_the_counts_of_the_new_text(tmp_path):
    """Words that the new text has too rarely by itself had count 0, and `<unk>` theirs: infinite
    nats of a word by its count alone. A run that began so resumes.
    """
    (tmp_path / "run").mkdir()
    for split in "train", "valid":
        (tmp_path / f"{split}.txt").write_text("a a a b b c\n")
    data = complete({"data": {"corpus": "text_files", "path": str(tmp_path), "threshold": 3}})[
        "data"
    ]
    vocabulary = load(data).vocabulary
    assert UNKNOWN in vocabulary.words and "b" not in vocabulary.words
    write_with_checksums(
        Vocabulary.build({"b": 3, "c": 2, "d": 1, "<eos>": 4}), tmp_path / "vocabulary.txt"
    )
    config = {"data": data, "init_words": "both", "init_from": str(tmp_path)}
    config |= {"output": {"clusters": ""}}
    both = vocabulary_for(config, tmp_path / "run", vocabulary)
    ids = load(data, vocabulary=both).ids["train"]
    np.testing.assert_array_equal(both.counts, np.bincount(ids, minlength=len(both)))
    assert both.counts_by_word == {"a": 3, EOS: 1, UNKNOWN: 0, "b": 2, "c": 1, "d": 0}
    (tmp_path / "run" / "config.json").touch()
    write_with_checksums(both, tmp_path / "run" / "vocabulary.txt")
    assert vocabulary_for(config, tmp_path / "run", vocabulary).digest == both.digest


def test_a_run_keeps_the_ngrams_that_it_counts(small, tmp_path):
    """In ngrams.npz, which resuming, scoring and exporting read; a run that starts from it takes
    over their rows where it counts the same ones.
    """
    ngrams = {"input.name": "ngrams", "input.words.name": "lookup", "input.rows": 30}
    ngrams |= {"input.kind": "banded", "input.row_width": 8, "input.hashed_rows": 9, "steps": 2}
    first, second = tmp_path / "first", tmp_path / "second"
    train(small(**ngrams), first)
    saved = (first / "ngrams.npz").read_bytes()
    run = Run.open(first, "latest")
    ids = load(run.saved_config["data"]).ids["train"]
    for order, counts in read(first / "ngrams.npz", run.vocabulary, (2, 3)).items():
        expected = count(np.asarray(ids), len(run.vocabulary), order, 30, 2)
        np.testing.assert_array_equal(counts, expected)
    train(small(**ngrams | {"steps": 3}), first)
    assert (first / "ngrams.npz").read_bytes() == saved
    export(first, tmp_path / "exported", "latest")
    exported = Run.open(tmp_path / "exported")
    jax.tree.map(np.testing.assert_array_equal, exported.lexicon, run.lexicon)
    with refuses("counts", str(tmp_path / "none.npz")):
        train(small(**ngrams | {"input.counts": str(tmp_path / "none.npz")}), second)
    with pytest.raises(InputError, match="of another vocabulary"):
        train(small(path="other", **ngrams | {"input.counts": str(first / "ngrams.npz")}), second)
    with locked(second), refuses(str(second), "in use"):
        train(small(**ngrams), second)
    assert not (second / "ngrams.npz").exists()

    learnt = Run.open(first, "latest").params["input"]["ngrams_2"]
    pairs = read(first / "ngrams.npz", run.vocabulary, (2,))[2]
    for least, kept in (2, True), (int(pairs[-1, -1]) + 1, False):
        train(
            small(
                **ngrams
                | {"input.least": least, "steps": 1, "init_from": str(first)}
                | {"init_checkpoint": "latest", "optimizer.learning_rate": 1e-9}
            ),
            second,
        )
        rows = Run.open(second, "latest").params["input"]["ngrams_2"]["table_0"]
        assert np.allclose(rows, learnt["table_0"], atol=1e-6) == kept
        assert np.abs(learnt["table_0"]).max() > 1e-4
        shutil.rmtree(second)


def test_a_resumed_run_keeps_its_origin(small, tmp_path):
    """Without the flag: published.json still names it. Another checkpoint of it is refused, where
    it was ignored.
    """
    first, second = tmp_path / "first", tmp_path / "second"
    train(small(), first)
    row = {"row": "a.py:b", "table": "Table 1", "validation": None, "test": 20.0}
    for given in {"init_from": str(first)}, {}:
        train(small(**given), second, (row, ["body.layers"]))
        changed = json.loads((second / "published.json").read_text())["changed"]
        assert changed == ["body.layers", "init_from"]
    for key, value in ("init_checkpoint", "latest"), ("init_words", "both"):
        with refuses(key, value):
            train(small(**{key: value}), second)
