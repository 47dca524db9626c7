"""Causal self-attention with dropout on its weights. Several implementations, called paths, give
the same numbers.

For one row of three tokens in segments 7 7 8, the weights of a head are

    query 0   1 . .      itself
    query 1   a b .      token 0 and itself, a + b = 1
    query 2   . . 1      itself: the other tokens belong to another segment

`plain` computes the weights of all pairs at once, `chunked` in chunks of queries (see chunked.py),
`triton` in kernels for NVIDIA GPUs (see flash.py), `cudnn` in NVIDIA's kernel, `splash` in JAX's
kernel for TPUs (see splash.py). A dropout mask depends only on the row's seeds and on positions, so
all paths drop the same weights.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_jax.bodies.chunked import causal_mask, chunked, scaled
from adaptive_jax.bodies.dense import added
from adaptive_jax.bodies.positions import biases
from adaptive_jax.bodies.remat import keep
from adaptive_jax.errors import InputError, check_known
from adaptive_jax.numerics.dropout import keep_mask, masked, positions, tied
from adaptive_jax.numerics.platforms import capability, platform, present, roomy

PATHS = ("auto", "plain", "chunked", "triton", "cudnn", "splash")


class Pairs(NamedTuple):
    """What weighs a pair of tokens besides their query and key.

    Attributes:
        segment_ids: int32 `[rows, time]`: a token sees only tokens of its own segment. None: every
            row is one segment.
        slopes: for each head, how much a score falls with each token of distance (ALiBi, see
            positions.py). (): not at all.
        dropout: rate at which weights are dropped after the softmax; the others are divided by 1 -
            dropout.
        seeds: uint32 `[rows, 2]` from `dropout.row_seeds`; needed if `dropout` is not 0.
    """

    segment_ids: jax.Array | None = None
    slopes: tuple[float, ...] = ()
    dropout: float = 0.0
    seeds: jax.Array | None = None


ALONE = Pairs()  # queries and keys decide alone


def attention(queries, keys, values, pairs: Pairs = ALONE, *, path="auto"):
    """Scaled dot-product attention of each token to itself and the tokens before it (Vaswani et al.
    2017, section 3.2.1).

    Args:
        queries, keys, values: `[rows, time, heads, width]` of one dtype, which is also the dtype of
            the products. Scores are scaled by width^-0.5; scores and softmax are float32.
        pairs: what else decides the weights: segments, distance, dropout.
        path: one of `PATHS`. "auto" takes the fastest path that supports the arguments: as measured
            on CPUs, as counted on GPUs.

    Returns:
        `[rows, time, heads, width]` in the dtype of the queries.

    Raises:
        InputError: the path is unknown or does not support the arguments, or a row has more than
            2^32 weights to drop.
    """
    path = _choose(path, queries.shape[1:], queries.dtype, pairs)
    pairs = pairs if pairs.dropout else pairs._replace(seeds=None)
    if path == "triton":
        return _flash(jnp.stack([queries, keys, values], axis=2), pairs)
    if path == "cudnn":
        return jax.nn.dot_product_attention(
            queries, keys, values, is_causal=True, implementation="cudnn"
        )
    if path == "splash":
        from adaptive_jax.bodies.splash import splash  # imports what only TPUs need

        return splash(queries, keys, values, pairs.segment_ids)
    if path == "chunked":
        return chunked(
            pairs.dropout, pairs.slopes, queries, keys, values, pairs.segment_ids, pairs.seeds
        )
    zero, time = tied(jnp.int32(0), queries), queries.shape[1]
    mask = causal_mask(zero, time, time)[None, None]
    if pairs.segment_ids is not None:
        mask &= ((pairs.segment_ids + zero)[:, :, None] == pairs.segment_ids[:, None])[:, None]
    return _plain((queries, keys, values), mask, zero, pairs)


def joint_attention(joint, bias, heads: int, pairs: Pairs = ALONE, *, path="auto"):
    """`attention` of queries, keys and values side by side, `[rows, time, 3 * heads * width]`,
    after a bias is added to them.

    "triton" reads them in place, and sums the gradient of the bias `[3 * heads * width]` where it
    computes theirs.
    """
    rows, time, width = *joint.shape[:2], joint.shape[2] // (3 * heads)
    path = _choose(path, (time, heads, width), joint.dtype, pairs)
    if path == "triton":
        return _flash(
            joint.reshape(rows, time, 3, heads, width), pairs, bias.reshape(3, heads, width)
        )
    joint = keep(added(joint, bias))
    parts = (part.reshape(rows, time, heads, width) for part in jnp.split(joint, 3, axis=-1))
    return attention(*parts, pairs, path=path)


def cached_attention(queries, keys, values, seen, slopes: tuple[float, ...] = ()):
    """Attention of the next tokens to a cache that already holds their own keys and values. Not
    meant to be differentiated.

    Args:
        queries: `[rows, time, heads, width]`.
        keys, values: `[rows, length, heads, width]`; those of the queries' own tokens begin at
            position `seen`.
        seen: number of tokens before the queries, a scalar.
        slopes: see `Pairs`.

    Returns:
        `[rows, time, heads, width]` in the dtype of the queries.
    """
    mask = causal_mask(seen, queries.shape[1], keys.shape[1])[None, None]
    return _plain((queries, keys, values), mask, seen, Pairs(slopes=slopes))


def _flash(joint, pairs, bias=None):
    # Triton is slow to import, and not on every machine.
    from adaptive_jax.bodies.flash import flash

    return flash(joint, pairs, bias)


def _choose(path, shape, dtype, pairs):
    """The path to take for rows of `shape`, (time, heads, width)."""
    time, heads, width = shape
    check_known(f"body.attention={path!r}", path, PATHS)
    if pairs.dropout and heads * time**2 > 2**32:
        raise InputError(
            f"attention dropout supports 2^32 weights a row, not those of {heads} heads over {time}"
            " tokens: choose a smaller batches.sequence_length or body.attention_dropout=0"
        )
    refusals = {
        "triton": _triton_refusal(time, width, dtype),
        "cudnn": _cudnn_refusal(width, dtype, pairs),
        "splash": _splash_refusal(time, dtype, pairs),
    }
    if refusal := refusals.get(path):
        raise InputError(f"body.attention={path!r} {refusal}: choose body.attention='chunked'")
    if path != "auto":
        return path
    # Triton computes float32 products without matrix units, and takes a minute to compile them.
    # Nobody has measured cuDNN and splash here: for those who ask. Up to 64 tokens are one chunk,
    # which has no keys to skip.
    if not refusals["triton"] and dtype != jnp.float32:
        return "triton"
    return "plain" if time <= 64 else "chunked"


def _triton_refusal(time, width, dtype):
    """Why our kernels cannot compute this, as the end of a sentence; empty if they can."""
    if platform() != "gpu":
        return f"needs a GPU, and this is a {platform()}"
    if capability() < (8, 0):
        return "needs an NVIDIA GPU of compute capability 8.0 or more"
    if time % 64:
        return f"takes rows of 64, 128, 192 ... tokens, not {time}"
    # Float32 blocks of wider heads exceed the shared memory of an A100, or of a GPU for desktops.
    if width not in (16, 32, 64, 128)[: 4 if dtype != jnp.float32 else 3 if roomy() else 2]:
        return (
            "takes heads of 16, 32, 64 or 128 features, or in float32 of up to"
            f" {64 if roomy() else 32}, not {width}"
        )
    if dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
        return f"computes in float16, bfloat16 and float32, not {dtype}"
    return ""


def _cudnn_refusal(width, dtype, pairs):
    """Likewise for cuDNN."""
    if platform() != "gpu":
        return f"needs a GPU, and this is a {platform()}"
    if not present():
        return "needs its own library and GPU to be compiled"
    if pairs.dropout:
        return (  # its seed is a constant of the program: every step would drop the same
            f"does not support dropout={pairs.dropout}"
        )
    if pairs.segment_ids is not None:
        return "does not support segments"
    if pairs.slopes:
        return (  # it would read a bias for every pair, which the kernels here compute
            "does not support body.positions='alibi'"
        )
    if dtype not in (jnp.float16, jnp.bfloat16):
        return f"computes in float16 and bfloat16, not {dtype}"
    if width % 8 or width > 128:
        return f"takes heads of 8, 16, ... 128 features, not {width}"
    return ""


def _splash_refusal(time, dtype, pairs):
    """Likewise for JAX's kernel for TPUs."""
    if platform() != "tpu":
        return f"needs a TPU, and this is a {platform()}"
    if pairs.dropout:
        return f"does not support dropout={pairs.dropout}"
    if pairs.slopes:
        return "does not support body.positions='alibi'"
    if time % 128:
        return f"takes rows of 128, 256, 384 ... tokens, not {time}"
    if dtype != jnp.bfloat16:  # it would round float32 factors of products to bfloat16
        return f"computes in bfloat16, not {dtype}"
    return ""


def _plain(arrays, mask, first, pairs):
    """Attention that computes the scores of all pairs at once; `mask` broadcasts to `[rows, heads,
    queries, keys]`.

    first: position of the first query. Segments are in the mask.
    """
    queries, keys, values = arrays
    scores = jnp.einsum(
        "bqhw,bkhw->bhqk", scaled(queries), keys, preferred_element_type=jnp.float32
    )
    if pairs.slopes:
        scores += biases(jnp.asarray(pairs.slopes), first, *scores.shape[2:])[None]
    weights = jax.nn.softmax(masked(scores, mask, tied(jnp.float32(-jnp.inf), queries)))
    if pairs.dropout:
        start, zero = (tied(x, pairs.seeds) for x in (jnp.uint32(0), jnp.zeros((), weights.dtype)))
        stays = keep_mask(pairs.seeds, positions(weights.shape[1:], start), pairs.dropout)
        weights = masked(weights / (1 - pairs.dropout), stays, zero)
    return jnp.einsum("bhqk,bkhw->bqhw", weights.astype(queries.dtype), values)
