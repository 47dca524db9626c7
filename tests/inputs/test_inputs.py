"""Inputs at the size of a real vocabulary: what the gather and its gradient need, and which
rows they touch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.data.vocabulary.lexicon import lexicon
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.inputs import distinct
from adaptive_jax.inputs.adaptive import AdaptiveInput
from adaptive_jax.inputs.char_cnn import CharacterCNN
from adaptive_jax.inputs.groc import GroC
from adaptive_jax.inputs.lookup import Lookup
from tests.toys import random_params

WORDS = 267_735
INPUTS = {
    "adaptive": AdaptiveInput(WORDS, 256, (20_000, 60_000)),
    "lookup, narrow": Lookup(WORDS, 256, width=64),
}


@pytest.mark.parametrize("name", INPUTS)
def test_nothing_as_large_as_vocabulary_times_features(name):
    """Forward and backward pass beside parameters and gradients: a few times the vectors of the
    batch, not a table of all words.
    """
    model, tokens = INPUTS[name], jax.ShapeDtypeStruct((8, 64), jnp.int32)
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    vectors = jax.ShapeDtypeStruct((8, 64, 256), jnp.float32)

    def gradient(params, tokens, pull):
        return jax.vjp(lambda params: model.apply(params, tokens), params)[1](pull)

    compiled = jax.jit(gradient).lower(shapes, tokens, vectors).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 4 * 512 * 256 < 4 * WORDS * 256 / 50


def test_a_deviation_is_no_rate():
    """A normal table may start with any deviation, 1 (as in torch's Embedding) and more."""
    init = jax.jit(Lookup(4_096, 8, init_deviation=1.5).init)
    table = init(jax.random.key(0), np.zeros(1, int))
    assert abs(np.std(table["params"]["table"]) - 1.5) < 0.05


def dense(params, tokens, dtype):
    """The slow twin: every token in every band, the gradients added token by token."""
    vectors, first = 0.0, 0
    for i in range(len(params["params"]) // 2):
        table, projection = (params["params"][f"{name}_{i}"] for name in ("table", "projection"))
        place = jnp.where(tokens < first, len(table), tokens - first)
        rows = table.at[place].get(mode="fill", fill_value=0.0)
        vectors += rows.astype(dtype) @ projection.astype(dtype)
        first += len(table)
    return vectors + jnp.where((tokens >= 0) & (tokens < first), 0, jnp.nan)[..., None]


def alone(model, params, tokens, pull):
    vectors, back = jax.vjp(lambda params: model(params, tokens), params)
    return vectors, back(pull)[0]


def rematerialised(model, params, tokens, pull):
    return alone(jax.checkpoint(model), params, tokens, pull)


def mapped(model, params, tokens, pull):
    """Rows are mapped, and tables are not."""
    vectors, gradients = jax.vmap(lambda *row: alone(model, params, *row))(tokens, pull)
    return vectors, jax.tree.map(lambda a: a.sum(0), gradients)


def accumulated(model, params, tokens, pull):
    """A row at a time, its gradients added to those before."""

    def add(total, row):
        vectors, gradients = alone(model, params, *row)
        return jax.tree.map(jnp.add, total, gradients), vectors

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), (tokens, pull))[::-1]


@functools.cache
def setting(dtype, cutoffs):
    """A model, its parameters, tokens, a cotangent, and the results of the slow twin."""
    model = AdaptiveInput(40, 8, cutoffs, factor=2, dtype=jnp.dtype(dtype))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 40, (3, 24)) // rng.integers(1, 9, (3, 24))
    tokens[1] = np.arange(24) % 6
    tokens[2, 3:6] = -1, 40, -(2**31)
    every = np.arange(24), np.arange(16, 40)  # so that the last band's last chunk ends behind all
    tokens = np.asarray([*tokens, *every], np.int32)
    params = jax.jit(model.init)(jax.random.key(0), tokens[:1])
    pull = jnp.asarray(rng.standard_normal((5, 24, 8)), dtype)
    slow = functools.partial(dense, dtype=dtype)
    expected = jax.jit(lambda *a: alone(slow, *a))(params, tokens, pull)
    return model, params, tokens, pull, expected


@pytest.mark.parametrize(
    "way, dtype, cutoffs",
    [(way, "float32", (4, 9)) for way in (alone, rematerialised, mapped, accumulated)]
    + [(mapped, "bfloat16", (4, 9)), (alone, "float32", ()), (alone, "float32", (1, 7, 8))],
)
def test_each_word_once_is_every_token_in_every_band(way, dtype, cutoffs, monkeypatch):
    """Words that come often, chunks that a band fills, overfills and leaves empty, and ids that do
    not exist, which have vectors of NaN and no gradient. The gradients of a word's tokens would
    replace each other, or a chunk that ends behind all words would clear the gradient of one.
    """
    monkeypatch.setattr(distinct, "CHUNK", 4)
    model, params, tokens, pull, expected = setting(dtype, cutoffs)
    results = jax.jit(lambda *a: way(model.apply, *a))(params, tokens, pull)
    far = 1e-5 if dtype == "float32" else 0.05

    def check(a, b):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, atol=far * np.nanmax(abs(b)), rtol=0)

    jax.tree.map(check, results, expected)


def test_a_word_that_fills_the_batch():
    """In 16 bits, the sum of its tokens' gradients goes on in float32: in bfloat16 it stopped to
    grow, and in float16 it was infinite.
    """
    tokens = jnp.zeros((1, 4_096), jnp.int32)
    words = Vocabulary.build(dict.fromkeys(("the", "a", "cat"), 1))
    cnn = {"width": 4, "filters": ((1, 3),), "letters": "elmo", "length": 5, "strides": (1,)}
    for layer, fields, more in (
        (AdaptiveInput, {"cutoffs": (1,)}, [jnp.float16]),
        (Lookup, {}, [jnp.float16]),
        (CharacterCNN, cnn, []),
        (GroC, cnn | {"relations": 0, "definition": 0}, []),
    ):
        gradients = []
        for dtype in (jnp.float32, jnp.bfloat16, *more):
            model = layer(len(words), 4, dtype=dtype, **fields)
            given = {"lexicon": lexicon(words, getattr(model, "lexicon_spec", {}))}
            shapes = jax.eval_shape(model.init, jax.random.key(0), tokens[:, :1])
            params = random_params(shapes["params"])

            def total(params, model=model, given=given):
                vectors = model.apply({"params": params} | given, tokens)
                return 20 * jnp.sum(vectors.astype(jnp.float32))

            gradients.append(jax.jit(jax.grad(total))(params))
        for few in gradients[1:]:
            jax.tree.map(
                lambda a, b: np.testing.assert_allclose(a, b, atol=0.03 * np.abs(b).max() + 1e-6),
                few,
                gradients[0],
            )


def test_projections_of_few_bits():
    """The gradient of one in bfloat16 is a sum over chunks in float32: in bfloat16 it stopped to
    grow at 256 ones.
    """
    model = AdaptiveInput(3_000, 2, (1,), factor=1)
    tokens = jnp.arange(3_000)[None]
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    ones = jax.tree.map(lambda a: jnp.ones(a.shape, jnp.bfloat16), params)
    gradient = jax.jit(jax.grad(lambda p: model.apply(p, tokens).astype("float32").sum()))(ones)
    of_projection = gradient["params"]["projection_1"].astype("float32")
    np.testing.assert_allclose(of_projection, 2_999, rtol=0.01)


def test_biases_of_few_bits():
    """In bfloat16, the gradient of a bias is the float32 sum of those of all words."""
    words = Vocabulary.build({f"w{n}": 1 for n in range(60)})
    model = CharacterCNN(len(words), 4, width=4, filters=((1, 3),), length=5, dtype=jnp.bfloat16)
    tokens, given = jnp.arange(len(words)), {"lexicon": lexicon(words, model.lexicon_spec)}
    params = random_params(jax.eval_shape(model.init, jax.random.key(0), tokens[:1])["params"])
    pulls = jax.random.normal(jax.random.key(1), (len(words), 4), jnp.bfloat16).astype(jnp.float32)

    def total(params):
        return jnp.sum(pulls * model.apply({"params": params} | given, tokens).astype(jnp.float32))

    of_bias = jax.jit(jax.grad(total))(params)["projection_bias"]
    np.testing.assert_allclose(of_bias, np.sum(pulls, axis=0), rtol=1e-5)


def test_scaled_vectors():
    """By sqrt(features), as GroC's rows may be trained; the table that an output shares is not."""
    plain, scaled = (AdaptiveInput(9, 16, (4,), scaled=flag) for flag in (False, True))
    tokens = jnp.arange(9)
    params = jax.jit(plain.init)(jax.random.key(0), tokens)
    vectors = [jax.jit(model.apply)(params, tokens) for model in (plain, scaled)]
    np.testing.assert_allclose(vectors[1], 4 * vectors[0], rtol=1e-6)
    bands = [model.apply(params, method="bands") for model in (plain, scaled)]
    jax.tree.map(np.testing.assert_array_equal, *bands)
