"""`linear_distillation` against all logits in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import linear_distillation
from adaptive_jax.losses import distillation, plans
from tests import refuses
from tests.losses.test_banded import check, in_float64
from tests.programs import hasty_jit

RNG = np.random.default_rng(0)
TOKENS, WORDS, PADDED = 7, 19, 23
STUDENT = tuple(RNG.standard_normal(s).astype("f") for s in ((TOKENS, 4), (WORDS, 4), WORDS))
TEACHER = tuple(RNG.standard_normal(s).astype("f") for s in ((TOKENS, 6), (PADDED, 6), PADDED))
TARGETS = RNG.integers(0, WORDS, TOKENS).astype(np.int32)
WEIGHTS = np.array([1, 2, 0, 1, 0.5, 1, 3], "f")


def dense(student, teacher, beta, temperature, hard_weight, weights):
    """The losses of tokens, from the definition: two divergences to the mixture."""
    (hidden, table, bias), (other, other_table, other_bias) = student, teacher
    logits = hidden @ table.T + bias[None]
    other_logits = (other @ other_table.T + other_bias[None])[:, :WORDS]
    q, p = (jax.nn.softmax(a / temperature) for a in (logits, other_logits))
    mixture = {0: q, 1: p}.get(beta, beta * p + (1 - beta) * q)
    of_p, of_q = (jnp.sum(a * jnp.log(a / mixture), axis=1) for a in (p, q))
    divergence = {0: of_p, 1: of_q}.get(beta, beta * of_p + (1 - beta) * of_q)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), TARGETS[:, None], axis=1)[:, 0]
    return weights * ((1 - hard_weight) * divergence + hard_weight * nll)


@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_loss_and_gradients(monkeypatch, beta, reduction):
    """Forward, mixed and reverse divergence, with the student's own loss; the teacher is wider and
    its table padded; chunks do not divide the tokens; a token of weight 0 may be NaN.
    """
    monkeypatch.setattr(distillation, "plan", lambda *_: plans.Plan(3))
    pull = np.random.default_rng(1).standard_normal(TOKENS).astype("f")
    bad = STUDENT[0].copy()
    bad[2] = np.nan

    def fast(*student):
        values = linear_distillation(
            student, TEACHER, TARGETS, beta=beta, temperature=2.0, hard_weight=0.3,
            weights=WEIGHTS, words=WORDS, reduction=reduction,
        )  # fmt: skip
        return values if reduction == "mean" else jnp.sum(pull * values)

    def slow(*student):
        values = dense(student, TEACHER, beta, 2.0, 0.3, WEIGHTS)
        return values.sum() / WEIGHTS.sum() if reduction == "mean" else jnp.sum(pull * values)

    slopes = functools.partial(jax.value_and_grad, argnums=(0, 1, 2))
    right = in_float64(slopes(slow), *STUDENT)
    check(jax.jit(slopes(fast))(bad, *STUDENT[1:]), right)


def test_sums_of_chunks_have_three_products():
    """6 N V d of the student and 2 of the teacher; without it a second pass costs a third more. No
    gradient of the teacher's table is made, not even zeros.
    """
    loss = lambda h, t: linear_distillation((h, t), (TEACHER[0], TEACHER[1][:WORDS]))
    jaxpr = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*STUDENT[:2]))
    assert jaxpr.count("dot_general") == 4
    rows, width = TEACHER[1][:WORDS].shape
    assert f"f32[{rows},{width}] = broadcast_in_dim" not in jaxpr


def test_a_loss_scale_keeps_gradients_in_float16():
    """They are rounded after the caller's scale: before it, most of a mean over many tokens are
    below 6e-8, the least number of float16.
    """
    rng = np.random.default_rng(2)
    hidden, other = (rng.standard_normal((4_096, 4)).astype("f") / 64 for _ in range(2))
    table = rng.standard_normal((WORDS, 4)).astype("f") / 64

    def loss(hidden, table):
        return 2**14 * linear_distillation((hidden, table), (other, TEACHER[1][:WORDS, :4]))

    slopes = hasty_jit(jax.grad(loss, (0, 1)))
    half = slopes(hidden.astype(np.float16), table.astype(np.float16))
    assert {slope.dtype for slope in half} == {jnp.dtype(np.float16)}
    for ours, right in zip(half, slopes(hidden, table), strict=True):
        assert np.linalg.norm(ours - right) < 0.01 * np.linalg.norm(right)


def test_reduced_dtypes():
    """bfloat16 students and float16 teachers: loss and gradients near those of float32."""
    half = STUDENT[0].astype(jnp.bfloat16), *STUDENT[1:]
    other = TEACHER[0].astype(np.float16), TEACHER[1][:WORDS], TEACHER[2][:WORDS]
    run = hasty_jit(jax.value_and_grad(lambda s, t: linear_distillation(s, t, beta=0.5)))
    (value, gradients), right = run(half, other), run(STUDENT, other)
    np.testing.assert_allclose(value, right[0], rtol=2e-2)
    assert gradients[0].dtype == jnp.bfloat16 and gradients[1].dtype == jnp.float32
    for ours, theirs in zip(gradients[:2], right[1][:2], strict=True):
        assert np.linalg.norm(ours - theirs) < 0.02 * np.linalg.norm(theirs)


def test_ignored_targets_and_weights():
    """An ignored target counts as weight 0; the loss has the gradient of its weights."""
    live = np.arange(TOKENS) != 1

    @jax.jit
    @jax.value_and_grad
    def run(weights, targets):
        options = {"hard_weight": 0.3, "weights": weights, "words": WORDS, "reduction": "sum"}
        return linear_distillation(STUDENT, TEACHER, targets, **options)

    value, slope = run(WEIGHTS, np.where(live, TARGETS, -100))
    check(value, run(WEIGHTS * live, TARGETS)[0])
    losses = dense(STUDENT, TEACHER, 0, 1.0, 0.3, 1.0)
    check(slope, losses * live * (WEIGHTS != 0))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_long_tables_need_little_memory(reduction):
    """All words of a chunk are computed at once, so its tokens are few: with the chunk of a loss
    that visits tiles of words, 512 tokens and a million words took 3.8 GiB, now 0.3.
    """
    hidden, table = (jax.ShapeDtypeStruct((n, 64), jnp.float32) for n in (512, 1_000_000))

    def loss(hidden, table):
        teacher = jax.lax.stop_gradient((hidden, table))
        return jnp.sum(linear_distillation((hidden, table), teacher, reduction=reduction))

    program = hasty_jit(jax.grad(loss, (0, 1))).lower(hidden, table).compile()
    assert program.memory_analysis().temp_size_in_bytes < 2**30


@pytest.mark.parametrize(
    ("student", "teacher", "temperature"),
    [(0, 3, 2.0), (1, 0, 2.0), (0, 0, np.float64(2))],
    ids=["teacher", "hidden", "temperature"],
)
def test_float64_beside_float32(student, teacher, temperature):
    """Under x64 a float64 teacher, hidden states or number of NumPy meets a float32 table; the sum
    over chunks has the dtype of the student's hidden states.
    """
    with jax.enable_x64(True):
        models = [
            [a.astype("f8") if i < wide else a for i, a in enumerate(model)]
            for model, wide in ((STUDENT, student), (TEACHER, teacher))
        ]

        def loss(*arrays):
            options = {"temperature": temperature, "words": WORDS, "reduction": "sum"}
            return linear_distillation(arrays, tuple(models[1]), **options)

        value, gradients = hasty_jit(jax.value_and_grad(loss, (0, 1, 2)))(*models[0])
        assert [value.dtype, *(a.dtype for a in gradients)] == [
            models[0][0].dtype, *(a.dtype for a in models[0])
        ]  # fmt: skip
        right = dense(STUDENT, TEACHER, 0, 2.0, 0, 1).sum()
        np.testing.assert_allclose(value, right, rtol=1e-5)


def test_a_shard_of_the_words(eight):
    """Words sharded over an axis, and tokens over another, give the loss and gradients of one
    device, in `jax.shard_map` and on Auto and Explicit meshes.
    """
    eight(PROGRAM)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from adaptive_jax import linear_distillation
rng = np.random.default_rng(0)
student = tuple(rng.standard_normal(s).astype("f") for s in ((8, 4), (20, 4), 20))
teacher = tuple(rng.standard_normal(s).astype("f") for s in ((8, 6), (20, 6), 20))
targets = np.arange(8) % 19
options = dict(beta=0.5, hard_weight=0.2, words=19)
def loss(student, teacher, targets, **more):
    return linear_distillation(student, teacher, targets, **options, **more)
right = jax.jit(jax.value_and_grad(loss))(student, teacher, targets)
specs = (P("data"), P("words"), P("words"))
by_width = (P("data"), P(None, "words"), P())
def near(values):
    for one, other in zip(*map(jax.tree.leaves, (values, right)), strict=True):
        assert np.allclose(one, other, rtol=2e-5, atol=2e-6), np.abs(one - other).max()
for kind in AxisType.Auto, AxisType.Explicit:
    mesh = jax.make_mesh((4, 2), ("data", "words"), (kind,) * 2)
    put = lambda tree, specs: tuple(
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(tree, specs))
    on = jax.device_put(targets, NamedSharding(mesh, P("data")))
    for one, other in (specs, specs), (specs, (P("data"),)), (by_width, (P("data"), P(), P())):
        other = (*other, P(), P())[:3]
        placed = put(student, one), put(teacher, other), on
        near(jax.jit(jax.value_and_grad(loss))(*placed))
mesh = jax.make_mesh((4, 2), ("data", "words"), (AxisType.Auto,) * 2)
local = lambda *a: loss(*a, axis_name="words", token_axes="data")
mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs, specs, P("data")), out_specs=P())
near(jax.jit(jax.value_and_grad(mapped))(student, teacher, targets))
"""


@pytest.mark.parametrize(
    "options, names",
    [
        ({"beta": 1.5}, ["beta"]),
        ({"temperature": 0}, ["temperature"]),
        ({"hard_weight": 0.5}, ["hard_weight", "targets"]),
        ({"words": 50}, ["words=50"]),
        ({"words": 0}, ["words"]),  # gave a loss of 0
        ({"words": 2.5}, ["words"]),
        ({"beta": jnp.ones(())}, ["beta"]),
        ({"axis_name": "nowhere"}, ["axis_name='nowhere'"]),
        ({"words": None}, ["words", "[19, 23]"]),
        ({"teacher": (TEACHER[0][1:], TEACHER[1])}, ["hidden"]),
        ({"teacher": TEACHER[:1]}, ["teacher", "1 entries"]),  # was a traceback
        ({"student": STUDENT[0]}, ["student", "hidden, table"]),
    ],
)
def test_bad_input(options, names):
    """A wrong argument is an error that names it, not a shape error deep inside."""
    arguments = {"student": STUDENT, "teacher": TEACHER, "words": WORDS} | options
    with refuses(*names):
        linear_distillation(**arguments)


def test_the_teacher_has_no_gradient():
    """An error, not a silent 0."""
    loss = lambda teacher: linear_distillation(STUDENT, teacher, words=WORDS)
    with refuses("teacher", "gradient"):
        jax.eval_shape(jax.grad(loss), TEACHER)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_there_is_no_second_derivative(reduction):
    """As the docstring promises; of "none" one was returned."""

    def slopes(hidden):
        student = hidden, *STUDENT[1:]
        losses = lambda student: linear_distillation(
            student, TEACHER, words=WORDS, reduction=reduction
        ).sum()
        return jax.grad(losses)(student)[0].sum()

    with refuses("second derivative"):
        jax.grad(slopes)(jnp.asarray(STUDENT[0]))
