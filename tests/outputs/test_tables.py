"""Tables of many bands: what parameters they have, and that a model on them is small to compile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from adaptive_jax.inputs.adaptive import AdaptiveInput
from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.outputs.softmax import Softmax
from adaptive_jax.outputs.tables import OwnTable, TiedTable

WORDS, FEATURES = 1507, 8


def table_of(kind, cutoffs):
    return {
        "own": OwnTable(WORDS, FEATURES, cutoffs, 1),
        "own, narrow": OwnTable(WORDS, FEATURES, cutoffs, 1, 4),
        "tied": TiedTable(Lookup(WORDS, FEATURES), FEATURES, cutoffs=cutoffs),
    }[kind]


def shapes_of(model):
    return jax.tree.map(
        jnp.shape,
        jax.eval_shape(
            lambda: model.init(
                jax.random.key(0), jnp.zeros((1, FEATURES)), jnp.zeros(1, int), method="nll"
            )
        )["params"],
    )


@pytest.mark.parametrize(
    "kind, width, own",
    [
        ("own, narrow", 4, {"table": (WORDS, 4), "projection_0": (4, 8)}),
        ("tied", 8, {"source": {"table": (WORDS, 8)}}),
    ],
)
def test_five_hundred_bands_are_few_parameters(kind, width, own):
    """Bands of one width share a table, tails a stack of projections; the loss has as many
    products as that of ten bands, and few more lines for each band: slices of the table.
    """
    cutoffs = [tuple(range(step, WORDS, step)) for step in (3, 150)]
    models = [Softmax(table_of(kind, each)) for each in cutoffs]
    tails = 502
    assert shapes_of(models[0]) == {
        "clusters": (tails, width),
        "table": own | {"projections": (tails, width, width)},
    }
    shape = jax.ShapeDtypeStruct((4, FEATURES), jnp.float32)
    programs = []
    for model in models:
        params = jax.eval_shape(
            lambda model=model: model.init(
                jax.random.key(0), jnp.zeros((1, FEATURES)), method="log_probs"
            )
        )
        run = jax.grad(
            lambda p, h, model=model: (
                model.apply(p, h, jnp.zeros(4, int), jnp.ones(4), method="loss").total
            )
        )
        programs.append(jax.jit(run).lower(params, shape).as_text())
    many, few = programs
    assert many.count("dot_general") == few.count("dot_general")
    more = len(many.splitlines()) - len(few.splitlines())
    assert more < 5 * (len(cutoffs[0]) - len(cutoffs[1]))


@pytest.mark.parametrize("kind", ["own", "own, narrow", "tied"])
def test_few_bands_keep_their_parameters(kind):
    """The names that checkpoints hold: an array of its own for each band and each projection of
    a tail.
    """
    names = {
        "own": ["table_0", "table_1", "table_2"],
        "own, narrow": ["projection_0", "table_0", "table_1", "table_2"],
        "tied": ["source"],
    }[kind]
    assert sorted(shapes_of(Softmax(table_of(kind, (11, 30))))["table"]) == sorted(
        [*names, "projection_1", "projection_2"]
    )


@pytest.mark.parametrize("source", [Lookup(20, 8, 4), AdaptiveInput(20, 8, (5, 12), 2)])
def test_an_input_is_a_table(source):
    """Outputs on an input alone are those on a table that shares all of it."""
    hidden = jax.random.normal(jax.random.key(0), (4, 8))
    alone, shared = Softmax(source), Softmax(TiedTable(source, 8, share_head_projection=True))

    @jax.jit
    def both(hidden):
        params = alone.init(jax.random.key(1), hidden, method="log_probs")["params"]
        other = params | {"table": {"source": params["table"]}}
        log_probs = [
            model.apply({"params": p}, hidden, method="log_probs")
            for model, p in ((alone, params), (shared, other))
        ]
        return (
            log_probs,
            alone.apply({"params": params}, hidden, jnp.arange(4), train=True, method="loss").nll,
        )

    log_probs, nll = both(hidden)
    np.testing.assert_allclose(*log_probs, rtol=1e-6)
    np.testing.assert_allclose(nll, -jnp.diagonal(log_probs[0]), rtol=1e-5)


@pytest.mark.parametrize("cutoffs", [(20,), tuple(range(10, 100, 10))])
def test_projections_start_as_they_are_told(cutoffs):
    """Those of a few bands, and those of many, which are one array."""
    ones = nn.initializers.ones
    table = OwnTable(100, 8, cutoffs, factor=1, width=4, projection_init=ones)
    params = jax.jit(lambda: table.init(jax.random.key(0), method="bands"))()["params"]
    projections = [a for name, a in params.items() if name.startswith("projection")]
    assert projections and all((a == 1).all() for a in projections)


def test_bands_of_a_tied_table():
    """Those of its own cutoffs: it named the one band of its source, and a bias of that size."""
    tied = TiedTable(Lookup(WORDS, FEATURES), FEATURES, cutoffs=(150,), bias=True)
    assert tied.word_tables() == {"bias": [150, WORDS - 150]}
