"""Tokens of weight 0 are not computed: they take no time, and what they hold changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import adaptive_cross_entropy
from adaptive_jax.losses import banded, flash_tails, passes
from adaptive_jax.losses.banded import Settings
from adaptive_jax.numerics.bands import Band
from tests.losses.test_banded import TOKENS, arrays

CASES = ["full softmax", "groups among others"]


def counted(monkeypatch):
    """A list that grows whenever a program computes a chunk."""
    seen, one_chunk = [], passes.one_chunk

    def spied(*arguments):
        jax.debug.callback(lambda: seen.append(1))
        return one_chunk(*arguments)

    monkeypatch.setattr(passes, "one_chunk", spied)
    return seen


@functools.cache
def compiled(case, summed):
    """A program for loss, gradients of hidden states and tables, and results by token."""
    _, targets, _, *softmax = arrays(case)

    def loss(hidden, softmax, weights):
        if summed:
            return banded.loss(hidden, targets, weights, *softmax, Settings(chunk=4))
        each = banded.losses(hidden, targets, weights, *softmax, Settings(chunk=4))
        return each.sum(), each

    step = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    return lambda hidden, weights: step(hidden, softmax, weights)


def total(case, weights, summed, hidden=None):
    """The result of `compiled`."""
    return compiled(case, summed)(arrays(case)[0] if hidden is None else hidden, weights)


@pytest.mark.parametrize("case", CASES)
def test_time_is_that_of_the_live_tokens(monkeypatch, case):
    """Chunks that are really computed, counted as the program runs: those of the live tokens alone,
    in the head and in the tails; with no weights all.

    Without it, padding and prompts cost what targets cost.
    """
    seen = counted(monkeypatch)
    sizes = [len(band.table) for band in arrays(case)[3]]
    band = np.searchsorted(np.cumsum(sizes)[:-1], arrays(case)[1], side="right")
    live = np.random.default_rng(1).random(TOKENS) < 0.3

    def trips(live):
        visits = [live.sum(), *(np.sum(live & (band == i)) for i in range(1, len(sizes)))]
        return sum(-(-visit // 4) for visit in visits)

    assert 0 < 2 * trips(live) < trips(live | True)
    compiled.cache_clear()  # what is compiled before does not count
    for weights, rounds in ((live, 1), (live & False, 1), (None, 1), (live, 2)):
        seen.clear()
        jax.block_until_ready(total(case, weights, summed=rounds == 1))
        jax.effects_barrier()
        kept = live | True if weights is None else weights
        assert len(seen) == rounds * trips(kept)
    compiled.cache_clear()


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_hidden_states_of_weight_0(case, summed):
    """NaN and infinity in them change no bit of anything; their own results and gradients are 0.

    Without it, one bad vector in padding ends a training run.
    """
    weights = np.arange(TOKENS) % 3 * np.linspace(0.5, 2, TOKENS).astype("f")
    hidden = arrays(case)[0]
    (_, each), (d_hidden, _) = found = total(case, weights, summed)
    assert not each[weights == 0].any() and not d_hidden[weights == 0].any()
    bad = np.where(weights[:, None] == 0, [[np.nan, np.inf] * (hidden.shape[1] // 2)], hidden)
    jax.tree.map(np.testing.assert_array_equal, total(case, weights, summed, bad), found)


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_weights_of_one_are_no_weights(case, summed):
    """Bit for bit: sorting live tokens first changes no sum where all are."""
    found = total(case, np.ones(TOKENS, "f"), summed)
    jax.tree.map(np.testing.assert_array_equal, found, total(case, None, summed))


def test_one_band_without_weights_sorts_nothing():
    """No sort, gather of tokens or loop of unknown length stands in its program."""
    hidden, targets, _, *softmax = arrays("full softmax")

    def loss(hidden, softmax):
        return banded.loss(hidden, targets, None, *softmax, Settings(chunk=4))[0]

    text = str(jax.make_jaxpr(jax.grad(loss))(hidden, softmax))
    loops = [text.count(f" {name}[") for name in ("sort", "while", "scan")]
    assert loops == [0, 0, 1]


def test_kernels_of_a_tail(monkeypatch):
    """Those for GPUs, interpreted, stop at the live tokens and read no other hidden state."""
    monkeypatch.setattr(flash_tails, "fits", lambda *_: True)
    rng = np.random.default_rng(0)
    table, projection = rng.standard_normal((256, 16)), rng.standard_normal((16, 8))
    bands = [Band(rng.standard_normal((5, 8)).astype("f"))]
    bands.append(Band(table.astype("f"), projection.astype("f")))
    hidden, clusters = rng.standard_normal((70, 8)).astype("f"), Band(np.ones((1, 8), "f"))
    targets, weights = rng.integers(0, 261, 70), np.arange(70) % 2
    bad = np.where(weights[:, None] == 0, np.nan, hidden)

    @jax.jit
    def loss(hidden, bands):
        run = lambda h, b: banded.loss(h, targets, weights, b, clusters)
        return jax.value_and_grad(run, (0, 1), has_aux=True)(hidden, bands)

    assert "pallas_call" in str(jax.make_jaxpr(loss)(bad, bands))
    found = loss(bad, bands)
    jax.tree.map(np.testing.assert_array_equal, found, loss(hidden, bands))

    # The kernels have no gradients of reports: there, chunks run instead.
    def each(hidden, bands):
        options = {"weights": weights, "reduction": "none", "reports": ("nll",), "z_loss": 0.1}
        loss, report = adaptive_cross_entropy(hidden, bands, clusters, targets, **options)
        return jnp.sum(loss + 2 * report.nll)

    pulled = jax.jit(jax.grad(lambda h, b: each(h, b), (0, 1)))(hidden, bands)
    monkeypatch.undo()
    slow = jax.jit(jax.grad(each, (0, 1)))(hidden, bands)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), pulled, slow)
    live = weights == 1
    twin = banded.losses(hidden[live], targets[live], None, bands, clusters)
    np.testing.assert_allclose(found[0][1][live], twin, rtol=2e-5)
    assert jnp.isfinite(found[0][0])
