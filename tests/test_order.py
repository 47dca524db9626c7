"""The order of words: `output.clusters` numbers a run's words, and cuts its table, by clusters."""

import shutil

import jax
import numpy as np
import pytest

from adaptive_jax.config.keys import complete
from adaptive_jax.data.corpora.load import load
from adaptive_jax.data.vocabulary.clusters import (
    Header,
    in_clusters,
    in_order,
    read_header,
    with_clusters,
    write_clusters,
)
from adaptive_jax.data.vocabulary.on_disk import read_vocabulary
from adaptive_jax.data.vocabulary.subwords import Subwords
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.interop.export import export
from adaptive_jax.model.language_model import build
from adaptive_jax.runs.run import Run
from adaptive_jax.runs.settings import read_config, read_words
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training.dry_run import dry_run
from adaptive_jax.training.loop import train
from adaptive_jax.training.make_clusters import of_run
from tests import refuses
from tests.training.test_runs import assert_close, state_of

WORDS = Vocabulary.build({"<eos>": 9, "<unk>": 4} | {"ab" * (n % 5) + str(n): 1 for n in range(39)})
SIZES = (9, 20, 12)
CUTOFFS = (9, 29)
BODY = {"body.features": 16, "body.heads": 2}
OWN = {"output.table.name": "own", "output.table.factor": 2}
TIED = {"output.table.name": "tied"}


def shuffled(vocabulary, path, sizes):
    """A file of clusters of a vocabulary at random; its ids in this order."""
    ids = np.random.default_rng(3).permutation(len(vocabulary)).astype(np.int32)
    write_clusters(
        path, Header("kmeans", 3, vocabulary.digest, sizes), [vocabulary.words[i] for i in ids]
    )
    return ids


@pytest.mark.parametrize(
    "layers, group",
    [
        ({"input.name": "adaptive", "input.factor": 2} | TIED, "input"),
        ({"input.name": "lookup"} | TIED, "output.table"),
        ({"input.name": "lookup"} | OWN, "output.table"),
        ({"input.name": "adaptive", "input.cutoffs": ()} | OWN, "output.table"),
    ],
)
def test_a_config_and_its_words_in_clusters(layers, group, tmp_path):
    """Ids are places in the file, counts follow their words, and the table that the output reads is
    cut at the clusters; without clusters nothing changes.
    """
    ids = shuffled(WORDS, tmp_path / "c.txt", SIZES)
    given = complete(BODY, layers, {"output.clusters": str(tmp_path / "c.txt")})
    config, words = in_clusters(given, WORDS)
    assert words.words == tuple(WORDS.words[i] for i in ids)
    np.testing.assert_array_equal(words.counts, WORDS.counts[ids])
    np.testing.assert_array_equal(words.ranks, ids)
    by_hand = complete(BODY, layers, {f"{group}.cutoffs": CUTOFFS, "data.vocabulary_size": 41})
    assert config == by_hand
    model = build(config, len(words))
    bands = jax.eval_shape(
        lambda: model.init_with_output(jax.random.key(0), method=lambda m: m.output.bands())[0]
    )
    assert tuple(len(band.table) for band in bands) == SIZES
    assert in_clusters(config, words) == (config, words)


def test_sub_word_units_in_clusters(tmp_path):
    """Text is spelled in the same units, under other ids."""
    units = Subwords.build({"lowest": 5, "lower": 2, "newer": 6, "<eos>": 4}, 5)
    sizes = 100, 100, len(units) - 200
    shuffled(units, tmp_path / "c.txt", sizes)
    other = in_order(units, tmp_path / "c.txt")
    spelled = [[v.words[i] for i in v.encode("lower new")] for v in (units, other)]
    assert spelled[0] == spelled[1] and units.encode("lower") != other.encode("lower")
    other.write(tmp_path / "vocabulary.txt")
    again = read_vocabulary(tmp_path / "vocabulary.txt")
    assert again.digest == other.digest != units.digest and again.same_words(units)


def check_embeddings(run):
    """Those of a run are the vectors of its words."""
    ids, vectors = of_run(run, words := read_words(run))
    opened = Run.open(run)
    rows = jax.jit(
        lambda given: opened.model.apply(given, np.arange(122), method=lambda m, i: m.input(i))
    )({"params": opened.params})
    np.testing.assert_allclose(vectors, rows, atol=1e-6)
    assert ids.tolist() == list(range(len(words)))


def test_a_run_in_clusters(config, tmp_path):
    """Stopped and resumed without the file that it began with, it ends and evaluates as a run that
    was never stopped; so does its export. Other clusters, or none, are refused.
    """
    file, clusters = tmp_path / "clusters.txt", {"output.clusters": str(tmp_path / "clusters.txt")}
    words = load(config()["data"]).vocabulary
    shuffled(words, file, (40, 40, 42))
    ordered = in_order(words, file)
    last = {"evaluate_every": 0, "checkpoint_every": 0} | clusters
    train(config(steps=6, **last), tmp_path / "whole")
    train(config(steps=3, **last), tmp_path / "stopped")
    shutil.move(file, moved := tmp_path / "moved.txt")
    train(config(steps=5, **last), tmp_path / "stopped")
    train(config(steps=6, **last | {"output.clusters": str(moved)}), tmp_path / "stopped")
    config_of_bands = config(**{"input.cutoffs": (40, 80)})
    assert_close(*(state_of(tmp_path / name, config_of_bands) for name in ("stopped", "whole")), 0)
    export(tmp_path / "whole", tmp_path / "exported")
    found = [
        evaluate(tmp_path / name, Request("test")) for name in ("whole", "stopped", "exported")
    ]
    assert len({each["nll"] for each in found}) == 1
    # By counts, not by ids: the most frequent words have the most tokens.
    bins = found[0]["bins"]
    assert bins[-1]["least"] == 1_001 and bins[-1]["share"] > 0.4
    assert read_words(tmp_path / "stopped").words == ordered.words != words.words
    kept = read_config(tmp_path / "whole")
    assert (kept["output"]["clusters"], kept["input"]["cutoffs"]) == (str(file), (40, 80))
    check_embeddings(tmp_path / "whole")

    stopped = tmp_path / "stopped"
    dry_run(config(steps=9, **last | {"data.vocabulary_size": 9}), stopped)
    for sizes, name in ((40, 42, 40), "input.cutoffs"), ((40, 40, 42), "vocabulary"):
        write_clusters(moved, Header("kmeans", 4, words.digest, sizes), words.words)
        with refuses(name):
            train(config(steps=9, **last | {"output.clusters": str(moved)}), stopped)
    with refuses("output.clusters", "empty"):
        train(config(steps=9, **{"input.cutoffs": (40, 80)}), stopped)
    with refuses("output.clusters", "--output"):
        train(config(**clusters), tmp_path / "new")
    both = {"init_from": str(tmp_path / "whole"), "init_words": "both"}
    with refuses("init_words=both", "output.clusters"):
        train(config(**last | {"output.clusters": str(moved)} | both), tmp_path / "new")


@pytest.mark.parametrize(
    "change, name",
    [
        (lambda lines: lines[1:], "header"),
        (lambda lines: [lines[0].replace("9,20", "9,0,20"), *lines[1:]], "header"),
        (lambda lines: lines[:-1], "vocabulary"),
        (lambda lines: [*lines[:-1], lines[1]], "vocabulary"),
        (lambda lines: [lines[0].replace("9,20", "9,21"), *lines[1:]], "vocabulary"),
    ],
)
def test_invalid_cluster_files(change, name, tmp_path):
    """A file is read as it was written, or one line says what is wrong."""
    path = tmp_path / "clusters.txt"
    words = shuffled(WORDS, path, SIZES)
    header = read_header(path)
    assert header == Header("kmeans", 3, WORDS.digest, SIZES) and header.cutoffs() == CUTOFFS
    assert in_order(WORDS, path).words == tuple(WORDS.words[i] for i in words)
    with refuses("another vocabulary"):  # of the same words, with other counts
        in_order(Vocabulary(WORDS.words, WORDS.counts + 1), path)
    path.write_text("\n".join([*change(path.read_text().splitlines()), ""]))
    with refuses(name):
        in_order(WORDS, path)


@pytest.mark.parametrize(
    "layers, name",
    [
        ({"output.name": "softmax"} | OWN, "output.name='softmax'"),
        ({"output.name": "nce"} | OWN, "output.name='nce'"),
        ({"output.table.name": "mapped"}, "output.table.name='mapped'"),
        (
            {"input.name": "adaptive", "input.cutoffs": (5, 20)} | OWN,
            "input.cutoffs=(5, 20)",
        ),
    ],
)
def test_layers_that_clusters_do_not_fit(layers, name):
    """One line, before a file is read. An adaptive input that the output does not share would give
    its widest vectors to the words of the first cluster.
    """
    with refuses(name):
        with_clusters(complete(BODY, layers, {"output.clusters": "c.txt"}))


def test_a_model_is_not_built_with_clusters_unread():
    """It would be cut in order of frequency without a word."""
    with refuses("'c.txt'", "build"):
        build(complete(BODY, OWN, {"output.clusters": "c.txt"}), 50)
