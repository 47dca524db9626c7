"""The benchmark of layers: its peers compute the same."""

import importlib.util

import pytest

from benchmarks import layers

CASES = {"attention": [2, 12, 2, 8], "lstm": [3, 5, 4, 6, 4]}


@pytest.mark.parametrize("name", layers.LAYERS)
def test_peers(name):
    """Every peer that runs here is measured; it fails where torch's outputs are not ours."""
    case = list(layers.LAYERS[name].cases(CASES[name], "float32"))[-1]
    rows = layers.measure(case, [], 1)
    torch = ["torch"] if importlib.util.find_spec("torch") else []
    assert not case.random and [row["peer"] for row in rows] == [*case.peers, *torch]
