"""Tables whose vectors are computed: dropout that an update shares.

The numbers of GroC's public code are compared in tests/reference/test_groc_code.py.
"""

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.inputs.lookup import Lookup
from adaptive_jax.outputs.computed import MappedTable


def test_an_update_shares_one_mask_a_layer():
    """What training drops of a table is a function of the key, the same for all words; without
    training nothing is dropped.
    """
    table = MappedTable(Lookup(5, 8), 8, form="bilinear", dropout=0.5)
    params = table.init(jax.random.key(0), method="bands")["params"] | {
        "kernel_0": jnp.eye(8),
        "kernel_bias_0": jnp.zeros(8),
    }
    vectors = params["source"]["table"]

    def drawn(seed, train=True):
        [(made, *_)] = table.apply(
            {"params": params}, train=train, rngs={"dropout": jax.random.key(seed)}, method="bands"
        )
        return np.asarray(made / vectors)

    assert {0.0, 2.0} == set(drawn(0).round(5).ravel())
    np.testing.assert_allclose(drawn(0), np.broadcast_to(drawn(0)[:1], (5, 8)), atol=1e-6)
    assert (drawn(0) != drawn(1)).any()
    np.testing.assert_allclose(drawn(0, train=False), 1.0, atol=1e-6)
