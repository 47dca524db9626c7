"""The kernels of a tail, interpreted, against chunks of tokens; and where they are used."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.losses import banded, flash_tails, passes
from adaptive_jax.losses.arguments import Settings
from adaptive_jax.losses.chunks import Results, Tokens, Wanted
from adaptive_jax.losses.plans import Plan
from adaptive_jax.numerics import dropout
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.devices import GPUS
from adaptive_jax.numerics.platforms import tracing_for

TOKENS, FEATURES, WIDTH, ROWS, WORDS = 150, 24, 16, 384, 301

SEEDS = dropout.row_seeds(jax.random.key(0), np.arange(TOKENS))


def arrays(projected, begin, end):
    """A band with rows behind its words, sorted tokens of which some are the tail's, and what
    was found before.
    """
    bits = np.random.default_rng(0)
    table = bits.standard_normal((ROWS, WIDTH), "f")
    table[WORDS:] = 9
    width = FEATURES if projected else WIDTH
    projection = bits.standard_normal((WIDTH, width), "f") / 5 if projected else None
    at = np.arange(TOKENS)
    column = np.where((at >= begin) & (at < end), bits.integers(0, WORDS, TOKENS), 10**6)
    hidden, weights = bits.standard_normal((TOKENS, width), "f"), bits.random(TOKENS, "f")
    before = tuple(bits.random(shape, "f") for shape in (TOKENS, TOKENS, (TOKENS, width)))
    return Band(table, projection), Tokens(hidden, column, weights, SEEDS), before


@pytest.mark.parametrize(
    "projected, settings, x64",
    [
        (True, Settings(tail_dropout=0.3, z_loss=0.02, chunk=32), False),
        (False, Settings(chunk=32), True),
    ],
)
def test_kernels_equal_chunks(monkeypatch, projected, settings, x64):
    """Losses, and gradients of states, table and projection; tokens of other bands and rows that
    are no words change nothing. Also with targets of 64 bits.

    Of tokens that begin and end inside a block, of one token, and of none.
    """
    monkeypatch.setattr(flash_tails, "SPLITS", 2)  # of three blocks of words

    @jax.jit
    def both(band, queue, before, begin, end):
        flags = jax.tree.map(lambda _: True, band)
        stage = passes.Stage(
            settings=settings,
            plan=Plan(32),
            sizes=(ROWS,),
            group=band,
            clusters=None,
            columns=(WORDS,),
            begins=[begin],
            ends=[end],
            word_counts=jnp.array([WORDS]),
            wanted=Wanted(True, flags, None),
        )
        loss, nll, d_hidden = before
        outcome = Results(loss, nll, {}, d_hidden)
        forward = stage._replace(wanted=None), queue, outcome._replace(d_hidden=None)
        return [
            [run(stage, queue, outcome), run(*forward)]
            for run in (flash_tails.visit, passes.visit_chunks)
        ]

    for begin, end in (37, 121), (64, 65), (50, 50):
        inputs = arrays(projected, begin, end)
        with jax.enable_x64(x64):
            ours, right = both(*inputs, begin, end)
        assert jax.tree.structure(ours) == jax.tree.structure(right)
        for one, other in zip(*map(jax.tree.leaves, (ours, right)), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
        assert (begin == end) == np.array_equal(ours[0][0].loss, inputs[2][0])


def test_tails_that_use_kernels():
    """For a tail in 16 bits on a GPU; never for the head, for groups of tails and for what they
    do not compute.
    """
    band = Band(jnp.zeros((256, 64), jnp.bfloat16), jnp.zeros((64, 128), jnp.bfloat16), None)
    wide = Band(jnp.zeros((256, 256), jnp.bfloat16), None, None)
    refused = [
        (Settings(label_smoothing=0.1), band, 1),
        (Settings(soft_cap=3.0), band, 1),
        (Settings(axis_name="words"), band, 1),
        (Settings(), band, 5),
        (Settings(), band._replace(table=band.table[:200]), 1),
        (Settings(), band._replace(table=band.table[:, :40]), 1),
        (Settings(), band._replace(table=band.table.astype(jnp.float32)), 1),
        (Settings(), band._replace(bias=jnp.zeros(256)), 1),
    ]
    assert not flash_tails.fits(Settings(), band, 1)  # a CPU
    with tracing_for("gpu", "NVIDIA H100 80GB HBM3"):
        assert flash_tails.fits(Settings(z_loss=0.1, tail_dropout=0.2), band, 1)
        assert not any(flash_tails.fits(*each) for each in refused)
        assert flash_tails.fits(Settings(), wide, 1)
    with tracing_for("gpu", GPUS["rtx4090"].kind):  # it has half of the shared memory
        assert flash_tails.fits(Settings(), band, 1) and not flash_tails.fits(Settings(), wide, 1)
    like = [jax.ShapeDtypeStruct((n, 64), jnp.bfloat16) for n in (300, 500, 1000, 1)]

    def loss(hidden, head, tail, clusters):
        targets, bands = jnp.zeros(300, jnp.int32), [Band(head), Band(tail)]
        return banded.loss(hidden, targets, None, bands, Band(clusters))[0]

    with tracing_for("gpu", "NVIDIA H100 80GB HBM3"):
        traced = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).trace(*like)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 2
    assert "x1024xf32" not in text  # no logits of the tail
