"""The core as it runs on accelerators, here on a CPU: even chunks, whole tiles of
columns, clusters inside the head.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.losses import banded, chunks
from adaptive_jax.losses.plans import even_rows
from adaptive_jax.numerics.bands import Band
from tests.losses import test_banded as twin

DROPS = banded.Settings(tail_dropout=0.3)


@pytest.fixture(autouse=True)
def accelerator(monkeypatch):
    """The core takes this machine for a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def anew(function):
    """The function, traced anew: what is traced elsewhere is for a CPU."""
    return jax.jit(
        lambda *args, **how: function.__wrapped__(*args, **how), static_argnames="settings"
    )


@pytest.mark.parametrize(
    "case, settings",
    [
        ("prime", twin.ALL),
        ("7 words", twin.ALL),
        ("groups among others", twin.ALL),
        ("no words in the head", twin.ALL),
        ("full softmax", DROPS),
    ],
)
def test_loss_and_every_gradient(case, settings):
    """They equal the twin's, with tail dropout, smoothing over the words that exist and z-loss,
    in chunks that do not divide.
    """
    values = twin.arrays(case)
    seeds, masks = twin.seeds_and_masks(values[3], settings.tail_dropout)
    fast = anew(twin.fast_loss)(*values, settings=settings._replace(chunk=7), seeds=seeds)
    twin.check(
        fast, twin.in_float64(lambda *v: twin.slow_loss(*v[:5], settings, v[5]), *values, masks)
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_targets_written_over(dtype):
    """Rounded powers with the targets' written anew are the gradient of the logits, bit for
    bit; a target may be on no device.
    """
    logits = np.random.default_rng(0).standard_normal((6, 9)).astype("f")
    column = np.array([0, 8, 3, -(2**30), -1, 9], np.int32)

    @jax.jit
    def both(logits, column):
        power = jnp.exp(logits - logits.max(axis=1)[:, None])
        total = power.sum(axis=1)
        hit = column[:, None] == jnp.arange(9)[None]
        exact = (power - jnp.where(hit, total[:, None], 0.0)).astype(dtype)
        return chunks.overwritten(power, column, total, dtype), exact

    np.testing.assert_array_equal(*both(logits, column))


def test_a_bias_of_clusters_alone():
    """Biases of clusters, of words, of both or of none give the same nll as the softmaxes kept
    apart.
    """
    hidden, targets, _, bands, clusters = twin.arrays("7 words")
    for words, tails in (False, True), (True, False):
        head = bands[0]._replace(bias=bands[0].bias if words else None)
        given = [head, *bands[1:]], clusters._replace(bias=clusters.bias if tails else None)
        apart = [
            Band(b.table, b.projection, np.zeros(len(b.table), "f") if b.bias is None else b.bias)
            for b in (head, given[1])
        ]
        slow = twin.in_float64(
            lambda *v: twin.slow_losses(*v)[1], hidden, targets, [apart[0], *bands[1:]], apart[1]
        )
        twin.check(jax.jit(banded.losses)(hidden, targets, None, *given), slow)


def test_padding_that_a_caller_gives():
    """Rows behind the words of a head stay without probability, though clusters move in between."""
    hidden, targets, weights, bands, clusters = twin.arrays("prime")
    rows = np.full((5, bands[0].table.shape[1]), 9.0, np.float32)
    wide = [bands[0]._replace(table=np.concatenate([bands[0].table, rows])), *bands[1:]]
    settings = banded.Settings(words=tuple(len(band.table) for band in bands))
    fast = anew(twin.fast_loss)(hidden, targets, weights, wide, clusters, settings=settings)
    slow = twin.in_float64(twin.slow_loss, hidden, targets, weights, bands, clusters)
    d_table = fast[1][2][0][0].table
    assert d_table.shape == wide[0].table.shape and (d_table[-5:] == 0).all()
    fast[1][2][0][0] = fast[1][2][0][0]._replace(table=d_table[:-5])
    twin.check(fast, slow)


@pytest.mark.parametrize(
    "tokens, most, rows",
    [
        (4_096, 3_328, 2_048),
        (32_768, 3_328, 3_328),
        (3_329, 3_328, 1_792),
        (3_328, 3_328, 3_328),
        (1_000, 3_328, 1_000),
        (40_960, 896, 896),
    ],
)
def test_rows_of_a_chunk(monkeypatch, tokens, most, rows):
    """As few chunks as hold the tokens, and in all of them less than a tile too many for each;
    on a CPU as many as fit.
    """
    assert even_rows(tokens, most) == rows
    chunks = -(-tokens // rows)
    assert chunks <= -(-tokens // most) and chunks * rows < tokens + 128 * chunks
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert even_rows(tokens, most) == min(tokens, most)


def test_products_of_whole_tiles():
    """The paper's bands: each softmax has three products, all of whose columns are whole tiles,
    and all tokens are one chunk of the head.
    """
    sizes, widths, columns = [20_000, 40_000, 207_735], [1024, 256, 64], [20_096, 40_064, 207_872]
    text = anew(twin.fast_loss).lower(*twin.shapes(4_096, sizes, widths)).as_text()
    products = re.findall(
        r"dot_general.*: \(tensor<(\w+)xf32>, tensor<(\w+)xf32>\) -> tensor<(\w+)xf32>", text
    )
    numbers = [{int(n) for shape in product for n in shape.split("x")} for product in products]
    assert [n for product in numbers for n in product if n % 64] == []
    for words, rows in zip(columns, (4_096, 512, 512), strict=True):
        of_band = [
            product
            for product in products
            if words in {int(n) for shape in product for n in shape.split("x")}
        ]
        assert len(of_band) == 3 and all(str(rows) in " ".join(product) for product in of_band), (
            words,
            of_band,
        )
