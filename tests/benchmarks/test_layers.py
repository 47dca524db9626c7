"""The benchmark of layers: its peers compute the same."""

import importlib.util

import jax
import numpy as np
import pytest

from adaptive_jax.errors import InputError
from benchmarks import layers

CASES = {
    "attention": [2, 12, 2, 8],
    "lstm": [3, 5, 4, 6, 4],
    "convolution": [2, 7, 3, 4, 6],
    "input": [2, 9, 16, 40, 8, 20],
}


@pytest.mark.parametrize("name", layers.LAYERS)
def test_peers(name, capsys):
    """Outputs and gradients of all peers that run here agree, but for random dropout; each is
    measured, torch too.
    """
    case = list(layers.LAYERS[name].cases(CASES[name], "float32"))[-1]
    results = {}
    for peer, function in case.peers.items():
        try:
            outputs = jax.eval_shape(function, *case.arguments)
            pull = jax.random.normal(jax.random.key(9), outputs.shape)
            results[peer] = layers.both(function, case.arguments, pull)
        except InputError:  # not on this device
            continue
    first, *others = results.values()
    assert others or name == "attention"  # which has one path on a CPU
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), first, other)
    rows = layers.measure(case, [*results, "torch"], 1)
    torch = ["torch"] if importlib.util.find_spec("torch") else []
    assert [row["peer"] for row in rows] == [*results, *torch]
    for row in rows:
        assert row["gflops_per_second"] == pytest.approx(case.flops / row["seconds"] / 1e9)
