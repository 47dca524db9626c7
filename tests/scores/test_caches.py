"""Caches: the numbers of public code, brute-force twins in float64, and what evaluate.py makes
of them.
"""

import math

import jax
import numpy as np
import pytest

from adaptive_jax.data.batches.windows import Windows
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.scores import cache as caches
from adaptive_jax.scores import nearest
from adaptive_jax.scores.cache import Cache, interpolate, log_probs, occurrences
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.scores.methods import METHODS
from adaptive_jax.scores.scoring import Evaluation, composed, score_split
from tests.random_runs import quiet, random_run


def log_softmax(logits):
    logits = logits.astype(np.float64)
    most = logits.max(axis=-1, keepdims=True)
    return logits - most - np.log(np.exp(logits - most).sum(axis=-1, keepdims=True))


@pytest.fixture
def small(monkeypatch):
    """Chunks so small that a short text has many."""
    monkeypatch.setattr(caches, "QUERIES", 16)
    monkeypatch.setattr(caches, "BLOCK", 32)
    monkeypatch.setattr(caches, "FAR", 64)
    monkeypatch.setattr(nearest, "GROUP", 4)
    monkeypatch.setattr(nearest, "FEW", 3)
    caches._look_up.cache_clear()
    yield
    caches._look_up.cache_clear()


WORDS, FEATURES = 9, 4


def text(tokens, seed=0):
    """Hidden states and words."""
    bits = np.random.default_rng(seed)
    return bits.normal(size=(tokens, FEATURES)).astype(np.float32), bits.integers(
        0, WORDS, tokens, dtype=np.int32
    )


def twin(cache, hidden, targets, theta=0.0):
    """p_cache of every word at every token, `[tokens, words]` in float64, entry by entry; NaN
    where the cache is empty.
    """
    hidden, found = hidden.astype(np.float64), np.full((len(targets), WORDS), np.nan)
    for t in range(len(targets)):
        weights = {}
        for i in range(max(0, t - cache.size()), t):
            weights[i] = {"local": math.exp(theta * hidden[t] @ hidden[i])}.get(cache.cache, 1.0)
        if cache.cache == "unbounded" and weights:
            far = {i: math.dist(hidden[t], hidden[i]) for i in weights}
            nearest = sorted(far, key=far.get)[: cache.neighbours]
            radius = far[nearest[-1]]
            weights = {i: math.exp(-((far[i] / radius) ** 2) / 2) for i in nearest}
        masses = (
            np.bincount([targets[i] for i in weights], list(weights.values()), WORDS)
            if weights
            else np.zeros(WORDS)
        )
        if cache.cache == "unigram_softmax":
            masses = np.exp(masses)
        if masses.sum():
            found[t] = masses / masses.sum()
    return found


@pytest.mark.parametrize("tokens, size", [(75, 20), (64, 1000), (1, 5)])
@pytest.mark.parametrize(
    "cache",
    [
        Cache("local", theta=(0.0, 0.4, 2.0)),
        Cache("unbounded", neighbours=7),
        Cache("unigram"),
        Cache("unigram_softmax"),
    ],
    ids=lambda cache: cache.cache,
)
def test_a_cache_and_its_twin(small, cache, tokens, size):
    """Texts and sizes that chunks divide, do not divide and exceed; the twin is normalised, so
    the cache is, too.
    """
    cache, (hidden, targets) = cache._replace(cache_size=size), text(tokens)
    rows = log_probs(cache, hidden, targets, WORDS, quiet)
    assert rows.shape == (len(cache.theta), tokens)
    for theta, row in zip(cache.theta, rows, strict=True):
        expected = twin(cache, hidden, targets, theta)
        np.testing.assert_allclose(np.nansum(expected[1:], axis=1), 1.0)
        np.testing.assert_allclose(
            np.exp(row), expected[np.arange(tokens), targets], rtol=2e-5, atol=1e-7
        )


def test_the_nearest_of_a_block():
    """Those of a sort of all entries, whether none of a block is nearer than before, some in
    few groups, or all; also where all states share an offset that is far larger than distances.
    """
    bits = np.random.default_rng(0)
    queries, neighbours, block = 5, 30, (nearest.FEW + 20) * nearest.GROUP
    before = -np.sort(bits.random((queries, neighbours)).astype(np.float32))
    hits, words = bits.random((queries, neighbours)) < 0.5, bits.random((queries, block)) < 0.5
    search = jax.jit(nearest.nearest)
    states = np.float32(1e4) + bits.integers(0, 8, (queries, FEATURES)).astype(np.float32)
    for nearer in 0, 50, nearest.FEW, nearest.FEW + 10, block:
        keys = states[0] + bits.integers(8, 16, (block, FEATURES)).astype(np.float32)
        groups = bits.permutation(block // nearest.GROUP)[:nearer]  # one entry of each
        near = groups * nearest.GROUP + bits.integers(nearest.GROUP, size=len(groups))
        keys[near if nearer < block else slice(None)] = states[0]
        exact = -np.square(states[:, None].astype(np.float64) - keys).sum(axis=2)
        valid = bits.random((queries, block)) < 0.9
        found = search(nearest.Nearest(before - 40, hits), states, keys, valid, words)
        every = np.concatenate([before - 40, np.where(valid, exact, -np.inf)], axis=1)
        order = np.argsort(-every, axis=1)[:, :neighbours]
        closest = np.take_along_axis(every, order, axis=1)
        np.testing.assert_allclose(found.nearness, closest, rtol=1e-5, atol=1e-3)


def test_counts_of_a_window():
    """Counts of a word among the last so many; many occurrences of one word overflow nothing."""
    _, targets = text(300)
    slow = [list(targets[max(0, t - 20) : t]).count(targets[t]) for t in range(300)]
    np.testing.assert_array_equal(occurrences(targets, 20), slow)
    [chances] = log_probs(Cache("unigram_softmax"), None, np.zeros(2_000, np.int32), WORDS, quiet)
    assert chances[0] == pytest.approx(-math.log(WORDS))
    assert chances[-1] == pytest.approx(0.0, abs=1e-12)


def test_mixing():
    """λ p + (1 − λ) p_cache; the model alone where the cache is empty, or λ is 1; a model that
    gives 0 leaves the cache's share.
    """
    nll, chances = (
        np.array([1.0, 2.0, 3.0, np.inf]),
        np.array([np.nan, -np.inf, -0.5, math.log(0.5)]),
    )
    expected = [
        1.0,
        2.0 - math.log(0.9),
        -math.log(0.9 * math.exp(-3) + 0.1 * math.exp(-0.5)),
        -math.log(0.05),
    ]
    np.testing.assert_allclose(interpolate(nll, chances, 0.9), expected)
    np.testing.assert_array_equal(interpolate(nll, chances, 1.0), nll)


@pytest.mark.parametrize("kind", ["local", "unigram"])
def test_a_cache_of_a_split(config, kind):
    """Its entries are the words that count, each with the hidden state that predicted it; the
    uniform distribution is mixed in before the cache.
    """
    vocabulary = Vocabulary.build({"<eos>": 30} | {f"w{n}": 20 - n for n in range(WORDS - 1)})
    run = random_run(config(**{"input.cutoffs": (3, 6), "body.features": 16}), vocabulary)
    ids = np.random.default_rng(1).integers(0, 4, 90, np.int32)  # many empty lines
    windows = Windows(16, 0, "complete_doc", "packed", 2)
    job = Evaluation(
        run=run,
        ids=ids,
        windows=windows,
        uniform=0.1,
        down_weight=1.0,
        train=None,
        progress=lambda what: quiet,
        tables=lambda: composed(run, ids),
        encode=None,
    )
    options = Cache(kind, model_weight=(0.7,), theta=(0.1,), cache_size=20)
    ((_, nll),) = METHODS["cache"].score(job, options)
    alone, hidden = score_split(run, ids, windows, quiet, hidden=True)
    counts = ~np.isnan(alone)
    assert not counts.all()
    by_model = 0.9 * np.exp(-alone[counts]) + 0.1 / WORDS
    by_cache = twin(options, hidden[counts], ids[counts], 0.1)
    by_cache = by_cache[np.arange(counts.sum()), ids[counts]]
    mixed = np.where(np.isnan(by_cache), by_model, 0.7 * by_model + 0.3 * by_cache)
    np.testing.assert_array_equal(np.isnan(nll), ~counts)
    np.testing.assert_allclose(nll[counts], -np.log(mixed), rtol=1e-4)


@pytest.fixture(scope="module")
def asked(trained_copy):
    """`asked(**options)`: the result of a cache on the validation split of the trained run."""

    def asked(**options):
        request = Request("validation", checkpoint="latest", method="cache", options=options)
        return evaluate(trained_copy, request)

    return asked


def test_a_grid(asked):
    """One evaluation tries all pairs and keeps the best; each is what it is if asked for alone."""
    result = asked(model_weight=(1.0, 0.9, 0.7), theta=(0.0, 0.1), cache_size=100)
    pairs = [(line["model_weight"], line["theta"]) for line in result["grid"]]
    assert pairs == [(1.0, 0.0), (1.0, 0.1), (0.9, 0.0), (0.9, 0.1), (0.7, 0.0), (0.7, 0.1)]
    best = min(result["grid"], key=lambda line: line["nll"])
    assert {key: result[key] for key in best} == best
    alone = asked(model_weight=(0.7,), theta=(0.1,), cache_size=100)
    assert "grid" not in alone
    assert alone["nll"] == pytest.approx(result["grid"][-1]["nll"], rel=1e-9)


def test_an_unbounded_cache_of_an_evaluation(asked, trained_copy):
    """With the model's weight at 1 a cache changes nothing; at 0.9 it changes the score."""
    result = asked(cache="unbounded", model_weight=(1.0, 0.9))
    assert [line["model_weight"] for line in result["grid"]] == [1.0, 0.9]
    one, less = (line["nll"] for line in result["grid"])
    plain = evaluate(trained_copy, Request("validation", checkpoint="latest"))
    assert one == pytest.approx(plain["nll"], rel=1e-9) and one != less
    assert abs(less - one) < 0.2
