"""Inputs at the size of a real vocabulary: what the gather and its gradient need, and which
rows they touch.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.inputs.adaptive import AdaptiveInput
from adaptive_jax.inputs.lookup import Lookup

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
    table = Lookup(4_096, 8, init_deviation=1.5).init(jax.random.key(0), jnp.zeros(1, int))
    assert abs(table["params"]["table"].std() - 1.5) < 0.05


@pytest.mark.parametrize("cutoffs", [(), (1,), (7, 8), (5, 11, 12)])
def test_vectors_and_gradients_against_a_table_of_all_words(cutoffs):
    """Rows of the assembled table and their gradient, for the edges of every band; nothing else
    of any table has one.
    """
    words, features = 17, 16
    model = AdaptiveInput(words, features, cutoffs, factor=2)
    edges = sorted({0, words - 1, *cutoffs, *(cut - 1 for cut in cutoffs)})
    tokens = jnp.asarray([edges, edges[::-1]])
    params = jax.jit(model.init)(jax.random.key(0), tokens)
    pull = np.random.default_rng(0).standard_normal((*tokens.shape, features)).astype(np.float32)

    def slow(params, tokens):
        bands = model.apply(params, method="bands")
        return jnp.concatenate([table @ projection for table, projection, _ in bands])[tokens]

    def both(function):
        def run(params, pull):
            vectors, back = jax.vjp(lambda params: function(params, tokens), params)
            return vectors, back(pull)[0]

        return jax.jit(run)(params, pull)

    fast = both(model.apply)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), fast, both(slow)
    )
    tables = [fast[1]["params"][f"table_{i}"] for i in range(len(cutoffs) + 1)]
    touched = np.concatenate([np.any(np.asarray(table) != 0, axis=1) for table in tables])
    np.testing.assert_array_equal(np.flatnonzero(touched), edges)
