"""The layers of `adaptive_jax.nnx` give the numbers of the linen layers, parameter by parameter."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import adaptive_jax
from adaptive_jax import OwnTable, TiedTable
from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.inputs.ngrams import NGrams
from adaptive_jax.interop.torch_softmax import from_torch, to_torch
from adaptive_jax.nnx import AdaptiveInput, AdaptiveSoftmax, give_lexicon
from tests import refuses

SIZES = {"vocabulary_size": 40, "features": 8, "cutoffs": (10, 20), "factor": 2}
TOKENS = np.random.default_rng(0).integers(0, 40, (3, 5))
TARGETS = np.random.default_rng(1).integers(0, 40, (3, 5))
HIDDEN = np.random.default_rng(2).normal(size=(3, 5, 8)).astype("f")


def params_of(layer):
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def equal(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


class Tied(nnx.Module):
    """An input and a softmax on its table."""

    def __init__(self, rngs):
        self.embed = AdaptiveInput(**SIZES, rngs=rngs)
        self.softmax = AdaptiveSoftmax(source=self.embed, rngs=rngs)

    def __call__(self, tokens, targets):
        return self.softmax(self.embed(tokens), targets)


class LinenTied(linen.Module):
    """The same in linen."""

    def setup(self):
        self.embed = adaptive_jax.AdaptiveInput(**SIZES)
        self.softmax = adaptive_jax.AdaptiveSoftmax(TiedTable(self.embed))

    def __call__(self, tokens, targets):
        return self.softmax(self.embed(tokens), targets)


def test_a_softmax_is_linen_s():
    """Names of parameters, loss, gradients, dropout, log-probabilities, predictions and reports."""
    layer = AdaptiveSoftmax(**SIZES, tail_dropout=0.5, bias=True, rngs=nnx.Rngs(0))
    other = adaptive_jax.AdaptiveSoftmax(**SIZES, tail_dropout=0.5, bias=True)
    params, key = params_of(layer), jax.random.key(3)
    shapes = jax.eval_shape(lambda: other.init(key, HIDDEN, TARGETS))["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    assert jax.tree.structure(nnx.state(layer)) == jax.tree.structure(nnx.state(layer, nnx.Param))

    @nnx.jit
    def ours(layer, hidden):
        def loss(layer):
            return layer(hidden, TARGETS, train=True, rngs=nnx.Rngs(dropout=key))

        value, gradient = nnx.value_and_grad(loss)(layer)
        report = layer(hidden, TARGETS, reports=("correct",))[1]
        return value, gradient, layer.log_probs(hidden), layer.predict(hidden), report

    @jax.jit
    def theirs(params, hidden):
        def run(params, *given, **how):
            return other.apply({"params": params}, hidden, *given, **how)

        dropped = nnx.Rngs(dropout=key).dropout()
        value, gradient = jax.value_and_grad(run)(
            params, TARGETS, train=True, rngs={"dropout": dropped}
        )
        methods = "log_probs", "predict"
        report = run(params, TARGETS, reports=("correct",))[1]
        return value, gradient, *(run(params, method=name) for name in methods), report

    value, gradient, *rest = ours(layer, HIDDEN)
    equal((value, nnx.to_pure_dict(gradient), *rest), theirs(params, HIDDEN))


def test_a_tied_softmax_shares_the_parameters_of_its_input():
    """They are the same variables, so a step of an optimizer changes both; loss and gradients
    are those of the linen model.
    """
    model = Tied(nnx.Rngs(0))
    assert model.softmax.table["source"]["table_1"] is model.embed.table_1
    params = params_of(model)
    assert sorted(params) == ["embed", "softmax"] and sorted(params["softmax"]) == ["clusters"]
    value, gradient = nnx.jit(nnx.value_and_grad(lambda m: m(TOKENS, TARGETS)))(model)
    expected = jax.jit(
        jax.value_and_grad(lambda p: LinenTied().apply({"params": p}, TOKENS, TARGETS))
    )(params)
    equal((value, nnx.to_pure_dict(gradient)), expected)
    equal(model.softmax.bands()[1].table, model.embed.bands()[1].table)
    narrow = AdaptiveSoftmax(
        TiedTable(model.embed.to_nnx__module, share_projections=False),
        source=model.embed,
        rngs=nnx.Rngs(1),
    )
    assert sorted(params_of(narrow)["table"]) == ["projection_1", "projection_2", "source"]
    with refuses("table=OwnTable", "source"):
        AdaptiveSoftmax(OwnTable(40, 8), source=model.embed, rngs=nnx.Rngs(1))
    with refuses("TiedTable", "source"):
        AdaptiveSoftmax(TiedTable(model.embed.to_nnx__module), rngs=nnx.Rngs(1))
    with refuses("source=Embed"):
        AdaptiveSoftmax(source=nnx.Embed(9, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    for wrong in (lambda: TiedTable(model.embed), lambda: TiedTable(model.embed, features=8)):
        with refuses("source", "linen"):
            wrong()
    with refuses("table", "linen"):
        AdaptiveSoftmax(model.embed, rngs=nnx.Rngs(1))


def test_a_composed_input_and_the_softmax_on_it():
    """Any input works in the bridge: without its lexicon it says so, and the lexicon is no
    parameter. That of words beside n-grams took the place of their parameters.
    """
    words = Vocabulary.build({"the": 5, "cat": 3, "sat": 2, "<eos>": 4, "<unk>": 1})
    layer = adaptive_jax.CharacterCNN(5, 8, width=4, filters=((1, 3),), length=6)
    known, tokens = lexicon(words, layer.lexicon_spec), TOKENS % 5
    table = adaptive_jax.MappedTable(layer, 8, depth=0)
    embed = nnx.bridge.ToNNX(layer).lazy_init(tokens, rngs=nnx.Rngs(0))
    with refuses("spelling"):
        embed(tokens)
    give_lexicon(embed, known)
    ngrams = NGrams(layer, orders=(2,), rows=6, row_width=4)
    beside = nnx.bridge.ToNNX(ngrams).lazy_init(tokens, rngs=nnx.Rngs(0))
    give_lexicon(beside, lexicon(words, ngrams.lexicon_spec))
    assert params_of(beside)["words"].keys() == params_of(embed).keys()
    assert jax.eval_shape(lambda: beside(tokens)).shape == (*tokens.shape, 8)
    softmax = AdaptiveSoftmax(table, source=embed, rngs=nnx.Rngs(1))
    both, given = nnx.List([embed, softmax]), {"lexicon": known}

    def linen_loss(params):
        vectors = layer.apply({"params": params} | given, tokens)
        inner = {"params": params} | given
        inner = {name: {"table": {"source": each}} for name, each in inner.items()}
        return adaptive_jax.AdaptiveSoftmax(table).apply(inner, vectors, tokens)

    loss, gradient = nnx.jit(nnx.value_and_grad(lambda m: m[1](m[0](tokens), tokens)))(both)
    [gradient] = nnx.to_pure_dict(gradient).values()  # the softmax has no parameters of its own
    expected = jax.jit(jax.value_and_grad(linen_loss))(params_of(embed))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (loss, gradient), expected
    )


def test_weights_of_torch_go_in_and_out():
    """`nnx.update` takes the parameters of linen's layer, and `to_torch` reads the layer."""
    random = np.random.default_rng(0)
    shapes = {
        "head.weight": (12, 8),
        **{"tail.0.0.weight": (4, 8), "tail.0.1.weight": (10, 4)},
        **{"tail.1.0.weight": (2, 8), "tail.1.1.weight": (20, 2)},
    }
    state = {name: random.normal(size=shape).astype("f") for name, shape in shapes.items()}
    layer = AdaptiveSoftmax(**SIZES, rngs=nnx.Rngs(0))
    nnx.update(layer, from_torch(state)[1])
    equal(to_torch(layer), state)


def test_axes_keep_their_names():
    """Those of `linen.with_partitioning`, as flax's bridge hands them on."""
    init = linen.with_partitioning(linen.initializers.normal(), ("words", "width"))
    mesh = jax.make_mesh((1, 1), ("words", "width"), (jax.sharding.AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        layer = AdaptiveSoftmax(**SIZES, table_init=init, clusters_init=init, rngs=nnx.Rngs(0))
    specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))
    assert specs["table"]["table_2"] == specs["clusters"] == jax.P("words", "width")
