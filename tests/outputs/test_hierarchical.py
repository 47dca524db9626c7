"""The hierarchical softmax against its definition: two softmaxes in float64 for every token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.numerics.bands import Band, softmax_flops
from adaptive_jax.outputs.softmax import Hierarchical
from adaptive_jax.outputs.tables import OwnTable
from tests.losses.test_banded import in_float64
from tests.toys import params_of_output

FEATURES, TOKENS = 8, 6
CASES = {  # words, cutoffs, factor, bias, classes
    "7 words, 7 classes": (7, (), 1, False, 7),
    "10,007 words, by cluster": (10_007, (100, 5_000), 2, True, 0),
    "267,735 words, 517 classes": (267_735, (), 1, True, 0),
}


def model_of(case):
    words, cutoffs, factor, bias, classes = CASES[case]
    return Hierarchical(OwnTable(words, FEATURES, cutoffs, factor, bias=bias), classes=classes)


def given(words):
    """Hidden states, targets at the edges and elsewhere, and weights."""
    targets = np.append(
        [0, words - 1, words // 3, words // 2],
        np.random.default_rng(0).integers(0, words, TOKENS - 4),
    )
    return (
        jax.random.normal(jax.random.key(2), (TOKENS, FEATURES)),
        targets.astype(np.int32),
        np.linspace(0, 2, TOKENS),
    )


def by_hand(hidden, targets, bands, clusters):
    """The nll of each target; what each token visits is computed for it alone."""
    starts, losses = np.cumsum([0, *(len(band.table) for band in bands)]), []
    for state, target in zip(hidden, targets, strict=True):
        number = int(np.searchsorted(starts, target, side="right")) - 1
        table, projection, bias = bands[number]
        there, losses = state if projection is None else projection @ state, [*losses, 0.0]
        visits = (
            (clusters.table, state, clusters.bias, number),
            (table, there, bias, target - starts[number]),
        )
        for rows, x, shift, column in visits:
            scores = rows @ x + (0 if shift is None else shift)
            losses[-1] += jax.nn.logsumexp(scores) - scores[column]
    return jnp.stack(losses)


@pytest.mark.parametrize("case", CASES)
def test_hierarchical_equals_its_definition(case):
    """Loss, nll and all gradients; words sit in classes as equal as can be."""
    words, *_, classes = CASES[case]
    model = model_of(case)
    params, (hidden, targets, weights) = params_of_output(model, FEATURES), given(words)

    def layers(params):
        return model.apply({"params": params}, method=lambda m: (m.bands()[1:], m.clusters))

    def fast(params, hidden):
        return model.apply({"params": params}, hidden, targets, weights, method="loss")

    def slow(params, hidden):
        nll = by_hand(hidden, targets, *layers(params))
        return nll @ weights, jnp.where(weights == 0, 0.0, nll)

    sizes = [len(band.table) for band in jax.eval_shape(layers, params)[0]]
    if "classes" in case:
        assert max(sizes) - min(sizes) <= 1
        assert len(sizes) == (classes or round(words**0.5))
    ours = jax.jit(jax.value_and_grad(fast, (0, 1), has_aux=True))(params, hidden)
    theirs = in_float64(jax.value_and_grad(slow, (0, 1), has_aux=True), params, hidden)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_every_class_of_a_cut_table_has_a_projection():
    """Three clusters of one width: beside words and their biases, three square projections,
    three rows and three biases.
    """
    model = Hierarchical(OwnTable(10_000, 400, (3_000, 6_000), 1, bias=True))
    shapes = jax.eval_shape(
        lambda: model.init(jax.random.key(0), jnp.zeros((1, 400)), method="log_probs")
    )
    assert sum(a.size for a in jax.tree.leaves(shapes)) == 10_000 * 401 + 3 * 400**2 + 3 * 401


def test_work_is_that_of_the_classes_visited():
    """With classes of equal words every token pays for the classes and for one of them."""
    bands = [Band(np.zeros((0, 16))), *[Band(np.zeros((100, 16)))] * 100]
    assert softmax_flops(bands) == pytest.approx(2 * 16 * (100 + 100))
