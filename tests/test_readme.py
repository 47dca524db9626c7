"""The README's example runs as it is printed."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


def test_layers_around_a_body_of_ones_own():
    """The code block trains: the loss is finite, its report adds up, and rare words get a gradient."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    # The vocabulary is the example's only cost; a hundredth of it shows the same.
    code = code.replace("267_735", "2_678").replace("20_000, 60_000", "200, 600").replace("30_000", "300").replace(
        "200_000", "2_000")
    names = {}
    exec(code, names)
    assert np.isfinite(names["loss"])
    np.testing.assert_allclose(names["loss"], jnp.sum(names["nll"]), rtol=1e-6)
    tables = names["gradients"]["params"]["embed"]
    assert jnp.abs(tables["table_2"][2_000 - 600]).sum() > 0
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(names["gradients"]))
