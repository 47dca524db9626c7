"""Dropout masks: they drop the right share, are independent, and depend on the key and the
row's number alone.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.numerics.dropout import keep_mask, positions, row_seeds
from adaptive_jax.numerics.layers import Dropout

SHAPE = (64, 96)


@functools.partial(jax.jit, static_argnums=2)
def compiled(key, row_ids, rate):
    return keep_mask(row_seeds(jax.random.key(key), row_ids), positions(SHAPE), rate)


def masks(key, row_ids, rate=0.3):
    return np.asarray(compiled(key, np.array(row_ids), rate))


def test_keys_of_four_words():
    """Those of the implementation "rbg" were refused."""
    one, other = (jax.random.key(seed, impl="rbg") for seed in (0, 1))
    rates = [
        np.mean(keep_mask(row_seeds(key, np.arange(64)), positions(SHAPE[1:]), 0.3))
        for key in (one, other)
    ]
    np.testing.assert_allclose(rates, 0.7, atol=0.02)
    seeds = [np.asarray(row_seeds(key, np.arange(2))) for key in (one, other)]
    assert len(np.unique(seeds)) == 8


def correlation(a, b):
    return abs(np.corrcoef(a.ravel(), b.ravel())[0, 1])


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.9])
def test_share_dropped_is_the_rate(rate):
    """Over all rows, in single columns and in single rows, to within five standard errors."""
    dropped = ~masks(0, range(64), rate)
    means = dropped.mean(), dropped.mean(axis=(0, 1)), dropped.mean(axis=(1, 2))
    for share, count in zip(means, (dropped.size, 64 * 64, 64 * 96), strict=True):
        assert np.all(np.abs(share - rate) < 5 * np.sqrt(rate * (1 - rate) / count))


def test_a_rate_just_below_1():
    """The rate rounds to 1 in 32 bits, which the comparison of uint32 cannot hold."""
    assert not masks(0, range(64), 1 - 1e-11).any()


def test_masks_are_independent():
    """Masks of neighbouring rows, of two keys, and of positions up to 32 apart do not
    correlate; four neighbours neither.
    """
    mask = masks(0, range(40))
    limit = 5 / np.sqrt(mask[1:, :32].size)
    assert correlation(mask, masks(1, range(40))) < limit
    assert correlation(mask[1:], mask[:-1]) < limit
    for apart in (1, 2, 3, 4, 8, 16, 32):
        assert correlation(mask[..., apart:], mask[..., :-apart]) < limit
        assert correlation(mask[:, apart:], mask[:, :-apart]) < limit
    patterns = mask.reshape(-1, 4) @ [1, 2, 4, 8]
    ones = np.array([p.bit_count() for p in range(16)])
    np.testing.assert_allclose(
        np.bincount(patterns, minlength=16) / len(patterns),
        0.7**ones * 0.3 ** (4 - ones),
        atol=0.005,
    )


def test_a_row_keeps_its_mask():
    """Each row has the mask of its number, whichever rows are asked for, in any order, under jit or
    not.

    Positions are row-major, so a part of a row can be drawn by itself.
    """
    every = masks(3, range(8))
    np.testing.assert_array_equal(masks(3, [5, 2, 7]), every[[5, 2, 7]])
    seeds = row_seeds(jax.random.key(3), jnp.array([5]))[0]
    np.testing.assert_array_equal(keep_mask(seeds, positions(SHAPE), 0.3), every[5])
    np.testing.assert_array_equal(positions((2, 3, 5)), np.arange(30).reshape(2, 3, 5))
    np.testing.assert_array_equal(positions((3, 5), start=15), positions((2, 3, 5))[1])


def test_a_locked_mask_without_a_time_axis():
    """Vectors `[rows, features]` drop what one step of a sequence drops; a mask of the rows alone
    would drop whole vectors, and of `x [rows]` it would make `[rows, rows]`.
    """
    x = jnp.ones((6, 40))
    rngs = {"dropout": jax.random.key(1)}
    drop = jax.jit(lambda x: Dropout(0.4, locked=True).apply({}, x, train=True, rngs=rngs))
    dropped = drop(x)
    assert ((dropped != 0).mean(axis=1) > 0).all() and ((dropped != 0).mean(axis=1) < 1).all()
    np.testing.assert_array_equal(drop(jnp.ones((6, 3, 40))), jnp.stack([dropped] * 3, axis=1))
    assert drop(x[:, 0]).shape == (6,)


def test_layer_scales_what_stays():
    """Entries are 0 or x / (1 - rate) in x's dtype and follow their row; without training, and
    at rate 0, x is unchanged.
    """
    x = jax.random.normal(jax.random.key(0), (4, 50, 20), jnp.bfloat16)
    rngs = {"dropout": jax.random.key(1)}
    drop = jax.jit(lambda x, row_ids: Dropout(0.25).apply({}, x, row_ids, train=True, rngs=rngs))
    dropped = drop(x, None)
    assert dropped.dtype == x.dtype
    stays = np.asarray(dropped != 0)
    assert 0.7 < stays.mean() < 0.8
    np.testing.assert_array_equal(np.asarray(dropped)[stays], np.asarray(x / 0.75)[stays])
    np.testing.assert_array_equal(drop(x[::-1], np.arange(4)[::-1])[::-1], dropped)
    for rate, train in ((0.25, False), (0.0, True)):
        np.testing.assert_array_equal(Dropout(rate).apply({}, x, train=train, rngs=rngs), x)
