"""Weights of torch's adaptive softmax in and out: torch's numbers, and its arrays bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from adaptive_jax import (
    AdaptiveInput,
    AdaptiveSoftmax,
    Hierarchical,
    InputError,
    OwnTable,
    Softmax,
    TiedTable,
)
from adaptive_jax.interop.torch_softmax import from_torch, to_torch
from tests import refuses
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
    "no head": ({"tail.0.1.weight": STATE["tail.0.1.weight"]}, "['tail.0.1.weight']"),
    "a prefix": ({f"softmax.{name}": a for name, a in STATE.items()}, "softmax.head.weight"),
    "left over": (STATE | {"tail.0.1.bias": np.ones(9, "f")}, "must have head.weight"),
    "other features": (
        STATE | {"tail.0.0.weight": np.ones((4, 6), "f")},
        "tail.0.0.weight must have shape (4, 8), got (4, 6)",
    ),
    "a short bias": (STATE | {"head.bias": np.ones(5, "f")}, "head.bias must have shape (7,)"),
    "a flat head": (STATE | {"head.weight": np.ones(7, "f")}, "head.weight must have shape"),
    "no word in the head": (STATE | {"head.weight": np.ones((2, 8), "f")}, "(3, 8), got (2, 8)"),
    "a broken div_value": (
        STATE | {"tail.1.0.weight": np.ones((1, 8), "f"), "tail.1.1.weight": np.ones((3, 1), "f")},
        "widths of a whole div_value for 8 features, got [4, 1]",
    ),
    "a tail without width": (
        {
            "head.weight": np.ones((6, 3), "f"),
            "tail.0.0.weight": np.ones((0, 3), "f"),
            "tail.0.1.weight": np.ones((15, 0), "f"),
        },
        "widths of a whole div_value for 3 features, got [0]",
    ),
    "NaN": (STATE | {"head.weight": np.full((7, 8), np.nan, "f")}, "head.weight must be real and"),
    "too large": (STATE | {"head.bias": np.full(7, 1e40)}, "head.bias must be real and finite"),
    "complex": (STATE | {"head.bias": np.ones(7, complex)}, "head.bias must be real and finite"),
    "one band": (Softmax(OwnTable(9, 4)), "must have cutoffs"),
    "no words in the head": (Hierarchical(OwnTable(20, 8, (5, 10), 2)), "must have words"),
    "a projected head": (
        AdaptiveSoftmax(vocabulary_size=9, features=4, cutoffs=(3,), width=8, factor=2),
        "must have a head without a projection",
    ),
    "a bias in a tail": (
        AdaptiveSoftmax(vocabulary_size=9, features=4, cutoffs=(3,), factor=2, bias=True),
        "must have no bias in a tail",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_names_and_shapes_that_do_not_fit(name):
    """The names or shapes that are wrong; weights that are not finite real numbers were taken."""
    wrong, says = WRONG[name]
    with pytest.raises(InputError) as error:
        from_torch(wrong) if isinstance(wrong, dict) else to_torch(bound(wrong))
    line = str(error.value)
    assert says in line and "\n" not in line and len(line) < 250


def test_complex_tensors_of_torch_are_refused():
    """Torch drops the imaginary part where a tensor becomes floats."""
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install torch")
    with refuses("head.bias"):
        from_torch(STATE | {"head.bias": torch.ones(7, dtype=torch.complex64)})


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
