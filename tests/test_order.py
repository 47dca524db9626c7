"""The order of words at the model's door: clusters change what layers see, and nothing that
callers give or get.
"""

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.config.keys import complete
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.clusters import Header, order, read_clusters, write_clusters
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.sealed import read_sealed
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation.clusters import of_run
from adaptive_jax.evaluation.evaluate import Request, evaluate
from adaptive_jax.evaluation.runs import open_run
from adaptive_jax.model.gradients import make_gradients
from adaptive_jax.model.language_model import build, parameter_shapes
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.parallel import sharding
from adaptive_jax.training.dry_run import dry_run
from adaptive_jax.training.loop import train
from tests.toys import NoBody
from tests.training.test_runs import assert_close, state_of

WORDS = Vocabulary.build({"<eos>": 9, "<unk>": 4} | {"ab" * (n % 5) + str(n): 1 for n in range(39)})
SIZES = (9, 20, 12)
CUTOFFS = (9, 29)
CNN = {
    "input.name": "char_cnn",
    "input.width": 4,
    "input.filters": ((2, 8),),
    "input.length": 8,
    "input.highway_layers": 0,
}
LEXICON = str(Path(__file__).parent / "fixtures" / "lexicon.jsonl")
OWN = {"output.table.name": "own", "output.table.factor": 2}
CASES = {
    "adaptive, own": (
        {
            "input.name": "adaptive",
            "input.cutoffs": (5, 20),
            "input.factor": 2,
            "output.table.bias": True,
        }
        | OWN
    ),
    "char_cnn, own": CNN | OWN,
    "lookup, tied": {
        "input.name": "lookup",
        "output.table.name": "tied",
        "output.table.bias": True,
    },
    "adaptive, tied": {"input.name": "adaptive", "input.factor": 2, "output.table.name": "tied"},
    "char_cnn, tied": CNN | {"output.table.name": "tied"},
    "groc, tied": (
        CNN
        | {
            "input.name": "groc",
            "input.strides": (2,),
            "input.lexicon": LEXICON,
            "output.table.name": "tied",
        }
    ),
}
BODY = {"body.features": 16, "body.heads": 2}


def shuffled(vocabulary, path, sizes):
    """A file of clusters of a vocabulary at random; its ids in this order."""
    ids = np.random.default_rng(3).permutation(len(vocabulary)).astype(np.int32)
    write_clusters(
        path, Header("kmeans", 3, vocabulary.digest, sizes), [vocabulary.words[i] for i in ids]
    )
    return ids


def outcome(config, vocabulary, ids, targets):
    """Loss, nll and log-probabilities in one program; gradients of an update in two parts, too,
    where all vectors are composed.
    """
    model = build(config, len(vocabulary)).clone(
        body=NoBody()
    )  # a body sees no ids, and takes long to compile
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda a: jnp.asarray(random.normal(0, 0.3, a.shape), jnp.float32), parameter_shapes(model)
    )
    variables = {"params": params, "lexicon": lexicon(vocabulary, model.wants())}
    rows = jnp.arange(len(ids))
    batch = Batch(ids, targets, jnp.where(targets < 0, 0.0, 1.0), rows)
    positions = jnp.full((len(ids), 1), 3)

    def everything(variables, batch):
        loss = model.apply(variables, batch)[0]
        if model.composed_words() == "all":
            parts = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[1:]), batch)
            arguments = variables["params"], variables["lexicon"], jnp.int32(0), parts, ()
            loss = loss.total, make_gradients(model, sharding.device_mesh(), 0)(*arguments)
        hidden, _ = model.apply(variables, batch, method="hidden")
        nll = model.apply(variables, hidden[:, 1:], targets[:, 1:], method="nll")
        log_probs = model.apply(variables, batch, positions, method="log_probs")
        return loss, hidden, nll, log_probs

    program = jax.jit(everything).lower(variables, batch).compile()
    return program(variables, batch)


@pytest.mark.parametrize("case", CASES)
def test_clusters_are_a_permutation_by_hand(case, tmp_path):
    """The same parameters with places for ids: loss, gradients, nll; log-probabilities in the
    order of words.
    """
    config = complete(BODY, CASES[case])
    words = shuffled(WORDS, tmp_path / "clusters.txt", SIZES)
    places, tied = np.argsort(words), "tied" in case
    ids = np.random.default_rng(0).integers(0, len(WORDS), (4, 7))
    inputs, targets = ids[:, :-1], ids[:, 1:].copy()
    targets[0, 0] = -1  # of weight 0
    config["output"]["clusters"] = str(tmp_path / "clusters.txt")
    ours = outcome(config, WORDS, inputs, targets)

    config["output"]["clusters"] = ""
    cut = config["input"] if case == "adaptive, tied" else config["output"]["table"]
    cut["cutoffs"] = CUTOFFS
    other = Vocabulary(tuple(WORDS.words[i] for i in words), WORDS.counts[words]) if tied else WORDS
    by_hand = outcome(
        config,
        other,
        places[inputs] if tied else inputs,
        np.where(targets < 0, -1, places[targets]),
    )
    *by_hand, log_probs = by_hand
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        ours,
        (*by_hand, log_probs[..., places]),
    )
    np.testing.assert_allclose(jax.nn.logsumexp(ours[-1], axis=-1), 0, atol=1e-5)
    at_three = np.take_along_axis(np.asarray(ours[-1])[:, 0], targets[:, 3:4], axis=1)[:, 0]
    np.testing.assert_allclose(ours[2][:, 2], -at_three, atol=1e-5)


def check_embeddings(workdir):
    """Those of a run are rows of its input's assembled table by word, though the table is in
    the order of clusters.
    """
    run = open_run(workdir)
    ids, vectors = of_run(workdir, run.vocabulary)
    given, places = {"params": run.params, "lexicon": run.lexicon}, run.lexicon["order"]["places"]
    rows = jax.jit(
        lambda given: run.model.apply(given, places, method=lambda m, places: m.input(places))
    )(given)
    np.testing.assert_allclose(vectors, rows, atol=1e-6)
    assert ids.tolist() == list(range(122))


def test_a_run_keeps_its_clusters(config, settings, tmp_path):
    """Stopped and resumed without the file that it began with, it ends and evaluates as a run
    that was never stopped.
    """
    file, clusters = tmp_path / "clusters.txt", {"output.clusters": str(tmp_path / "clusters.txt")}
    shuffled(load(config()["data"]).vocabulary, file, (40, 40, 42))
    last = {"evaluate_every": 0, "checkpoint_every": 0} | clusters
    train(config(steps=6, **last), tmp_path / "whole")
    train(config(steps=3, **last), tmp_path / "stopped")
    file.unlink()
    train(config(steps=6, **last), tmp_path / "stopped")
    own = {"output.clusters": str(tmp_path / "stopped" / "clusters.txt")}
    assert_close(*(state_of(tmp_path / name, config(**own)) for name in ("stopped", "whole")), 0)
    whole, stopped = (
        evaluate(tmp_path / name, Request("test"))["nll"] for name in ("whole", "stopped")
    )
    assert whole == stopped
    check_embeddings(tmp_path / "whole")

    other, copy = tmp_path / "other.txt", tmp_path / "stopped" / "clusters.txt"
    dry_run(
        config(
            steps=9,
            **last | {"output.clusters": str(shutil.copy(copy, other)), "data.vocabulary_size": 9},
        ),
        copy.parent,
        1,
    )
    shuffled(load(config()["data"]).vocabulary, other, (40, 42, 40))
    with pytest.raises(
        InputError, match="output.clusters was .* and is now .*other.txt, with other clusters"
    ):
        train(config(steps=9, **last | {"output.clusters": str(other)}), tmp_path / "stopped")
    with pytest.raises(InputError, match=r"cannot read output.clusters=.*make it with .*--output="):
        train(config(**clusters), tmp_path / "new")
    lines = copy.read_text().splitlines()
    copy.write_text("\n".join([lines[0], *lines[:0:-1], ""]))
    with pytest.raises(InputError, match=r"clusters.txt is damaged"):
        evaluate(tmp_path / "stopped", Request("test"))
    copy.unlink()
    for call in (
        (lambda: evaluate(copy.parent, Request("test"))),
        (lambda: train(config(**clusters), copy.parent)),
    ):
        with pytest.raises(InputError, match=r"clusters.txt is missing: restore"):
            call()
    other = read_sealed(tmp_path / "whole" / "vocabulary.txt", "").cut(limit=100)
    with pytest.raises(
        InputError,
        match=r"orders 122 words of another vocabulary .* 100 words.*adaptive_jax clusters",
    ):
        order(other, tmp_path / "whole" / "clusters.txt")


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda lines: lines[1:], "line 1: .* is no header"),
        (lambda lines: [lines[0].replace("9,20", "9,0,20"), *lines[1:]], "line 1: .* is no header"),
        (lambda lines: lines[:-1], "does not hold every word of the vocabulary once"),
        (lambda lines: [*lines[:-1], lines[1]], "does not hold every word"),
        (lambda lines: [lines[0].replace("9,20", "9,21"), *lines[1:]], "does not hold every word"),
    ],
)
def test_files_that_are_none(change, says, tmp_path):
    """What is read is what was written, or one line that says what is wrong."""
    path = tmp_path / "clusters.txt"
    words = shuffled(WORDS, path, SIZES)
    header, read = read_clusters(path, WORDS)
    assert (
        header == Header("kmeans", 3, WORDS.digest, SIZES)
        and header.cutoffs() == CUTOFFS
        and (read == words).all()
    )
    path.write_text("\n".join([*change(path.read_text().splitlines()), ""]))
    with pytest.raises(InputError, match=says):
        read_clusters(path, WORDS)


def test_a_file_of_fewer_words_builds_no_model(tmp_path):
    """The header alone says so, before anything is compiled."""
    path = tmp_path / "clusters.txt"
    shuffled(WORDS, path, SIZES)
    with pytest.raises(InputError, match=r"orders 41 words, and the vocabulary has 50"):
        build(complete(BODY, OWN, {"output.clusters": str(path)}), 50)
