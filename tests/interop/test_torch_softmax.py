"""Weights of torch's adaptive softmax in and out: torch's numbers, and its arrays bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from adaptive_jax import (
    AdaptiveInput,
    AdaptiveSoftmax,
    Differentiated,
    Hierarchical,
    InputError,
    OwnTable,
    Softmax,
    TiedTable,
)
from adaptive_jax.interop.torch_softmax import from_torch, to_torch
from tests.toys import random_params


def same(ours, theirs):
    assert sorted(ours) == sorted(theirs)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name])


TORCH = {
    "narrowing": dict(in_features=16, n_classes=60, cutoffs=[9, 25], div_value=4.0, head_bias=True),
    "many of one width": dict(
        in_features=6, n_classes=70, cutoffs=list(range(7, 70, 7)), div_value=1.0
    ),
}


@pytest.mark.parametrize("name", TORCH)
def test_a_module_of_torch_and_back(name):
    """The installed torch: equal log-probabilities and predictions, and a fresh module that
    loads the arrays gives bit-equal losses.
    """
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    torch.manual_seed(0)
    module = torch.nn.AdaptiveLogSoftmaxWithLoss(**TORCH[name])
    hidden = torch.randn(30, TORCH[name]["in_features"])
    targets = torch.randint(0, TORCH[name]["n_classes"], (30,))
    layer, params = from_torch(module.state_dict(), tail_dropout=0.1)
    assert layer.tail_dropout == 0.1
    run = jax.jit(lambda h, t: (layer.apply({"params": params}, h, t), *both(layer, params, h)))
    mean, log_probs, predicted = run(hidden.numpy(), targets.int().numpy())
    with torch.no_grad():
        output, loss = module(hidden, targets)
        np.testing.assert_allclose(log_probs, module.log_prob(hidden), rtol=2e-6, atol=2e-6)
        np.testing.assert_array_equal(predicted, module.predict(hidden))
        np.testing.assert_allclose(mean, loss, rtol=2e-6)
        other = torch.nn.AdaptiveLogSoftmaxWithLoss(**TORCH[name])
        state = to_torch(layer.bind({"params": params}))
        other.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
        assert torch.equal(other(hidden, targets).output, output)
    half = from_torch({k: v.bfloat16() for k, v in module.state_dict().items()})[1]
    assert jax.tree.map(jnp.shape, half) == jax.tree.map(jnp.shape, params)


def both(layer, params, hidden):
    return [layer.apply({"params": params}, hidden, method=m) for m in ("log_probs", "predict")]


def test_a_tied_softmax_goes_out_through_its_bands():
    """Torch's module has no input; the tied arrays are copied, and the probabilities stay."""
    softmax = AdaptiveSoftmax(TiedTable(AdaptiveInput(40, 8, (10, 20), factor=2)))
    hidden = np.random.default_rng(0).normal(size=(5, 8)).astype("f")
    shapes = jax.eval_shape(lambda: softmax.init(jax.random.key(0), method="bands"))
    variables = random_params(shapes)
    layer, params = from_torch(to_torch(softmax.bind(variables)))
    ours, theirs = jax.jit(
        lambda h: (
            softmax.apply(variables, h, method="log_probs"),
            layer.apply({"params": params}, h, method="log_probs"),
        )
    )(hidden)
    np.testing.assert_array_equal(ours, theirs)


STATE = {
    "head.weight": np.ones((7, 8), "f"),
    "tail.0.0.weight": np.ones((4, 8), "f"),
    "tail.0.1.weight": np.ones((9, 4), "f"),
    "tail.1.0.weight": np.ones((2, 8), "f"),
    "tail.1.1.weight": np.ones((3, 2), "f"),
}


def bound(softmax):
    shapes = jax.eval_shape(lambda: softmax.init(jax.random.key(0), method="bands"))
    return softmax.bind(random_params(shapes))


WRONG = {
    "no head": ({"tail.0.1.weight": STATE["tail.0.1.weight"]}, "a state of tail.0.1.weight"),
    "a prefix": ({f"softmax.{name}": a for name, a in STATE.items()}, "softmax.head.weight"),
    "left over": (STATE | {"tail.0.1.bias": np.ones(9, "f")}, "head.weight, tail.0.0"),
    "other features": (
        STATE | {"tail.0.0.weight": np.ones((4, 6), "f")},
        "tail.0.0.weight of shape [4, 6] must be [4, 8]",
    ),
    "a short bias": (STATE | {"head.bias": np.ones(5, "f")}, "head.bias of shape [5]"),
    "a flat head": (STATE | {"head.weight": np.ones(7, "f")}, "head.weight of shape [7]"),
    "no word in the head": (STATE | {"head.weight": np.ones((2, 8), "f")}, "[2, 8] must be [3, 8]"),
    "a broken div_value": (
        STATE | {"tail.1.0.weight": np.ones((1, 8), "f"), "tail.1.1.weight": np.ones((3, 1), "f")},
        "widths 4, 1 must be those of a whole div_value",
    ),
    "a tail without width": (
        {
            "head.weight": np.ones((6, 3), "f"),
            "tail.0.0.weight": np.ones((0, 3), "f"),
            "tail.0.1.weight": np.ones((15, 0), "f"),
        },
        "tail 0 of width 0 must be 1 wide or more",
    ),
    "one band": (Softmax(OwnTable(9, 4)), "1 band must have cutoffs"),
    "no words in the head": (Hierarchical(OwnTable(20, 8, (5, 10), 2)), "must have words"),
    "a projected head": (
        AdaptiveSoftmax(vocabulary_size=9, features=4, cutoffs=(3,), width=8, factor=2),
        "[8, 4] must have none",
    ),
    "a bias in a tail": (
        AdaptiveSoftmax(vocabulary_size=9, features=4, cutoffs=(3,), factor=2, bias=True),
        "tail 0 must have no bias",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_one_line(name):
    """The names or shapes that are wrong, and what to give."""
    wrong, says = WRONG[name]
    with pytest.raises(InputError) as error:
        from_torch(wrong) if isinstance(wrong, dict) else to_torch(bound(wrong))
    line = str(error.value)
    assert says in line and ": " in line and "\n" not in line and len(line) < 200


def test_a_module_in_place_of_its_state_and_settings_of_the_state():
    """They ended in errors of Python's own."""
    with pytest.raises(InputError, match=r"Dense must be a state: use module.state_dict\(\)"):
        from_torch(nn.Dense(3))
    with pytest.raises(InputError, match="bias=True is what the state says: leave it out"):
        from_torch(STATE, bias=True)


def test_a_layer_without_parameters_and_one_of_another_kind():
    """They ended in an AttributeError."""
    for layer in Softmax(OwnTable(9, 4)), Differentiated(OwnTable(9, 4)):
        with pytest.raises(InputError, match=r"use softmax.bind"):
            to_torch(layer)


class Tied(nn.Module):
    """A model as the pages have it."""

    def setup(self):
        self.embed = AdaptiveInput(20, 8, cutoffs=(5, 10), factor=2)
        self.softmax = AdaptiveSoftmax(TiedTable(self.embed))

    def __call__(self, tokens):
        return self.softmax(self.embed(tokens), tokens)


def test_the_softmax_of_a_tied_model():
    """Its table is that of the input, which flax finds within `apply` alone."""
    model = Tied()
    variables = random_params(jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.arange(3))))
    state = model.apply(variables, method=lambda m: to_torch(m.softmax))
    assert sorted(state) == sorted(STATE) and state["head.weight"].shape == (7, 8)
