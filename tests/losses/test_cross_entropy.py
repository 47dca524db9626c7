"""The public losses against a dense twin in float64, under every transformation of JAX, and cut
over 8 devices by words.
"""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import (
    Band,
    adaptive_cross_entropy,
    linear_cross_entropy,
    linear_distillation,
    linear_log_probs,
)
from adaptive_jax.losses.banded import Settings
from tests import refuses
from tests.losses.test_banded import check, in_float64, slow_losses

TOKENS, WIDTH = 6, 4
ALL = {"bias": True, "weights": True, "soft_cap": 2.0, "label_smoothing": 0.2, "z_loss": 0.03}
SIZES = {"narrowing": (5, 9, 30), "alike": (7, *[9, 10] * 4, 11)}  # words of each band
SIGNED = np.array([0.5, -0.25, 0, 0.125, 0, 0.25], np.float32)  # whose sum is 0.625
CASES = [
    (103, {"weights": SIGNED}, ("mean", "sum")),
    (4_100, {}, ("mean", "none")),
    (4_100, ALL, ("mean", "none", "sum")),
    (1, ALL, ("mean", "none")),
]


def arrays(words, options, width=WIDTH):
    """hidden, table, bias and weights, and targets."""
    rng = np.random.default_rng(words)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    targets = np.concatenate([[0, words - 1], rng.integers(0, words, TOKENS - 2)]).astype(np.int32)
    bias = normal(words) if options.get("bias") else None
    weights = options.get("weights")
    weights = np.array([1, 2, 0, 1, 0, 0.5], np.float32) if weights is True else weights
    return (normal(TOKENS, width), normal(words, width), bias, weights), targets


def settings(options):
    return {name: value for name, value in options.items() if name not in ("bias", "weights")}


def dense(hidden, table, bias, weights, targets, **options):
    return dense_adaptive(hidden, [Band(table, None, bias)], None, weights, targets, **options)


def dense_adaptive(hidden, bands, clusters, weights, targets, *, reduction, **options):
    each = slow_losses(hidden, targets, bands, clusters, Settings(**options))[0]
    weights = jnp.ones_like(each) if weights is None else weights
    each = weights * jnp.where(weights == 0, 0.0, each)  # where the weight is 0, so is its gradient
    if reduction == "none":
        return each
    return each.sum() / (weights.sum() if reduction == "mean" else 1)


def adaptive_arrays(sizes):
    """hidden, bands that narrow if they are few, clusters and weights, and targets."""
    rng = np.random.default_rng(len(sizes))

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    widths = [WIDTH, 2, 1] if len(sizes) == 3 else [WIDTH] * len(sizes)
    bands = [
        Band(normal(n, w), normal(w, WIDTH) if i else None, normal(n))
        for i, (n, w) in enumerate(zip(sizes, widths, strict=True))
    ]
    words = sum(sizes)
    targets = [0, sizes[0] - 1, sizes[0], sum(sizes[:2]), words - 1, words - 2]
    clusters = Band(normal(len(sizes) - 1, WIDTH), None, normal(len(sizes) - 1))
    weights = np.array([1, 2, 1, 1, 3, 0.5], np.float32)
    return (normal(TOKENS, WIDTH), bands, clusters, weights), np.array(targets, np.int32)


def repeated(times, values, targets):
    """The same tokens so many times."""
    hidden, *softmax, weights = values
    hidden, weights, targets = (np.concatenate([a] * times) for a in (hidden, weights, targets))
    return (hidden, *softmax, weights), targets


def ours(hidden, table, bias, weights, targets, **options):
    return linear_cross_entropy(hidden, table, targets, bias=bias, weights=weights, **options)


def ours_adaptive(hidden, bands, clusters, weights, targets, **options):
    return adaptive_cross_entropy(hidden, bands, clusters, targets, weights=weights, **options)


def pulled(loss, values, targets, pull, *, reductions, **options):
    """The loss for these reductions, and the gradients of all arrays."""

    def run(values, targets, pull):
        found = []
        for reduction in reductions:
            value, back = jax.vjp(
                lambda v, r=reduction: loss(*v, targets, reduction=r, **options), values
            )
            found.append((value, back(pull if reduction == "none" else pull[0])))
        return found

    return jax.jit(run)(values, targets, pull)


PULL = np.array([0.7, -1.3, 0.4, 2.0, 1.1, -0.2], np.float32)


@pytest.mark.parametrize("words, options, reductions", CASES)
def test_against_the_dense_twin(words, options, reductions):
    """Values and gradients of all arrays, weights of any signs among them; "none" under a cotangent
    of any signs.
    """
    values, targets = arrays(words, options)
    options = settings(options) | {"reductions": reductions}
    fast = pulled(ours, values, targets, PULL, **options)
    slow = in_float64(lambda *v: pulled(dense, *v, **options), values, targets, PULL)
    check(fast, slow)


def test_adaptive_against_the_dense_twin():
    """Three bands, plain tuples, under all options, and nine tails of one loop: values and all
    gradients.
    """
    for case, reductions in ("narrowing", ["mean"]), ("alike", ["none"]):
        values, targets = adaptive_arrays(SIZES[case])
        options = settings(ALL) | {"reductions": reductions}
        hidden, bands, clusters, weights = given = values
        if case == "narrowing":
            given = hidden, [*map(tuple, bands)], tuple(clusters), weights
        fast = pulled(ours_adaptive, given, targets, PULL, **options)
        twin = functools.partial(pulled, dense_adaptive, **options)
        check(fast, in_float64(twin, values, targets, PULL))


def test_bfloat16_tables():
    """Of hidden states and a table in bfloat16 the loss is in float32, off by roundings of logits
    alone, and gradients are in bfloat16.
    """
    (hidden, table, bias, weights), targets = arrays(4_100, ALL)
    half = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(table, jnp.bfloat16), bias, weights
    options = settings(ALL) | {"reductions": ["mean"]}
    [(value, [gradients])] = pulled(ours, half, targets, PULL, **options)
    wide = tuple(np.asarray(array, np.float32) for array in half)
    twin = functools.partial(pulled, dense, **options)
    [(exact, [slow])] = in_float64(twin, wide, targets, PULL)
    assert value.dtype == jnp.float32
    assert gradients[0].dtype == gradients[1].dtype == jnp.bfloat16
    np.testing.assert_allclose(value, exact, rtol=1e-3)
    for one, other in zip(gradients, slow, strict=True):
        assert np.linalg.norm(np.asarray(one, np.float64) - other) <= 2**-7 * np.linalg.norm(other)


def test_transformations():
    """vmap, scan and checkpoint, with gradients by token through them, give what a loop over
    examples gives.
    """
    rng = np.random.default_rng(0)
    hidden, table = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((3, TOKENS, WIDTH), (11, WIDTH))
    )
    targets = rng.integers(0, 11, (3, TOKENS)).astype(np.int32)

    def one(hidden, table, targets):
        return jnp.sum(PULL * linear_cross_entropy(hidden, table, targets, reduction="none"))

    def looped(h, t):
        return sum(one(h[i], t, targets[i]) for i in range(3))

    def mapped(h, t):
        return jax.vmap(one, (0, None, 0))(h, t, targets).sum()

    def scanned(h, t):
        return jax.lax.scan(
            lambda total, row: (total + jax.checkpoint(one)(row[0], t, row[1]), None),
            0.0,
            (h, targets),
        )[0]

    wanted, *found = (
        jax.jit(jax.value_and_grad(f, (0, 1)))(hidden, table) for f in (looped, mapped, scanned)
    )
    for each in found:
        check(each, wanted)


def test_bands_of_several_examples():
    """vmap over examples and their bands: each has as many tokens in a band as it has."""
    (hidden, bands, clusters, _), targets = adaptive_arrays(SIZES["narrowing"])
    stacked = jax.tree.map(lambda a: np.stack([a, a[::-1], a / 2]), (hidden, bands))
    targets = np.stack([targets, 0 * targets, targets[::-1]])

    def one(values, targets):
        return adaptive_cross_entropy(*values, clusters, targets)

    @jax.jit
    def both(values, targets):
        each = [
            jax.value_and_grad(one)(jax.tree.map(lambda a, i=i: a[i], values), targets[i])
            for i in range(3)
        ]
        return jax.vmap(jax.value_and_grad(one))(values, targets), jax.tree.map(
            lambda *a: jnp.stack(a), *each
        )

    check(*both(stacked, targets))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_derivative_is_refused(reduction):
    """In one line, forward over reverse and reverse over reverse alike."""
    loss = lambda h: linear_cross_entropy(
        h, np.ones((5, 2), np.float32), [0, 1, 4], reduction=reduction
    ).sum()
    hidden = jnp.ones((3, 2))
    for second in (jax.hessian(loss), jax.grad(lambda h: jax.grad(loss)(h).sum())):
        with refuses("second derivative", "optax"):
            jax.eval_shape(second, hidden)
    with pytest.raises(TypeError, match="forward-mode"):  # as docs/losses.md says
        jax.jvp(loss, (hidden,), (hidden,))


def test_rows_that_are_padding():
    """Rows behind the words change nothing, whatever they hold, and have no gradient."""
    values, targets = arrays(101, ALL)
    hidden, table, bias, weights = values
    rows = np.full((27, WIDTH), 9, np.float32)
    padded = hidden, np.concatenate([table, rows]), np.concatenate([bias, rows[:, 0]]), weights
    options = settings(ALL) | {"reductions": ["mean"]}
    [(value, ((d_hidden, d_table, d_bias, d_weights),))] = pulled(
        ours, padded, targets, PULL, words=101, **options
    )
    assert not d_table[101:].any() and not d_bias[101:].any()
    check(
        (value, d_hidden, d_table[:101], d_bias[:101], d_weights),
        pulled(ours, values, targets, PULL, **options),
    )


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_targets_that_do_not_exist(reduction):
    """Of weight 0 they change nothing, in the padding of a table too; with a weight, loss and
    gradients are NaN. Without any weight the loss is 0.
    """
    (hidden, table, *_), targets = arrays(12, {})
    mask = np.arange(TOKENS) < 4
    total = lambda h, y, w: linear_cross_entropy(
        h, table, y, weights=w, words=9, reduction=reduction
    ).sum()
    loss = jax.jit(jax.value_and_grad(total))
    expected = loss(hidden, np.where(mask, targets % 9, 0), mask)
    assert np.isfinite(expected[0])
    for wrong in (-1, 9, 11, 999):
        check(loss(hidden, np.where(mask, targets % 9, wrong), mask), expected)
        value, gradient = loss(hidden, 0 * targets + wrong, mask)
        assert np.isnan(value) and np.isnan(gradient[:4]).all()
    value, gradient = loss(hidden, targets, 0 * mask)
    assert value == 0 and not gradient.any()


token_losses = functools.partial(linear_cross_entropy, reduction="none")


def log_probs_of_pairs(hidden, table, targets):
    return linear_log_probs(hidden, table, jnp.stack([targets, 0 * targets], axis=1)).sum(axis=1)


def nll_report(hidden, table, targets):
    options = {"reduction": "none", "reports": "nll"}
    return linear_cross_entropy(hidden, table, targets, **options)[1].nll


def distilled(hidden, table, targets):
    teacher = jax.lax.stop_gradient((2 * hidden, table))
    options = {"reduction": "none", "hard_weight": 0.5}
    return linear_distillation((hidden, table), teacher, targets, **options)


@pytest.mark.parametrize(
    "loss",
    [token_losses, nll_report, log_probs_of_pairs, distilled],
    ids=["losses", "nll", "log-probabilities", "distillation"],
)
def test_unused_losses_of_targets_that_do_not_exist(loss):
    """They change no gradient: 0 · NaN made that of the whole table NaN, where the caller selected
    the other losses. Those that are used make gradients NaN, as they are NaN themselves.
    """
    (hidden, table, *_), targets = arrays(12, {})
    exist = np.arange(TOKENS) < 4

    def selected(hidden, table, targets, used):
        return jnp.where(used, loss(hidden, table, targets), 0).sum()

    slopes = jax.jit(jax.grad(selected, (0, 1)))
    wrong = np.where(exist, targets, [-1, 12] * (TOKENS // 2))
    check(slopes(hidden, table, wrong, exist), slopes(hidden, table, targets, exist))
    of_hidden, of_table = slopes(hidden, table, wrong, exist | True)
    assert np.isnan(of_hidden[~exist]).all() and np.isfinite(of_hidden[exist]).all()
    assert np.isnan(of_table).all()


def test_a_mean_by_weights_whose_sum_is_0():
    """It is the plain sum: a loss of pairs with weights of 1 and -1 was meant, not NaN."""
    (hidden, table, *_), targets = arrays(12, {})
    signs = np.resize([1.0, -1.0], TOKENS)
    mean, total = (
        linear_cross_entropy(hidden, table, targets, weights=signs, reduction=reduction)
        for reduction in ("mean", "sum")
    )
    assert mean == total != 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"label_smoothing": jnp.zeros(())},
        {"z_loss": np.array(-1.0)},
        {"words": 6.5},
        {"words": 8},
    ],
)
def test_wrong_arguments(wrong):
    """A wrong argument is named as the caller knows it, before anything is traced."""
    (hidden, table, *_), targets = arrays(7, {})
    with refuses(*wrong):
        linear_cross_entropy(hidden, table, **({"targets": targets} | wrong))


PROGRAM = """
import itertools, json, re, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from adaptive_jax import InputError
from tests.losses.test_cross_entropy import *
FLAT = jax.make_mesh((8,), ("words",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((2, 4), ("rows", "words"), axis_types=(AxisType.Auto,) * 2)
report, results = {}, {}

def padded(array, devices):
    return np.pad(array, [(0, -len(array) % devices), *[(0, 0)] * (array.ndim - 1)])

def keep(name, found, values):
    found = jax.tree.map(lambda a, of: np.asarray(a)[:len(of)], found[1], values), found[0]
    results.update({f"{name}_{i}": leaf for i, leaf in enumerate(jax.tree.leaves(found))})

# One table over 8 devices, with gradients taken inside or outside shard_map.
values, targets = arrays(4_100, ALL)
cut, specs = (
    (values[0], padded(values[1], 8), padded(values[2], 8), values[3]),
    (P(), P("words"), P("words"), P()),
)
for name, reduction in ("inside", "mean"), ("outside", "none"):
    def local(v, y, pull):
        return jnp.sum(
            pull * ours(*v, y, reduction=reduction, axis_name="words", words=4_100, **settings(ALL))
        )
    whole = jax.shard_map(local, mesh=FLAT, in_specs=(specs, P(), P()), out_specs=P())
    inside = jax.shard_map(
        jax.value_and_grad(local), mesh=FLAT, in_specs=(specs, P(), P()), out_specs=(P(), specs)
    )
    pull = PULL if reduction == "none" else PULL[0]
    run = inside if name == "inside" else jax.value_and_grad(whole)
    compiled = jax.jit(run).lower(cut, targets, pull).compile()
    keep(reduction, compiled(cut, targets, pull), values)
    pattern = r"= \\(?(\\w+\\[[0-9,]*\\]).* (all-[a-z-]+|collective-[a-z]+|reduce-scatter)\\("
    report[reduction] = re.findall(pattern, compiled.as_text())

# Bands, cut by words over 4 devices, and tokens over 2, or over all.
for (case, sizes), times in itertools.product(SIZES.items(), (1, 4)):
    values, targets = repeated(times, *adaptive_arrays(sizes))
    axes = "rows" if times == 1 else ("rows", "words")
    hidden, bands, clusters, weights = values
    cut = hidden, [Band(padded(t, 4), p, padded(b, 4)) for t, p, b in bands], clusters, weights
    specs = (
        P(axes),
        [Band(P("words"), p if p is None else P(), P("words")) for _, p, _ in bands],
        P(),
        P(axes),
    )
    def local(v, y):
        return jax.lax.psum(
            ours_adaptive(*v, y, reduction="sum", axis_name="words", words=sizes, **settings(ALL)),
            axes,
        )
    run = jax.shard_map(
        jax.value_and_grad(local), mesh=GRID, in_specs=(specs, P(axes)), out_specs=(P(), specs)
    )
    keep(f"{case}{times}", jax.jit(run)(cut, targets), values)

# Padding that a target of weight 0 points to, in a table of 12 rows on 4 devices.
values, targets = arrays(9, ALL)
hidden, table, bias, weights = values
hidden = np.where(weights[:, None] == 0, np.nan, hidden)  # what nobody computes may be anything
cut, specs = (
    (hidden, padded(table, 4), padded(bias, 4), weights),
    (P("rows"), P("words"), P("words"), P("rows")),
)
def local(v, y):
    return jax.lax.psum(
        ours(*v, y, reduction="sum", axis_name="words", words=9, **settings(ALL)), "rows"
    )
run = jax.shard_map(
    jax.value_and_grad(local), mesh=GRID, in_specs=(specs, P("rows")), out_specs=(P(), specs)
)
keep("padding", jax.jit(run)(cut, np.where(weights == 0, [0, 0, 9, 0, 11, 0], targets)), values)

# What is refused.
for name, count, spec, check_vma in (
    ("unchecked", 8, (P(), P("words"), P()), False),
    ("cut", 1, (P(), P("words"), P("words")), True),
):
    try:
        jax.eval_shape(
            jax.shard_map(
                lambda h, t, y: linear_cross_entropy(h, t, y, axis_name="words", reduction="none"),
                mesh=FLAT,
                in_specs=spec,
                out_specs=spec[0],
                check_vma=check_vma,
            ),
            jnp.ones((count, 4)),
            jnp.ones((8, 4)),
            jnp.arange(8),
        )
    except InputError as error:
        report[name] = str(error)

# A step of 10 million words.
words, rows = 10_000_003, 1_250_001
hidden, targets = (
    jax.random.normal(jax.random.key(0), (4, 4)),
    jnp.array([0, rows, 5_000_000, words - 1]),
)
def step(table, hidden, targets):
    def loss(table):
        return linear_cross_entropy(
            hidden, table, targets, axis_name="words", words=words, reduction="sum"
        )
    value, gradient = jax.value_and_grad(loss)(table)
    return table - gradient, value
step = jax.jit(
    jax.shard_map(step, mesh=FLAT, in_specs=(P("words"), P(), P()), out_specs=(P("words"), P())),
    donate_argnums=0,
)
table = jax.jit(lambda: jnp.zeros((8 * rows, 4)), out_shardings=NamedSharding(FLAT, P("words")))()
step = step.lower(table, hidden, targets).compile()
report["bytes"] = step.memory_analysis().temp_size_in_bytes
table, value = step(table, hidden, targets)
results.update(
    value=value, hidden=hidden, rows=table[targets], other=table[1], padding=table[words:]
)
np.savez(sys.argv[1], **{f"_{name}": array for name, array in results.items()})
print(json.dumps(report))
"""


def test_words_cut_over_8_devices(eight, tmp_path):
    """Values and gradients are those of one device; a loss sends vectors of tokens, no table;
    10 million words take a step.
    """
    report = json.loads(eight(PROGRAM, tmp_path / "found.npz"))
    stored = np.load(tmp_path / "found.npz")

    def results(name):
        return [stored[key] for key in stored if re.fullmatch(rf"_{name}_\d+", key)]

    def one_device(loss, values, targets, reduction, pull=1.0):
        def total(values):
            return jnp.sum(pull * loss(*values, targets, reduction=reduction, **settings(ALL)))

        return jax.tree.leaves(jax.jit(jax.value_and_grad(total))(values)[::-1])

    values, targets = arrays(4_100, ALL)
    for reduction, pull in ("mean", PULL[0]), ("none", PULL):
        check(results(reduction), one_device(ours, values, targets, reduction, pull))
        # The maximum and the sums of a chunk, and the gradient of hidden; a second pass for "none".
        kinds = report[reduction]
        assert {kind for _, kind in kinds} == {"all-reduce"}
        assert sorted({shape for shape, _ in kinds}) == ["f32[6,3]", "f32[6,4]", "f32[6]"]
        assert len(kinds) <= (3 if reduction == "mean" else 5)
    for (case, sizes), times in itertools.product(SIZES.items(), (1, 4)):
        given = repeated(times, *adaptive_arrays(sizes))
        check(results(f"{case}{times}"), one_device(ours_adaptive, *given, "sum"))
    values, targets = arrays(9, ALL)
    check(results("padding"), one_device(ours, values, np.where(values[3] == 0, 0, targets), "sum"))
    assert (
        "leave its check_vma on" in report["unchecked"]
        and "replicate them over it" in report["cut"]
    )

    # Of a table of zeros every word has probability 1 / words, so the gradient of a target's row is
    # about minus its hidden state.
    np.testing.assert_allclose(stored["_value"], 4 * np.log(10_000_003), rtol=1e-6)
    np.testing.assert_allclose(stored["_rows"], stored["_hidden"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        stored["_other"], -stored["_hidden"].sum(axis=0) / 10_000_003, rtol=1e-4
    )
    assert not stored["_padding"].any()
    assert (
        report["bytes"] < 4 * 1_250_001 * 4 * 8
    )  # a few times the device's rows, or the logits of its tokens
