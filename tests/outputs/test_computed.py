"""Tables whose vectors are computed: dropout that an update shares.

The numbers of GroC's public code are compared in tests/reference/test_groc_code.py.
"""

import functools

import jax
import numpy as np

from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.outputs.computed import MappedTable
from tests import refuses


def test_a_bilinear_map_is_one():
    """A depth of it would have no effect."""
    with refuses("depth=2", "form='bilinear'"):
        MappedTable(Lookup(5, 8), 8, form="bilinear", depth=2)


def test_an_update_shares_one_mask_a_layer():
    """The part of a table that training drops is a function of the key, the same for all words;
    without training nothing is dropped.
    """
    table = MappedTable(Lookup(5, 8), 8, form="bilinear", dropout=0.5)
    params = jax.jit(lambda: table.init(jax.random.key(0), method="bands"))()["params"]
    params |= {"kernel_0": np.eye(8, dtype="f"), "kernel_bias_0": np.zeros(8, "f")}

    @functools.partial(jax.jit, static_argnums=1)
    def bands(key, train):
        rngs = {"dropout": key}
        return table.apply({"params": params}, train=train, rngs=rngs, method="bands")

    def drawn(seed, train=True):
        [(made, *_)] = bands(jax.random.key(seed), train)
        return np.asarray(made) / np.asarray(params["source"]["table"])

    assert {0.0, 2.0} == set(drawn(0).round(5).ravel())
    np.testing.assert_allclose(drawn(0), np.broadcast_to(drawn(0)[:1], (5, 8)), atol=1e-6)
    assert (drawn(0) != drawn(1)).any()
    np.testing.assert_allclose(drawn(0, train=False), 1.0, atol=1e-6)
