"""Gated convolutions against a slow twin; segments; the variance at the start; what a backward pass
costs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.bodies.gated_conv import ACTIVATIONS, FORMS, Convolution, GatedConv
from adaptive_jax.interop.fconv import blocks_of, layers_of
from adaptive_jax.numerics.batch import Batch
from tests import refuses
from tests.toys import normal

ROWS, TIME, FEATURES = 3, 7, 6
BLOCKS = ((1, 3, 8), (3, 1, 4, 4, 4, 1, 10), (2, 2, 10))
SEGMENTS = np.array([[1, 1, 1, 1, 1, 1, 1], [1, 1, 2, 2, 2, 2, 3], [1, 2, 2, 2, 2, 0, 0]])


def shapes_of(body):
    vectors = jax.ShapeDtypeStruct((1, 1, body.features), jnp.float32)
    return jax.eval_shape(body.init, jax.random.key(0), vectors)["params"]


def params_of(body):
    """Random parameters, biases among them; g is not the norm of v. Without norms, smaller
    ones: products of products grow.
    """
    scale = 0.5 if body.weight_norm else 0.2
    leaves, structure = jax.tree.flatten(shapes_of(body))
    return jax.tree.unflatten(
        structure, [normal(*leaf.shape, seed=i) * scale for i, leaf in enumerate(leaves)]
    )


def sigmoid(a):
    return 1 / (1 + np.exp(-a))


NUMPY = {
    "glu": lambda a, b: a * sigmoid(b),
    "gtu": lambda a, b: np.tanh(a) * sigmoid(b),
    "bilinear": lambda a, b: a * b,
    "relu": lambda a: np.maximum(a, 0),
    "tanh": np.tanh,
    "linear": lambda a: a,
}


def twin_layer(params, x, segment_ids):
    """A convolution token by token, in float64."""
    v, kernel = np.float64(params["v"]), len(params["v"])
    if "g" in params:
        v = v * params["g"] / np.sqrt((v**2).sum(axis=(0, 1)))
    out = np.zeros((*x.shape[:2], v.shape[2])) + params["bias"]
    for row in range(len(x)):
        for t in range(x.shape[1]):
            for back in range(kernel):
                if t - back >= 0 and segment_ids[row, t - back] == segment_ids[row, t]:
                    out[row, t] += x[row, t - back] @ v[kernel - 1 - back]
    return out


def twin(body, params, x, segment_ids):
    """The body layer by layer, in float64 numpy."""
    layer = functools.partial(twin_layer, segment_ids=segment_ids)
    x = layer(params["entry"], x) if body.form == "fairseq" else x
    for i, run in enumerate(body.stages):
        for number in range(run.count):
            block = jax.tree.map(
                lambda a, number=number, run=run: a[number] if run.count > 1 else a,
                params[f"blocks_{i}"],
            )
            y = x
            for j in range(len(run.layers)):
                maps = layer(block[f"layer_{j}"], y)
                y = NUMPY[body.activation](
                    *np.split(maps, ACTIVATIONS[body.activation].maps, axis=-1)
                )
            x = y + (x if x.shape == y.shape else layer(block["projection"], x))
            x *= {"paper": 1.0, "fairseq": 0.5**0.5}[body.form]
    return layer(params["output"], x) if body.output_width else x


SMALL = ((1, 3, 8), (2, 2, 8))
BODIES = {
    "glu": GatedConv(FEATURES, BLOCKS, "paper", "glu"),
    "gtu": GatedConv(FEATURES, BLOCKS, "fairseq", "gtu", output_width=5),
    "bilinear": GatedConv(FEATURES, SMALL, "fairseq", "bilinear", weight_norm=False),
    "relu": GatedConv(FEATURES, SMALL, "paper", "relu", weight_norm=False, output_width=5),
    "tanh": GatedConv(FEATURES, SMALL, "fairseq", "tanh"),
    "linear": GatedConv(FEATURES, SMALL, "paper", "linear"),
}


@functools.cache
def hidden_of():
    """Hidden states of all bodies in segments, and of one without segments and in bfloat16,
    with its gradients: one program.
    """
    vectors, ids = normal(ROWS, TIME, FEATURES, seed=9), jnp.zeros((ROWS, TIME), jnp.int32)
    batch = Batch(ids, ids, None, jnp.arange(ROWS), SEGMENTS)

    def program(params, vectors):
        hidden = {
            name: body.apply({"params": params[name]}, vectors, (), batch)[0]
            for name, body in BODIES.items()
        }
        alone = BODIES["glu"].apply({"params": params["glu"]}, vectors)[0]
        low = BODIES["glu"].clone(dtype=jnp.bfloat16)
        loss = lambda params: jnp.sum(low.apply({"params": params}, vectors)[0].astype(jnp.float32))
        return (
            hidden,
            alone,
            low.apply({"params": params["glu"]}, vectors)[0],
            jax.grad(loss)(params["glu"]),
        )

    params = {name: params_of(body) for name, body in BODIES.items()}
    return params, vectors, *jax.jit(program)(params, vectors)


@pytest.mark.parametrize("name", BODIES)
def test_a_body_equals_its_slow_twin(name):
    """All activations, both forms, with weight normalisation and without; convolutions read
    zeros for other segments.
    """
    params, vectors, hidden, alone, *_ = hidden_of()
    body = BODIES[name]
    expected = twin(body, params[name], np.float64(vectors), SEGMENTS)
    assert expected.shape[-1] == body.output_features
    np.testing.assert_allclose(
        hidden[name], expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max()
    )
    if name == "glu":
        expected = twin(body, params[name], np.float64(vectors), np.ones_like(SEGMENTS))
        np.testing.assert_allclose(alone, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


def test_bfloat16():
    """Products in bfloat16; parameters and their gradients stay float32."""
    *_, alone, low, gradients = hidden_of()
    assert low.dtype == jnp.bfloat16 and {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {
        jnp.dtype("float32")
    }
    error = np.abs(np.float32(low) - alone).mean() / np.abs(alone).mean()
    assert 1e-4 < error < 0.02
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_initial_weights_keep_the_variance():
    """Of small inputs, through the convolution and its activation, and through dropout before
    it.
    """

    def mean_squares(key):
        keep = jax.random.bernoulli(jax.random.key(1), 0.75, (4, 32, 128)) / 0.75
        squares = {}
        for name, activation in ACTIVATIONS.items():
            x = jax.random.normal(jax.random.key(2), (4, 32, 128)) * (
                1.0 if name in ("bilinear", "relu", "linear") else 0.1
            )
            variance = activation.variance or FORMS["fairseq"].variance
            normed = name in ("glu", "relu", "tanh")
            layer = Convolution(3, activation.maps * 128, variance * 0.75, jnp.float32, normed)
            maps, _ = layer.init_with_output(key, x * keep, jnp.zeros((4, 2, 128)))
            y = activation.function(*jnp.split(maps, activation.maps, axis=-1))[:, 2:]
            squares[name] = jnp.mean(y**2) / jnp.mean(x**2)
        return squares

    for name, ratio in jax.jit(mean_squares)(jax.random.key(0)).items():
        assert 0.9 < ratio < 1.1, (name, ratio)


def test_hidden_states_start_as_large_as_vectors():
    """Of 13 blocks of two layers; sums that are not scaled grow a little."""

    def size(form):
        body = GatedConv(64, ((1, 4, 64), (12, 4, 64, 4, 64)), form)
        vectors = jax.random.normal(jax.random.key(0), (2, 100, 64)) / 8
        (hidden, _), _ = body.init_with_output(jax.random.key(1), vectors)
        return 8 * jnp.sqrt(
            jnp.mean(hidden[:, 76:] ** 2)
        )  # tokens that read no zeros before the start

    paper, fairseq = jax.jit(lambda: (size("paper"), size("fairseq")))()
    assert 2 < paper < 8 and 0.7 < fairseq < 1.4


def test_a_backward_pass_recomputes_no_product():
    """Windows and normed weights are computed again, but each convolution has three products:
    its own and two gradients.
    """
    body = GatedConv(8, ((1, 3, 8), (4, 2, 8)))
    loss = lambda params, x: jnp.sum(body.apply({"params": params}, x)[0])
    text = (
        jax.jit(jax.grad(loss, (0, 1)))
        .lower(shapes_of(body), jnp.ones((2, 5, 8)))
        .compile()
        .as_text()
    )
    assert text.count(" dot(") == 6
    windows = jax.make_jaxpr(jax.grad(loss))(shapes_of(body), jnp.ones((2, 5, 8)))
    assert "f32[4,2,5,16]" not in str(windows)  # nor are the windows of all blocks kept


def test_blocks_of_fairseqs_layers():
    """Blocks end where a residual leads back to the end of the one before; equal blocks are one."""
    layers = layers_of(
        "[(16, 4)] + [(16, 4, 0), (16, 4, 2)] * 2 + [(8, 1, 0), (8, 3, 0), (24, 1, 3)]"
    )
    assert blocks_of(layers) == ((1, 4, 16), (2, 4, 16, 4, 16), (1, 1, 8, 3, 8, 1, 24))
    for wrong in "[(16, 4)] * x", "(16, 4)", "[(16,)]", "[__import__('os')]", "[(16, 4)":
        with refuses("decoder_layers"):
            layers_of(wrong)
    for wrong in [(16, 4, 2)], [(16, 4, 1), (16, 4, 0)], [(16, 4, 0), (16, 4, 1)]:
        with refuses("decoder_layers"):
            blocks_of(wrong)


def test_a_carry_may_be_stored_in_another_dtype():
    """bfloat16 is often stored as float32; the stages that repeat refused it."""
    body = GatedConv(FEATURES, BLOCKS, dtype=jnp.bfloat16)
    params, x = {"params": params_of(body)}, normal(ROWS, TIME, FEATURES)
    carry = body.apply(params, x, body.initial_carry(ROWS))[1]
    stored = jax.tree.map(np.float32, carry)
    for one, other in zip(*(body.apply(params, x, each) for each in (carry, stored)), strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


def test_gradients_through_gates():
    """Dauphin et al. 2017, equations 2 and 3: with tanh and sigmoid of one X, and with X and its
    sigmoid. Through stacks of up to 13 layers the gradient of the first vanishes faster.
    """
    x = np.linspace(-4, 4, 41, dtype=np.float32)
    gate, squashed = sigmoid(x), np.tanh(x)
    expected = {
        "gtu": (1 - squashed**2) * gate + gate * (1 - gate) * squashed,
        "glu": gate + x * gate * (1 - gate),
    }
    for name, slope in expected.items():
        gradient = jax.grad(lambda a, name=name: ACTIVATIONS[name].function(a, a))
        np.testing.assert_allclose(jax.vmap(gradient)(x), slope, atol=1e-6)
    depths, width = (1, 3, 5, 9, 13), 64
    kernels = normal(max(depths), width, 2 * width) * np.sqrt(2 / width)
    vectors, pull = normal(128, width, seed=1), normal(128, width, seed=2)

    def norm(name, depth):
        def stack(x):
            for kernel in kernels[:depth]:
                x = ACTIVATIONS[name].function(*jnp.split(x @ kernel, 2, axis=-1))
            return x

        return np.linalg.norm(jax.vjp(stack, vectors)[1](pull)[0])

    left = {name: np.array([norm(name, depth) for depth in depths]) for name in expected}
    left = {name: norms / norms[0] for name, norms in left.items()}
    assert (left["gtu"][1:] < 0.8 * left["glu"][1:]).all() and (np.diff(left["gtu"]) < 0).all()
