"""The collection "lexicon" in a program of one's own: never made up, and checked before it is
read.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.inputs.char_cnn import CharacterCNN
from adaptive_jax.inputs.groc import GroC
from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.outputs.sampled import Sampled
from adaptive_jax.outputs.tables import OwnTable
from tests import refuses
from tests.toys import random_params

VOCABULARY = Vocabulary.build({"the": 5, "cat": 3, "sat": 2, "<eos>": 4, "<unk>": 1})
SMALL = {"width": 4, "filters": ((1, 3), (2, 2)), "length": 6, "strides": (1, 1)}
TOKENS = jnp.array([[0, 3, 1], [4, 0, 2]])


@pytest.fixture(scope="module", params=[CharacterCNN, GroC])
def composed(request, tmp_path_factory):
    """`(class, its fields, variables)` of an input that reads the lexicon."""
    fields = SMALL
    if request.param is GroC:
        path = tmp_path_factory.mktemp("lexicon") / "small.jsonl"
        path.write_text('{"word": "cat", "relations": ["the"], "definition": "the cat sat"}\n')
        fields = SMALL | {"lexicon": str(path), "relations": 2, "definition": 3}
    layer = request.param(len(VOCABULARY), 8, **fields)
    shapes = jax.eval_shape(layer.init, jax.random.key(0), TOKENS)
    assert list(shapes) == ["params"]
    variables = {"params": random_params(shapes["params"])}
    return request.param, fields, variables | {"lexicon": lexicon(VOCABULARY, layer.lexicon_spec)}


def test_no_lexicon_is_made_up(composed):
    """The result of `init` holds no lexicon, and does not run without one: all words would have
    the same vector, or the same count.
    """
    layer, fields, variables = composed
    with refuses("needs", "apply"):
        layer(len(VOCABULARY), 8, **fields).apply(
            {"params": variables["params"]}, TOKENS, mutable=True
        )
    sampled = Sampled(OwnTable(5, 8), 2, "unigram")
    arguments = jnp.ones((2, 8)), jnp.zeros(2, int)
    shapes = jax.eval_shape(
        lambda key: sampled.init(key, *arguments, method="loss"), jax.random.key(0)
    )
    assert list(shapes) == ["params"]
    with refuses("needs", "counts"):
        jax.eval_shape(lambda params: sampled.apply(params, *arguments, method="nll"), shapes)


def mapped(layer):
    shared = {"params": None, "lexicon": None}
    return nn.vmap(layer, variable_axes=shared, split_rngs={"params": False})


def scanned(step):
    shared = "params", "lexicon"
    return nn.scan(step, variable_broadcast=shared, split_rngs={"params": False})


@pytest.mark.parametrize("transform", [nn.remat, nn.jit, mapped, scanned])
def test_inside_flax_transforms(composed, transform):
    """The vectors are those of the layer itself: flax tries `setup` there without variables."""
    layer, fields, variables = composed

    class Model(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            if transform is not scanned:
                return transform(layer)(len(VOCABULARY), 8, name="words", **fields)(tokens)

            def step(module, carry, row):
                return carry, layer(len(VOCABULARY), 8, name="words", **fields)(row)

            return scanned(step)(self, (), tokens)[1]

    given = {name: {"words": inner} for name, inner in variables.items()}
    expected = jax.jit(layer(len(VOCABULARY), 8, **fields).apply)(variables, TOKENS)
    np.testing.assert_allclose(jax.jit(Model().apply)(given, TOKENS), expected, atol=1e-6)
    shapes = jax.eval_shape(Model().init, jax.random.key(0), TOKENS)
    assert jax.tree.map(jnp.shape, shapes) == jax.tree.map(jnp.shape, {"params": given["params"]})


@pytest.mark.parametrize(
    "fields, names",
    [
        ({"length": 5}, ["spelling letters", "[5, 6]", "[5, 5]"]),
        ({"letters": "elmo"}, ["spelling symbols", "[5]", "nothing"]),
        ({"vocabulary_size": 4}, ["spelling lengths", "[5]", "[4]"]),
    ],
)
def test_a_lexicon_of_other_settings(fields, names):
    """It would be read as this one, or fail deep inside."""
    layer = CharacterCNN(5, 8, **SMALL)
    params = jax.eval_shape(layer.init, jax.random.key(0), TOKENS)["params"]
    size = fields.get("vocabulary_size", 5)
    words = Vocabulary(VOCABULARY.words[:size], VOCABULARY.counts[:size])
    given = lexicon(
        words, CharacterCNN(**{"vocabulary_size": 5, "features": 8} | SMALL | fields).lexicon_spec
    )

    def vectors(lexicon):
        return jax.eval_shape(
            lambda p: layer.apply({"params": p, "lexicon": lexicon}, TOKENS), params
        )

    with refuses(*names):
        vectors(given)
    with refuses("spelling lengths", "nothing"):
        vectors({"spelling": {}})


def test_a_masked_id_that_does_not_exist(composed):
    """Its vector is NaN, and the gradients of a loss that leaves it out are those without it."""
    layer, fields, variables = composed
    makers = [(layer(len(VOCABULARY), 8, **fields), variables)]
    lookup = Lookup(len(VOCABULARY), 8, width=4)
    shapes = jax.eval_shape(lookup.init, jax.random.key(0), TOKENS)
    makers.append((lookup, random_params(shapes)))
    for model, given in makers:

        def total(params, tokens, model=model, given=given):
            vectors = model.apply(given | {"params": params}, tokens)
            in_vocabulary = (tokens >= 0) & (tokens < len(VOCABULARY))
            return jnp.where(in_vocabulary[..., None], vectors, 0).sum()

        vectors = jax.jit(model.apply)(given, jnp.array([0, -1, 2, 9]))
        missing = np.array([[False], [True], [False], [True]])
        np.testing.assert_array_equal(np.isnan(vectors), missing.repeat(8, axis=1))
        gradient = jax.jit(jax.grad(total))
        masked, expected = (
            gradient(given["params"], jnp.array(tokens)) for tokens in ([0, -1, 2, 9], [0, 2])
        )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), masked, expected)
