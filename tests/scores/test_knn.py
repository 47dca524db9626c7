"""Nearest neighbours in another text: against brute force in float64, over a trained run, and
the files of a datastore.
"""

import json
import shutil
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.scores import knn
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.knn import Datastore, Neighbours, log_probs
from adaptive_jax.scores.scoring import Scored
from tests import refuses
from tests.random_runs import quiet
from tests.scores.test_caches import FEATURES, WORDS, text


@pytest.fixture
def small(monkeypatch):
    """Parts so small that a short text has many."""
    for name, size in ("GROUP", 32), ("QUERIES", 16), ("BLOCK", 32):
        monkeypatch.setattr(knn, name, size)


def twin(store, hidden, neighbours, temperature):
    """p_knn of every word at every token, `[tokens, words]` in float64, token by token."""
    keys = np.asarray(store.keys, np.float64) + store.origin
    found = np.zeros((len(hidden), WORDS))
    for t, state in enumerate(hidden.astype(np.float64)):
        far = ((keys - state) ** 2).sum(axis=1)
        nearest = np.argsort(far)[:neighbours]
        weights = np.exp(-far[nearest] / temperature)
        np.add.at(found[t], store.words[nearest], weights / weights.sum())
    return found


@pytest.mark.parametrize("tokens, entries, neighbours", [(75, 100, 7), (20, 64, 1_000), (5, 3, 2)])
def test_the_search_and_its_twin(small, tokens, entries, neighbours):
    """Texts and datastores that parts divide, do not divide and exceed, and fewer entries than
    neighbours.
    """
    keys, words = text(entries, seed=0)
    store = Datastore(keys.astype(np.float16), words, np.zeros(FEATURES, np.float32))
    hidden, targets = text(tokens, seed=1)
    options = Neighbours(temperature=(0.5, 3.0), neighbours=neighbours)
    rows = log_probs(store, hidden, targets, options, lambda visits, count: visits)
    assert rows.shape == (2, tokens)
    for temperature, row in zip(options.temperature, rows, strict=True):
        expected = twin(store, hidden, neighbours, temperature)
        np.testing.assert_allclose(expected.sum(axis=1), 1.0)
        np.testing.assert_allclose(
            np.exp(row), expected[np.arange(tokens), targets], rtol=1e-4, atol=1e-7
        )


@pytest.fixture(scope="module")
def asked(trained_copy):
    """`asked(split, checkpoint, **options)`: the result on a copy of the trained run, whose
    workdir is `asked.workdir`.
    """
    workdir = trained_copy

    def asked(split="validation", checkpoint="latest", **options):
        return evaluate(
            workdir, Request(split, checkpoint=checkpoint, method="knn", options=options)
        )

    asked.workdir = workdir
    return asked


def test_an_evaluation(asked):
    """One search tries all pairs; the model alone is as without neighbours; the datastore is kept
    for the next.
    """
    result = asked(model_weight=(1.0, 0.9), temperature=(1.0, 100.0), neighbours=50)
    plain = evaluate(asked.workdir, Request("validation", checkpoint="latest"))
    settings = [(line["model_weight"], line["temperature"]) for line in result["grid"]]
    assert settings == [(1.0, 1.0), (1.0, 100.0), (0.9, 1.0), (0.9, 100.0)]
    one = [line["nll"] for line in result["grid"]]
    assert one[0] == one[1] == pytest.approx(plain["nll"], rel=1e-6)
    assert len({one[0], *one[2:]}) == 3 and all(abs(nll - one[0]) < 0.2 for nll in one)
    store = asked.workdir / "eval" / "datastore"
    made = (store / "keys").stat().st_mtime_ns
    alone = asked(model_weight=(0.9,), temperature=(100.0,), neighbours=50)
    assert alone["nll"] == pytest.approx(one[-1], rel=1e-6)
    assert (store / "keys").stat().st_mtime_ns == made
    entries, features = (
        json.loads((store / "about.json").read_text())[key] for key in ("entries", "features")
    )
    assert (store / "keys").stat().st_size == 2 * entries * features and features == 32


def test_a_datastore_of_other_parameters_is_made_anew(asked, config, tmp_path, caplog):
    """Of another checkpoint or damaged, it is replaced; another text has one of its own. Words in
    reverse gave another perplexity in silence, and an origin that was cut short a traceback.
    """

    def digest():
        return json.loads((asked.workdir / "eval" / "datastore" / "about.json").read_text())[
            "states"
        ]

    given = {"model_weight": (0.9,), "neighbours": 8}
    first = asked(**given)["nll"]
    before = digest()
    assert asked(checkpoint="200", **given)["nll"] != first
    assert digest() != before
    assert asked(**given)["nll"] == first and digest() == before
    about = asked.workdir / "eval" / "datastore" / "about.json"
    about.write_text(about.read_text()[:-9])
    assert asked(**given)["nll"] == first and digest() == before
    for name, change in (
        ("words", lambda content: content[::-1]),
        ("origin", lambda content: content[:-4]),
        ("keys", lambda content: content[:999] + bytes([content[999] ^ 1]) + content[1000:]),
    ):
        path = about.with_name(name)
        path.write_bytes(change(path.read_bytes()))
        assert asked(**given)["nll"] == first
        assert f"{path} is damaged" in caplog.text
    shutil.copy(Path(config()["data"]["path"]) / "test.txt", tmp_path / "train.txt")
    assert asked(datastore=str(tmp_path), **given)["nll"] != first
    assert digest() == before and len(list((asked.workdir / "eval").glob("datastore*"))) == 2


def test_states_that_do_not_fit(tmp_path):
    """States beyond float16 are one line."""
    with refuses("float16"):
        made(tmp_path, np.array([[1.0, 2.0], [3.0, 1e6]], np.float32), np.arange(2))


def made(folder, keys, words):
    """The datastore of hidden states and words."""
    scored = Scored(np.arange(len(keys)), np.zeros(len(keys)), keys)
    knn._write(folder, {}, [scored], words)
    return knn._read(folder, {})


def test_states_far_from_the_origin(small, tmp_path):
    """Hidden states far from zero keep their precision in float16 keys and in distances."""
    (keys, words), (hidden, targets) = text(100, seed=0), text(20, seed=1)
    far = np.float32(300)
    store = made(tmp_path, keys + far, words)
    [row] = log_probs(store, hidden + far, targets, Neighbours(neighbours=100), quiet)
    near = Datastore(keys, words, np.zeros(FEATURES))
    expected = twin(near, hidden, 100, 1.0)[np.arange(20), targets]
    np.testing.assert_allclose(np.exp(row), expected, rtol=0.02, atol=1e-4)


def test_two_evaluations_at_once(tmp_path, monkeypatch):
    """The second waits for the datastore of the first, and reads it."""

    def slow(run, ids, *_, **_options):
        made.append(ids)
        time.sleep(0.3)
        yield Scored(ids, ids, np.ones((len(ids), 2), np.float32))

    def evaluate(number):
        found[number] = knn.open_datastore(tmp_path, "datastore", None, np.arange(3), None, None)

    made, found = [], {}
    monkeypatch.setattr(knn, "scores", slow)
    monkeypatch.setattr(knn, "_description", lambda *_: {})
    both = [threading.Thread(target=evaluate, args=(number,)) for number in (1, 2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert len(made) == 1
    np.testing.assert_array_equal(found[1].origin, found[2].origin)


def test_the_text_to_be_scored(asked):
    """The evaluated text may not be the datastore: each token would find itself."""
    with refuses("datastore"):
        asked("train")


def test_a_datastore_of_other_windows(tmp_path, monkeypatch):
    """In another window or context words have other states. A link to a folder of another disk
    stays: nothing replaced its datastore, and the one that was made was lost.
    """
    (tmp_path / "disk").mkdir()
    (tmp_path / "eval").mkdir()
    (tmp_path / "eval" / "datastore").symlink_to(tmp_path / "disk")

    def scored(run, ids, windows, *_, **_options):
        computed.append((windows.window, windows.context))
        yield Scored(ids, ids, np.ones((len(ids), 2), np.float32))

    computed, run = [], SimpleNamespace(step=1, identity=b"", vocabulary=None, lexicon={})
    monkeypatch.setattr(knn, "scores", scored)
    monkeypatch.setattr(knn, "of_scores", lambda *_: "")
    for window, context in (8, 0), (8, 0), (8, 4), (16, 4):
        settings = Windows(window, context, "none", "packed", 1)
        knn.open_datastore(tmp_path, "datastore", run, np.arange(3), settings, None)
    assert computed == [(8, 0), (8, 4), (16, 4)]
    assert (tmp_path / "eval" / "datastore").is_symlink() and (tmp_path / "disk" / "keys").exists()


@pytest.mark.parametrize("tokens, expected", [(10_000, (8, 5)), (900, (3, 5)), (200, (1, 0))])
def test_rows_of_a_datastore_on_streams(tokens, expected, monkeypatch):
    """As in training: in one row a text takes a step a window; one row needs no context."""
    settings = []

    def opened(workdir, name, run, ids, windows, progress):
        settings.append(windows)
        raise NotImplementedError

    monkeypatch.setattr(knn, "open_datastore", opened)
    config = {"tokens_per_update": 480, "batches": {"sequence_length": 60}}
    job = SimpleNamespace(
        run=SimpleNamespace(workdir=None, config=config),
        ids=np.arange(1, 6),
        windows=Windows(60, 5, "none", "streams", 2),
        train=lambda _: np.arange(tokens),
        progress=lambda _: None,
    )
    with pytest.raises(NotImplementedError):
        next(knn.score(job, Neighbours()))
    assert (settings[0].rows, settings[0].context) == expected
