"""Equality with the loss of the public AWD-LSTM code, an adaptive softmax whose tails have full
width and biases.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.losses import banded
from adaptive_jax.numerics.bands import Band, band_sizes, split_rows

FIXTURES = Path(__file__).parents[1] / "fixtures" / "awd_lstm"
ARRAYS = np.load(FIXTURES / "splitcross.npz")
CASES = json.loads((FIXTURES / "splitcross.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES)
def test_splitcross(case):
    """Loss, gradients and log-probabilities. There the k-th split has the k-th tombstone from
    the end; here they are in order.
    """
    arrays = {
        name.removeprefix(f"{case}/"): ARRAYS[name]
        for name in ARRAYS.files
        if name.startswith(f"{case}/")
    }
    sizes = band_sizes(CASES[case]["ntoken"], tuple(CASES[case]["splits"]))
    names = ["hiddens", "weight", "bias"] + ["tail_vectors", "tail_bias"] * (len(sizes) > 1)
    targets = arrays["targets"].astype(np.int32)

    def layers(weight, bias, vectors=None, more=None):
        bands = [
            Band(table, None, part)
            for table, part in zip(split_rows(weight, sizes), split_rows(bias, sizes), strict=True)
        ]
        return bands, None if vectors is None else Band(vectors[::-1], None, more[::-1])

    @jax.jit
    def everything(hidden, *params):
        def loss(hidden, *params):
            return banded.loss(
                hidden, targets, jnp.full(len(targets), 1 / len(targets)), *layers(*params)
            )[0]

        values = jax.value_and_grad(loss, argnums=tuple(range(1 + len(params))))(hidden, *params)
        return values, banded.log_probs(hidden, *layers(*params))

    (loss, gradients), log_probs = everything(*(arrays[name] for name in names))
    np.testing.assert_allclose(loss, arrays["loss"], rtol=1e-6)
    for name, ours in zip(names, gradients, strict=True):
        theirs = arrays[f"grad/{name}"]
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * np.abs(theirs).max(), err_msg=name)
    picked = np.asarray(log_probs)[np.arange(len(targets)), targets]
    np.testing.assert_allclose(-picked.mean(), arrays["loss"], rtol=1e-6)
    if "logprob" in arrays:
        np.testing.assert_allclose(log_probs, arrays["logprob"], atol=2e-5)
