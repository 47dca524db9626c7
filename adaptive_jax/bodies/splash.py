"""Causal attention on a TPU by the kernel that comes with JAX, "splash attention". It drops no
weights.
"""

import jax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from adaptive_jax.bodies.chunked import scaled
from adaptive_jax.numerics.platforms import platform

STEP = 128  # time is a multiple of it


def splash(queries, keys, values, segment_ids=None):
    """Scaled dot-product attention of each token to itself and the tokens before it; see
    `attention.attention`.

    Args:
        queries, keys, values: `[rows, time, heads, width]`; time is a multiple of 128.
        segment_ids: int32 `[rows, time]` or None.

    Returns:
        `[rows, time, heads, width]` in the dtype of the queries.
    """
    time, heads = queries.shape[1:3]
    size = next(size for size in (512, 256, STEP) if time % size == 0)
    backward = "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute", "block_q_dq", "block_kv_dq"
    attend = kernels.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((time, time))] * heads),
        block_sizes=kernels.BlockSizes(size, size, size, **dict.fromkeys(backward, size)),
        head_shards=1,
        q_seq_shards=1,
        interpret=platform() == "cpu",
    )

    def attend_row(queries, keys, values, segment_ids):
        return attend(
            queries,
            keys,
            values,
            None if segment_ids is None else kernels.SegmentIds(segment_ids, segment_ids),
        )

    by_heads = (array.swapaxes(1, 2) for array in (scaled(queries), keys, values))
    return jax.vmap(attend_row)(*by_heads, segment_ids).swapaxes(1, 2)
