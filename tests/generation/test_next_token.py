"""Words chosen without computing every tail, against all log-probabilities: top k and draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.generation.next_token import Grouped, NextToken, draw, draw_among, top_k
from adaptive_jax.losses.distribution import log_probs
from adaptive_jax.losses.groups import join
from adaptive_jax.numerics.bands import Band

FEATURES, ROWS = 8, 6
# Words of each band: two tails of their own; a head without words and a group of tails that one
# loop visits; no tail.
SIZES = {"adaptive": (20, 30, 50), "hierarchical": (0, *[9, 10] * 5), "softmax": (60,)}
DRAWS = 4_000


@functools.cache
def softmax(name):
    """Bands whose tails differ in what they hold, and hidden states `[rows, features]`, the
    first rows of which are sure.
    """
    keys = iter(jax.random.split(jax.random.key(3), 50))
    sizes = SIZES[name]
    bands = [
        Band(2 * jax.random.normal(next(keys), (size, FEATURES)) / (1 + (i > 0)))
        for i, size in enumerate(sizes)
    ]
    clusters = (
        Band(jax.random.normal(next(keys), (len(sizes) - 1, FEATURES))) if len(sizes) > 1 else None
    )
    hidden = jax.random.normal(next(keys), (ROWS, FEATURES)) * jnp.linspace(1.0, 0.2, ROWS)[:, None]
    return bands, clusters, hidden


def next_token(name, hidden, banned=()):
    bands, clusters, _ = softmax(name)
    if clusters is None:
        return NextToken(log_probs(hidden, bands), banned)
    return NextToken.banded(hidden, Grouped(*join(bands), clusters), banned)


def dense(name, banned=()):
    """All log-probabilities in float64 `[rows, words]`."""
    bands, clusters, hidden = softmax(name)
    values = np.array(log_probs(hidden, bands, clusters), np.float64)
    values[:, list(banned)] = -np.inf
    return values


@pytest.mark.parametrize(
    "name, banned, sizes",
    [
        ("adaptive", (), (1, 40)),
        ("adaptive", (3, 25), (7,)),
        ("hierarchical", (), (7,)),
        ("softmax", (3,), (7,)),
    ],
)
def test_best_words_are_those_of_all_log_probabilities(name, banned, sizes):
    """For a few words, and for more than the head has; with and without words that count as
    impossible.
    """
    hidden = softmax(name)[2]
    for k in sizes:
        best = jax.jit(lambda hidden, k=k: top_k(next_token(name, hidden, banned), k))(hidden)
        expected = dense(name, banned)
        order = np.argsort(-expected, axis=1, kind="stable")[:, :k]
        np.testing.assert_array_equal(best.ids, order)
        np.testing.assert_allclose(
            best.log_probs, np.take_along_axis(expected, order, axis=1), rtol=1e-5
        )


def test_only_tails_that_can_matter_are_computed():
    """Row by row, as many as have at least the probability of the k-th best word."""
    for name in "adaptive", "hierarchical":
        hidden = softmax(name)[2]
        one = jax.jit(
            lambda row, name=name: (
                top_k(next_token(name, row), 3),
                next_token(name, row).cluster_log_probs,
            )
        )
        closed = 0
        for row, values in zip(hidden, dense(name), strict=True):
            best, reached = one(row[None])
            needed = int((np.asarray(reached) >= np.sort(values)[-3]).sum())
            assert int(best.clusters_computed) == needed
            closed += reached.shape[1] - needed
        assert closed > 0


@functools.cache
def drawing(name, banned=()):
    """A program that draws a word for many rows of hidden states."""

    def drawn(hidden, seed, power):
        keys = jax.random.split(jax.random.key(seed), len(hidden))
        bands, clusters, _ = softmax(name)
        return draw(NextToken(log_probs(hidden, bands, clusters), banned).log_probs, keys, power)

    return jax.jit(drawn)


def chances(values, power, top_p=1.0):
    """The distribution to draw from, by sorting all words: float64 `[words]`."""
    mass = np.exp(power * (values - values.max()))
    order = np.argsort(-values, kind="stable")
    before = np.cumsum(mass[order]) - mass[order]
    kept = np.zeros(len(values))
    kept[order[before < top_p * mass.sum()]] = 1
    return mass * kept / (mass * kept).sum()


def check_frequencies(words, expected):
    """Pearson's chi-square of words drawn, those with less than 5 expected joined, is no more
    than chance: p > 1e-4.
    """
    counts = np.bincount(words, minlength=len(expected))
    assert not counts[expected == 0].any()
    often = expected * len(words) >= 5
    observed, wanted = [
        np.append(a[often], a[~often].sum()) for a in (counts, expected * len(words))
    ]
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    assert ((observed - wanted) ** 2 / wanted).sum() < degrees + 4 * np.sqrt(2 * degrees) + 10


@pytest.mark.parametrize("power", [1.0, 2.5, 0.4])
@pytest.mark.parametrize(
    "name, banned", [("adaptive", ()), ("adaptive", (3, 25)), ("hierarchical", ())]
)
def test_draws_have_the_frequencies_of_all_words(name, banned, power):
    """4,000 draws of a row against the distribution of all words, at three temperatures."""
    hidden, values = jnp.tile(softmax(name)[2][3:4], (DRAWS, 1)), dense(name, banned)[3]
    draws = drawing(name, banned)(hidden, 0, power)
    check_frequencies(np.asarray(draws.id), chances(values, power))
    np.testing.assert_allclose(draws.log_prob, values[draws.id], rtol=1e-5, atol=1e-6)


def test_draws_of_many_words():
    """From blocks of words, of which the last is not full: no word of the padding, and words of the
    last block as often as they should be.
    """
    values = np.log(np.linspace(1.0, 2.0, 1_100))
    keys = jax.random.split(jax.random.key(1), DRAWS)
    log_probs = jnp.tile(jnp.float32(values - np.log(np.exp(values).sum())), (DRAWS, 1))
    draws = jax.jit(draw)(log_probs, keys, jnp.float32(2))
    check_frequencies(np.asarray(draws.id), chances(values, 2.0))


def test_a_tiny_share_is_the_most_probable_word():
    """On a flat distribution too, where draws among all would hardly ever find it."""

    @jax.jit
    def drawn(log_probs):
        keys = jax.random.split(jax.random.key(0), 2)
        best = top_k(NextToken(log_probs), 20_000)
        return draw_among(best, keys, jnp.float32(1), jnp.float32(1e-9))

    assert drawn(jnp.zeros((2, 20_000))).id.tolist() == [0, 0]


@pytest.mark.parametrize("k", [9, 100])
def test_draws_among_the_best_have_their_frequencies(k):
    """Top k, and top p of these and of all words, at a temperature."""
    values, hidden = dense("adaptive")[4], jnp.tile(softmax("adaptive")[2][4:5], (DRAWS, 1))

    @jax.jit
    def drawn(hidden, seed, power, top_p):
        best = top_k(next_token("adaptive", hidden), k)
        return draw_among(best, jax.random.split(jax.random.key(seed), DRAWS), power, top_p)

    best = np.where(np.argsort(np.argsort(-values, kind="stable")) < k, values, -np.inf)
    for power, top_p in (1.0, 1.0), (0.5, 0.6), (2.0, 0.9):
        draws = drawn(hidden, 1, power, top_p)
        check_frequencies(np.asarray(draws.id), chances(best, power, top_p))
        np.testing.assert_allclose(draws.log_prob, values[draws.id], rtol=1e-5)
