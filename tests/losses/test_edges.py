"""Other dtypes, strict promotion, ignored targets, numbers that only the program knows, and means
over devices.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from adaptive_jax import adaptive_cross_entropy, linear_cross_entropy
from adaptive_jax.losses import banded, distribution, plans
from adaptive_jax.losses.distribution import log_probs, predict
from adaptive_jax.numerics.bands import Band
from tests import refuses
from tests.losses.shardings import losses_of
from tests.losses.test_banded import check, in_float64
from tests.losses.test_cross_entropy import adaptive_arrays


def normal(*shape):
    """Numbers in float32 that depend on the shape alone, not on the tests before."""
    return np.random.default_rng(shape).standard_normal(shape).astype("f")


def full(hidden, table, targets, weights):
    """The mean over all logits."""
    logits = hidden @ table.T
    each = losses_of(logits, targets)
    return jnp.sum(weights * each) / weights.sum()


@pytest.mark.parametrize("words, tile", [(300, None), (65_504, None), (300, 128)])
def test_float16(monkeypatch, words, tile):
    """Gradients in float16 are finite and right, by its 11 bits, from 65,504 words on too, where a
    sum of powers is infinite.
    """
    if tile:
        monkeypatch.setattr(plans, "plan", lambda *_: plans.Plan(2, tile, True))
    hidden, table = normal(3, 8).astype("float16"), (normal(words, 8) / 4).astype("float16")
    weights = np.array([2.0, 1e-3, 1.0], "f")
    values = hidden, table, np.random.default_rng(1).integers(0, words, 3)
    run = lambda h, t, y: linear_cross_entropy(h, t, y, weights=weights)
    value, gradients = jax.jit(jax.value_and_grad(run, (0, 1)))(*values)
    twin = lambda h, t, y: full(h, t, y, weights)
    exact, right = in_float64(jax.value_and_grad(twin, (0, 1)), *values)
    np.testing.assert_allclose(value, exact, rtol=1e-3)
    for one, other in zip(gradients, right, strict=True):
        assert one.dtype == jnp.float16 and jnp.isfinite(one).all()
        error = np.asarray(one, np.float64) - other
        # Numbers of float16 are 6e-8 apart at least.
        assert np.linalg.norm(error) <= 2**-9 * np.linalg.norm(other) + 3e-8 * error.size**0.5


def test_a_mean_in_float16_of_a_sum_beyond_it():
    """A sum of gradients over 65,504 made that of their mean infinite."""
    hidden, table = jnp.full((500, 2), 300, jnp.float16), jnp.zeros((3, 2), jnp.float16)
    slope = jax.jit(jax.grad(lambda t: linear_cross_entropy(hidden, t, np.zeros(500, int))))
    right = np.repeat([[-200.0], [100.0], [100.0]], 2, axis=1)
    np.testing.assert_allclose(slope(table), right, rtol=2e-3)


def test_a_scaled_mean_in_float16():
    """A scale of the loss comes before gradients are rounded to float16: those of a mean of 30,000
    tokens lose their digits there.
    """
    hidden, table = normal(30_000, 2), normal(3, 2) / 50
    targets = np.random.default_rng(1).integers(0, 3, len(hidden))

    def scaled(hidden, table):
        return 2.0**15 * linear_cross_entropy(hidden, table, targets)

    slopes = jax.jit(jax.grad(scaled, (0, 1)))
    half = [jnp.asarray(a, jnp.float16) for a in (hidden, table)]
    for one, right in zip(slopes(*half), slopes(*[a.astype("f") for a in half]), strict=True):
        assert one.dtype == jnp.float16
        assert jnp.abs(one.astype("f") - right).sum() <= 1e-3 * jnp.abs(right).sum()


def test_the_scale_of_logits_in_float16():
    """Its gradient is summed in float32: in float16 each of 30,000 tokens would add 0."""
    hidden, table = normal(30_000, 2).astype("float16"), normal(3, 2).astype("float16") / 5_000
    targets = np.random.default_rng(1).integers(0, 3, len(hidden))

    def loss(scale, hidden, table):
        return linear_cross_entropy(hidden, table, targets, logit_scale=scale)

    slope = jax.jit(jax.grad(loss))
    right = slope(1.5, hidden.astype("f"), table.astype("f"))
    np.testing.assert_allclose(slope(1.5, hidden, table), right, rtol=2e-2)


def test_a_scaled_bias_in_bfloat16():
    """It is added in float32, so its product with the scale of the logits is not rounded."""
    bias, none = jnp.asarray(9 * normal(50), jnp.bfloat16), jnp.zeros((50, 1))
    each = linear_cross_entropy(
        none.astype(bias.dtype), none, range(50), bias=bias, logit_scale=1.3, reduction="none"
    )
    right = -jax.nn.log_softmax(1.3 * bias.astype("f"))
    np.testing.assert_allclose(each, right, rtol=1e-5, atol=1e-5)


def test_calls_outside_jit_compile_once(monkeypatch):
    """JAX compiles a loop at every call there, which took a second each time."""
    traced = []
    for module, name in (banded, "one_pass"), (distribution, "_of_head"):
        inner = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, inner=inner, **k: (traced.append(1), inner(*a, **k))[1]
        )
    (hidden, bands, clusters, _), targets = adaptive_arrays((6, 7, 19))
    counts = []
    for _ in range(3):
        slopes = jax.grad(adaptive_cross_entropy)(hidden, bands, clusters, targets)
        words = predict(hidden, bands, clusters)
        counts.append(len(traced))
    assert 0 < counts[0] == counts[2]
    assert jnp.isfinite(slopes).all() and words.shape == targets.shape


def test_checks_of_indices_find_none():
    """`jax.experimental.checkify` reported one outside, that of a word of a tail in the head."""
    (hidden, bands, clusters, _), targets = adaptive_arrays((6, 7, 19))
    slope = jax.grad(lambda h, y: adaptive_cross_entropy(h, bands, clusters, y))
    checked = checkify.checkify(slope, errors=checkify.index_checks)
    error, _ = jax.jit(checked)(jnp.asarray(hidden), jnp.asarray(targets))
    assert error.get() is None


@pytest.mark.parametrize("reduction, tile", [("mean", None), ("none", 4)])
def test_float64(monkeypatch, tile, reduction):
    """Under x64, sums are in float64 too, as are weights and gradients; 1e-13 says so."""
    if tile:
        monkeypatch.setattr(plans, "plan", lambda *_: plans.Plan(2, tile, False))
    values = normal(6, 4), normal(11, 4)
    targets = np.random.default_rng(1).integers(0, 11, 6)
    weights = np.array([1, 2, 0, 1, 0.5, 1])

    def ours(h, t, y, w):
        return linear_cross_entropy(h, t, y, weights=w, reduction=reduction).sum()

    def twin(h, t, y, w):
        return full(h, t, y, w) * (1 if reduction == "mean" else w.sum())

    with jax.enable_x64(True):
        wide = *(jnp.asarray(a, jnp.float64) for a in values), targets, jnp.asarray(weights)
        wide_results, right = (jax.jit(jax.value_and_grad(f, (0, 1)))(*wide) for f in (ours, twin))
        assert {leaf.dtype for leaf in jax.tree.leaves(wide_results)} == {jnp.dtype("float64")}
        for one, other in zip(jax.tree.leaves(wide_results), jax.tree.leaves(right), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize(
    "name, value", [("label_smoothing", 0.1), ("z_loss", 0.1), ("soft_cap", 2)]
)
def test_numbers_of_numpy_do_not_widen(name, value):
    """Under x64 a float64 of NumPy made parts of the loss float64: what a sweep by `np.linspace`
    passes.
    """
    hidden, table, targets = normal(6, 4), normal(11, 4), np.arange(6)
    one, other = (
        linear_cross_entropy(hidden, table, targets, **{name: number})
        for number in (np.float32(value), value)
    )
    assert one == other
    with jax.enable_x64(True):
        wide = linear_cross_entropy(hidden, table, targets, **{name: np.float64(value)})
    assert wide.dtype == jnp.float32
    np.testing.assert_allclose(wide, other, rtol=1e-6)


@pytest.mark.parametrize("dtype, tile", [("float32", None), ("bfloat16", 4), ("float16", None)])
def test_strict_promotion(monkeypatch, dtype, tile):
    """Every option in a program in which JAX widens nothing by itself."""
    if tile:
        monkeypatch.setattr(plans, "plan", lambda *_: plans.Plan(2, tile, True))
    (hidden, bands, clusters, weights), targets = adaptive_arrays((5, 9, 30))
    options = {"z_loss": 0.1, "soft_cap": 2.0, "label_smoothing": 0.1, "logit_scale": 0.5}

    def total(hidden, bands):
        whole = adaptive_cross_entropy(hidden, bands, clusters, targets, weights=weights, **options)
        each, report = linear_cross_entropy(
            hidden,
            bands[0].table,
            np.minimum(targets, 4),
            reduction="none",
            reports=("nll", "entropy", "top_k", "correct"),
            top_k=2,
            **options,
        )
        padded = linear_cross_entropy(
            hidden, bands[0].table, np.minimum(targets, 3), words=4, label_smoothing=0.1
        )
        return whole + each.sum() + report.entropy.sum() + padded

    with jax.numpy_dtype_promotion("strict"):
        found = jax.jit(jax.value_and_grad(total, (0, 1)))(jnp.asarray(hidden, dtype), bands)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_ignored_targets():
    """-100 by default, and any other id, counts 0 and is not in the mean, as in torch; its hidden
    state may be NaN. Without it, a batch of Hugging Face is NaN under jit.
    """
    hidden, table = normal(6, 4), normal(11, 4)
    targets = np.random.default_rng(1).integers(1, 11, 6)
    mask = np.array([1, 0, 1, 1, 0, 1], bool)
    bad = np.where(mask[:, None], hidden, np.nan).astype("f")
    run = jax.jit(
        jax.value_and_grad(lambda h, y, i: linear_cross_entropy(h, table, y, ignore_index=i)),
        static_argnums=2,
    )
    expected = jax.jit(jax.value_and_grad(full))(hidden, table, targets, 1.0 * mask)
    for ignored in -100, 7_000:
        check(run(bad, np.where(mask, targets, ignored), ignored), expected)
    eager = np.where(mask, targets, -100)
    listed = lambda h: linear_cross_entropy(h, table, eager.tolist(), weights=np.full(6, 3.0))
    check(jax.jit(listed)(hidden), expected[0])
    with refuses("targets[1]=-100"):
        linear_cross_entropy(hidden, table, eager, ignore_index=None)
    value, gradient = run(hidden, 0 * targets - 100, -100)
    assert value == 0 and not gradient.any()
    # Of soft targets, each one by itself.
    soft, probs = np.stack([targets, 0 * targets], axis=1), np.full((6, 2), 0.5, "f")
    with refuses("target_probs", "gradient"):
        jax.eval_shape(
            jax.grad(lambda q: linear_cross_entropy(hidden, table, soft, target_probs=q)), probs
        )
    ignoring = lambda h: linear_cross_entropy(h, table, soft, target_probs=probs, ignore_index=0)
    check(jax.jit(ignoring)(hidden), 0.5 * jax.jit(full)(hidden, table, targets, np.ones(6)))


def test_numbers_that_the_program_knows():
    """z_loss, soft_cap and logit_scale as arrays give what numbers give; the scale has its
    gradient, the others refuse one.
    """
    (hidden, bands, clusters, weights), targets = adaptive_arrays((5, 9, 30))

    def loss(hidden, numbers):
        names = dict(zip(("logit_scale", "z_loss", "soft_cap"), numbers, strict=True))
        return adaptive_cross_entropy(hidden, bands, clusters, targets, weights=weights, **names)

    def by_hand(hidden, scale):
        *scaled, last = (band._replace(bias=scale * band.bias) for band in (*bands, clusters))
        how = {"weights": weights, "z_loss": 0.05, "soft_cap": 1.5}
        return adaptive_cross_entropy(scale * hidden, scaled, last, targets, **how)

    of_arrays = jax.value_and_grad(lambda h, scale, others: loss(h, (scale, *others)), (0, 1))
    results = value, (slope, _) = jax.jit(of_arrays)(hidden, 0.7, (0.05, 1.5))
    check(results, jax.jit(jax.value_and_grad(by_hand, (0, 1)))(hidden, 0.7))
    of_numbers = jax.jit(lambda h: jax.value_and_grad(loss)(h, (0.7, 0.05, 1.5)))
    check((value, slope), of_numbers(hidden))
    with refuses("soft_cap", "gradient"):
        jax.eval_shape(jax.grad(lambda z: loss(hidden, (0.7, z, 1.5))), 0.05)
    with refuses("soft_cap"):
        loss(hidden, (0.7, 0.05, jnp.ones(2)))


PROGRAM = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from adaptive_jax import InputError, linear_cross_entropy
from tests.losses.test_edges import normal
MESH = jax.make_mesh((4, 2), ("data", "words"), axis_types=(AxisType.Auto,) * 2)
hidden, table, targets = normal(16, 4), normal(10, 4), np.arange(16, dtype=np.int32) % 10
targets[[0, 1, 2, 9]] = -100  # devices have other numbers of tokens, the first one a single one
apart = {}
for axis, cut, reductions in (None, P(), ["mean"]), ("words", P("words"), ["mean", "sum"]):
    for reduction in reductions:
        one_device = lambda h, t: linear_cross_entropy(h, t, targets, reduction=reduction)
        def local(h, t, y):
            return linear_cross_entropy(
                h, t, y, reduction=reduction, token_axes="data", axis_name=axis
            )
        specs = P("data"), cut, P("data")
        outside = jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=P())
        inside = jax.shard_map(
            jax.value_and_grad(local, (0, 1)),
            mesh=MESH,
            in_specs=specs,
            out_specs=(P(), (P("data"), cut)),
        )
        wanted = jax.jit(jax.value_and_grad(one_device, (0, 1)))(hidden, table)
        found = {
            "outside": jax.jit(jax.value_and_grad(outside, (0, 1)))(hidden, table, targets),
            "inside": jax.jit(inside)(hidden, table, targets),
        }
        for name, each in found.items():
            pairs = zip(jax.tree.leaves(each), jax.tree.leaves(wanted), strict=True)
            far = [  # a sum of losses is far above 1
                np.abs(np.asarray(a) - np.asarray(b)).max() / max(1, np.abs(b).max())
                for a, b in pairs
            ]
            apart[f"{name} {reduction} {axis}"] = float(np.max(far))  # `max` would drop NaN
def reported(h, t, y):
    names = ("predicted", "correct", "entropy", "logsumexp", "top_k")
    return linear_cross_entropy(
        h, t, y, axis_name="words", reports=names, top_k=7, reduction="none", words=9
    )[1]
hits = np.where(targets == -100, -100, np.argmax(hidden @ table[:9].T, axis=1)).astype(np.int32)
hits[5] = 1 - min(hits[5], 1)
broken = np.where(np.arange(16)[:, None] == 4, np.nan, hidden).astype("f")
cut = jax.shard_map(
    reported, mesh=MESH, in_specs=(P("data"), P("words"), P("data")), out_specs=P("data")
)
whole = linear_cross_entropy(
    hidden, table, hits, words=9, top_k=7, reduction="none",
    reports=("predicted", "correct", "entropy", "logsumexp", "top_k"),
)[1]
pairs = zip(jax.tree.leaves(jax.jit(cut)(hidden, table, hits)), jax.tree.leaves(whole), strict=True)
far = [np.abs(1.0 * np.asarray(a) - np.asarray(b)).max() for a, b in pairs]
apart["reports"] = float(np.max(far))
apart["predicted of NaN"] = int(jax.jit(cut)(broken, table, hits).predicted[4])
half = jnp.full((8, 2000, 2), 40, jnp.float16), jnp.zeros((3, 2), jnp.float16)
def mean(h, t):
    return linear_cross_entropy(h, t, jnp.zeros(h.shape[:-1], int), token_axes="data")
of_table = jax.shard_map(
    jax.grad(mean, 1), mesh=MESH, in_specs=(P("data"), P()), out_specs=P()
)
# To a thousandth, where the others are compared to 2e-6
apart["float16"] = float(jnp.abs(jax.jit(of_table)(*half)[0] / (-40 * 2 / 3) - 1).max()) / 1e3
apart["right"] = -int(whole.correct.sum())
print(json.dumps(apart))
"""


def test_a_mean_over_devices(eight):
    """token_axes makes mean and sum, with gradients taken inside and outside shard_map, those of
    one device, though devices have 1 to 4 tokens that count; reports of words cut over devices
    are those of one; and no sum of gradients leaves the range of float16.
    """
    apart = json.loads(eight(PROGRAM))
    assert len(apart) == 10 and all(far < 2e-6 for far in apart.values()), apart
    assert (apart["right"], apart["predicted of NaN"]) == (-11, 0)


def test_the_scale_of_logits_ignores_what_counts_for_nothing():
    """Its gradient, where hidden states of weight 0 are NaN: 0 · NaN made it NaN."""
    (hidden, bands, clusters, _), targets = adaptive_arrays((4, 5, 6))
    hidden = jnp.asarray(hidden)
    weights = np.ones(len(hidden), "f")
    weights[1] = 0
    broken = hidden.at[1].set(jnp.nan)
    table = jnp.asarray(normal(31, hidden.shape[1]))

    def of_full(scale, hidden):
        return linear_cross_entropy(
            hidden, table, targets % 31, weights=weights, logit_scale=scale, bias=table[:, 0]
        )

    def of_bands(scale, hidden):
        how = {"weights": weights, "logit_scale": scale}
        return adaptive_cross_entropy(hidden, bands, clusters, targets, **how)

    def by_hand(scale):
        plain = {"weights": weights, "bias": scale * table[:, 0]}
        return linear_cross_entropy(scale * hidden, table, targets % 31, **plain)

    run = jax.value_and_grad
    check(jax.jit(run(of_full))(1.5, hidden), jax.jit(run(by_hand))(1.5))
    for loss in of_full, of_bands:
        slope = jax.jit(jax.grad(loss))
        np.testing.assert_allclose(slope(1.5, broken), slope(1.5, hidden), rtol=1e-5)


@pytest.mark.parametrize("scale", [1, 60])
@pytest.mark.parametrize("sizes", [(4, 5, 6), (7, *[9] * 8, 11)], ids=["two tails", "one loop"])
def test_projections_in_float16(scale, sizes):
    """Their gradients were 0 where weights are 1e-8, and infinite where tables have numbers over
    32.
    """
    (hidden, bands, clusters, _), targets = adaptive_arrays(sizes)
    hidden = jnp.asarray(hidden)
    tails = [Band(scale * table, projection / scale, bias) for table, projection, bias in bands[1:]]
    bands = [bands[0], *tails]

    @jax.jit
    def slopes(weight, hidden, bands):
        def loss(bands):
            weights = jnp.full(len(hidden), weight)
            how = {"weights": weights, "reduction": "sum"}
            return adaptive_cross_entropy(hidden, bands, clusters, targets, **how) / weight

        return [band.projection for band in jax.grad(loss)(bands)[1:]]

    right = slopes(1.0, hidden, bands)
    for weight in 1.0, 1e-8:
        found = slopes(weight, hidden.astype(jnp.float16), bands)
        for one, other in zip(found, right, strict=True):
            assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(other)  # 0 of an idle tail


def test_soft_targets_of_weight_0_may_be_nan():
    """And need not exist: gradients of table and bias were NaN, and the loss was not."""
    hidden, table = jnp.asarray(normal(7, 4)), jnp.asarray(normal(11, 4))
    targets = np.stack([np.arange(7), np.arange(1, 8)], axis=1)
    probs, weights = np.full((7, 2), 0.5, np.float32), np.ones(7, np.float32)
    weights[3] = 0

    def loss(hidden, table, bias, targets, probs):
        given = {"target_probs": probs, "weights": weights, "bias": bias}
        return linear_cross_entropy(hidden, table, targets, **given)

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    right = run(hidden, table, table[:, 0], targets, probs)
    targets[3], probs[3] = -1, np.nan
    found = run(hidden, table, table[:, 0], targets, probs)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, right)
    eager = loss(hidden, table, table[:, 0], targets, probs)
    np.testing.assert_allclose(eager, right[0], rtol=1e-6)


@pytest.mark.parametrize("dtype, rtol", [(np.float32, 1e-4), (np.float16, 2e-2)])
def test_losses_of_tokens_that_no_chunk_divides(dtype, rtol):
    """Gradients of table and bias were NaN: rows that fill the last chunk had the normaliser 0; in
    float16 they had it where the powers of a bias are infinite.
    """
    hidden, table, targets = normal(11, 3).astype(dtype), normal(7, 3), np.arange(11) % 7
    bias = 30 * np.arange(7, dtype=np.float32)

    def gradients(function, hidden):
        return jax.jit(jax.grad(function, (0, 1, 2)))(hidden, table, bias)

    def of_tokens(hidden, table, bias):
        settings = {"bias": bias, "reduction": "none", "chunk": 4}
        return linear_cross_entropy(hidden, table, targets, **settings).sum()

    wide = hidden.astype(np.float32)
    right = gradients(lambda h, t, b: losses_of(h @ t.T + b[None], targets).sum(), wide)
    for array, expected in zip(gradients(of_tokens, hidden), right, strict=True):
        np.testing.assert_allclose(array, expected, rtol=rtol, atol=rtol / 10)


def test_a_second_derivative_by_weights_is_refused():
    """Of the losses of tokens, in one line, as that by hidden states."""
    hidden, table = jnp.asarray(normal(7, 4)), jnp.asarray(normal(11, 4))

    def by_hidden(weights):
        how = {"weights": weights, "reduction": "none"}
        losses = lambda h: linear_cross_entropy(h, table, np.arange(7), **how).sum()
        return jnp.sum(jax.grad(losses)(hidden) ** 2)

    with refuses("second derivative"):
        jax.eval_shape(jax.grad(by_hidden), jnp.ones(7))


def test_a_head_of_tails_alone():
    """It has reports, and log-probabilities in float64."""
    hidden, width = normal(6, 4), 4
    bands = [Band(jnp.zeros((0, width)))] + [Band(jnp.asarray(normal(5, width)))] * 9
    clusters = Band(jnp.asarray(normal(9, width)))
    how = {"reports": ("correct",)}
    best = jax.jit(predict)(hidden, bands, clusters)
    targets = np.where(np.arange(6) % 2 == 0, best, (best + 1) % 45)
    _, report = jax.jit(lambda *a: adaptive_cross_entropy(*a, **how))(
        hidden, bands, clusters, targets
    )
    assert report.correct.tolist() == [True, False] * 3
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (hidden, bands, clusters))
        shape = jax.eval_shape(log_probs, *wide)
        assert (shape.shape, shape.dtype) == ((len(hidden), 45), jnp.float64)


def test_a_token_of_nan_gets_word_0():
    """And changes no other: it visits no tail."""
    (hidden, bands, clusters, _), _ = adaptive_arrays((5, 9, 30))
    words, broken = jax.jit(predict), hidden.copy()
    broken[2] = np.nan
    expected = np.where(np.arange(len(hidden)) == 2, 0, words(hidden, bands, clusters))
    np.testing.assert_array_equal(words(broken, bands, clusters), expected)


def test_ids_of_unsigned_64_bits():
    """Under x64 they lost their upper half: 2**32 + 1 counted as 1."""
    hidden, table = jnp.asarray(normal(4, 4)), jnp.asarray(normal(11, 4))
    each = jax.jit(lambda y: linear_cross_entropy(hidden, table, y, reduction="none"))
    with jax.enable_x64(True):
        losses = each(jnp.asarray(np.array([3, 2**32 + 1, 1, 2**63 + 1], np.uint64)))
    np.testing.assert_array_equal(np.isnan(losses), [False, True, False, True])
