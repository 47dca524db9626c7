"""Causal attention with dropout on an NVIDIA GPU, one kernel for the forward pass and one for the
backward pass (Dao et al. 2022; Dao 2023).

A program of the forward kernel holds a block of queries and visits the keys before them block by
block, so weights never leave the chip. A program of the backward kernel owns a block of tokens:
first it visits the keys before them and sums the gradient of their queries, then the queries after
them and sums the gradients of their keys and values. So all programs do equal work. Dropout masks
are the hash `dropout.stays`, computed beside each weight. The kernels read queries, keys and values
from the output of the model's projection, and write the three gradients in the same layout, so
nothing is copied.

Pallas compiles the kernels by Triton; on a CPU it interprets them, for tests.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from adaptive_jax.bodies.blocks import save_for_backward
from adaptive_jax.numerics.dropout import stays
from adaptive_jax.numerics.meshes import kernel_arguments, vary_alike
from adaptive_jax.numerics.platforms import platform
from adaptive_jax.numerics.products import added

HIDDEN = -1e30  # the score of a key that a query does not see


class Blocks(NamedTuple):
    """Sizes of a kernel: tokens per program, tokens per step of its loop, warps, and pipeline
    stages.
    """

    program: int = 64
    step: int = 64
    warps: int = 4
    stages: int = 2


class _Settings(NamedTuple):
    """Settings of all programs of both kernels."""

    dropout: float
    slopes: tuple[float, ...]
    forward: Blocks
    backward: Blocks

    def kernel(self, blocks: Blocks, joint, segment_ids) -> "_Kernel":
        """Settings of the programs of one of the kernels."""
        return _Kernel(
            self.dropout, blocks, joint.shape[1], segment_ids is not None, bool(self.slopes)
        )

    def optional_arrays(self, segment_ids, seeds) -> list[jax.Array]:
        """The arrays that `_Kernel.read` reads, without those that are None."""
        slopes = jnp.asarray(self.slopes, jnp.float32) if self.slopes else None
        return [array for array in (slopes, segment_ids, seeds) if array is not None]


def flash(joint, pairs, bias=None, *, blocks: tuple[Blocks, Blocks] | None = None):
    """Scaled dot-product attention of each token to itself and the tokens before it; see
    `attention.attention`.

    Args:
        joint: `[rows, time, 3, heads, width]`: queries, keys and values. Time is a multiple of 64,
            width a power of 2 from 16 on.
        pairs: see `attention.Pairs`.
        bias: `[3, heads, width]`, added to `joint` in its dtype; the backward kernel sums its
            gradient in float32. None: nothing.
        blocks: of the forward and of the backward kernel; all sizes divide time. None: defaults
            by time and width, not yet measured.

    Returns:
        `[rows, time, heads, width]` in the dtype of `joint`.
    """
    if blocks is None:
        warps = 4 if joint.shape[-1] <= 64 else 8
        blocks = Blocks(128 if joint.shape[1] % 128 == 0 else 64, 64, warps), Blocks(64, 64, warps)
    settings = _Settings(pairs.dropout, pairs.slopes, *blocks)
    seeds = pairs.seeds if pairs.dropout else None
    return _flash(settings, *vary_alike((joint, bias, pairs.segment_ids, seeds)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(settings, joint, bias, segment_ids, seeds):
    return _forward(settings, joint, bias, segment_ids, seeds)[0]


def _forward(settings, joint, bias, segment_ids, seeds):
    rows, time, _, heads, width = joint.shape
    if bias is not None:
        # With features as one axis, the layout of the product before it.
        joint = added(joint.reshape(rows, time, -1), bias.reshape(-1)).reshape(joint.shape)
    joint = save_for_backward(joint)
    size = settings.forward.program
    attended, logsumexp = _call(
        functools.partial(_forward_kernel, settings.kernel(settings.forward, joint, segment_ids)),
        settings.forward,
        [joint, *settings.optional_arrays(segment_ids, seeds)],
        [
            jax.ShapeDtypeStruct((rows, time, heads, width), joint.dtype),
            jax.ShapeDtypeStruct((rows, heads, time), jnp.float32),
        ],
        [
            pl.BlockSpec((None, size, None, width), lambda i, head, row: (row, i, head, 0)),
            pl.BlockSpec((None, None, size), lambda i, head, row: (row, head, i)),
        ],
    )
    attended, logsumexp = save_for_backward(attended), save_for_backward(logsumexp)
    return attended, (joint, bias, segment_ids, seeds, attended, logsumexp)


def _backward(settings, residuals, gradient):
    joint, bias, segment_ids, seeds, attended, logsumexp = residuals
    (rows, time, *token_shape), size = joint.shape, settings.backward.program
    # A term shared by the gradients of all weights of a query: D in Dao et al. 2022, appendix B.2.
    shared = jnp.sum(attended.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1).swapaxes(
        1, 2
    )
    d_joint, sums = _call(
        functools.partial(_backward_kernel, settings.kernel(settings.backward, joint, segment_ids)),
        settings.backward,
        [joint, gradient, logsumexp, shared, *settings.optional_arrays(segment_ids, seeds)],
        [
            jax.ShapeDtypeStruct(joint.shape, joint.dtype),
            jax.ShapeDtypeStruct((rows, time // size, *token_shape), jnp.float32),
        ],
        [
            pl.BlockSpec(
                (None, size, 3, None, token_shape[-1]), lambda i, head, row: (row, i, 0, head, 0)
            ),
            pl.BlockSpec(
                (None, None, 3, None, token_shape[-1]), lambda i, head, row: (row, i, 0, head, 0)
            ),
        ],
    )
    return d_joint, None if bias is None else sums.sum((0, 1)).astype(bias.dtype), None, None


_flash.defvjp(_forward, _backward)


def _call(kernel, blocks, arrays, shapes, out_specs):
    """Runs `kernel` for every block of tokens, head and row of `arrays[0]`, the joint array.

    A program reads the part of each array that belongs to its row and head. Arrays have the axes of
    the joint array, or `[rows, time, heads, width]`, `[rows, heads, time]`, `[rows, any]` or
    `[heads]`.
    """
    rows, time, _, heads, width = arrays[0].shape
    specs_by_rank = {
        5: pl.BlockSpec((None, time, 3, None, width), lambda i, head, row: (row, 0, 0, head, 0)),
        4: pl.BlockSpec((None, time, None, width), lambda i, head, row: (row, 0, head, 0)),
        3: pl.BlockSpec((None, None, time), lambda i, head, row: (row, head, 0)),
        1: pl.BlockSpec((1,), lambda i, head, row: (head,)),
    }
    specs = [
        specs_by_rank.get(a.ndim) or pl.BlockSpec((None, a.shape[1]), lambda i, head, row: (row, 0))
        for a in arrays
    ]
    arrays, shapes = kernel_arguments(arrays, shapes)
    call = pl.pallas_call(
        kernel,
        grid=(time // blocks.program, heads, rows),
        in_specs=specs,
        out_specs=out_specs,
        out_shape=shapes,
        interpret=platform() == "cpu",
        compiler_params=triton.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
    )
    with jax.enable_x64(False):  # numbers in kernels are of 32 bits
        return call(*arrays)


class _PairInputs(NamedTuple):
    """Inputs of the weights of one row and head besides queries and keys; None where absent."""

    segments: jax.Array | None = None
    slope: jax.Array | None = None
    seeds: tuple | None = None  # two seeds and the first position of the head's weights


class _Kernel(NamedTuple):
    """Settings of the programs of a kernel, and functions of a block of queries and keys."""

    dropout: float
    blocks: Blocks
    time: int
    segmented: bool
    sloped: bool

    def read(self, refs):
        """The inputs of this row and head, from the optional arrays."""
        refs, seeds = list(refs), None
        if self.dropout:
            words, head = refs.pop(), pl.program_id(1).astype(jnp.uint32)
            seeds = words[0], words[1], head * jnp.uint32(self.time**2 % 2**32)
        segments = refs.pop() if self.segmented else None
        return _PairInputs(segments, refs.pop()[0] if self.sloped else None, seeds)

    def scores(self, queries, keys, starts, inputs):
        """Scores times log2(e), float32 `[queries, keys]`, of queries that begin at `starts[0]`
        with keys that begin at `starts[1]`.
        """
        # Scaled in float32. With this factor weights are powers of 2, one instruction: `_exp2`.
        scores = _product(queries, keys.T) * (queries.shape[1] ** -0.5 * math.log2(math.e))
        places = [
            start + lax.broadcasted_iota(jnp.int32, scores.shape, axis)
            for axis, start in enumerate(starts)
        ]
        seen = places[0] >= places[1]
        if inputs.slope is not None:
            distances = (places[0] - places[1]).astype(jnp.float32)
            scores -= inputs.slope * math.log2(math.e) * distances
        if inputs.segments is not None:
            query_segments, key_segments = (
                inputs.segments[pl.ds(start, size)]
                for start, size in zip(starts, scores.shape, strict=True)
            )
            seen &= query_segments[:, None] == key_segments[None]
        return jnp.where(seen, scores, HIDDEN)

    def stays(self, seeds, starts, shape):
        """Mask, bool `shape`, of the weights that are not dropped, for queries that begin at
        `starts[0]` and keys that begin at `starts[1]`.
        """
        queries, keys = (
            start.astype(jnp.uint32) + lax.broadcasted_iota(jnp.uint32, shape, axis)
            for axis, start in enumerate(starts)
        )
        return stays(
            seeds[0], seeds[1], seeds[2] + queries * jnp.uint32(self.time) + keys, self.dropout
        )


def _forward_kernel(kernel, joint, *refs):
    *refs, attended, logsumexp = refs
    inputs = kernel.read(refs)
    size, step = kernel.blocks[:2]
    first = pl.program_id(0) * size
    queries = joint[pl.ds(first, size), 0, :]

    def visit(i, state):
        mixed, largest, total = state
        keys, values = (joint[pl.ds(i * step, step), part, :] for part in (1, 2))
        starts = first, i * step
        scores = kernel.scores(queries, keys, starts, inputs)
        # Until a query sees a key of its segment, its weights are meaningless; its own key, which
        # comes last, scales them to 0.
        now = jnp.maximum(largest, scores.max(axis=1))
        shrink, weights = _exp2(largest - now), _exp2(scores - now[:, None])
        total = total * shrink + weights.sum(axis=1)
        if inputs.seeds is not None:
            keeps = kernel.stays(inputs.seeds, starts, weights.shape)
            weights = jnp.where(keeps, weights, 0.0)
        return mixed * shrink[:, None] + _product(weights.astype(values.dtype), values), now, total

    start = (
        jnp.zeros(queries.shape, jnp.float32),
        jnp.full((size,), HIDDEN, jnp.float32),
        jnp.zeros((size,), jnp.float32),
    )
    mixed, largest, total = lax.fori_loop(0, lax.div(first + size + step - 1, step), visit, start)
    attended[...] = (mixed / (total * (1 - kernel.dropout))[:, None]).astype(attended.dtype)
    logsumexp[...] = largest + jnp.log2(total)


def _backward_kernel(kernel, joint, gradient, logsumexp, shared, *refs):
    *refs, d_joint, sums = refs
    inputs = kernel.read(refs)
    size, step = kernel.blocks[:2]
    first = pl.program_id(0) * size
    scale, keep_scale = joint.shape[-1] ** -0.5, 1 / (1 - kernel.dropout)

    def read(place):
        """Queries, keys and values of a block, and the gradient, logsumexp and shared term of its
        queries.
        """
        return [joint[place, part, :] for part in range(3)], (
            gradient[place, :],
            logsumexp[place],
            shared[place],
        )

    def weigh(queries, keys, values, query_inputs, starts):
        """Weights after dropout, not yet divided by 1 - rate, and gradients of scores, of a block
        of queries and keys, in the dtype of the products.
        """
        upstream, logsumexp, shared = query_inputs
        weights = _exp2(kernel.scores(queries, keys, starts, inputs) - logsumexp[:, None])
        dropped, d_weights = weights, _product(upstream, values.T) * keep_scale
        if inputs.seeds is not None:
            keeps = kernel.stays(inputs.seeds, starts, weights.shape)
            dropped, d_weights = (jnp.where(keeps, x, 0.0) for x in (dropped, d_weights))
        return dropped.astype(queries.dtype), (weights * (d_weights - shared[:, None])).astype(
            queries.dtype
        )

    (queries, keys, values), query_inputs = read(pl.ds(first, size))
    zeros = jnp.zeros(queries.shape, jnp.float32)

    def visit_keys(i, total):
        (_, block_keys, block_values), _ = read(pl.ds(i * step, step))
        _, d_scores = weigh(queries, block_keys, block_values, query_inputs, (first, i * step))
        return total + _product(d_scores, block_keys)

    def write(part, total):
        d_joint[:, part, :] = total.astype(d_joint.dtype)
        # The part of the bias's gradient that comes from this block's tokens.
        sums[part, :] = total.sum(axis=0)

    write(0, scale * lax.fori_loop(0, lax.div(first + size + step - 1, step), visit_keys, zeros))

    def visit_queries(i, totals):
        (block_queries, _, _), block_inputs = read(pl.ds(i * step, step))
        dropped, d_scores = weigh(block_queries, keys, values, block_inputs, (i * step, first))
        return totals[0] + _product(d_scores.T, block_queries), totals[1] + _product(
            dropped.T, block_inputs[0]
        )

    d_keys, d_values = lax.fori_loop(
        lax.div(first, step), kernel.time // step, visit_queries, (zeros, zeros)
    )
    write(1, d_keys * scale)
    write(2, d_values * keep_scale)


def _exp2(x):
    """2^x, float32; on a GPU in one instruction, which flushes results below 2^-126 to 0. XLA's
    `exp2` takes four, to keep those.
    """
    if platform() == "cpu":
        return jnp.exp2(x)
    [powers] = triton.elementwise_inline_asm(
        "ex2.approx.ftz.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return powers


def _product(left, right):
    """A product of blocks, summed in float32; float32 blocks are not rounded to TF32."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    return jnp.dot(left, right, precision=precision, preferred_element_type=jnp.float32)
