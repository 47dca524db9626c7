"""Decoder-only transformers, normalised before or after every sub-block."""

import contextlib
import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.bodies.attention import Pairs, cached_attention, joint_attention
from adaptive_jax.bodies.blocks import (
    REMAT,
    Dense,
    LayerNorm,
    ParameterGroup,
    Rows,
    as_stored,
    gathered,
    policy,
    save_for_backward,
    unrolled,
)
from adaptive_jax.bodies.positions import (
    POSITIONS,
    LearnedPositions,
    alibi_slopes,
    check_table,
    sinusoids,
)
from adaptive_jax.errors import InputError, check_at_least, check_known, check_rates
from adaptive_jax.numerics.arrays import check_dtype, floats
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.dropout import drop, row_seeds
from adaptive_jax.numerics.layers import Dropout
from adaptive_jax.numerics.products import added

BLOCKS = "blocks"  # name of the parameters of all blocks, stacked along a leading axis


class Cache(NamedTuple):
    """Decoding memory: keys and values of the tokens so far, `[layers, rows, length, heads,
    features / heads]`.
    """

    keys: jax.Array
    values: jax.Array
    seen: jax.Array  # number of tokens so far, a scalar


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _relu(rate, x, mask):
    """Computes `drop(jax.nn.relu(x), mask, rate)`. Its gradient needs only the result, which the
    next product saves anyway.
    """
    return drop(jnp.maximum(x, 0), mask, rate)


def _relu_forward(rate, x, mask):
    result = save_for_backward(_relu(rate, x, mask))
    return result, result


def _relu_backward(rate, result, gradient):
    return jnp.where(result > 0, gradient / (1 - rate) if rate else gradient, 0), None


_relu.defvjp(_relu_forward, _relu_backward)


class Block(nn.Module):
    """One block: self-attention, then a feed-forward layer. Attributes are those of `Transformer`,
    and `slopes` that of `Pairs`.
    """

    features: int
    heads: int
    feed_forward: int
    dropout: float
    attention_dropout: float
    activation_dropout: float
    slopes: tuple[float, ...]
    dtype: jnp.dtype
    train: bool

    @nn.compact
    def __call__(self, x, cache, seen, segment_ids, row_ids):
        """Maps `x [rows, time, features]` and this layer's cached `(keys, values)`, or `()`, to
        both after this block.
        """

        def dropped(y):
            return Dropout(self.dropout)(y, row_ids, train=self.train)

        def dense(width, name):
            return lambda x: added(*Dense(width, self.dtype, name=name)(x))

        def attend(x):
            nonlocal cache
            # One product for all three. Xavier over the joint shape equals Xavier of each with
            # gain 1/sqrt(2), as in the released code.
            joint, bias = Dense(3 * self.features, self.dtype, name="query_key_value")(x)
            if cache:
                joint = added(joint, bias)
                queries, keys, values = (
                    y.reshape(*x.shape[:2], self.heads, -1) for y in jnp.split(joint, 3, axis=-1)
                )
                pairs = zip(cache, (keys, values), strict=True)
                cache = tuple(
                    jax.lax.dynamic_update_slice_in_dim(old, new, seen, axis=1)
                    for old, new in pairs
                )
                keys, values = cache
                mixed = cached_attention(queries, keys, values, seen, self.slopes)
            else:
                rate = self.attention_dropout if self.train else 0.0
                seeds = row_seeds(self.make_rng("dropout"), row_ids) if rate else None
                pairs = Pairs(segment_ids, self.slopes, rate, seeds)
                mixed = joint_attention(joint, bias, self.heads, pairs)
            return dropped(dense(self.features, "attended")(mixed.reshape(x.shape)))

        def feed_forward(x):
            rate = self.activation_dropout if self.train else 0.0
            inner = dense(self.feed_forward, "inner")(x)
            inner = _relu(rate, inner, Dropout(rate).mask(inner, row_ids, train=self.train))
            return dropped(dense(self.features, "outer")(inner))

        x = self.around(attend, LayerNorm(dtype=self.dtype, name="norm_attention"), x)
        x = self.around(feed_forward, LayerNorm(dtype=self.dtype, name="norm_feed_forward"), x)
        return x, cache

    def around(self, sub_block, norm, x):
        """Residual connection around a sub-block with a normalised input (Baevski & Auli 2019,
        section 4.1).
        """
        return save_for_backward(x + sub_block(norm(x)))


class PostNormBlock(Block):
    """A block that normalises residual sums. Attributes are those of `Block`."""

    def around(self, sub_block, norm, x):
        """Residual connection around a sub-block, normalised after the sum (Vaswani et al. 2017,
        section 3.1).
        """
        return norm(save_for_backward(x + sub_block(x)))


class Transformer(nn.Module):
    """The decoder of Baevski & Auli 2019, section 4.1.

    It scales the input vectors by sqrt(features), adds position vectors, and applies `layers`
    blocks of causal self-attention and a ReLU feed-forward layer; each sub-block has a normalised
    input and a residual connection. One scan runs all blocks, so their parameters have a leading
    axis `[layers, ...]`, and sixteen layers compile as fast as one; in training on GPUs, and in
    bfloat16 on CPUs, the scan is unrolled. What a layer inside a block sows as "penalties" `[rows,
    time]`, or as "intermediates", gets the leading axis too.

    Attributes:
        features: width of the hidden states (the paper's e).
        layers: blocks (N).
        heads: attention heads of a block (H); they divide the features.
        feed_forward: width of the feed-forward layer (e_ff).
        dropout: rate on the embeddings and on the output of each sub-block.
        attention_dropout: rate on the attention weights.
        activation_dropout: rate after the ReLU.
        final_norm: whether to normalise the last hidden states. The released WikiText-103 models
            do not.
        scaled: whether to multiply the input vectors by sqrt(features).
        positions: position encoding: "sinusoidal" vectors, a "learned" table of vectors, "alibi",
            attention that falls with distance (Press et al. 2022), or "none".
        max_positions: rows of the table of learned positions: the most tokens that the model can
            read at once.
        remat: what the backward pass recomputes in each block instead of saving it. "none": only
            gathers and casts of parameters; "elementwise": also normalisations, dropout masks and
            attention weights; "all": the whole block, at the cost of another forward pass; "auto":
            "none" on CPUs, "elementwise" elsewhere.
        dtype: of the matrix products; parameters, normalisation and attention weights are float32.
        gather: turns a block's stored parameters into the ones it computes with; see
            `adaptive_jax.bodies.blocks`.

    Raises:
        InputError: heads that do not divide the features, an odd number of features, an unknown
            name, or a number out of range.
    """

    features: int = 256
    layers: int = 6
    heads: int = 8
    feed_forward: int = 1024
    dropout: float = 0.1
    attention_dropout: float = 0.1
    activation_dropout: float = 0.0
    final_norm: bool = True
    scaled: bool = True
    positions: str = "sinusoidal"
    max_positions: int = 1_024
    remat: str = "auto"
    dtype: jnp.dtype = jnp.float32
    gather: Callable = as_stored

    block: ClassVar[type[nn.Module]] = Block

    def __post_init__(self):
        super().__post_init__()
        names = "features", "layers", "heads", "feed_forward", "max_positions"
        check_at_least(1, **{name: getattr(self, name) for name in names})
        check_known(f"positions={self.positions!r}", self.positions, POSITIONS)
        check_dtype(self.dtype)
        check_rates(self, "dropout", "attention_dropout", "activation_dropout")
        check_known(f"remat={self.remat!r}", self.remat, REMAT)
        if self.features % self.heads or self.features % 2:
            raise InputError(
                f"features must be even and a multiple of heads, got {self.features}"
                f" features and {self.heads} heads"
            )

    def attention_flops(self, length: int) -> int:
        """FLOPs per token of the products of queries, keys and values, in rows of `length`."""
        return 4 * self.layers * length * self.features

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """The groups of parameters to gather, one per block. Blocks cast their matrices to `dtype`
        anyway; to cast after gathering would move twice the bytes of bfloat16.
        """
        return (ParameterGroup((BLOCKS,), self.dtype, stacked=True),)

    @nn.compact
    def __call__(
        self, vectors: jax.Array, carry=(), batch: Batch | None = None, *, train: bool = False
    ):
        """Maps vectors `[rows, time, features]` and a carry to `(hidden states [rows, time,
        features], next carry)`.

        Args:
            carry: `()` for rows that stand alone, and `()` is returned; or a `Cache`, which the
                rows continue; attention then has no dropout, even if `train`.
            batch: its `row_ids` (for dropout) and `segment_ids` are used. Tokens see only tokens of
                their segment, and positions count from 0 in each. None: rows 0, 1, 2 … of one
                segment each.

        Raises:
            InputError: shapes that do not fit; more tokens than learned positions; a full cache; or
                a cache together with segments or resets, which it does not support. Inside
                `jax.jit` the number of tokens in the cache is unknown: there the hidden states of a
                cache that overflows are NaN.
        """
        vectors = floats("vectors", vectors, "rows", "time", self.features)
        rows, time, seen = Rows.of(batch, vectors, carry), vectors.shape[1], 0
        if len(carry):
            _check_cache(carry, vectors, rows)
            keys, values = (jnp.asarray(a, self.dtype) for a in (carry.keys, carry.values))
            carry = carry._replace(keys=keys, values=values)
            seen = carry.seen
        x = vectors.astype(self.dtype)
        if self.scaled:
            x *= jnp.asarray(self.features**0.5, self.dtype)
        if (positions := self._position_vectors(seen, time)) is not None:
            x = (x.astype(positions.dtype) + positions[rows.positions()]).astype(self.dtype)
        x = Dropout(self.dropout)(x, rows.ids, train=train)

        unroll, block = unrolled(x, train), self.block
        if self.gather is not as_stored:
            block = gathered(block, functools.partial(self.gather, BLOCKS))
        blocks = nn.scan(
            # Outside of a loop, common-subexpression elimination would undo the recomputation.
            nn.remat(block, policy=policy(self.remat), prevent_cse=unroll),
            variable_axes={"params": 0, "penalties": 0, "intermediates": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
            out_axes=0,
            length=self.layers,
            unroll=self.layers if unroll else 1,
        )(
            features=self.features,
            heads=self.heads,
            feed_forward=self.feed_forward,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            activation_dropout=self.activation_dropout,
            slopes=alibi_slopes(self.heads) if self.positions == "alibi" else (),
            dtype=self.dtype,
            train=train,
            name=BLOCKS,
        )
        x, cache = blocks(
            x, (carry.keys, carry.values) if carry else (), seen, rows.segment_ids, rows.ids
        )
        if self.final_norm:
            x = LayerNorm(dtype=self.dtype, name="norm")(x)
        if not carry:
            return x, ()
        carry = Cache(*cache, seen + time)
        return jnp.where(carry.seen > carry.keys.shape[2], jnp.nan, x), carry

    def _position_vectors(self, seen, time):
        """Vectors `[time, features]` of the positions that begin at `seen`; None if nothing is
        added to the tokens.
        """
        positions = seen + jnp.arange(time)
        if self.positions == "learned":
            check_table(self.max_positions, time)
            return LearnedPositions(self.max_positions, self.features, name="learned_positions")(
                positions
            )
        return sinusoids(positions, self.features) if self.positions == "sinusoidal" else None

    def initial_carry(self, rows: int) -> tuple:
        """The training carry before the first batch: `()`, as every row stands alone."""
        return ()

    def cache(self, rows: int, length: int) -> Cache:
        """An empty decoding memory of `rows` rows of up to `length` tokens.

        Raises:
            InputError: `length` exceeds the number of learned positions.
        """
        check_at_least(1, rows=rows, length=length)
        if self.positions == "learned":
            check_table(self.max_positions, length)
        shape = (self.layers, rows, length, self.heads, self.features // self.heads)
        return Cache(
            jnp.zeros(shape, self.dtype), jnp.zeros(shape, self.dtype), jnp.zeros((), jnp.int32)
        )


def _check_cache(cache, vectors, rows):
    """Raises InputError for a cache of another number of rows, rows that are reset, or more tokens
    than fit.
    """
    (count, time), expected = vectors.shape[:2], "carry must be () or made by body.cache"
    if not isinstance(cache, Cache) or cache.keys.shape[1] != count:
        got = f"{cache.keys.shape[1]} rows" if isinstance(cache, Cache) else type(cache).__name__
        raise InputError(f"{expected} for {count} rows, got {got}")
    if rows.reset is not None:
        raise InputError("batch.reset must be None beside a cache: rows continue")
    length, seen = cache.keys.shape[2], 0
    with contextlib.suppress(jax.errors.ConcretizationTypeError):  # inside jax.jit
        seen = int(cache.seen)
    if seen + time > length:
        raise InputError(f"{expected} with length={seen + time} or more, got length {length}")


class PostNormTransformer(Transformer):
    """The decoder of Vaswani et al. 2017, normalised after every sub-block. Attributes are those of
    `Transformer`.

    The last block already normalises its output, so `final_norm` is False by default.
    """

    final_norm: bool = False

    block = PostNormBlock
