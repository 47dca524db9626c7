"""The kernels for NVIDIA GPUs, compiled for GPUs of each size of shared memory, which the
compiler checks.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from adaptive_jax.bodies.attention import Pairs, joint_attention
from adaptive_jax.bodies.positions import alibi_slopes
from adaptive_jax.losses import banded
from adaptive_jax.numerics.bands import Band
from adaptive_jax.parallel.sharding import device_mesh
from adaptive_jax.planning.targets import topology
from tests.training.test_compiled_for import compiles

TIME, FEATURES = 128, 128


def loss(joints, biases, segment_ids, seeds, hidden, tables, projections):
    """Attention with heads of 64 and 128 features, and an adaptive softmax whose tails have
    widths of 16 to 256.
    """
    pairs = Pairs(segment_ids, alibi_slopes(2), 0.1, seeds)
    mixed = [
        joint_attention(joint, bias, 2, pairs).astype(jnp.float32)
        for joint, bias in zip(joints, biases, strict=True)
    ]
    bands = [Band(tables[0]), *map(Band, tables[1:-1], projections)]
    targets = jnp.zeros(len(hidden), jnp.int32)
    return (
        sum((each**2).sum() for each in mixed)
        + banded.loss(hidden, targets, None, bands, Band(tables[-1]))[0]
    )


@compiles
@pytest.mark.parametrize(
    "name, kernels, tracked",
    [("a100", 10, False), ("h100", 10, True), ("rtx4090", 8, False)],
)  # the last has no room for a tail of 256
def test_kernels_fit_in_shared_memory(name, kernels, tracked):
    """Two kernels for each width of heads, and two for each width of a tail, where they are
    used; none is too large. Where `jax.shard_map` tracks what differs from device to device, its
    default, kernels were refused.
    """
    target = topology(name)
    mesh, whole, rows = device_mesh(1, target.devices), PartitionSpec(), PartitionSpec("data")

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, whole))

    widths, heads = (16, 64, 256), (64, 128)
    given = (
        [array(2, TIME, 6 * width) for width in heads],
        [array(6 * width, dtype=jnp.float32) for width in heads],
        array(2, TIME, dtype=jnp.int32),
        array(2, 2, dtype=jnp.uint32),
        array(300, FEATURES),
        [
            array(500, FEATURES),
            *[array(1000, width) for width in widths],
            array(len(widths), FEATURES),
        ],
        [array(width, FEATURES) for width in widths],
    )
    specs = rows, whole, rows, rows, rows, whole, whole
    update = jax.shard_map(
        jax.grad(loss, (0, 1, 4, 5, 6)),
        mesh=mesh,
        in_specs=specs,
        out_specs=(rows, whole, rows, whole, whole),
        check_vma=tracked,
    )
    text = jax.jit(update).lower(*given).compile(target.options).as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == kernels
