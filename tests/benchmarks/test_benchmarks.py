"""The benchmarks of the output layer: their peers compute the same, and growth is what they say."""

import importlib.util
import json
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import outputs


def test_the_output_layer_against_its_peers():
    """The peers compute the same loss and gradients; work is counted as the targets ask for it."""
    case = outputs.Case(16, 101, (11, 40), tokens=30)
    results = {}
    for name, (compiled, values) in outputs.jax_peers(case).items():
        results[name] = compiled(*values)
    assert list(results) == ["banded", "masked dense", "full softmax"]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        results["banded"],
        results["masked dense"],
    )
    _, targets, bands, _ = outputs.arguments(case)
    first, second = ((targets >= 11) & (targets < 40)).sum(), (targets >= 40).sum()
    products = 30 * 13 * 16 + first * (29 * 4 + 4 * 16) + second * (61 * 1 + 1 * 16)
    assert outputs.gflop(case, targets, bands) == pytest.approx(6e-9 * products)
    rows = outputs.measure(case, 1, ["torch", "full softmax"], {"product": outputs.product_peer(8)})
    assert [row["peer"] for row in rows] == ["banded", "masked dense", "product"]
    assert rows[0]["times_banded"] == 1 and rows[-1]["tokens_per_second"] is None


def test_more_outputs_are_peers():
    """The core in bfloat16 computes nearly the same; every other output is a loss of hidden states
    and parameters: of random vectors near log V, but for nce, which sums over its noise.
    """
    case = outputs.Case(64, 210, (40, 90), tokens=16)
    losses = {
        name: float(compiled(*values)[0]) / 16
        for name, (compiled, values) in outputs.jax_peers(case, outputs.DENSE, more=True).items()
    }
    assert [name.split()[0] for name in losses] == [
        *("banded", "bfloat16", "hierarchical", "hierarchical", "sampled", "nce"),
        *("D-softmax", "D-softmax*"),
    ]
    assert losses["bfloat16"] == pytest.approx(losses["banded"], rel=2**-7)
    assert all(4 < loss < 8 for name, loss in losses.items() if not name.startswith("nce")), losses
    assert all(0 < loss < math.inf for loss in losses.values()), losses


def flags(**changes):
    """The flags of the size `growth`, tiny."""
    return SimpleNamespace(
        **{
            "sizes": ["growth"],
            "vocabularies": ["40", "160"],
            "tokens": 8,
            "repeats": 1,
            "skip": ["torch"],
            "json": None,
            "plot": None,
        }
        | changes
    )


def test_growth_with_the_vocabulary(tmp_path, capsys):
    """A line for every size and peer, growth beneath, and a plot; peers are left out where they
    would be too large.
    """
    plot = tmp_path / "plot.png" if importlib.util.find_spec("matplotlib") else None
    outputs.main(flags(json=tmp_path / "numbers", plot=plot))
    rows = json.loads((tmp_path / "numbers").read_text())
    assert [(row["vocabulary"], row["peer"]) for row in rows] == [
        (words, peer)
        for words in (40, 160)
        for peer in ("banded", "masked dense", "full softmax", "smallest")
    ]
    growth = [rows[at]["seconds"] / rows[at + 3]["seconds"] for at in (0, 4)]
    assert (
        f"banded: {growth[0]:.2f}, {growth[1]:.2f} times the time of banded at 40 words"
        in capsys.readouterr().out
    )
    assert plot is None or plot.stat().st_size > 1000
    assert outputs.cutoffs_of(1_070_940) == (10_000, 40_000, 160_000, 640_000)
    assert outputs.cutoffs_of(40_000) == (10_000,)
    assert outputs.too_large(267_735, 2048) == [] and len(outputs.too_large(535_470, 2048)) == 2
