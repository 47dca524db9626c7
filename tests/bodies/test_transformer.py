"""The transformer against a plain one in float64, written layer by layer and head by head; its
cache; what blocks sow.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from adaptive_jax.bodies.positions import LearnedPositions, alibi_slopes, sinusoids
from adaptive_jax.bodies.transformer import Block, PostNormTransformer, Transformer
from adaptive_jax.numerics.batch import Batch
from tests import refuses
from tests.toys import random_params

ROWS, TIME, FEATURES, HEADS, LAYERS = 2, 7, 16, 4, 3
VECTORS = np.random.default_rng(0).standard_normal((ROWS, TIME, FEATURES), np.float32)


def make(kind=Transformer, **fields):
    return kind(
        **{"features": FEATURES, "layers": LAYERS, "heads": HEADS, "feed_forward": 24}
        | {"dropout": 0.0, "attention_dropout": 0.0}
        | fields
    )


@functools.partial(jax.jit, static_argnums=0, static_argnames="train")
def apply(body, *arrays, **how):
    """`body.apply`, compiled once for all tests with this body and these shapes."""
    return body.apply(*arrays, **how)


def fresh(body):
    """Random values for every parameter, gains and biases too, so that a missing one shows."""
    shapes = jax.eval_shape(body.init, jax.random.key(0), VECTORS)
    return random_params({"params": shapes["params"]})


def slow(params, x, final_norm, positions):
    """Section 4.1 of Baevski & Auli 2019, in numpy; with ALiBi, section 3 of Press et al. 2022."""
    params = jax.tree.map(lambda a: np.asarray(a, np.float64), params["params"])

    def norm(x, p):
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]
        )

    def dense(x, p):
        return x @ p["kernel"] + p["bias"]

    x = np.asarray(x, np.float64) * FEATURES**0.5
    if positions == "sinusoidal":
        x += np.asarray(sinusoids(jnp.arange(TIME), FEATURES), np.float64)
    if positions == "learned":
        x += params["learned_positions"]["table"][:TIME]
    slopes = alibi_slopes(HEADS) if positions == "alibi" else [0] * HEADS
    width = FEATURES // HEADS
    for layer in range(LAYERS):
        p = jax.tree.map(lambda a, layer=layer: a[layer], params["blocks"])
        queries, keys, values = np.split(
            dense(norm(x, p["norm_attention"]), p["query_key_value"]), 3, axis=-1
        )
        attended = np.zeros_like(x)
        for head in range(HEADS):
            part = slice(head * width, (head + 1) * width)
            for row in range(ROWS):
                for t in range(TIME):
                    scores = keys[row, : t + 1, part] @ queries[row, t, part] / width**0.5 + slopes[
                        head
                    ] * np.arange(-t, 1)
                    shares = np.exp(scores - scores.max())
                    attended[row, t, part] = shares / shares.sum() @ values[row, : t + 1, part]
        x = x + dense(attended, p["attended"])
        x = x + dense(np.maximum(dense(norm(x, p["norm_feed_forward"]), p["inner"]), 0), p["outer"])
    return norm(x, params["norm"]) if final_norm else x


def test_learned_positions():
    """Parameters may be NumPy's, as those read from a file; a position beyond the table is NaN."""
    table = np.arange(8, dtype="f").reshape(4, 2)
    vectors = LearnedPositions(4, 2).apply({"params": {"table": table}}, np.array([3, 0, 4]))
    np.testing.assert_array_equal(vectors, [[6, 7], [0, 1], [np.nan, np.nan]])


def test_positions_of_many_rows():
    """The gradient of a learned position is a sum over rows in float32: in bfloat16 it stopped to
    grow at 256 rows.
    """
    rows, found = 600, []
    x, ids = jnp.ones((rows, 4, 4)), jnp.zeros((rows, 4), jnp.int32)
    batch = Batch(ids, ids, None, ids[:, 0], ids + jnp.array([[1, 1, 2, 2]]))
    for dtype in jnp.float32, jnp.bfloat16:
        how = {"features": 4, "layers": 1, "heads": 1, "positions": "learned", "max_positions": 4}
        body = make(final_norm=False, dtype=dtype, **how)
        params = jax.jit(body.init)(jax.random.key(0), x[:1])

        def total(params, body=body):
            return jnp.sum(body.apply(params, x, batch=batch)[0][..., 0].astype(jnp.float32))

        found.append(jax.jit(jax.grad(total))(params)["params"]["learned_positions"]["table"])
    assert np.abs(found[0]).max() > rows
    np.testing.assert_allclose(found[1], found[0], atol=0.05 * np.abs(found[0]).max())


@pytest.mark.parametrize(
    "final_norm, positions",
    [(True, "sinusoidal"), (False, "learned"), (True, "alibi"), (False, "none")],
)
def test_hidden_states(final_norm, positions):
    """Scaling, positions, masks, heads, residuals and normalisation, with all parameters random."""
    body = make(final_norm=final_norm, positions=positions, max_positions=TIME + 1)
    params = fresh(body)
    assert ("learned_positions" in params["params"]) == (positions == "learned")
    hidden, carry = apply(body, params, VECTORS)
    assert carry == body.initial_carry(ROWS) == ()
    np.testing.assert_allclose(
        hidden, slow(params, VECTORS, final_norm, positions), rtol=2e-4, atol=2e-4
    )


def test_learned_positions_have_an_end():
    """More tokens than positions, in rows or in a cache, are a one-line error with the cure, in
    a compiled program too.
    """
    body = make(positions="learned", max_positions=TIME)
    names = "tokens", "body.max_positions", f"--window={TIME}"
    with refuses(*names):
        apply(body, fresh(body), np.concatenate([VECTORS, VECTORS[:, :1]], axis=1))
    with refuses(*names):
        body.cache(ROWS, TIME + 1)
    assert body.cache(ROWS, TIME).keys.shape[2] == TIME


def test_full_cache_is_an_error_and_never_silent():
    """A cache of 4 takes 4 tokens exactly; one more is a one-line error, or NaN inside a
    compiled program.
    """
    body = make()
    params = fresh(body)
    _, carry = apply(body, params, VECTORS[:, :2], body.cache(ROWS, 4))
    hidden, full = apply(body, params, VECTORS[:, 2:4], carry)
    np.testing.assert_allclose(hidden, apply(body, params, VECTORS)[0][:, 2:4], atol=1e-5)
    stored = carry._replace(keys=np.float16(carry.keys), values=np.float16(carry.values))
    np.testing.assert_allclose(apply(body, params, VECTORS[:, 2:4], stored)[0], hidden, atol=0.01)
    with refuses("length=6", "length 4"):
        body.apply(params, VECTORS[:, :2], full)
    with refuses("length=7", "length 4"):
        apply(body, params, VECTORS, body.cache(ROWS, 4))
    for begun in (
        carry._replace(seen=jnp.int32(3)),
        full,
    ):  # one of the two tokens would still fit the first of these
        for _ in range(2):
            hidden, begun = apply(body, params, VECTORS[:, 2:4], begun)
            assert jnp.isnan(hidden).all()
    batch = Batch(None, None, None, np.arange(ROWS))
    for field, shape in ("segment_ids", (ROWS, TIME)), ("reset", ROWS):  # which a cache ignores
        with refuses(f"batch.{field}"):
            body.apply(params, VECTORS, carry, batch._replace(**{field: np.ones(shape, int)}))


def test_post_norm_normalises_once():
    """The last block ends in a norm, and fairseq's post-norm decoder has no other; a second one
    would make another model of the same config.
    """
    body = make(PostNormTransformer, layers=1)
    assert set(fresh(body)["params"]) == {"blocks"}
    assert set(fresh(make(layers=1))["params"]) == {"blocks", "norm"}


class Penalised(Block):
    """A block that sows the squares of its output, as activation regularisation does."""

    @nn.compact
    def __call__(self, *arguments):
        x, cache = super().__call__(*arguments)
        self.sow("penalties", "squares", (x**2).mean(axis=-1))
        return x, cache


class PenalisedTransformer(Transformer):
    block = Penalised


def test_blocks_can_sow():
    """Penalties of every layer and token, with gradients to the layer's parameters; without the
    collection nothing changes. Intermediates of blocks were dropped in silence.
    """
    body = make(PenalisedTransformer, final_norm=False)
    params = fresh(body)

    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(params):
        (hidden, _), sown = body.apply(params, VECTORS, mutable=["penalties"])
        (penalties,) = jax.tree.leaves(sown)
        return penalties[0].sum(), (hidden, penalties)

    (_, (hidden, penalties)), gradient = jax.jit(loss)(params)
    assert penalties.shape == (LAYERS, ROWS, TIME)
    np.testing.assert_allclose(penalties[-1], (hidden**2).mean(axis=-1), rtol=1e-5)
    of_layers = np.abs(gradient["params"]["blocks"]["outer"]["kernel"]).sum(axis=(1, 2))
    assert of_layers[0] > 0 and not of_layers[1:].any()
    np.testing.assert_allclose(hidden, apply(make(final_norm=False), params, VECTORS)[0], rtol=1e-5)
    capture = {"capture_intermediates": True, "mutable": ["intermediates"]}
    _, captured = jax.eval_shape(lambda: body.apply(params, VECTORS, train=False, **capture))
    [of_blocks] = captured["intermediates"]["blocks"]["norm_attention"]["__call__"]
    assert of_blocks.shape == (LAYERS, ROWS, TIME, FEATURES)


@pytest.mark.parametrize("rate", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_alone(rate):
    """With any one of the three rates two keys differ in training; evaluation needs no key and
    drops nothing.
    """
    body = make(layers=1, **{rate: 0.3})
    params = fresh(body)
    one, other, again = (
        apply(body, params, VECTORS, train=True, rngs={"dropout": jax.random.key(key)})[0]
        for key in (0, 1, 0)
    )
    assert (one != other).any()
    np.testing.assert_array_equal(one, again)
    np.testing.assert_array_equal(
        apply(body, params, VECTORS)[0], apply(make(layers=1), params, VECTORS)[0]
    )


def test_places_of_dropout():
    """With a rate of a half, what is kept is doubled: vectors that enter, what a block adds and,
    under another rate, nothing else; attention's rate leaves both.
    """

    def hidden(added, **rates):
        body = make(layers=1, final_norm=False, positions="none", **rates)
        params = jax.tree.map(jnp.zeros_like, fresh(body))
        params["params"]["blocks"]["outer"]["bias"] += added
        return apply(body, params, VECTORS, train=True, rngs={"dropout": jax.random.key(0)})[0]

    entered = VECTORS * FEATURES**0.5
    assert set(np.unique((hidden(0, dropout=0.5) / entered).round(4))) == {0.0, 2.0}
    added = hidden(1, dropout=0.5) - hidden(0, dropout=0.5)
    assert set(np.unique(added.round(4))) == {0.0, 2.0}
    np.testing.assert_allclose(hidden(1, attention_dropout=0.5), entered + 1, rtol=1e-6)


def test_layers_draw_their_own_dropout():
    """Two layers of one scan do not share a mask.

    Parameters are 0 but for a feed-forward layer that adds the number of its active units to every
    feature. Half of the units are dropped and the others count double, so two layers with one mask
    would add a multiple of 4.
    """
    body = make(layers=2, activation_dropout=0.5, final_norm=False)
    params = jax.tree.map(jnp.zeros_like, fresh(body))
    blocks = params["params"]["blocks"]
    blocks["inner"]["bias"] += 1.0
    blocks["outer"]["kernel"] += 1.0
    hidden = apply(body, params, VECTORS, train=True, rngs={"dropout": jax.random.key(0)})[0]
    added = np.asarray(
        hidden - (VECTORS * FEATURES**0.5 + sinusoids(jnp.arange(TIME), FEATURES)[None])
    )[..., 0].round(3)
    assert not (added % 2).any() and (added % 4).any()


def test_rematerialisation_changes_nothing():
    """Recomputed values are those that would have been kept: gradients are equal, with dropout and
    rows of several chunks.
    """
    vectors = jax.random.normal(jax.random.key(0), (1, 70, FEATURES))
    rates = {"dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}

    def gradients(remat):
        body = make(layers=2, heads=2, remat=remat, **rates)

        def loss(params, vectors):
            return jnp.sum(
                body.apply(params, vectors, train=True, rngs={"dropout": jax.random.key(2)})[0] ** 3
            )

        step = jax.jit(jax.grad(loss, argnums=(0, 1)))
        return jax.tree.leaves(step(fresh(body), vectors))

    kept = gradients("none")
    for how in "elementwise", "all":
        for a, b in zip(kept, gradients(how), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(a).max())
