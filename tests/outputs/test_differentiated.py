"""The differentiated softmax against a dense softmax in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.outputs.differentiated import Differentiated
from adaptive_jax.outputs.tables import OwnTable
from tests.losses.test_banded import in_float64
from tests.programs import dtypes_of_products
from tests.toys import params_of_output

FEATURES, TOKENS = 12, 6
CASES = {  # form, words, cutoffs, factor, width, bias, tokens of a chunk
    "slices, 7 words": ("slices", 7, (2, 4), 2, 6, True, 4),
    "projections, 10,007 words": ("projections", 10_007, (100, 5_000), 2, 8, True, 2),
    "projections, 1,000 words": ("projections", 1_000, (100, 300), 2, 0, False, None),
}


def setting(case):
    """The model, its parameters, hidden states, targets at the edges and elsewhere, and weights."""
    form, words, cutoffs, factor, width, bias, _ = CASES[case]
    model = Differentiated(
        OwnTable(words, FEATURES, cutoffs, factor, width, bias, projected=form == "projections"),
    )
    targets = np.array([0, words - 1, cutoffs[0], cutoffs[1] - 1, words // 2, 1], np.int32)
    return (
        model,
        params_of_output(model, FEATURES),
        jax.random.normal(jax.random.key(2), (TOKENS, FEATURES)),
        targets,
        np.linspace(0, 2, TOKENS),
    )


def dense(form, params, hidden):
    """Log-probabilities `[tokens, words]`."""
    logits, at = [], 0
    for i in range(3):
        table = params[f"table_{i}"]
        width = table.shape[1]
        x = hidden[:, at : at + width]
        if form == "projections":
            x = hidden @ params["projection_0"].T if "projection_0" in params else hidden
            x = x @ params[f"projection_{i}"].T if i else x
        logits.append(x @ table.T)
        at += width
    return jax.nn.log_softmax(
        jnp.concatenate(logits, axis=1) + (params["bias"][None] if "bias" in params else 0.0)
    )


@pytest.mark.parametrize("case", CASES)
def test_differentiated_equals_the_dense_softmax(case, monkeypatch):
    """Loss, nll and all gradients, of the loss and of the nll, whether chunks divide the tokens
    or not; a target that does not exist, whose nll is masked, has no part in them.
    """
    model, params, hidden, targets, weights = setting(case)
    if CASES[case][-1]:
        monkeypatch.setattr(
            "adaptive_jax.outputs.differentiated.chunk_size", lambda *_: CASES[case][-1]
        )

    def fast(params, hidden):
        total, nll = model.apply(
            {"params": {"table": params}}, hidden, targets, weights, method="loss"
        )
        return total, nll

    def fast_nll(params, hidden, targets):
        nll = model.apply({"params": {"table": params}}, hidden, targets, method="nll")
        return jnp.where(weights == 0, 0.0, nll) @ weights

    def slow(params, hidden):
        nll = -dense(CASES[case][0], params, hidden)[np.arange(TOKENS), targets]
        return nll @ weights, jnp.where(weights == 0, 0.0, nll)

    @jax.jit
    def ours(params, hidden, padded):
        return jax.value_and_grad(fast, (0, 1), has_aux=True)(params, hidden), jax.grad(
            fast_nll, (0, 1)
        )(params, hidden, padded)

    one, by_nll = ours(params["table"], hidden, np.where(weights == 0, -1, targets))
    value, gradient = in_float64(
        jax.value_and_grad(slow, (0, 1), has_aux=True), params["table"], hidden
    )
    for mine, theirs in zip(
        jax.tree.leaves((one, by_nll)), jax.tree.leaves((value, gradient, gradient)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


def test_logits_exist_for_a_chunk_and_run_in_bfloat16(monkeypatch):
    """No array of all tokens and words; products in bfloat16 change little, gradients of tables
    stay float32.
    """
    monkeypatch.setattr("adaptive_jax.outputs.differentiated.chunk_size", lambda *_: 2)
    model, params, hidden, targets, weights = setting("projections, 10,007 words")

    def loss(params, hidden):
        return model.apply({"params": params}, hidden, targets, weights, method="loss").total

    run = jax.jit(jax.value_and_grad(loss))
    text = run.lower(params, hidden).as_text()
    assert "2x5007xf32" in text and f"{TOKENS}x5007x" not in text
    exact, gradient = run(params, hidden)
    half = hidden.astype(jnp.bfloat16)
    assert ("bf16", "bf16", "f32") in dtypes_of_products(run.lower(params, half).as_text())
    near, other = run(params, half)
    assert near == pytest.approx(float(exact), rel=0.02)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=0.05 * float(jnp.abs(b).max())),
        other,
        gradient,
    )


def test_loss_and_gradients_compute_logits_once():
    """Three products a band; with `jax.checkpoint` around a chunk there are four."""
    model, params, *tokens = setting("slices, 7 words")

    def loss(params, hidden):
        return model.apply({"params": params}, hidden, *tokens[1:], method="loss").total

    program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(params, tokens[0])
    assert program.as_text().count("stablehlo.dot_general") == 3 * 3


def test_work_is_that_of_all_bands():
    """Every token visits each word with the width of its band, and slices cost nothing."""
    model, params, *_ = setting("slices, 7 words")
    assert model.flops(model.apply({"params": params}, method="bands")) == 2 * (
        2 * 6 + 2 * 3 + 3 * 1
    )


def test_weights_keep_their_dtype():
    """Their gradient was float32 where they are bfloat16, which a product with them refused."""
    model, params, hidden, targets, weights = setting("projections, 10,007 words")

    def total(weights):
        return model.apply({"params": params}, hidden, targets, weights, method="loss").total

    half = jnp.asarray(weights, jnp.bfloat16)
    assert jax.eval_shape(jax.grad(total), half).dtype == jnp.bfloat16


def test_a_loss_scale_keeps_gradients_in_float16():
    """Those of hidden states were rounded before the caller's scale, most of a mean to 0."""
    model, params, hidden, targets, _ = setting("slices, 7 words")

    @jax.jit
    def slope(hidden, weight, scale):
        weights = jnp.full(TOKENS, weight)
        total = lambda h: model.apply({"params": params}, h, targets, weights, method="loss").total
        return jax.grad(lambda h: scale * total(h))(hidden)

    half = hidden.astype(jnp.float16)
    expected = slope(half, 1.0, 1.0)
    assert expected.dtype == jnp.float16
    np.testing.assert_allclose(slope(half, 2.0**-20, 2.0**20), expected, rtol=2e-3, atol=1e-6)
