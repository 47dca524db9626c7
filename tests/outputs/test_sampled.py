"""Sampled softmax and noise-contrastive estimation against their sums in float64; how often
candidates are drawn.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.outputs import sampled
from adaptive_jax.outputs.sampled import NCE, Sampled
from adaptive_jax.outputs.tables import OwnTable
from tests import refuses
from tests.losses.test_banded import in_float64
from tests.programs import dtypes_of_products
from tests.toys import params_of_output

FEATURES, TOKENS, SAMPLES = 8, 4, 9
CASES = {  # class, words, width, bias, proposal
    "sampled, 7 words": (Sampled, 7, 8, True, "unigram"),
    "sampled, 10,007 words": (Sampled, 10_007, 4, False, "log_uniform"),
    "nce, 7 words": (NCE, 7, 4, True, "log_uniform"),
    "nce, 267,735 words": (NCE, 267_735, 8, True, "unigram"),
}
RNGS = {"dropout": jax.random.key(5)}


def counts_of(words):
    return (1e6 / np.arange(1, words + 1)).round().astype(np.float32) + 1


def setting(case, samples=SAMPLES):
    """The model, its variables, hidden states, targets and weights."""
    kind, words, width, bias, proposal = CASES[case]
    model = kind(OwnTable(words, FEATURES, width=width, bias=bias), samples, proposal)
    lexicon = {"lexicon": {"counts": counts_of(words)}} if proposal == "unigram" else {}
    targets = np.append(
        [0, words - 1, 1], np.random.default_rng(0).integers(0, words, TOKENS - 3)
    ).astype(np.int32)
    hidden = jax.random.normal(jax.random.key(2), (TOKENS, FEATURES))
    variables = {"params": params_of_output(model, FEATURES)} | lexicon
    return model, variables, hidden, targets, np.linspace(0, 2, TOKENS)


def drawn(model, variables, words):
    """The candidates that a training loss draws, and the log of how often each word is expected
    among them.
    """
    key = model.apply(variables, rngs=RNGS, method=lambda m: m.make_rng("dropout"))
    ranks, counts = np.arange(1, words + 1), counts_of(words).astype(np.float64)
    if model.proposal == "unigram":
        return sampled.unigram(key, jnp.asarray(counts_of(words)), SAMPLES), np.log(
            SAMPLES * counts / counts.sum()
        )
    return sampled.log_uniform(key, words, SAMPLES), np.log(
        SAMPLES * np.log((ranks + 1) / ranks) / math.log(words + 1)
    )


def by_hand(case, params, hidden, targets, candidates, expected):
    """Loss and estimated nll `[tokens]`, from the scores of target and candidates of one token
    after the other.
    """
    kind, words, *_ = CASES[case]
    table, rows = params["table"], []
    for state, target in zip(
        hidden @ table.get("projection_0", np.eye(FEATURES)).T, targets, strict=True
    ):
        drawn = np.append(candidates, target)
        scores = table["table_0"][drawn] @ state + (
            table["bias"][drawn] if "bias" in table else 0.0
        )
        others = jnp.exp(scores - expected[drawn])[:-1] * (candidates != target)
        nll = jnp.log(others.sum() + jnp.exp(scores[-1])) - scores[-1]
        odds = jnp.exp(
            scores - math.log(words) - expected[drawn]
        )  # that a word is data and no noise
        noise = -jnp.log(odds[-1] / (1 + odds[-1])) - jnp.log(1 / (1 + odds[:-1])).sum()
        rows.append((noise if kind is NCE else nll, nll))
    return tuple(map(jnp.stack, zip(*rows, strict=True)))


def train_loss(model, variables, params, *arrays):
    loss = model.apply(
        variables | {"params": params}, *arrays, train=True, rngs=RNGS, method="loss"
    )
    return loss.total, loss.nll


@pytest.mark.parametrize("case", CASES)
def test_the_training_loss_is_the_sum_over_candidates(case):
    """Loss, reported nll and all gradients."""
    model, variables, hidden, targets, weights = setting(case)
    candidates, expected = drawn(model, variables, CASES[case][1])

    def slow(params, hidden):
        loss, nll = by_hand(case, params, hidden, targets, np.asarray(candidates), expected)
        return loss @ weights, jnp.where(weights == 0, 0.0, nll)

    def fast(params, hidden, variables):
        return train_loss(model, variables, params, hidden, targets, weights)

    ours = jax.jit(jax.value_and_grad(fast, (0, 1), has_aux=True))(
        variables["params"], hidden, variables
    )
    theirs = in_float64(jax.value_and_grad(slow, (0, 1), has_aux=True), variables["params"], hidden)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", ["sampled, 7 words", "nce, 7 words"])
def test_many_candidates_estimate_the_nll(case):
    """With 20,000 candidates the reported nll is that among all words; for the sampled softmax
    so are loss and gradient.
    """
    model, variables, *arrays = setting(case, 20_000)

    @jax.jit
    def both(params):
        exact = jax.value_and_grad(
            lambda p: model.apply({**variables, "params": p}, *arrays, method="loss").total
        )(params)
        training = jax.value_and_grad(
            lambda p: train_loss(model, variables, p, *arrays), has_aux=True
        )(params)
        return exact, model.apply(variables, *arrays[:2], method="nll"), training

    (exact, gradient), nll, ((total, estimate), estimated) = both(variables["params"])
    np.testing.assert_allclose(estimate, np.where(arrays[2] == 0, 0.0, nll), rtol=0.05)
    if case.startswith("sampled"):
        np.testing.assert_allclose(total, exact, rtol=0.02)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.05), estimated, gradient)


@pytest.mark.parametrize("words", [7, 10_007])
@pytest.mark.parametrize("proposal", sampled.PROPOSALS)
def test_candidates_are_drawn_as_often_as_is_said(words, proposal):
    """A chi-squared statistic of 200,000 draws lies within four deviations of its mean; chances
    sum to 1.
    """
    draws, key, counts = 200_000, jax.random.key(1), jnp.asarray(counts_of(words))

    @jax.jit
    def drawn(key, counts):
        every = jnp.arange(words)
        if proposal == "unigram":
            return sampled.unigram(key, counts, draws), sampled.unigram_chance(every, counts)
        return sampled.log_uniform(key, words, draws), sampled.log_uniform_chance(every, words)

    ids, chances = drawn(key, counts)
    expected = draws * np.exp(np.asarray(chances, np.float64))
    assert expected.sum() == pytest.approx(draws, rel=1e-5)
    statistic = np.sum((np.bincount(ids, minlength=words) - expected) ** 2 / expected)
    assert abs(statistic - (words - 1)) < 4 * (2 * words + np.sum(1 / expected)) ** 0.5


def test_whole_counts_that_sum_beyond_int32():
    """Their sum in int32 is negative, and the loss was NaN."""
    model, variables, *arrays = setting("sampled, 7 words")
    counts = np.array([1.5e9, 1e9, 5e8, 10, 5, 2, 1])
    whole, real = (
        train_loss(model, {"lexicon": {"counts": given}}, variables["params"], *arrays)[0]
        for given in (counts.astype(np.int64), counts.astype(np.float32))
    )
    assert whole == real


@pytest.mark.parametrize("case", ["sampled, 7 words", "nce, 7 words"])
def test_a_target_that_was_never_counted(case):
    """It counts as half of the rarest word: with a chance of 0, NCE learnt nothing of it, and a
    sampled softmax had no finite loss.
    """
    model, variables, hidden, targets, weights = setting(case)
    model = model.clone(proposal="unigram")
    arrays = hidden, jnp.full_like(targets, 6), jnp.ones_like(weights)

    def loss(params, last):
        lexicon = {"counts": jnp.array([5.0, 3, 2, 1, 1, 1, last])}
        return train_loss(model, {"lexicon": lexicon}, params, *arrays)[0]

    run = jax.jit(jax.value_and_grad(loss))
    both = [run(variables["params"], last) for last in (0.0, 0.5)]
    jax.tree.map(np.testing.assert_array_equal, *both)
    assert jnp.isfinite(both[0][0])


@pytest.mark.parametrize("case", ["sampled, 7 words", "nce, 7 words"])
def test_a_lexicon_in_which_nothing_was_counted(case):
    """All words are equally likely; loss and gradients were NaN."""
    model, variables, *arrays = setting(case)
    model = model.clone(proposal="unigram")

    def loss(params, counts):
        return train_loss(model, {"lexicon": {"counts": counts}}, params, *arrays)[0]

    run = jax.jit(jax.value_and_grad(loss))
    nothing, equal = (run(variables["params"], jnp.full(7, count)) for count in (0.0, 3.0))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), nothing, equal)


def test_rare_words_of_a_large_vocabulary_can_be_drawn():
    """Of the rarest half of 267,735 words many different ones appear, more than 23 bits of one
    uniform number can tell apart.
    """
    words, draws = 267_735, 200_000
    ids = np.asarray(sampled.log_uniform(jax.random.key(0), words, draws))
    rare = ids[ids >= words // 2]
    share = math.log(2) / math.log(words)
    assert len(rare) == pytest.approx(draws * share, rel=0.05)
    different = len(np.unique(rare))
    assert different == pytest.approx(
        words / 2 * (1 - math.exp(-len(rare) / (words / 2))), rel=0.02
    )
    assert ids.min() >= 0 and ids.max() < words


@pytest.mark.parametrize("case", ["sampled, 10,007 words", "nce, 267,735 words"])
def test_training_sees_candidates_only_and_runs_in_bfloat16(case):
    """No array of tokens and words exists, nor any logits of all words; products in bfloat16
    change little.
    """
    model, variables, hidden, targets, weights = setting(case)

    def loss(params, variables, hidden):
        return train_loss(model, variables, params, hidden, targets, weights)

    text = (
        jax.jit(jax.grad(loss, has_aux=True))
        .lower(variables["params"], variables, hidden)
        .as_text()
    )
    assert f"{TOKENS}x{CASES[case][1]}x" not in text and f"{TOKENS}x{SAMPLES}xf32" in text
    run = jax.jit(loss)
    half = hidden.astype(jnp.bfloat16)
    text = run.lower(variables["params"], variables, half).as_text()
    assert dtypes_of_products(text) == {("bf16", "bf16", "f32")}
    (_, exact), (_, near) = (run(variables["params"], variables, h) for h in (hidden, half))
    np.testing.assert_allclose(near, exact, rtol=0.03)


def test_gradients_of_a_bfloat16_table_are_summed_in_float32():
    """A word that hundreds of tokens have as target would stop growing in bfloat16."""
    model, variables, hidden, targets, weights = setting("sampled, 7 words")
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), variables["params"])

    def loss(params):
        arrays = hidden.astype(jnp.bfloat16), targets, weights
        return train_loss(model, variables, params, *arrays)[0]

    program = str(jax.make_jaxpr(jax.grad(loss))(half))
    assert "scatter-add" in program and not re.search(r"bf16\[7,8\] = scatter-add", program)


def test_work_is_that_of_the_candidates():
    """A token is projected, then multiplied with its target and the candidates."""
    model = Sampled(OwnTable(1_000, 8, width=4), 9)
    bands = jax.eval_shape(lambda: model.init_with_output(jax.random.key(0), method="bands")[0])
    assert model.flops(bands) == 2 * 4 * (9 + 1 + 8)


def test_there_is_no_second_derivative():
    """Differentiating the written gradient again gave numbers on one device, and a traceback of
    JAX on a mesh.
    """
    model, variables, hidden, targets, weights = setting("sampled, 7 words")

    def gradient(hidden):
        def total(hidden):
            return model.apply(
                variables, hidden, targets, weights, train=True, rngs=RNGS, method="loss"
            ).total

        return jnp.sum(jax.grad(total)(hidden) ** 2)

    with refuses("second derivative"):
        jax.eval_shape(jax.grad(gradient), hidden)
