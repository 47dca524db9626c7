"""Gradients that nobody asks for are not computed; reports without a gradient refuse one; chosen
words have log-probabilities with gradients.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import (
    Band,
    adaptive_cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
)
from adaptive_jax.losses import plans
from tests import refuses
from tests.losses.test_banded import check, in_float64
from tests.losses.test_cross_entropy import adaptive_arrays
from tests.programs import hasty_jit

RNG = np.random.default_rng(0)
TOKENS, WIDTH, WORDS = 7, 4, 23
HIDDEN, TABLE = (RNG.standard_normal((n, WIDTH)).astype("f") for n in (TOKENS, WORDS))
BIAS = RNG.standard_normal(WORDS).astype("f")
TARGETS = RNG.integers(0, WORDS, TOKENS).astype(np.int32)
CHOSEN = RNG.integers(0, WORDS, (TOKENS, 3)).astype(np.int32)
CHOSEN[2] = CHOSEN[2, 0]  # one word several times
PULL = RNG.standard_normal((TOKENS, 3)).astype("f")


def loss(hidden, table, bias, **options):
    return linear_cross_entropy(hidden, table, TARGETS, bias=bias, **options)


@functools.cache
def every():
    """The gradients by hidden states, table and bias in one program."""
    return jax.jit(jax.grad(loss, (0, 1, 2)))(HIDDEN, TABLE, BIAS)


TWICE = {
    "jit": lambda f, *a: f(*a),
    "vmap": lambda f, *a: jnp.mean(jax.vmap(lambda s: f(*a) * s / s)(jnp.array([1.0, 2.0]))),
    "scan": lambda f, *a: jax.lax.scan(lambda c, _: (c + f(*a) / 2, None), 0.0, None, 2)[0],
    "remat": lambda f, *a: jax.checkpoint(f)(*a),
    "cond": lambda f, *a: jax.lax.cond(a[0][0, 0] < 9, f, lambda *a: 0.0, *a),
}


@pytest.mark.parametrize("way", TWICE)
def test_each_gradient_by_itself(way):
    """By hidden states, table or bias alone they are those of all three; a frozen table under
    `stop_gradient` is frozen, too.
    """

    def stopped(hidden, table, bias):
        return loss(hidden, jax.lax.stop_gradient(table), bias)

    @hasty_jit
    def gradients(*arguments):
        alone = [jax.grad(lambda *a: TWICE[way](loss, *a), i)(*arguments) for i in range(3)]
        return *alone, jax.grad(lambda *a: TWICE[way](stopped, *a))(*arguments)

    check(gradients(HIDDEN, TABLE, BIAS), (*every(), every()[0]))


def test_frozen_bands():
    """Any part of an adaptive softmax alone: head, tails, projections, clusters."""
    (hidden, bands, clusters, weights), targets = adaptive_arrays((5, *[6] * 8, 9))
    arrays = {"hidden": hidden, "bands": bands, "clusters": clusters}
    total = lambda a: adaptive_cross_entropy(**a, targets=targets, weights=weights)
    leaves, structure = jax.tree.flatten(arrays)
    every = jax.tree.leaves(jax.jit(jax.grad(total))(arrays))
    for indices in ([0], [1], [len(leaves) - 1], range(1, 4), range(4, len(leaves), 3)):
        indices = [*indices]

        def of_some(some, indices=indices):
            changed = [*leaves]
            for i, leaf in zip(indices, some, strict=True):
                changed[i] = leaf
            return total(structure.unflatten(changed))

        some = hasty_jit(jax.grad(of_some))([leaves[i] for i in indices])
        check(some, [every[i] for i in indices])


@pytest.mark.parametrize("words, tile", [(300, None), (300, 64), (300_000, None)])
def test_products_of_a_frozen_table(monkeypatch, words, tile):
    """Hidden states alone cost two products and no array of the table's size: LoRA and prompt
    tuning paid for a float32 gradient of the head, and for a third product.
    """
    if tile:
        monkeypatch.setattr(plans, "plan", lambda *_: plans.Plan(8, tile, True))
    shapes = [(16, 128), (words, 128), (16,)]
    like = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, "ffi", strict=True)]
    counts = {}
    for which in (0, 1, (0, 1)):
        slope = jax.grad(lambda h, t, y: linear_cross_entropy(h, t, y), which)
        counts[which] = str(jax.make_jaxpr(slope)(*like)).count("dot_general")
    assert counts == {0: 2, 1: 2, (0, 1): 3}
    step = jax.jit(jax.grad(lambda h, t, y: linear_cross_entropy(h, t, y)))
    text = step.lower(*like).compile().as_text()
    arrays = re.findall(rf"= f32\[(?:{words},128|128,{words})\]\S* (\w+)", text)
    assert "parameter" in {*arrays} <= {"parameter", "transpose", "bitcast", "get"}, arrays


def test_products_of_losses_of_tokens():
    """reduction="none" and log_probs compute logits twice and gradients once, 8 N V d, whatever the
    number of words; the sums of the forward pass are kept.
    """

    def none(h, t):
        return linear_cross_entropy(h, t, TARGETS, reduction="none").sum()

    def chosen(h, t):
        return linear_log_probs(h, t, CHOSEN).sum()

    for function in none, chosen:
        slopes = jax.make_jaxpr(jax.grad(function, (0, 1)))(HIDDEN, TABLE)
        assert str(slopes).count("dot_general") == 4, function


def dense_log_probs(hidden, table, bias, chosen, cap=None, scale=1.0):
    logits = scale * (hidden @ table.T + bias[None])
    logits = logits if cap is None else cap * jnp.tanh(logits / cap)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), chosen, axis=1)


@pytest.mark.parametrize("plan", [None, plans.Plan(3, 5, True), plans.Plan(3, 5, False)])
def test_log_probs_of_chosen_words(monkeypatch, plan):
    """Values and every gradient equal those of all logits in float64: repeated targets add, ignored
    ones are 0 without gradient, tokens of weight 0 are not computed.
    """
    if plan:
        monkeypatch.setattr(plans, "plan", lambda *_: plan)
    ignored = CHOSEN.copy()
    ignored[1, 0], ignored[4] = -100, -100
    weights = np.array([1, 2, 0.5, 0, 3, 1, 1], "f")  # of which 0 alone counts
    bad = HIDDEN.copy()
    bad[3] = np.nan
    mask = (ignored != -100) * (weights != 0)[:, None]

    def fast(hidden, table, bias, scale):
        values = linear_log_probs(
            hidden, table, ignored, bias=bias, weights=weights, soft_cap=2.0, logit_scale=scale
        )
        return jnp.sum(PULL * values), values

    def slow(hidden, table, bias, scale):
        values = dense_log_probs(hidden, table, bias, CHOSEN, 2.0, scale) * mask
        return jnp.sum(PULL * values), values

    def slopes(function):
        return jax.value_and_grad(function, (0, 1, 2, 3), has_aux=True)

    scale = np.float32(1.3)
    right = in_float64(slopes(slow), HIDDEN, TABLE, BIAS, scale)
    check(jax.jit(slopes(fast))(bad, TABLE, BIAS, scale), right)


def test_reports_beside_log_probs():
    """Entropy and the best words' log-probabilities with gradients, as reduction="none" has them:
    the best words' had none, in silence.
    """

    def dense(hidden, table):
        log_probs = jax.nn.log_softmax(hidden @ table.T)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)
        best = jax.lax.top_k(log_probs, 3)[0]
        chosen = jnp.take_along_axis(log_probs, CHOSEN, axis=1)
        return jnp.sum(PULL * (chosen + 2 * best)) + jnp.sum(PULL[:, 0] * entropy)

    def ours(hidden, table):
        chosen, report = linear_log_probs(
            hidden, table, CHOSEN, reports=("entropy", "top_k"), top_k=3
        )
        best = report.top_k.log_probs
        return jnp.sum(PULL * (chosen + 2 * best)) + jnp.sum(PULL[:, 0] * report.entropy)

    def of_losses(hidden, table):
        each, report = linear_cross_entropy(
            hidden, table, TARGETS, reports=("entropy", "top_k"), top_k=3, reduction="none"
        )
        best = report.top_k.log_probs
        return -each.sum() + jnp.sum(PULL * best) + jnp.sum(PULL[:, 0] * report.entropy)

    def dense_of_losses(hidden, table):
        log_probs = jax.nn.log_softmax(hidden @ table.T)
        entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, axis=1)
        best = jax.lax.top_k(log_probs, 3)[0]
        targets = jnp.take_along_axis(log_probs, TARGETS[:, None], axis=1)
        return targets.sum() + jnp.sum(PULL * best) + jnp.sum(PULL[:, 0] * entropy)

    for fast, slow in (ours, dense), (of_losses, dense_of_losses):
        slopes = jax.jit(jax.value_and_grad(fast, (0, 1)))(HIDDEN, TABLE)
        check(slopes, in_float64(jax.value_and_grad(slow, (0, 1)), HIDDEN, TABLE))


def test_log_probs_outside_the_vocabulary():
    """NaN under jit, an error before; reports that need one target are refused."""
    outside = CHOSEN.copy()
    outside[1, 2] = WORDS
    values = jax.jit(lambda y: linear_log_probs(HIDDEN, TABLE, y))(outside)
    assert np.isnan(values[1]).all() and np.isfinite(np.delete(values, 1, axis=0)).all()
    with refuses("targets[1, 2]=23"):
        linear_log_probs(HIDDEN, TABLE, outside)
    for wrong in CHOSEN[:, 0], None:  # the message named an argument that there is not
        with refuses("targets", "shape" if wrong is not None else "None"):
            linear_log_probs(HIDDEN, TABLE, wrong)
    with refuses("'nll'", "target"):
        linear_log_probs(HIDDEN, TABLE, CHOSEN, reports="nll")


def aux(h):
    return linear_cross_entropy(h, TABLE, TARGETS, reports=("nll", "entropy", "predicted"))


def carried(h):
    def step(carry, _):
        value, report = aux(h)
        return (carry[0] + value, report), report.nll

    start = 0.0, aux(h)[1]
    (value, report), nll = jax.lax.scan(step, start, None, 2)
    return value / 2, (report, nll)


@functools.cache
def slope_of_aux():
    """The gradient of the loss alone."""
    return jax.jit(jax.grad(lambda h: aux(h)[0]))(HIDDEN)


UNUSED = {
    "aux": aux,
    "scan": carried,
    "remat": jax.checkpoint(aux),
    "cond": lambda h: jax.lax.cond(h[0, 0] < 9, aux, aux, h),
    "stopped": lambda h: (aux(h)[0] + jax.lax.stop_gradient(aux(h)[1].nll.sum()), None),
}


@pytest.mark.parametrize("way", UNUSED)
def test_reports_that_nobody_differentiates(way):
    """They stay reports wherever they travel: no error, and the gradient of the loss."""
    slope = hasty_jit(jax.grad(UNUSED[way], has_aux=True))
    check(slope(HIDDEN)[0], slope_of_aux())


@pytest.mark.parametrize("way", [way for way in UNUSED if way != "stopped"])
def test_a_gradient_of_a_report_is_refused(way):
    """An entropy bonus under "mean" trained nothing, in silence."""

    def with_bonus(h):
        value, report = UNUSED[way](h)
        report = report[0] if way == "scan" else report
        return value - report.entropy.mean()

    with refuses("reports", "reduction"):
        jax.eval_shape(jax.grad(with_bonus), HIDDEN)


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}])
def test_scopes_of_a_profile(options):
    """Products stand under names in the program: a profile showed anonymous loops."""
    total = lambda h, t, y: jnp.sum(linear_cross_entropy(h, t, y, **options))
    slope = jax.jit(jax.value_and_grad(total, (0, 1)))
    text = slope.lower(np.ones((7, 64), "f"), np.ones((23, 64), "f"), TARGETS).compile().as_text()
    for scope in "logits", "normaliser", "gradient_of_hidden", "gradient_of_table":
        assert re.search(rf'op_name="[^"]*\b{scope}\b', text), scope


@pytest.mark.parametrize(
    "wrong, cure",
    [
        ({"table": TABLE[0]}, "[4]"),
        ({"bias": BIAS[1:]}, "[22]"),
        ({"chunk": 0}, "chunk"),
    ],
)
def test_arguments_are_named_as_the_caller_named_them(wrong, cure):
    """Errors say table and bias, not bands[0].table as of an adaptive softmax."""
    with refuses(*wrong, cure) as error:
        linear_cross_entropy(**{"hidden": HIDDEN, "table": TABLE, "targets": TARGETS} | wrong)
    assert "bands" not in str(error.value)


def test_chunks_that_the_caller_chooses():
    """`chunk` changes no number, in a full and in an adaptive softmax, and is the number of tokens
    whose logits are alive at a time.
    """
    of_full = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnames="chunk")
    (hidden, bands, clusters, _), targets = adaptive_arrays((5, 9, 30))
    of_bands = jax.jit(jax.grad(adaptive_cross_entropy), static_argnames="chunk")
    arguments = hidden, bands, clusters, targets
    expected = of_bands(*arguments)
    check(of_full(HIDDEN, TABLE, BIAS, chunk=3), every())
    check(of_bands(*arguments, chunk=3), expected)
    chosen = lambda h: linear_log_probs(h, TABLE, CHOSEN, chunk=2).sum()
    in_bands = lambda h: adaptive_cross_entropy(h, *arguments[1:], chunk=2)
    for function, states, words in (chosen, HIDDEN, 23), (in_bands, hidden, 30):
        program = str(jax.make_jaxpr(jax.grad(function))(states))
        assert f"f32[2,{words}]" in program and f"f32[{len(states)},{words}]" not in program


def test_bands_have_no_name_of_a_full_softmax():
    """An adaptive softmax names the band."""
    with refuses("bands[0].table"):
        adaptive_cross_entropy(HIDDEN, [Band(TABLE[0])], None, TARGETS)


def test_log_probs_on_meshes(eight):
    """With words sharded in `jax.shard_map`, beside reports, and on Auto and Explicit meshes, by
    hidden states and by the table alone, too: they are those of one device.
    """
    eight(MESHES)


MESHES = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from adaptive_jax import linear_log_probs
rng = np.random.default_rng(0)
hidden, table = (rng.standard_normal((n, 8)).astype("f") for n in (16, 64))
chosen, pull = rng.integers(0, 64, (16, 3)), rng.standard_normal((16, 3)).astype("f")

def reported(hidden, table, chosen, pull, **options):
    values, report = linear_log_probs(
        hidden, table, chosen, reports=("top_k", "entropy"), top_k=3, **options)
    return jnp.sum(pull * (values + report.top_k.log_probs)) + report.entropy.sum()

def near(one, other):
    for a, b in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        assert np.allclose(a, b, rtol=2e-5, atol=2e-5), np.abs(a - b).max()

arrays = hidden, table, chosen, pull
right = jax.device_get(jax.jit(jax.value_and_grad(reported, (0, 1)))(*arrays))
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
local = lambda *a: jax.lax.psum(reported(*a, axis_name="model"), "data")
specs = P("data"), P("model"), P("data"), P("data")
mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
near(jax.jit(jax.value_and_grad(mapped, (0, 1)))(*arrays), right)
for kind in AxisType.Auto, AxisType.Explicit:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    for tokens, rows in (P("data"), P("model")), (P(("data", "model")), P(None, "model")):
        placed = [jax.device_put(a, NamedSharding(mesh, s))
                  for a, s in zip(arrays, (tokens, rows, tokens, tokens))]
        near(jax.jit(jax.value_and_grad(reported, (0, 1)))(*placed), right)
        for i in 0, 1:
            near(jax.jit(jax.grad(reported, i))(*placed), right[1][i])
"""
