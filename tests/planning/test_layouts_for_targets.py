"""Layouts of large trainers, compiled for 8 H100 that are not here: bytes that cross devices."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from adaptive_jax import linear_cross_entropy
from adaptive_jax.planning.targets import topology
from benchmarks.collectives import collectives

LACKS_COMPILER = sys.version_info < (3, 12) or importlib.util.find_spec("nvidia") is None
# When the file is read: JAX must start with the plugin, or it partitions nothing of its own for it.
TARGET = None if LACKS_COMPILER else topology("h100:8")
TOKENS, WIDTH, WORDS = 4_096, 512, 65_536
BOTH = ("fsdp", "expert")
LAYOUTS = {  # mesh, axes of tokens, spec of the table, MB
    "an axis of size 1": ({"fsdp": 8, "tensor": 1}, "fsdp", P("tensor", "fsdp"), 36),
    "width beside another axis": ({"data": 2, "fsdp": 4}, ("data", "fsdp"), P(None, "fsdp"), 92),
    "words over two axes": ({"fsdp": 4, "expert": 2}, BOTH, P(BOTH), 9),
    "width over two axes": ({"fsdp": 4, "expert": 2}, BOTH, P(None, BOTH), 36),
}


@pytest.mark.skipif(LACKS_COMPILER, reason="needs the extra targets and Python 3.12")
@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_that_cross_devices(name):
    """A table sharded by words stays; one by width crosses with its gradient, a device's share of
    134 MB each. Without it, both were gathered whole in float32.
    """
    axes, tokens, table, most = LAYOUTS[name]
    devices = np.array(TARGET.devices).reshape(*axes.values())
    mesh = Mesh(devices, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
    specs = P(tokens), table, P(tokens)
    like = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(
            [(TOKENS, WIDTH), (WORDS, WIDTH), (TOKENS,)],
            (jnp.bfloat16, jnp.float32, jnp.int32),
            specs,
            strict=True,
        )
    ]
    step = jax.value_and_grad(linear_cross_entropy, (0, 1))
    shardings = NamedSharding(mesh, P()), (like[0].sharding, like[1].sharding)
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, out_shardings=shardings).lower(*like)
    moved = sum(kind["bytes"] for kind in collectives(lowered.compile(TARGET.options)))
    assert moved < most * 1e6
