"""The words that a model expects at a token: equal to sorting all log-probabilities."""

import jax
import numpy as np
import pytest

from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.scores import distributions
from adaptive_jax.scores.distributions import predictive_stats
from tests.random_runs import random_run

SIZE, FEATURES = 60, 16
WORDS = Vocabulary.build({"<eos>": 57, "<unk>": 3} | {f"w{n}": 60 - n for n in range(58)})


@pytest.fixture(scope="module")
def run(config):
    changes = {"body.features": FEATURES, "body.feed_forward": 16, "input.cutoffs": (10, 30)}
    return random_run(config(**changes), WORDS)


def test_the_most_probable_words_rank_and_entropy(run, monkeypatch):
    """Whatever the number of tokens at a time; of words that are equal none stands before the
    other.
    """
    bits = np.random.default_rng(0)
    hidden = bits.normal(0, 3, (11, FEATURES)).astype(np.float32)
    hidden[4] = 0  # all words of a band are equal
    targets = bits.integers(0, SIZE, 11, dtype=np.int32)
    dense = np.asarray(
        jax.jit(
            lambda states: run.model.apply(
                {"params": run.params},
                states,
                method=lambda model, states: model.output.log_probs(states),
            )
        )(hidden)
    )
    monkeypatch.setattr(distributions, "TOKENS", 4)
    computed = predictive_stats(run, {}, hidden, targets, 5)
    np.testing.assert_allclose(computed.log_probs, -np.sort(-dense, axis=1)[:, :5], rtol=1e-6)
    np.testing.assert_allclose(
        np.take_along_axis(dense, computed.words, 1), computed.log_probs, rtol=1e-6
    )
    of_targets = np.take_along_axis(dense, targets[:, None], 1)
    np.testing.assert_array_equal(computed.rank, 1 + (dense > of_targets).sum(axis=1))
    np.testing.assert_allclose(computed.entropy, -(np.exp(dense) * dense).sum(axis=1), rtol=1e-5)
    unpredictable = np.full(11, SIZE + 2)
    new = predictive_stats(run, {}, hidden, unpredictable, 1)
    np.testing.assert_array_equal(new.rank, SIZE + 1)
    every = predictive_stats(run, {}, hidden, targets, 1_000).words  # no more than there are
    np.testing.assert_array_equal(np.sort(every, axis=1), [np.arange(SIZE)] * 11)
