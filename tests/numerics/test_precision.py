"""Effects of a config's `dtype` on matrix products on accelerators, read off programs lowered
for a TPU.
"""

import re

import jax
import jax.numpy as jnp
import pytest

from adaptive_jax.model.language_model import build
from adaptive_jax.numerics import products
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.optimizers import optim
from adaptive_jax.parallel import sharding
from adaptive_jax.training.state import shape_of_state
from adaptive_jax.training.update import make_update

PRODUCT = re.compile(r"stablehlo\.(?:dot_general|convolution)\b.*")


def lowered_products(config, monkeypatch):
    """The lines of an update's products whose operands and result are float32, and the others."""
    monkeypatch.setattr(
        products, "platform", lambda: "tpu"
    )  # the mesh is of CPUs; lowering needs no TPU
    mesh, model, optimizer = sharding.device_mesh(), build(config, 122), optim.from_config(config)
    state = shape_of_state(model, optimizer, mesh)
    ints, floats = (jax.ShapeDtypeStruct((1, 4, 16), dtype) for dtype in (jnp.int32, jnp.float32))
    batch = Batch(ints, ints, floats, jax.ShapeDtypeStruct((1, 4), jnp.int32))
    update = make_update(model, optimizer, mesh, 0, state).trace(state, {}, batch)
    text = update.lower(lowering_platforms=("tpu",)).as_text()
    found = PRODUCT.findall(text)
    full = [line for line in found if line.count("xf32>") == 3]
    return full, [line for line in found if line not in full]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_float32_is_float32(config, monkeypatch, dtype):
    """Forward and backward, every product of float32 arrays is exact if the config says
    float32, and no other product is.
    """
    full, others = lowered_products(config(dtype=dtype), monkeypatch)
    exact = [line for line in full + others if "HIGHEST" in line]
    assert len(full) + len(others) > 20
    if dtype == "float32":
        assert not others and len(exact) == len(full)
    else:
        assert not exact and len(others) > len(full)


def test_a_precision_that_the_user_chose_stays(config, monkeypatch):
    """Else nobody could trade digits for speed."""
    with jax.default_matmul_precision("high"):
        full, others = lowered_products(config(dtype="float32"), monkeypatch)
    assert full and not [line for line in full + others if "HIGHEST" in line]
