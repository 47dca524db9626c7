"""The benchmarks of whole updates: they compare equal models, and count what the paper counts."""

import numpy as np
import pytest

from adaptive_jax.config.keys import resolve
from adaptive_jax.planning.plan import make_plan
from benchmarks import scaling, throughput
from configs import billion_word, wikitext103


@pytest.fixture
def tiny():
    """A config of a few thousand parameters, with the layers that torch has."""
    config = throughput.laptop() | {
        "dtype": "bfloat16",
        "tokens_per_update": 32,
        "tokens_per_device": 32,
    }
    config["body"] |= {"layers": 2, "features": 32, "heads": 4, "feed_forward": 48}
    for group in (config["input"], config["output"]["table"]):
        group["cutoffs"] = (100, 300)
    config["data"]["vocabulary_size"], config["batches"]["sequence_length"] = 700, 16
    return config


def test_torch_is_given_an_equal_model(tiny):
    """As many parameters but for the biases and the like that each has, and the loss of a
    uniform guess.
    """
    torch = pytest.importorskip("torch")
    from benchmarks import torch_model

    model = torch_model.TorchModel(tiny)
    theirs = sum(p.numel() for p in model.parameters())
    assert (
        make_plan(tiny, 700, 1).parameters["total"] - theirs == 2 * 32
    )  # the last norm, which theirs does without
    ids = throughput.zipf(tiny, 2)
    update = torch_model.torch_update(tiny, ids, "cpu")
    losses = [update() for _ in range(3)]
    assert np.isfinite(losses).all() and abs(losses[0] / np.log(700) - 1) < 0.5
    with torch.no_grad():
        inputs, targets = torch.tensor(ids[:, :-1]), torch.tensor(ids[:, 1:]).long()
        moved = inputs.clone()
        moved[:, -1] = 5
        assert model(moved, targets) != model(inputs, targets)


def test_what_the_paper_counts():
    """Arithmetic halves with twice the devices, sums of gradients do not, and sharding
    parameters costs three more passes.
    """
    config = resolve(wikitext103.get_config("adp_t"))
    eight, sixteen = (scaling.costs(config, "H200", devices, 1) for devices in (8, 16))
    assert eight["arithmetic"] == pytest.approx(2 * sixteen["arithmetic"])
    assert eight["communication"] == pytest.approx(2 * 4 * 246.9e6 * 7 / 8 / 450e9, rel=1e-3)
    config = resolve(billion_word.get_config("very_large")) | {"tokens_per_device": 16_384}
    assert scaling.costs(config, "H200", 8, 8)["communication"] == pytest.approx(
        3 * 4 * 1026.2e6 * 7 / 8 / 450e9, rel=1e-3
    )
