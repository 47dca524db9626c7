"""The benchmarks of whole updates: they compare equal models."""

import jax
import numpy as np
import pytest

from adaptive_jax.scores import scoring
from benchmarks import reading_and_writing, throughput
from tests.toys import plan_of


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
        plan_of(tiny, 700, 1).parameters["total"] - theirs == 2 * 32
    )  # the last norm, which theirs does without
    ids = throughput.zipf(tiny, 2, 17)
    update = torch_model.torch_update(tiny, ids, "cpu")
    losses = [update() for _ in range(3)]
    assert np.isfinite(losses).all() and abs(losses[0] / np.log(700) - 1) < 0.5
    with torch.no_grad():
        inputs, targets = torch.tensor(ids[:, :-1]), torch.tensor(ids[:, 1:]).long()
        moved = inputs.clone()
        moved[:, -1] = 5
        assert model(moved, targets) != model(inputs, targets)


def test_scoring_has_two_peers(tiny, monkeypatch):
    """All three give each token the same score."""
    tiny["dtype"], scored, results = "float32", [], []

    def scores(*arguments):
        for part in scoring.scores(*arguments):
            scored.append(part.nll)
            yield part

    monkeypatch.setattr(reading_and_writing, "scores", scores)
    monkeypatch.setattr(jax, "block_until_ready", results.append)
    peers = reading_and_writing.evaluate_peers(tiny, 8, 100, throughput.zipf(tiny, 100))
    assert list(peers) == ["evaluate", "forward pass", "all outputs"]
    for run in peers.values():
        run()
    expected = np.concatenate(scored)
    after_context, whole = (np.concatenate(batches) for batches in results)
    whole = np.concatenate([whole[:1, :8], whole[1:, 8:]])  # the first window has no context
    assert len(expected) == 100
    for other in after_context, whole:
        np.testing.assert_allclose(other.ravel()[:100], expected, rtol=1e-5)


def test_writing_has_two_peers(trained, monkeypatch):
    """With a cache and without, the same keys draw the same tokens."""
    drawn = []

    def fetched(token):
        drawn.append(token.item())
        return drawn[-1]

    monkeypatch.setattr(reading_and_writing, "int", fetched, raising=False)
    peers = reading_and_writing.generate_peers(trained, 3)
    assert list(peers) == ["generate", "all probabilities", "no cache"]
    assert len(peers["generate"]().split()) == 3
    for name in "all probabilities", "no cache":
        peers[name]()
    assert len(drawn) == 6 and drawn[:3] == drawn[3:]
