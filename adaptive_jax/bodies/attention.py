"""Causal self-attention with dropout on its weights: one function, the same numbers by several paths.

With two heads of three tokens, and segments 7 7 8, a row's weights are, where anything is seen at all,

    query 0   1 . .      itself
    query 1   a b .      token 0 and itself, a + b = 1
    query 2   . . 1      itself: the others are of another segment

`plain` makes the weights of all pairs at once, as one writes it down. `chunked` goes through blocks of queries, leaves out the
keys after a block, and in the backward pass makes weights and dropout masks again, so one chunk of weights is all that exists.
`cudnn` is the vendor's kernel. What is dropped depends on seeds and place alone, so paths agree entry by entry.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from adaptive_jax.dropout import keep_mask, positions
from adaptive_jax.errors import InputError, check_known

ATTENDED = "attended"  # by this name a policy of rematerialisation may keep what a chunked forward pass has found
PATHS = ("auto", "plain", "chunked", "cudnn")


def attention(queries, keys, values, *, segments=None, dropout=0.0, seeds=None, path="auto"):
    """Scaled dot-product attention of every token to itself and those before it (Vaswani et al. 2017, section 3.2.1).

    Args:
        queries, keys, values: `[batch, time, heads, width]` of one dtype, in which products are computed; scores are scaled by
            width^-0.5, and they and their softmax are float32.
        segments: int32 `[batch, time]`: tokens see those of their own segment only. None: every row is one segment.
        dropout: rate at which weights are dropped after the softmax; the others are divided by 1 - dropout.
        seeds: uint32 `[batch, 2]`, the rows' seeds of dropout, `dropout.row_seeds`.
        path: a name of `PATHS`. "auto" takes the fastest of those that were measured and can do what is asked.

    Returns:
        `[batch, time, heads, width]` in the dtype of the queries.

    Raises:
        InputError: a path that is not known or cannot do what is asked, or more weights in a row than dropout can tell apart.
    """
    time, heads = queries.shape[1:3]
    check_known(f"body.attention={path!r}", path, PATHS)
    if dropout and heads * time**2 > 2**32:
        raise InputError(
            f"attention dropout tells 2^32 weights of a row apart, not those of {heads} heads over {time} tokens: "
            "choose a smaller data.block or body.attention_dropout=0"
        )
    refusal = _cudnn_cannot(queries, segments, dropout)
    if path == "auto":
        # Up to 64 tokens there is one chunk, and nothing to leave out.
        path = "plain" if time <= 64 else "chunked" if refusal else "cudnn"
    if path == "cudnn":
        if refusal:
            raise InputError(f"body.attention='cudnn' {refusal}: choose body.attention='chunked'")
        return jax.nn.dot_product_attention(queries, keys, values, is_causal=True, implementation="cudnn")
    if path == "chunked":
        return _chunked(dropout, queries, keys, values, segments, seeds if dropout else None)
    seen = _seen(0, time, time)[None, None]
    if segments is not None:
        seen &= (segments[:, :, None] == segments[:, None])[:, None]
    return _plain(queries, keys, values, seen, dropout, seeds)


def cached(queries, keys, values, seen):
    """Attention when decoding, of the next tokens to all that were seen and those before them; no gradient is meant to be taken.

    Args:
        queries: `[batch, time, heads, width]`.
        keys, values: `[batch, length, heads, width]`; those of the queries' own tokens begin at place `seen`.
        seen: how many tokens came before, a scalar.

    Returns:
        `[batch, time, heads, width]` in the dtype of the queries.
    """
    return _plain(queries, keys, values, _seen(seen, queries.shape[1], keys.shape[1])[None, None], 0.0, None)


def _cudnn_cannot(queries, segments, dropout):
    """What keeps cuDNN from this, in words; empty if nothing does."""
    if jax.default_backend() != "gpu":
        return f"needs a GPU, and this is a {jax.default_backend()}"
    if dropout:
        return f"has no dropout={dropout} whose masks follow the rows"  # its seed is a constant of the program
    if segments is not None:
        return "has no segments"
    if queries.dtype not in (jnp.float16, jnp.bfloat16):
        return f"computes in float16 and bfloat16, not {queries.dtype}"
    if queries.shape[-1] % 8 or queries.shape[-1] > 128:
        return f"takes heads of 8, 16, ... 128 features, not {queries.shape[-1]}"
    return ""


def _seen(first, time, length):
    """Which of `length` keys each of `time` queries from place `first` on may see, bool `[time, length]`."""
    return jnp.arange(length)[None] <= first + jnp.arange(time)[:, None]


def _plain(queries, keys, values, seen, dropout, seeds):
    """Attention by the scores of all pairs at once; `seen` broadcasts to `[batch, heads, queries, keys]`."""
    scores = jnp.einsum("bqhw,bkhw->bhqk", _scaled(queries), keys, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    if dropout:
        weights = jnp.where(keep_mask(seeds, positions(weights.shape[1:]), dropout), weights / (1 - dropout), 0)
    return jnp.einsum("bhqk,bkhw->bqhw", weights.astype(queries.dtype), values)


def _scaled(queries):
    return queries * queries.shape[-1] ** -0.5


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(dropout, queries, keys, values, segments, seeds):
    """Attention in chunks of queries, arguments as those of `attention`."""
    return _chunked_forward(dropout, queries, keys, values, segments, seeds)[0]


def _chunked_forward(dropout, queries, keys, values, segments, seeds):
    heads = queries.shape[2]
    folded = _folded(_scaled(queries)), _folded(keys), _folded(values), *_of_heads(heads, segments, seeds)
    attended, log_sums = _in_groups(functools.partial(_forward, dropout), folded)
    attended = checkpoint_name(_unfolded(attended, heads), ATTENDED)
    log_sums = checkpoint_name(log_sums, ATTENDED)
    return attended, (folded, attended, log_sums)


def _chunked_backward(dropout, kept_back, gradient):
    folded, attended, log_sums = kept_back
    heads = gradient.shape[2]
    # What every weight's gradient has in common with its row: the softmax pulls it out (Dao et al. 2022, appendix B.2).
    common = jnp.einsum("bqhw,bqhw->bhq", attended, gradient, preferred_element_type=jnp.float32).reshape(log_sums.shape)
    gradients = _in_groups(functools.partial(_backward, dropout), (*folded, log_sums, common, _folded(gradient)))
    queries, keys, values = (_unfolded(each, heads) for each in gradients)
    return _scaled(queries), keys, values, None, None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _forward(dropout, queries, keys, values, segments, seeds, numbers):
    """Attended values `[heads, time, width]` and log-sums of the scores `[heads, time]` of some heads, `[heads, time, width]`."""
    time = queries.shape[1]

    def attend(end, first, queries, own):
        scores = _scores(first, end, queries, own, keys, segments)
        most = scores.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores - most)
        total = weights.sum(axis=-1, keepdims=True)
        log_sums = (most + jnp.log(total))[..., 0]
        weights = _dropped(weights, dropout, seeds, numbers, first, time)
        attended = _product("nqk,nkw->nqw", weights, values[:, :end]) / total
        return (attended.astype(values.dtype), log_sums), ()

    stages = [_stage(functools.partial(attend, stage[1]), stage, (queries, segments))[0] for stage in _stages(time)]
    return tuple(jnp.concatenate(each, axis=1) for each in zip(*stages, strict=True))


def _backward(dropout, queries, keys, values, segments, seeds, numbers, log_sums, common, gradient):
    """Gradients of (scaled) queries, keys and values, each `[heads, time, width]`, in one more pass over the chunks."""
    time = queries.shape[1]

    def attend(end, first, queries, own, log_sums, common, gradient):
        weights = jnp.exp(_scores(first, end, queries, own, keys, segments) - log_sums[..., None])
        slopes = _product("nqw,nkw->nqk", gradient, values[:, :end])
        slopes, kept_weights = (_dropped(x, dropout, seeds, numbers, first, time) for x in (slopes, weights))
        slopes = weights * (slopes - common[..., None])
        # A CPU sums over queries faster if they lie along the last axis; without the barrier the compiler turns them back.
        turned = jax.lax.optimization_barrier((jnp.swapaxes(queries, 1, 2), jnp.swapaxes(gradient, 1, 2)))
        of_keys, of_values = (_product("nwq,nqk->nwk", *pair) for pair in zip(turned, (slopes, kept_weights), strict=True))
        return _product("nqk,nkw->nqw", slopes, keys[:, :end]).astype(keys.dtype), (of_keys, of_values)

    of_queries, of_keys, of_values = [], 0, 0
    for stage in _stages(time):
        ours, theirs = _stage(functools.partial(attend, stage[1]), stage, (queries, segments, log_sums, common, gradient))
        of_queries.append(ours)
        padded = [jnp.pad(x, ((0, 0), (0, 0), (0, time - stage[1]))) for x in theirs]
        of_keys, of_values = of_keys + padded[0], of_values + padded[1]
    turned = (jnp.swapaxes(x, 1, 2).astype(keys.dtype) for x in (of_keys, of_values))
    return jnp.concatenate(of_queries, axis=1), *turned


def _stages(time):
    """Stages of queries, each in equal chunks and over the keys before its end: (first, end, size of a chunk).

    On a CPU 130 tokens are (0, 64, 64), (64, 128, 64), (128, 130, 2), and 3072 are (0, 384, 128), (384, 768, 128) ... in eight.
    """
    # Small chunks leave out more of what lies after the queries, large ones make fewer and larger products: measured on a CPU.
    size = 64 if time <= 512 and jax.default_backend() == "cpu" else 128
    whole = time - time % size
    # Eight stages leave out 7/8 of all that can be, and the program does not grow with time.
    step = size * -(-time // (8 * size))
    stages = [(first, min(first + step, whole), size) for first in range(0, whole, step)]
    return stages if whole == time else [*stages, (whole, time, time - whole)]


def _stage(function, stage, arrays):
    """`function(first, *chunk)` for every chunk `[heads, size, ...]` of a stage of `arrays`, `[heads, time, ...]`.

    Returns what it returns: results by query, joined to `[heads, end - first, ...]`, and what is summed over chunks.
    """
    first, end, size = stage
    if end - first == size:
        return function(first, *jax.tree.map(lambda x: x[:, first:end], arrays))
    chunks = jax.tree.map(
        lambda x: jnp.moveaxis(x[:, first:end].reshape(len(x), -1, size, *x.shape[2:]), 1, 0), tuple(arrays)
    )
    chunks = jnp.arange(first, end, size), *chunks

    def step(sums, chunk):
        done, more = function(*chunk)
        return jax.tree.map(jnp.add, sums, more), done

    shapes = jax.eval_shape(function, *jax.tree.map(lambda x: x[0], chunks))[1]
    sums, done = jax.lax.scan(step, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), chunks)
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(x.shape[1], end - first, *x.shape[3:]), done), sums


def _scores(first, end, queries, own, keys, segments):
    """Scores `[heads, queries, end]` of queries from `first` on, of segments `own`, with the keys before `end`; -inf if unseen."""
    seen = _seen(first, queries.shape[1], end)[None]
    if segments is not None:
        seen &= own[:, :, None] == segments[:, None, :end]
    return jnp.where(seen, _product("nqw,nkw->nqk", queries, keys[:, :end]), -jnp.inf)


def _dropped(weights, dropout, seeds, numbers, first, time):
    """Weights `[heads, queries, keys]` of queries from `first` on, those that are dropped zero; `numbers` are the heads'."""
    if not dropout:
        return weights
    within = (first + jnp.arange(weights.shape[1]))[:, None] * time + jnp.arange(weights.shape[2])[None]
    stays = jax.vmap(lambda seed, head: keep_mask(seed, head * time**2 + within.astype(jnp.uint32), dropout))(seeds, numbers)
    return jnp.where(stays, weights / (1 - dropout), 0)


def _product(form, left, right):
    """Product of every head's matrices, in the narrower of the two types, summed in float32."""
    dtype = min(left.dtype, right.dtype, key=lambda dtype: dtype.itemsize)
    return jnp.einsum(form, left.astype(dtype), right.astype(dtype), preferred_element_type=jnp.float32)


def _in_groups(function, arrays):
    """`function(*arrays)` of all heads, or of as many at a time as make full use of a processor's cache and threads."""
    count, time = arrays[0].shape[:2]
    on_cpu = jax.default_backend() == "cpu"
    # Float32 weights of a chunk: 256 KiB on a CPU, which computes a head at a time anyway; elsewhere 256 MiB.
    room = (2**16 if on_cpu else 2**26) // (_stages(time)[0][2] * time)
    group = max(size for size in range(1, count + 1) if count % size == 0 and size <= max(room, 1))
    if group == count:
        return function(*arrays)
    # XLA on a CPU wakes other threads only where many operations wait: four groups side by side, or a device on every thread.
    alone = on_cpu and jax.local_device_count() == 1
    beside = max(groups for groups in (1, 2, 4) if (count // group) % groups == 0) if alone else 1
    parts = jax.tree.map(lambda x: x.reshape(-1, beside, group, *x.shape[1:]), arrays)

    def some(part):
        def one(number):
            return function(*jax.tree.map(lambda x: x[number], part))

        return jax.tree.map(lambda *each: jnp.stack(each), *map(one, range(beside)))

    return jax.tree.map(lambda x: x.reshape(count, *x.shape[3:]), jax.lax.map(some, parts))


def _folded(x):
    """`[batch, time, heads, width]` to `[batch * heads, time, width]`."""
    return jnp.swapaxes(x, 1, 2).reshape(-1, x.shape[1], x.shape[3])


def _unfolded(x, heads):
    """The way back from `_folded`."""
    return jnp.swapaxes(x.reshape(-1, heads, *x.shape[1:]), 1, 2)


def _of_heads(heads, segments, seeds):
    """Segments `[batch * heads, time]`, seeds `[batch * heads, 2]` and number in the row `[batch * heads]` of every folded head."""
    numbers = None if seeds is None else jnp.tile(jnp.arange(heads, dtype=jnp.uint32), len(seeds))
    return *(None if x is None else jnp.repeat(x, heads, axis=0) for x in (segments, seeds)), numbers
