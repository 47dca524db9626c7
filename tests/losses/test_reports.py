"""Reports beside the loss, soft targets, and gradients of results by token, against all logits in
float64.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import Band, adaptive_cross_entropy, linear_cross_entropy
from adaptive_jax.losses import plans
from adaptive_jax.losses.reports import REPORTS
from tests import refuses
from tests.losses.shardings import losses_of
from tests.losses.test_banded import check, in_float64
from tests.losses.test_cross_entropy import adaptive_arrays

TOKENS, WIDTH, WORDS, TOP = 7, 4, 23, 3
OPTIONS = {"z_loss": 0.03, "soft_cap": 2.0, "label_smoothing": 0.2}
SOFT = {name: OPTIONS[name] for name in ("z_loss", "soft_cap")}
RNG = np.random.default_rng(0)
HIDDEN, TABLE, BIAS = (
    RNG.standard_normal(shape).astype("f") for shape in ((TOKENS, WIDTH), (WORDS, WIDTH), WORDS)
)
TARGETS = RNG.integers(0, WORDS, TOKENS).astype(np.int32)
TARGETS[3] = (HIDDEN @ TABLE.T + BIAS[None])[3].argmax()
TEACHER = RNG.integers(0, WORDS, (TOKENS, 3)).astype(np.int32)
PROBS = RNG.random((TOKENS, 3)).astype("f") / 3
WEIGHTS = np.array([1, 2, 0, 1, 0, 0.5, 1], "f")
PULLS = RNG.standard_normal((4, TOKENS)).astype("f")


@pytest.fixture(params=["one tile", "kept", "computed again"])
def tiled(request, monkeypatch):
    """Tables as they are, or in tiles of 5 words, with logits that are kept or not."""
    if request.param != "one tile":
        kept = request.param == "kept"
        plan = functools.partial(plans.Plan, words=5, keeps_logits=kept)
        monkeypatch.setattr(plans, "plan", lambda *_: plan(3))


def dense(hidden, table, bias, weights, *soft, z_loss, soft_cap, label_smoothing=0.0):
    """`(weighted losses, nll, logsumexp, entropy)` by token, and the other reports."""
    logits = soft_cap * jnp.tanh((hidden @ table.T + bias[None]) / soft_cap)
    log_probs = jax.nn.log_softmax(logits)
    logsumexp = jax.scipy.special.logsumexp(logits, axis=1)
    hard = losses_of(logits, TARGETS)
    nll, loss = hard, (1 - label_smoothing) * hard - label_smoothing * log_probs.mean(axis=1)
    if soft:
        nll = loss = -jnp.sum(soft[0] * jnp.take_along_axis(log_probs, TEACHER, axis=1), axis=1)
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)
    penalty, live = z_loss * logsumexp**2, weights != 0
    each = [jnp.where(live, a, 0.0) for a in (loss + penalty, nll, logsumexp, entropy)]
    values, words = jax.lax.top_k(log_probs, TOP)
    predicted = logits.argmax(axis=1)
    others = [penalty, predicted, predicted == TARGETS, values, words]
    others = [jnp.where(live.reshape(-1, *[1] * (a.ndim - 1)), a, 0) for a in others]
    return [weights * each[0], *each[1:]], others


def pulled(function, *values):
    """Results, and gradients by one cotangent for each token of each of four of them."""

    def total(*values):
        each, others = function(*values)
        return sum(jnp.sum(pull * a) for pull, a in zip(PULLS, each, strict=True)), (each, others)

    return jax.value_and_grad(total, (0, 1, 2), has_aux=True)(*values)


def ours(hidden, table, bias, weights, probs=None, **options):
    """As `dense`."""
    options |= {"bias": bias, "weights": weights, "target_probs": probs, "top_k": TOP}
    options["reports"] = [name for name in REPORTS if probs is None or name != "correct"]
    targets = TARGETS if probs is None else TEACHER
    each, report = linear_cross_entropy(hidden, table, targets, reduction="none", **options)
    correct = report.predicted == TARGETS if probs is not None else report.correct
    correct &= weights != 0
    others = [report.z_loss, report.predicted, correct, *report.top_k]
    return [each, report.nll, report.logsumexp, report.entropy], others


@functools.cache
def slow_reports(soft):
    """Reports and gradients of all logits in float64; of soft targets too."""
    options, probs = (SOFT, (PROBS,)) if soft else (OPTIONS, ())
    twin = lambda *v: pulled(functools.partial(dense, **options), *v)
    return in_float64(twin, HIDDEN, TABLE, BIAS, WEIGHTS, *probs)


@functools.cache
def reports_without_bias():
    """The other reports of all logits in float64."""
    twin = functools.partial(dense, **OPTIONS)
    return in_float64(twin, HIDDEN, TABLE, 0 * BIAS, WEIGHTS)[1]


@pytest.mark.parametrize("options, soft", [(OPTIONS, ()), (SOFT, (PROBS,))])
def test_every_report_and_gradients_by_token(tiled, options, soft):
    """Each report, and gradients by a cotangent of its own for each token's loss, nll, logsumexp
    and entropy, are those of all logits; soft targets too.

    Without it, whoever logs an accuracy or needs an entropy computes all logits once more.
    """
    values = HIDDEN, TABLE, BIAS, WEIGHTS, *soft
    fast = jax.jit(lambda *v: pulled(functools.partial(ours, **options), *v))(*values)
    check(fast, slow_reports(bool(soft)))
    assert fast[0][1][1][2][3]  # one of them is right


def test_reports_beside_a_mean(tiled):
    """Under "mean" they have the same values, and the loss has the same gradient; one of a report
    is an error: without it, an entropy bonus trains nothing in silence.
    """
    names = [name for name in REPORTS if name != "nll"]

    def loss(hidden, reports):
        top = TOP if "top_k" in reports else 0
        options = OPTIONS | {"weights": WEIGHTS, "reports": reports, "top_k": top}
        results = linear_cross_entropy(hidden, TABLE, TARGETS, **options)
        return results if reports else (results, None)

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (value, report), gradient = run(HIDDEN, tuple(names))
    np.testing.assert_array_equal(gradient, run(HIDDEN, ())[1])
    np.testing.assert_array_equal(value, run(HIDDEN, ())[0][0])
    statistics = [report.z_loss, report.predicted, report.correct, *report.top_k]
    check(statistics, reports_without_bias())
    of_report = lambda h: jnp.sum(loss(h, ("nll", "entropy", "top_k"))[1].nll)
    assert report.nll is None
    with refuses("reduction='none'"):
        jax.eval_shape(jax.grad(of_report), HIDDEN)


def test_words_that_cannot_come(tiled):
    """A word with a logit of -inf is at best an entry of -inf, not one with a finite number."""
    bias = jnp.full(len(TABLE), -jnp.inf).at[jnp.array([3, 8])].set(0.0)
    _, report = linear_cross_entropy(
        HIDDEN, TABLE, jnp.full_like(TARGETS, 3), bias=bias, reports=["top_k"], top_k=3
    )
    pair = jax.nn.log_softmax(HIDDEN @ TABLE[jnp.array([3, 8])].T)
    np.testing.assert_allclose(report.top_k.log_probs[:, :2], -jnp.sort(-pair), rtol=1e-5)
    assert (report.top_k.log_probs[:, 2] == -jnp.inf).all()


def test_reports_need_no_product():
    """All of them, and soft targets, have as many products as the plain gradient."""

    def products(**options):
        run = lambda h, t: jax.tree.leaves(linear_cross_entropy(h, t, **options))[0]
        return str(jax.make_jaxpr(jax.grad(run, (0, 1)))(HIDDEN, TABLE)).count("dot_general")

    plain = products(targets=TARGETS)
    assert plain == products(targets=TARGETS, reports=REPORTS, top_k=TOP) == 3
    assert plain == products(targets=TEACHER, target_probs=PROBS)


@pytest.mark.parametrize("case", [(5, 9, 30), (7, *[9, 10] * 4, 11)])
def test_reports_of_an_adaptive_softmax(case):
    """nll, z-loss, and whether torch's rule predicts the target: the best of the head, then the
    best of its tail.
    """
    (hidden, bands, clusters, weights), targets = adaptive_arrays(case)
    logits = [(hidden if p is None else hidden @ p.T) @ t.T + b for t, p, b in bands]
    head = np.concatenate([logits[0], hidden @ clusters.table.T + clusters.bias], axis=1)
    starts = np.cumsum([0, *case])
    best = head.argmax(axis=1)
    words = [
        b if b < case[0] else starts[1 + b - case[0]] + logits[1 + b - case[0]][i].argmax()
        for i, b in enumerate(best)
    ]
    targets = np.where(np.arange(len(targets)) % 2 == 0, words, targets)  # half of them are right
    weights[4] = 0
    options = {"weights": weights, "z_loss": 0.1, "reports": ("nll", "z_loss", "correct")}
    run = functools.partial(adaptive_cross_entropy, hidden, bands, clusters, reduction="none")
    each, report = jax.jit(functools.partial(run, **options))(targets)
    np.testing.assert_array_equal(report.correct, (targets == words) & (weights != 0))
    assert report.correct.sum() >= 2
    plain = jax.jit(run)(targets)
    check(report.nll, np.where(weights == 0, 0, plain))
    check(weights * (report.nll + report.z_loss), each)


@pytest.mark.parametrize(
    "options, names",
    [
        ({"top_k": 3}, ["top_k=3"]),
        ({"reports": ["top_k"], "top_k": 24}, ["top_k=24", "23"]),
        ({"targets": TEACHER, "target_probs": PROBS, "label_smoothing": 0.1}, ["label_smoothing"]),
        ({"targets": TEACHER, "target_probs": PROBS[:, :2]}, ["targets", "[7, 3]"]),
        (
            {"targets": TEACHER[:, :1], "target_probs": PROBS[:, :1], "weights": WEIGHTS[1:]},
            ["weights", "[6]"],
        ),
        ({"reports": "nil"}, ["reports='nil'", "predicted"]),
        ({"token_axes": "data", "reduction": "none"}, ["token_axes", "effect"]),
        ({"token_axes": "data"}, ["token_axes", "tokens"]),
        ({"ignore_index": 0.5}, ["ignore_index"]),
        ({"ignore_index": 2**40}, ["ignore_index", "int32"]),
    ],
)
def test_refused_options(options, names):
    """With the arguments, and what they may be."""
    with refuses(*names):
        linear_cross_entropy(HIDDEN, TABLE, **({"targets": TARGETS} | options))


def test_a_target_that_does_not_exist_is_not_correct():
    """Word 0 stands for it inside, so a prediction of word 0 counted as correct."""
    hidden, table = np.ones((2, 2), "f"), np.array([[9, 9], [0, 0], [0, 0]], "f")
    run = jax.jit(lambda targets: linear_cross_entropy(hidden, table, targets, reports="correct"))
    assert run(np.array([7, 0]))[1].correct.tolist() == [False, True]


@pytest.mark.parametrize(
    "bands, clusters, options, names",
    [
        (
            [Band(TABLE)] * 2,
            Band(TABLE[:1]),
            {"reports": ["entropy"]},
            ["'entropy'", "nll, z_loss, correct", "log_probs"],
        ),
        (TABLE, None, {}, ["list", "Band"]),
        ([TABLE], None, {"logit_scale": 2.0}, ["bands[0]", "Band"]),
    ],
)
def test_refused_options_of_an_adaptive_softmax(bands, clusters, options, names):
    """Reports that it does not know, and bands that are none."""
    with refuses(*names):
        adaptive_cross_entropy(HIDDEN, bands, clusters, TARGETS, **options)


def test_targets_of_probability_0_may_be_any_number():
    """A teacher's list that is filled up: NaN under jit, an error before it."""
    probs, filled = (PROBS * [[1, 1, 0]]).astype("f"), TEACHER.copy()
    filled[:, 2] = [-1, 99, -100, 5, 23, 2**30, -7]
    run = lambda targets: linear_cross_entropy(HIDDEN, TABLE, targets, target_probs=probs)
    for loss in run, jax.jit(run):
        np.testing.assert_allclose(loss(filled), run(TEACHER), rtol=1e-6)


def test_reports_of_one_band():
    """An adaptive softmax without tails reports what a full one does, but for `top_k`."""
    names = [name for name in REPORTS if name != "top_k"]
    options = {"weights": WEIGHTS, "z_loss": 0.1, "reduction": "none", "reports": names}
    bands = [Band(TABLE, None, BIAS)]
    check(
        adaptive_cross_entropy(HIDDEN, bands, None, TARGETS, **options),
        linear_cross_entropy(HIDDEN, TABLE, TARGETS, bias=BIAS, **options),
    )
