"""The transformer against a plain one in float64, written layer by layer and head by head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.bodies.transformer import Transformer, sinusoids
from adaptive_jax.errors import InputError

BATCH, TIME, FEATURES, HEADS, LAYERS = 2, 7, 16, 4, 3
RATES = ("dropout", "attention_dropout", "activation_dropout")


def body(**fields):
    return Transformer(**{"features": FEATURES, "layers": LAYERS, "heads": HEADS, "feed_forward": 24} | fields)


def vectors():
    return jax.random.normal(jax.random.key(0), (BATCH, TIME, FEATURES))


def random_params(model):
    """Every parameter random, gains and biases too, so that none can be left out unseen."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), vectors())
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    return jax.tree.unflatten(tree, [0.4 * jax.random.normal(k, a.shape) for k, a in zip(keys, leaves, strict=True)])


def slow(params, x, final_norm):
    """Section 4.1 of Baevski & Auli 2019, in numpy."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params["params"])

    def norm(x, p):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]

    def dense(x, p):
        return x @ p["kernel"] + p["bias"]

    x = np.asarray(x, np.float64) * FEATURES**0.5 + np.asarray(sinusoids(jnp.arange(TIME), FEATURES), np.float64)
    width = FEATURES // HEADS
    for layer in range(LAYERS):
        p = jax.tree.map(lambda a, layer=layer: a[layer], params["blocks"])
        queries, keys, values = np.split(dense(norm(x, p["norm_attention"]), p["query_key_value"]), 3, axis=-1)
        attended = np.zeros_like(x)
        for head in range(HEADS):
            part = slice(head * width, (head + 1) * width)
            for row in range(BATCH):
                for t in range(TIME):
                    scores = keys[row, :t + 1, part] @ queries[row, t, part] / width**0.5
                    shares = np.exp(scores - scores.max())
                    attended[row, t, part] = shares / shares.sum() @ values[row, :t + 1, part]
        x = x + dense(attended, p["attended"])
        x = x + dense(np.maximum(dense(norm(x, p["norm_feed_forward"]), p["inner"]), 0), p["outer"])
    return norm(x, params["norm"]) if final_norm else x


@pytest.mark.parametrize("final_norm", [True, False])
def test_hidden_states(final_norm):
    """Scaling, positions, masks, heads, residuals and normalisation, with all weights random."""
    model = body(final_norm=final_norm)
    params = random_params(model)
    hidden, carry = jax.jit(model.apply)(params, vectors())
    assert carry == ()
    np.testing.assert_allclose(hidden, slow(params, vectors(), final_norm), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("rate", RATES)
def test_each_dropout_acts_in_training_alone(rate):
    """Each of the three rates alone makes two keys differ in training; without training no key is asked for."""
    model = body(layers=1, **{rate: 0.3})
    params = random_params(model)
    run = jax.jit(lambda key: model.apply(params, vectors(), train=True, rngs={"dropout": key})[0])
    one, other = run(jax.random.key(0)), run(jax.random.key(1))
    assert (one != other).any()
    np.testing.assert_array_equal(one, run(jax.random.key(0)))
    plain = body(layers=1).apply(params, vectors())[0]
    np.testing.assert_array_equal(model.apply(params, vectors())[0], plain)


def test_layers_draw_their_own_dropout():
    """The layers of the scan do not share a mask: with blocks that only drop and halve, zeros of two layers differ.

    A feed-forward of ones passes the sum of its active units to every feature, so the share kept of each position shows
    in the residual; two layers with one mask would add the same amount twice.
    """
    model = body(layers=2, activation_dropout=0.5, final_norm=False)
    params = jax.tree.map(jnp.zeros_like, random_params(model))
    blocks = params["params"]["blocks"]
    blocks["inner"]["bias"] += 1.0
    blocks["outer"]["kernel"] += 1.0
    hidden = model.apply(params, vectors(), train=True, rngs={"dropout": jax.random.key(0)})[0]
    start = vectors() * FEATURES**0.5 + sinusoids(jnp.arange(TIME), FEATURES)[None]
    kept = np.asarray((hidden - start)[..., 0] / 2).round(3)  # units kept in both layers together
    assert (kept % 1 == 0).all() and kept.std() > 0
    assert (kept % 2 == 1).any()  # an odd sum: the two layers did not keep the same number everywhere


def test_sixteen_layers_are_as_large_a_program_as_two():
    """The scan compiles one block, however many there are."""
    sizes = []
    for layers in (2, 16):
        model = body(layers=layers)
        shapes = jax.eval_shape(model.init, jax.random.key(0), vectors())
        sizes.append(len(jax.jit(model.apply).lower(shapes, vectors()).as_text().splitlines()))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("fields, says", [
    ({"heads": 5}, "5 heads do not divide 16 features"),
    ({"layers": 0}, "layers=0 must be 1 or more"),
    ({"attention_dropout": 1.0}, r"attention_dropout=1\.0 is no rate"),
])
def test_wrong_fields(fields, says):
    """One line with the value."""
    with pytest.raises(InputError, match=says):
        body(**fields)


@pytest.mark.parametrize("remat", ["elementwise", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rematerialisation_changes_nothing(remat, dtype):
    """What is computed again is what would have been kept: gradients are equal, dropout and long rows included."""
    vectors = jax.random.normal(jax.random.key(0), (2, 70, 16))

    def gradients(remat):
        body = Transformer(features=16, layers=2, heads=2, feed_forward=24, dropout=0.2, attention_dropout=0.2,
                           activation_dropout=0.2, remat=remat, dtype=jnp.dtype(dtype))  # fmt: skip
        params = body.init(jax.random.key(1), vectors)

        def loss(params, vectors):
            hidden, _ = body.apply(params, vectors, train=True, rngs={"dropout": jax.random.key(2)})
            return jnp.sum(hidden.astype(jnp.float32) ** 3)

        return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, vectors)

    kept, again = gradients("none"), gradients(remat)
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(again), strict=True):
        largest = np.abs(np.asarray(a, np.float32)).max()
        np.testing.assert_allclose(a, b, rtol=0, atol=(1e-5 if dtype == "float32" else 2e-2) * largest)
