"""The schedules of the paper, at the updates where they turn."""

import jax
import jax.numpy as jnp
import pytest

from adaptive_jax.errors import InputError
from adaptive_jax.training import schedules

PAPER = {  # Baevski & Auli 2019, section 4.5: warm-up, first cycle, cycles, M, updates in all
    "WikiText-103": (16_000, 18_000, 4, 0.75, 286_000),
    "Billion Word": (16_000, 137_000, 3, 0.6, 975_000),
}


@pytest.mark.parametrize("corpus", PAPER)
def test_cycles_of_the_paper(corpus):
    """Every cycle begins at M^c and ends at 1e-5 M^c, each twice as long, and the last ends with the training."""
    warmup, first, cycles, shrink, updates = PAPER[corpus]
    with jax.enable_x64(True):
        rate = schedules.cosine_cycles(learning_rate=1.0, min_learning_rate=1e-5, warmup_from=1e-7, warmup_steps=warmup,
                              cycle_steps=first, cycles=cycles, shrink=shrink)
        assert rate(jnp.asarray(0)) == pytest.approx(1e-7, rel=1e-9)
        assert rate(jnp.asarray(warmup // 2)) == pytest.approx((1 + 1e-7) / 2, rel=1e-9)
        begin = warmup
        for cycle in range(cycles):
            length = first * 2**cycle
            low, high = 1e-5 * shrink**cycle, shrink**cycle
            assert rate(jnp.asarray(begin)) == pytest.approx(high, rel=1e-9)
            assert rate(jnp.asarray(begin + length // 2)) == pytest.approx((low + high) / 2, rel=1e-9)
            assert low <= rate(jnp.asarray(begin + length - 1)) < low + high * 1e-6
            begin += length
        assert begin == updates
        for later in (updates, 2 * updates):
            assert rate(jnp.asarray(later)) == pytest.approx(1e-5 * shrink ** (cycles - 1), rel=1e-9)


@pytest.mark.parametrize("wrong", [{"cycles": 0}, {"cycle_steps": 0}])
def test_a_schedule_without_cycles(wrong):
    """One line that names both settings."""
    settings = {"learning_rate": 1.0, "min_learning_rate": 0.0, "warmup_from": 0.0, "warmup_steps": 1, "cycle_steps": 5,
                "cycles": 1, "shrink": 1.0} | wrong
    with pytest.raises(InputError, match=r"schedule\.cycles=\d of schedule\.cycle_steps=\d: both must be 1 or more"):
        schedules.cosine_cycles(**settings)
