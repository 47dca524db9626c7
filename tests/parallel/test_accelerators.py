"""Figures of accelerators, utilisation by its formula, and the cache of compiled programs."""

import jax
import jax.numpy as jnp
import pytest

from adaptive_jax.config import cache
from adaptive_jax.numerics.devices import find
from adaptive_jax.parallel import accelerators


@pytest.mark.parametrize(
    "kind, flops",
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5e", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v4", 275e12),
        ("TPU v6 lite", 918e12),
        ("TPU v6e", 918e12),
        ("TPU7x", 2307e12),
    ],
)
def test_devices_are_found_by_their_kind(kind, flops):
    """The name that a device reports picks its figures; "TPU v5 lite", or "TPU v5e", is not a
    "TPU v5".
    """
    assert find(kind).flops == flops


def test_memory_is_that_of_the_kind():
    """Chunks on an A100 of 40 GB were planned for twice its memory."""
    kinds = "A100-SXM4-40GB", "A100-PCIE-40GB", "A100-SXM4-80GB", "V100-SXM2-16GB", "V100-SXM2-32GB"
    assert [round(find(kind).memory / 1e9) for kind in kinds] == [43, 43, 86, 16, 32]


@pytest.mark.parametrize(
    "kind",
    ["NVIDIA RTX A1000 6GB Laptop GPU", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GH200 480GB"],
)
def test_other_devices_with_such_a_name(kind):
    """They are not listed: an A1000 was taken for an A100."""
    assert find(kind) is None


def test_utilisation_is_work_over_what_was_possible():
    """8 H200 that do a tenth of 8 x 989 TFLOP in a second have a utilisation of 0.1; a CPU has
    none.
    """
    assert accelerators.utilisation(0.1 * 8 * 989e12 * 3, 3.0, 8, "NVIDIA H200") == pytest.approx(
        0.1
    )
    assert accelerators.utilisation(1e12, 1.0, 1, "cpu") is None
    assert accelerators.memory() is None


@pytest.fixture
def no_place():
    """JAX without a compilation cache, as outside of tests."""
    from jax.experimental.compilation_cache import compilation_cache

    before = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
    compilation_cache.reset_cache()


def test_programs_are_kept(no_place, own_cache, monkeypatch):
    """A compiled program is written below the cache; a compilation cache that the user chose is
    kept.
    """
    accelerators.keep_programs()
    jax.jit(lambda x: jnp.sin(x) @ x + 17.25)(jnp.ones((8, 8)))
    assert [path for path in (own_cache / "programs").rglob("*") if path.is_file()]
    monkeypatch.setenv(cache.VARIABLE, str(own_cache / "other"))
    accelerators.keep_programs()
    assert str(own_cache / "programs") in jax.config.jax_compilation_cache_dir
