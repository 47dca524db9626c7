"""The softmax as a layer: its own table, its reductions, the most probable word, names of axes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax.sharding import PartitionSpec as P

from adaptive_jax import (
    AdaptiveInput,
    AdaptiveSoftmax,
    Hierarchical,
    Lookup,
    OwnTable,
    Softmax,
    TiedTable,
    adaptive_cross_entropy,
    linear_cross_entropy,
)
from adaptive_jax.losses import distribution
from adaptive_jax.losses.arguments import ADAPTIVE_REPORTS
from adaptive_jax.losses.reports import REPORTS
from adaptive_jax.outputs.softmax import FullSoftmax
from tests import refuses
from tests.toys import random_params

WORDS, FEATURES, CUTOFFS = 61, 8, (11, 30)
SIZES = {"vocabulary_size": WORDS, "features": FEATURES, "cutoffs": CUTOFFS, "factor": 2}
HIDDEN = np.random.default_rng(0).normal(size=(3, 7, FEATURES)).astype("f")
TARGETS = np.random.default_rng(1).integers(0, WORDS, (3, 7))
WEIGHTS = np.random.default_rng(2).uniform(size=(3, 7)).astype("f") * (TARGETS % 3 > 0)


def shapes_of(layer):
    return jax.eval_shape(lambda: layer.init(jax.random.key(0), HIDDEN, TARGETS))["params"]


class InSetup(nn.Module):
    """Makes the layer in setup."""

    def setup(self):
        self.softmax = AdaptiveSoftmax(**SIZES)

    def __call__(self, hidden, targets):
        return self.softmax(hidden, targets)


class InCompact(nn.Module):
    """Makes the layer where it is called."""

    @nn.compact
    def __call__(self, hidden, targets):
        return AdaptiveSoftmax(**SIZES, name="softmax")(hidden, targets)


def test_a_softmax_makes_its_own_table():
    """Sizes are those of an own table inside the layer, wherever the layer is made: else a
    parent would hold the table, or a copy of the layer would refuse its fields.
    """
    own = AdaptiveSoftmax(**SIZES, width=4, bias=True, tail_dropout=0.2)
    given = AdaptiveSoftmax(OwnTable(*SIZES.values(), 4, True), tail_dropout=0.2)
    assert own == given == own.clone() == own.copy()
    assert shapes_of(own) == shapes_of(given) == shapes_of(Softmax(given.table))
    expected = {"softmax": shapes_of(AdaptiveSoftmax(**SIZES))}
    assert shapes_of(InSetup()) == shapes_of(InCompact()) == expected


@functools.cache
def regularised():
    softmax = AdaptiveSoftmax(**SIZES, bias=True, label_smoothing=0.1, z_loss=0.01)
    return softmax, {"params": random_params(shapes_of(softmax))}


def test_a_call_reduces_as_the_function_does():
    """Mean and each token, in training and not, are `adaptive_cross_entropy` of its arrays; the
    sum is that of `loss`; a batch without weights has mean 0; targets of -100 count nowhere.
    """
    softmax, variables = regularised()

    @jax.jit
    def both(hidden, targets, weights):
        arrays = softmax.apply(variables, method="arrays")
        given, pairs = (hidden, targets, weights), []
        for reduction, train in ("mean", False), ("none", True):
            smooth = {"label_smoothing": 0.1, "z_loss": 0.01} if train else {}
            theirs = adaptive_cross_entropy(
                hidden, *arrays, targets, weights=weights, reduction=reduction, **smooth
            )
            ours = softmax.apply(variables, *given, reduction=reduction, train=train)
            pairs.append((ours, theirs))
        loss = softmax.apply(variables, *given, train=True, method="loss").total
        pairs.append((softmax.apply(variables, *given, reduction="sum", train=True), loss))
        padded = softmax.apply(variables, hidden, jnp.where(weights > 0, targets, -100))
        return pairs, padded, softmax.apply(variables, hidden, targets, method="nll")

    pairs, padded, nll = both(HIDDEN, TARGETS, WEIGHTS)
    for ours, theirs in pairs:
        np.testing.assert_array_equal(ours, theirs)
    np.testing.assert_allclose(padded, nll[WEIGHTS > 0].mean(), rtol=1e-6)
    nothing, *_ = both(HIDDEN, TARGETS, 0 * WEIGHTS)
    assert nothing[0][0] == 0


def test_a_mean_draws_the_dropout_of_the_sum():
    """With tail dropout, mean and sum are one draw; losses of single tokens have none, and say
    so.
    """
    softmax = AdaptiveSoftmax(**SIZES, tail_dropout=0.5)
    variables = {"params": random_params(shapes_of(softmax))}
    run = functools.partial(softmax.apply, variables, HIDDEN, TARGETS, WEIGHTS, train=True)
    rngs = {"dropout": jax.random.key(3)}
    mean, total = jax.jit(lambda: (run(rngs=rngs), run(rngs=rngs, method="loss").total))()
    np.testing.assert_allclose(mean, total / WEIGHTS.sum(), rtol=1e-6)
    one = functools.partial(softmax.apply, variables, train=True, rngs=rngs)
    alone, row = jax.jit(
        lambda h, y: (one(h[0], y[0]), one(h, y))  # a hidden state [features] is one token
    )(HIDDEN[0, :1], TARGETS[0, :1])
    np.testing.assert_array_equal(alone, row)
    with refuses("'none'"):
        run(rngs=rngs, reduction="none")


def test_reports_of_a_layer_are_those_of_the_function():
    """A call refused `reports`. With one band all of them are those of `linear_cross_entropy`; a
    head of clusters alone has those of several bands.
    """
    full = FullSoftmax(OwnTable(WORDS, FEATURES, bias=True), z_loss=0.01)
    layers = regularised()[0], Hierarchical(OwnTable(*SIZES.values())), full
    states = [{"params": random_params(shapes_of(layer))} for layer in layers]

    @jax.jit
    def both(states, hidden, weights):
        results, tokens = [], (hidden, TARGETS, weights)
        for layer, variables in zip(layers, states, strict=True):
            bands, clusters = layer.apply(variables, method="arrays")
            settings = {"weights": weights}
            settings |= {"label_smoothing": layer.label_smoothing, "z_loss": layer.z_loss}
            if clusters:
                asked = {"reports": ADAPTIVE_REPORTS}
                softmax = hidden, bands, clusters, TARGETS
                theirs = adaptive_cross_entropy(*softmax, **settings, **asked)
            else:
                asked = {"reports": REPORTS, "top_k": 3}
                softmax = hidden, bands[0].table, TARGETS
                theirs = linear_cross_entropy(*softmax, bias=bands[0].bias, **settings, **asked)
            ours = layer.apply(variables, *tokens, train=True, **asked)
            results.append((ours, theirs))
        return results

    for ours, theirs in both(states, HIDDEN, WEIGHTS):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)
        assert ((ours[1].nll > 0) == (WEIGHTS != 0)).all() and ours[1].correct.dtype == bool


def test_reports_see_the_masks_of_tail_dropout():
    """The way around, the function on `arrays()`, drew none."""
    softmax = AdaptiveSoftmax(**SIZES, tail_dropout=0.5)
    variables = {"params": random_params(shapes_of(softmax))}
    run = functools.partial(
        softmax.apply, variables, HIDDEN, TARGETS, WEIGHTS, rngs={"dropout": jax.random.key(3)}
    )
    (total, report), loss, (_, plain) = jax.jit(
        lambda: (
            run(train=True, reduction="sum", reports="nll"),
            run(train=True, method="loss"),
            run(reports=("nll",)),
        )
    )()
    np.testing.assert_array_equal(total, loss.total)
    np.testing.assert_array_equal(report.nll, loss.nll)
    assert (report.nll != plain.nll).any()


PREDICTED = {
    "full": Softmax(OwnTable(WORDS, FEATURES, bias=True)),
    "adaptive": AdaptiveSoftmax(**SIZES, width=4, bias=True),
    "hierarchical": Hierarchical(OwnTable(WORDS, FEATURES), classes=12),  # a loop over tails
}


@pytest.mark.parametrize("name", PREDICTED)
def test_the_predicted_word_is_the_argmax(name, monkeypatch):
    """Of all log-probabilities, over heads that decide, tails that do, and ties; in chunks of
    few tokens.
    """
    monkeypatch.setattr(distribution, "LOGITS", 2 * WORDS)
    softmax = PREDICTED[name]
    params = random_params(shapes_of(softmax), scale=3.0)
    hidden = np.concatenate([HIDDEN.reshape(-1, FEATURES) * s for s in (0, 0.3, 1, 5)])

    @jax.jit
    def run(hidden):
        methods = "predict", "log_probs"
        return [softmax.apply({"params": params}, hidden, method=name) for name in methods]

    predicted, log_probs = run(hidden[None])
    np.testing.assert_array_equal(predicted, log_probs.argmax(axis=-1))
    assert predicted.shape == (1, len(hidden)) and predicted.dtype == jnp.int32
    assert len(np.unique(predicted)) > 8
    if name == "adaptive":  # a word of every band
        assert set(np.searchsorted(CUTOFFS, predicted.ravel(), side="right")) == {0, 1, 2}


def test_prediction_computes_no_tail_that_cannot_win():
    """A tail of NaN changes no token whose head decides; if it were read, the word would be
    the tail's.
    """
    softmax, variables = regularised()
    table = dict(variables["params"]["table"])
    broken = {
        "params": variables["params"] | {"table": table | {"table_2": table["table_2"] * np.nan}}
    }
    hidden = 40 * table["table_0"][:4]  # far towards words of the head
    run = jax.jit(lambda given: softmax.apply(given, hidden, method="predict"))
    expected = run(variables)
    assert (expected < CUTOFFS[0]).all()
    np.testing.assert_array_equal(run(broken), expected)


def test_tables_and_clusters_start_and_are_cut_as_their_initializers_say():
    """With `nn.with_partitioning`, as flax's own layers: each table and the clusters have the
    names of their axes, and the loss is that of plain arrays.
    """
    init = nn.with_partitioning(nn.initializers.constant(0.25), ("words", "width"))
    softmax = AdaptiveSoftmax(**SIZES, table_init=init, clusters_init=init)
    variables = jax.jit(lambda: softmax.init(jax.random.key(0), HIDDEN, TARGETS))()
    specs = nn.get_partition_spec(variables)["params"]
    tables = {f"table_{i}": P("words", "width") for i in range(3)}
    assert specs == {
        "table": tables | {"projection_1": P(), "projection_2": P()},
        "clusters": P("words", "width"),
    }
    plain = nn.meta.unbox(variables)
    assert (plain["params"]["table"]["table_1"] == 0.25).all()
    assert (plain["params"]["clusters"] == 0.25).all()
    losses = jax.jit(lambda *given: [softmax.apply(each, HIDDEN, TARGETS) for each in given])
    np.testing.assert_array_equal(*losses(variables, plain))


def test_a_tied_table_has_the_features_of_its_source():
    """They need not be given twice, whatever the source."""
    for source in AdaptiveInput(**SIZES, width=4), Lookup(WORDS, FEATURES, 4):
        assert TiedTable(source) == TiedTable(source, FEATURES)
        assert shapes_of(Softmax(TiedTable(source))) == shapes_of(
            Softmax(TiedTable(source, FEATURES))
        )
