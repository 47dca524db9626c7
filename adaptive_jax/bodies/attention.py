"""Causal self-attention with dropout on its weights.

For one row of three tokens in segments 7 7 8, the weights of a head are

    query 0   1 . .      itself
    query 1   a b .      token 0 and itself, a + b = 1
    query 2   . . 1      itself: the other tokens belong to another segment

`attention` runs everywhere: it computes a chunk of queries at a time and skips the keys after it,
so only one chunk of weights exists. Its backward pass recomputes weights and dropout masks. On
NVIDIA GPUs `joint_attention` runs two kernels instead (see flash.py). A dropout mask depends only
on the row's seeds and on positions, so both drop the same weights.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from adaptive_jax.bodies.blocks import save_for_backward
from adaptive_jax.bodies.positions import biases
from adaptive_jax.errors import InputError
from adaptive_jax.numerics.dropout import keep_mask, tied
from adaptive_jax.numerics.meshes import axes_of, pvary
from adaptive_jax.numerics.platforms import capability, platform
from adaptive_jax.numerics.products import added


class Pairs(NamedTuple):
    """Inputs of attention weights besides queries and keys.

    Attributes:
        segment_ids: int32 `[rows, time]`: a token sees only tokens of its own segment. None: every
            row is one segment.
        slopes: of each head, how much a score falls per token of distance (ALiBi, see
            positions.py). (): no ALiBi.
        dropout: rate at which weights are dropped after the softmax; the rest are divided by 1 -
            dropout.
        seeds: uint32 `[rows, 2]` from `dropout.row_seeds`; needed if `dropout` is not 0.
    """

    segment_ids: jax.Array | None = None
    slopes: tuple[float, ...] = ()
    dropout: float = 0.0
    seeds: jax.Array | None = None


ALONE = Pairs()  # weights depend on queries and keys alone


def attention(queries, keys, values, pairs: Pairs = ALONE):
    """Scaled dot-product attention of each token to itself and the tokens before it (Vaswani et al.
    2017, section 3.2.1).

    Args:
        queries, keys, values: `[rows, time, heads, width]` of one dtype, which is also the dtype of
            the products. Scores are scaled by width^-0.5; scores and softmax are float32.
        pairs: segments, ALiBi slopes and dropout.

    Returns:
        `[rows, time, heads, width]` in the dtype of the queries.

    Raises:
        InputError: dropout on more than 2^32 weights per row.
    """
    _check_weights(*queries.shape[1:3], pairs)
    seeds = pairs.seeds if pairs.dropout else None
    return _chunked(pairs.dropout, pairs.slopes, queries, keys, values, pairs.segment_ids, seeds)


def joint_attention(joint, bias, heads: int, pairs: Pairs = ALONE, *, path: str | None = None):
    """Adds a bias to queries, keys and values and computes their `attention`.

    Args:
        joint: queries, keys and values side by side, `[rows, time, 3 * heads * width]`.
        bias: `[3 * heads * width]`.
        path: "triton", the kernels of flash.py, which read the joint array in place and sum the
            gradient of the bias; "chunked", `attention`; None: the kernels where `kernels_fit`.
    """
    rows, time, width = *joint.shape[:2], joint.shape[2] // (3 * heads)
    if path is None:
        path = "triton" if kernels_fit((time, heads, width), joint.dtype) else "chunked"
    if path == "triton":
        from adaptive_jax.bodies.flash import flash  # Triton is slow to import, and not everywhere

        _check_weights(time, heads, pairs)
        joint = joint.reshape(rows, time, 3, heads, width)
        return flash(joint, pairs, bias.reshape(3, heads, width))
    joint = save_for_backward(added(joint, bias))
    parts = (part.reshape(rows, time, heads, width) for part in jnp.split(joint, 3, axis=-1))
    return attention(*parts, pairs)


def cached_attention(queries, keys, values, seen, slopes: tuple[float, ...] = ()):
    """Attention of new tokens to a cache that already holds their own keys and values. Not meant
    to be differentiated.

    Args:
        queries: `[rows, time, heads, width]`.
        keys, values: `[rows, length, heads, width]`; those of the new tokens begin at `seen`.
        seen: number of tokens before the queries, a scalar.
        slopes: see `Pairs`.

    Returns:
        `[rows, time, heads, width]` in the dtype of the queries.
    """
    in_float32 = {"preferred_element_type": jnp.float32}
    scores = jnp.einsum("bqhw,bkhw->bhqk", scaled(queries), keys, **in_float32)
    if slopes:
        scores += biases(jnp.asarray(slopes, jnp.float32), seen, *scores.shape[2:])[None]
    mask = causal_mask(seen, queries.shape[1], keys.shape[1])
    weights = jax.nn.softmax(jnp.where(mask[None, None], scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhw->bqhw", weights.astype(queries.dtype), values)


def _check_weights(time, heads, pairs):
    if pairs.dropout and heads * time**2 > 2**32:
        raise InputError(
            f"attention dropout supports 2^32 weights per row, got {heads} heads over {time}"
            " tokens: use a smaller batches.sequence_length or body.attention_dropout=0"
        )


def kernels_fit(shape: tuple[int, int, int], dtype) -> bool:
    """True if flash.py supports rows of `shape`, (time, heads, width), on the device that the
    code is traced for.
    """
    time, _, width = shape
    # In float32 the kernels could not use matrix units, and would take a minute to compile.
    fits = time % 64 == 0 and width in (16, 32, 64, 128) and dtype in (jnp.float16, jnp.bfloat16)
    return fits and capability() >= (8, 0)


def causal_mask(first, time: int, length: int) -> jax.Array:
    """Mask, bool `[time, length]`, of the keys that each of `time` queries may see; the first
    query is at position `first`.
    """
    return jnp.arange(length)[None] <= (first + jnp.arange(time))[:, None]


def scaled(queries: jax.Array) -> jax.Array:
    """Queries times width^-0.5, so that their products with keys are scores."""
    return queries * queries.shape[-1] ** -0.5


class _Heads(NamedTuple):
    """The heads of all rows along one axis of rows * heads entries; the last four fields are None
    where not needed.
    """

    queries: jax.Array  # [heads, time, width], scaled; keys and values have the same shape
    keys: jax.Array
    values: jax.Array
    segment_ids: jax.Array | None  # [heads, time]
    seeds: jax.Array | None  # [heads, 2], the row's seeds
    head_ids: jax.Array | None  # [heads], the head's number in its row
    slopes: jax.Array | None  # [heads]


def _fold(x):
    """`[rows, time, heads, width]` to `[rows * heads, time, width]`."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], x.shape[3])


def _unfold(x, heads):
    """The inverse of `_fold`."""
    return jnp.swapaxes(x.reshape(-1, heads, *x.shape[1:]), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked(dropout, slopes, queries, keys, values, segment_ids, seeds):
    """Computes `attention`; arguments are those of `attention` and the fields of `Pairs`."""
    return _chunked_forward(dropout, slopes, queries, keys, values, segment_ids, seeds)[0]


def _chunked_forward(dropout, slopes, queries, keys, values, segment_ids, seeds):
    count = queries.shape[2]
    repeated = (None if x is None else jnp.repeat(x, count, axis=0) for x in (segment_ids, seeds))
    head_ids = None if seeds is None else jnp.tile(jnp.arange(count, dtype=jnp.uint32), len(seeds))
    head_slopes = jnp.tile(jnp.asarray(slopes, jnp.float32), len(queries)) if slopes else None
    heads = _Heads(
        _fold(scaled(queries)), _fold(keys), _fold(values), *repeated, head_ids, head_slopes
    )
    attended, logsumexp = _in_groups(functools.partial(_forward, dropout), heads)
    attended, logsumexp = save_for_backward(_unfold(attended, count)), save_for_backward(logsumexp)
    return attended, (heads, attended, logsumexp)


def _chunked_backward(dropout, _, residuals, gradient):
    heads, attended, logsumexp = residuals
    # A term shared by the gradients of all weights of a query: D in Dao et al. 2022, appendix B.2.
    shared = jnp.einsum(
        "bqhw,bqhw->bhq", attended, gradient, preferred_element_type=jnp.float32
    ).reshape(logsumexp.shape)
    gradients = _in_groups(
        functools.partial(_backward, dropout), heads, logsumexp, shared, _fold(gradient)
    )
    queries, keys, values = (_unfold(each, gradient.shape[2]) for each in gradients)
    return scaled(queries), keys, values, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _forward(dropout, heads):
    """Attended values `[heads, time, width]` and logsumexp of the scores `[heads, time]`."""
    time = heads.queries.shape[1]

    def attend(end, first, queries, segment_ids):
        scores = _scores(heads, queries, segment_ids, first, end)
        largest = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - largest)
        total = weights.sum(axis=-1, keepdims=True)
        logsumexp = (largest + jnp.log(total))[..., 0]
        weights = _drop(weights, dropout, heads, first)
        attended = _product("nqk,nkw->nqw", weights, heads.values[:, :end]) / total
        return (attended.astype(heads.values.dtype), logsumexp), ()

    chunked = heads.queries, heads.segment_ids
    stages = [_run_stage(attend, stage, chunked)[0] for stage in _stages(time)]
    return tuple(jnp.concatenate(each, axis=1) for each in zip(*stages, strict=True))


def _backward(dropout, heads, logsumexp, shared, gradient):
    """Gradients of (scaled) queries, keys and values, each `[heads, time, width]`, in a second
    pass over the chunks.
    """
    time, dtype = heads.queries.shape[1], heads.keys.dtype

    def attend(end, first, queries, segment_ids, logsumexp, shared, gradient):
        weights = jnp.exp(_scores(heads, queries, segment_ids, first, end) - logsumexp[..., None])
        d_weights = _product("nqw,nkw->nqk", gradient, heads.values[:, :end])
        d_weights, dropped = (_drop(x, dropout, heads, first) for x in (d_weights, weights))
        d_scores = weights * (d_weights - shared[..., None])
        transposed = jnp.swapaxes(queries, 1, 2), jnp.swapaxes(gradient, 1, 2)
        if platform() == "cpu":
            # Sums over queries are faster along the last axis; without the barrier the compiler
            # would undo the transposition.
            transposed = jax.lax.optimization_barrier(transposed)
        sums = tuple(
            _product("nwq,nqk->nwk", *pair)
            for pair in zip(transposed, (d_scores, dropped), strict=True)
        )
        return _product("nqk,nkw->nqw", d_scores, heads.keys[:, :end]).astype(dtype), sums

    d_queries, d_keys, d_values = [], 0, 0
    chunked = heads.queries, heads.segment_ids, logsumexp, shared, gradient
    for stage in _stages(time):
        d_chunk, sums = _run_stage(attend, stage, chunked)
        d_queries.append(d_chunk)
        padded = [jnp.pad(x, ((0, 0), (0, 0), (0, time - stage[1]))) for x in sums]
        d_keys, d_values = d_keys + padded[0], d_values + padded[1]
    return jnp.concatenate(d_queries, axis=1), *(
        jnp.swapaxes(x, 1, 2).astype(dtype) for x in (d_keys, d_values)
    )


def _stages(time):
    """Stages `(first, end, size)`: the queries from `first` to `end`, in chunks of `size`, see the
    keys before `end`.

    On a CPU 130 tokens give (0, 64, 64), (64, 128, 64), (128, 130, 2), and 3072 give eight: (0,
    384, 128), (384, 768, 128) …
    """
    # Small chunks skip more keys, large ones make fewer and larger products. Measured on a CPU.
    size = 64 if time <= 512 and platform() == "cpu" else 128
    last = time - time % size
    # Eight stages skip 7/8 of the masked keys, and the program does not grow with time.
    step = size * -(-time // (8 * size))
    stages = [(first, min(first + step, last), size) for first in range(0, last, step)]
    return stages if last == time else [*stages, (last, time, time - last)]


def _run_stage(function, stage, arrays):
    """Calls `function(end, first, *chunk)` for every chunk `[heads, size, ...]` of a stage
    of arrays `[heads, time, ...]`.

    `function` returns results per query, which are concatenated to `[heads, end - first, ...]`,
    and arrays that are summed over chunks.
    """
    first, end, size = stage
    function = functools.partial(function, end)
    if end - first == size:
        return function(first, *jax.tree.map(lambda x: x[:, first:end], arrays))
    chunks = jax.tree.map(
        lambda x: jnp.moveaxis(x[:, first:end].reshape(len(x), -1, size, *x.shape[2:]), 1, 0),
        arrays,
    )
    chunks = jnp.arange(first, end, size), *chunks

    def step(sums, chunk):
        results, chunk_sums = function(*chunk)
        return jax.tree.map(jnp.add, sums, chunk_sums), results

    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], chunks))[1]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    sums, results = jax.lax.scan(step, pvary(zeros, axes_of(chunks)), chunks)
    return (
        jax.tree.map(
            lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], end - first, *x.shape[3:]), results
        ),
        sums,
    )


def _scores(heads, queries, segment_ids, first, end):
    """Scores `[heads, queries, end]` of a chunk of queries, which begins at `first`, with the keys
    before `end`; -inf where masked.
    """
    zero, hidden = (tied(x, queries) for x in (jnp.int32(0), jnp.float32(-jnp.inf)))
    mask = causal_mask(first + zero, queries.shape[1], end)[None]
    if segment_ids is not None:
        mask &= (segment_ids + zero)[:, :, None] == heads.segment_ids[:, None, :end]
    scores = _product("nqw,nkw->nqk", queries, heads.keys[:, :end])
    if heads.slopes is not None:
        scores += biases(heads.slopes, first + zero, queries.shape[1], end)
    return jnp.where(mask, scores, hidden)


def _drop(weights, dropout, heads, first):
    """Applies dropout to weights `[heads, queries, keys]` of queries that begin at `first`."""
    if not dropout:
        return weights
    time = heads.queries.shape[1]
    zero, dropped = (tied(x, heads.seeds) for x in (jnp.int32(0), jnp.zeros((), weights.dtype)))
    in_head = (zero + first + jnp.arange(weights.shape[1]))[:, None] * time + jnp.arange(
        weights.shape[2]
    )[None]
    in_head, per_head = in_head.astype(jnp.uint32), jnp.uint32(time**2 % 2**32)
    keeps = jax.vmap(lambda seed, head: keep_mask(seed, head * per_head + in_head, dropout))
    return jnp.where(keeps(heads.seeds, heads.head_ids), weights / (1 - dropout), dropped)


def _product(form, left, right):
    """Product of each head's matrices in the narrower of the two dtypes, summed in float32."""
    dtype = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    return jnp.einsum(
        form, left.astype(dtype), right.astype(dtype), preferred_element_type=jnp.float32
    )


def _in_groups(function, heads, *arrays):
    """Calls `function(heads, *arrays)` for all heads at once, or for groups of heads whose
    weights fit into a processor's cache.
    """
    count, time = heads.queries.shape[:2]
    on_cpu = platform() == "cpu"
    # At most 256 KiB of float32 weights per chunk on a CPU, which computes one head at a time
    # anyway; 256 MiB elsewhere.
    fit = max((2**16 if on_cpu else 2**26) // (_stages(time)[0][2] * time), 1)
    group = max(size for size in range(1, count + 1) if count % size == 0 and size <= fit)
    if group == count:
        return function(heads, *arrays)
    # XLA on a CPU uses more threads only where many operations are ready: with one device, run up
    # to four groups side by side.
    one_cpu = on_cpu and jax.local_device_count() == 1
    parallel = max(n for n in (1, 2, 4) if (count // group) % n == 0) if one_cpu else 1
    parts = jax.tree.map(lambda x: x.reshape(-1, parallel, group, *x.shape[1:]), (heads, *arrays))

    def step(part):
        groups = [function(*jax.tree.map(lambda x, i=i: x[i], part)) for i in range(parallel)]
        return jax.tree.map(lambda *each: jnp.stack(each), *groups)

    return jax.tree.map(lambda x: x.reshape(count, *x.shape[3:]), jax.lax.map(step, parts))
