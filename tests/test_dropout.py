"""Dropout's masks: as many entries as asked for, independent of each other, a function of key and row number alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.dropout import Dropout, kept, places, row_seeds

SHAPE = (64, 96)


def masks(key, rows, rate=0.3, shape=SHAPE):
    return np.asarray(kept(row_seeds(jax.random.key(key), jnp.asarray(rows)), places(shape), rate))


def correlation(a, b):
    return abs(np.corrcoef(a.ravel(), b.ravel())[0, 1])


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.5, 0.9])
def test_as_many_are_dropped_as_asked(rate):
    """The share that is dropped, over all rows and within single columns, is the rate to within five standard errors."""
    drawn = ~masks(0, range(64), rate)
    for share, count in ((drawn.mean(), drawn.size), (drawn.mean(axis=(0, 1)), 64 * 64), (drawn.mean(axis=(1, 2)), 64 * 96)):
        assert np.all(np.abs(share - rate) < 5 * np.sqrt(rate * (1 - rate) / count))


def test_masks_are_independent():
    """Of neighbouring rows, keys, places, and of places a power of two apart, none tells of the other."""
    drawn, others = masks(0, range(40)), masks(1, range(40))
    limit = 5 / np.sqrt(drawn[1:, :32].size)
    assert correlation(drawn, others) < limit
    assert correlation(drawn[1:], drawn[:-1]) < limit
    for apart in (1, 2, 3, 4, 8, 16, 32):
        assert correlation(drawn[..., apart:], drawn[..., :-apart]) < limit
        assert correlation(drawn[:, apart:], drawn[:, :-apart]) < limit
    patterns = drawn.reshape(-1, 4) @ [1, 2, 4, 8]
    expected = 0.7 ** np.array([bin(p).count("1") for p in range(16)]) * 0.3 ** np.array([4 - bin(p).count("1") for p in range(16)])
    np.testing.assert_allclose(np.bincount(patterns, minlength=16) / len(patterns), expected, atol=0.005)


def test_a_row_keeps_its_mask():
    """Whichever rows are asked for, in whatever order, and through jit, each has the mask of its number."""
    whole = masks(3, range(8))
    np.testing.assert_array_equal(masks(3, [5, 2, 7]), whole[[5, 2, 7]])
    one = row_seeds(jax.random.key(3), jnp.arange(8))[5]
    np.testing.assert_array_equal(kept(one, places(SHAPE), 0.3), whole[5])
    np.testing.assert_array_equal(jax.jit(lambda: kept(row_seeds(jax.random.key(3), jnp.arange(8)), places(SHAPE), 0.3))(), whole)


def test_places_count_a_row_through():
    """Places are those of the flat row, so a part of a row can be drawn by itself."""
    np.testing.assert_array_equal(places((2, 3, 5)), np.arange(30).reshape(2, 3, 5))


def test_the_layer_scales_what_stays():
    """Entries are 0 or x / (1 - rate) in x's type; without training, and at rate 0, x is untouched."""
    x = jax.random.normal(jax.random.key(0), (4, 50, 20), jnp.bfloat16)
    dropped = Dropout(0.25).apply({}, x, train=True, rngs={"dropout": jax.random.key(1)})
    assert dropped.dtype == x.dtype
    stays = np.asarray(dropped != 0)
    assert 0.7 < stays.mean() < 0.8
    np.testing.assert_array_equal(np.asarray(dropped)[stays], np.asarray(x / 0.75)[stays])
    moved = Dropout(0.25).apply({}, x[::-1], jnp.arange(4)[::-1], train=True, rngs={"dropout": jax.random.key(1)})
    np.testing.assert_array_equal(moved[::-1], dropped)
    for rate, train in ((0.25, False), (0.0, True)):
        np.testing.assert_array_equal(Dropout(rate).apply({}, x, train=train, rngs={"dropout": jax.random.key(1)}), x)
