"""Vectors of words from their letters: convolutions, highway layers and a projection, once for
every distinct word.

Words are sorted by length and computed a chunk at a time, in loops whose trip counts depend on the
data. The backward pass repeats the loops. It recomputes the convolutions, whose results are large
and cheap, and reads the products of the highway layers, which are small and most of the work, if
they fit into `MAX_SAVED_BYTES`.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from adaptive_jax.numerics.arrays import distinct, look_up
from adaptive_jax.numerics.layers import ACTIVATIONS
from adaptive_jax.numerics.meshes import axes_of, pvary, vary_alike
from adaptive_jax.numerics.products import added, bits_on_cpu, of_bits, product, sum_dtype

# The most bytes of highway layers' products to save for the backward pass.
MAX_SAVED_BYTES = 2**30


class Chunks(NamedTuple):
    """Sizes of chunks of words.

    Attributes:
        most: the most distinct words of a chunk.
        short: see `Reader`.
    """

    most: int
    short: tuple[int, ...]

    def size(self, words: int) -> int:
        """The chunk size for `words` words in the fewest chunks of about equal size: a multiple of
        128, but not more than `words` or `most`.
        """
        words = max(1, words)
        even = -(-words // -(-words // self.most))
        return min(self.most, words, -(-even // 128) * 128)


class Reader(NamedTuple):
    """Static settings; hashable.

    Attributes:
        strides: of each convolution, in letters.
        activation: of the largest responses and of the highway layers, a key of `ACTIVATIONS`.
        dtype: of products and vectors.
        chunk: distinct words that are computed at a time.
        short: lengths; a chunk whose words are all no longer than one of these skips the
            convolutions over the padding behind it.
    """

    strides: tuple[int, ...]
    activation: str
    dtype: jnp.dtype
    chunk: int
    short: tuple[int, ...]


def read_words(reader: Reader, weights: Mapping, words: jax.Array, spelling: Mapping) -> jax.Array:
    """Vectors `[n, features]` of `words [n]`; NaN for ids outside of the vocabulary.

    weights: `characters [letters, width]`; `convolutions`, a list of `(kernel [span, width,
        features], bias)`; `highways`, a list of `(kernel [features, 2 features], bias)`, new values
        before gates; `projection`, `(kernel, bias or None)`; and, for words that have symbols
        instead of letters, `symbols [symbols, features]`.
    spelling: of all words, in rows sorted by length.
    """
    weights, spelling = jax.tree.map(jnp.asarray, (weights, dict(spelling)))
    weights, words, spelling = vary_alike((weights, words, spelling))
    count = len(spelling["lengths"])
    rows = spelling["row_of_word"].at[words]
    rows = rows.get(mode="fill", fill_value=count, wrap_negative_indices=False)
    distinct_rows, index = distinct(rows, count, reader.chunk)
    vectors = look_up(_of_sorted(reader, weights, distinct_rows, spelling), index)
    return jnp.where((rows < count)[:, None], vectors, jnp.nan)


def letter_vectors(characters: jax.Array, letters: jax.Array) -> jax.Array:
    """Vectors `[words, columns, width]` of letters `[words, columns]`, the convolutions' input."""
    return characters[letters]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_sorted(reader, weights, words, spelling):
    """Vectors `[words, features]` of rows `words` of `spelling`, which are sorted, padding last."""
    return _visit_all(reader, weights, words, spelling, 0)[0]


def _forward(reader, weights, words, spelling):
    size = sum(kernel.shape[1] for kernel, _ in weights["highways"])
    columns = size if len(words) * size * jnp.dtype(reader.dtype).itemsize <= MAX_SAVED_BYTES else 0
    vectors, products = _visit_all(reader, weights, words, spelling, columns)
    return vectors, (weights, words, spelling, products)


def _visit_all(reader, weights, words, spelling, columns):
    """The vectors, and the first `columns` columns, all or none, of the highway layers'
    concatenated products.
    """

    def visit(most, trip, arrays):
        rows = lax.dynamic_slice_in_dim(words, trip * reader.chunk, reader.chunk)
        vectors, products = _vectors(reader, weights, rows, spelling, most)
        parts = vectors, jnp.concatenate([*products, vectors[:, :0]], axis=1)[:, :columns]
        put = functools.partial(
            lax.dynamic_update_slice_in_dim, start_index=trip * reader.chunk, axis=0
        )
        return jax.tree.map(put, arrays, jax.tree.map(bits_on_cpu, parts))

    widths = weights["projection"][0].shape[1], columns
    zeros = tuple(bits_on_cpu(jnp.zeros((len(words), width), reader.dtype)) for width in widths)
    arrays = pvary(zeros, axes_of(words))
    for most, begin, end in runs(reader, words, spelling):
        arrays = lax.fori_loop(begin, end, functools.partial(visit, most), arrays)
    return tuple(of_bits(array, reader.dtype) for array in arrays)


def _backward(reader, residuals, cotangent):
    weights, words, spelling, products = residuals
    widths = [kernel.shape[1] for kernel, _ in weights["highways"]]

    def visit(most, trip, gradient):
        rows, d_vectors, saved = (
            lax.dynamic_slice_in_dim(a, trip * reader.chunk, reader.chunk)
            for a in (words, cotangent, products)
        )
        saved = lax.split(saved, widths, axis=1) if saved.shape[1] else None
        _, vjp = jax.vjp(lambda w: _vectors(reader, w, rows, spelling, most, saved)[0], weights)
        d_chunk = vjp(d_vectors.astype(reader.dtype))[0]
        return jax.tree.map(lambda total, part: total + part.astype(total.dtype), gradient, d_chunk)

    gradient = jax.tree.map(lambda w: jnp.zeros(w.shape, sum_dtype(w.dtype)), weights)
    gradient = pvary(gradient, axes_of(words))
    for most, begin, end in runs(reader, words, spelling):
        gradient = lax.fori_loop(begin, end, functools.partial(visit, most), gradient)
    return jax.tree.map(lambda g, w: g.astype(w.dtype), gradient, weights), None, None


_of_sorted.defvjp(_forward, _backward)


def runs(reader: Reader, words: jax.Array, spelling: Mapping):
    """Yields `(most, begin, end)`: chunks `begin` to `end - 1` are of words of `most` letters or
    fewer.

    Each of these runs gets its own loop: for many CPU devices, jaxlib 0.11 crashes when it compiles
    one loop with a branch.
    """
    full, word_count = spelling["letters"].shape[1], len(spelling["lengths"])
    lengths = spelling["lengths"].at[words].get(mode="fill", fill_value=0)
    longest = lengths.reshape(-1, reader.chunk).max(axis=1)
    has_words = (words < word_count).reshape(-1, reader.chunk).any(axis=1)
    begin = 0
    for most in (*(length for length in reader.short if length < full), full):
        end = jnp.sum(has_words & (longest <= most))
        yield most, begin, end
        begin = end


def positions(span: int, stride: int, most: int, full: int) -> int:
    """Number of responses of a filter that words of at most `most` letters need: all that touch a
    letter, and one of padding if there is any.
    """
    return min((full - span) // stride, -(-most // stride)) + 1


def _vectors(reader, weights, rows, spelling, most, saved=None):
    """Vectors `[chunk, features]` of rows of `spelling`, and products of the highway layers; rows
    out of range are padding.
    """
    letters = spelling["letters"].at[rows].get(mode="fill", fill_value=0).astype(jnp.int32)
    vectors, products = read_letters(reader, weights, letters, most, saved)
    if "symbols" in weights:
        symbol = spelling["symbols"].at[rows].get(mode="fill", fill_value=0)
        symbol_vectors = weights["symbols"].astype(reader.dtype)[jnp.maximum(symbol, 0)]
        vectors = jnp.where(symbol[:, None] >= 0, symbol_vectors, vectors)
    return vectors, products


def read_letters(
    reader: Reader, weights: Mapping, letters: jax.Array, most: int, saved=None
) -> tuple[jax.Array, list]:
    """Vectors `[chunk, features]` of words of at most `most` letters `[chunk, length]`, and the
    products of the highway layers.

    saved: these products, if an earlier pass saved them; then only their gradients are computed.
    """
    # Only operands of products are cast. So the gradients of a character's many occurrences, and of
    # biases, are summed in float32, which is also faster with XLA on a CPU.
    full, activation = letters.shape[1], ACTIVATIONS[reader.activation]
    x = letter_vectors(weights["characters"], letters).astype(reader.dtype)
    pooled = []
    for (kernel, bias), stride in zip(weights["convolutions"], reader.strides, strict=True):
        seen = windows(x, len(kernel), stride, positions(len(kernel), stride, most, full))
        responses = product(seen, kernel.reshape(-1, kernel.shape[2]))
        pooled.append(activation(responses.max(axis=1).astype(bias.dtype) + bias[None]))
    x, products = jnp.concatenate(pooled, axis=1), []
    for i, (kernel, bias) in enumerate(weights["highways"]):
        arguments = x.astype(reader.dtype), kernel
        products.append(
            product(*arguments) if saved is None else _saved_product(*arguments, saved[i])
        )
        new, gate = jnp.split(products[-1].astype(bias.dtype) + bias[None], 2, axis=1)
        gate = nn.sigmoid(gate)
        x = gate * x + (1 - gate) * activation(new)
    kernel, bias = weights["projection"]
    vectors = product(x.astype(reader.dtype), kernel)
    return vectors if bias is None else added(vectors, bias), products


def windows(x: jax.Array, span: int, stride: int, count: int) -> jax.Array:
    """The first `count` windows of `span` columns of `x [words, columns, width]`, `stride` apart,
    each as one row: `[words, count, span * width]`.

    They are slices of blocks of `stride` columns, so that neither they nor their gradients are
    gathered column by column.
    """
    words, columns, width = x.shape
    blocks = -(-span // stride)  # blocks per window
    used = (count + blocks - 1) * stride
    x = jnp.pad(x, [(0, 0), (0, max(used - columns, 0)), (0, 0)])[:, :used]
    x = x.reshape(words, -1, stride * width)
    parts = [x[:, i : i + count, : (span - i * stride) * width] for i in range(blocks)]
    return jnp.concatenate(parts, axis=2)


@jax.custom_vjp
def _saved_product(x, kernel, saved):
    """Returns `saved`, the result of `product(x, kernel)`, with the gradient of that product."""
    return saved


_saved_product.defvjp(
    lambda x, kernel, saved: (saved, (x, kernel)),
    # The pullback does not depend on the product itself.
    lambda arrays, gradient: (*jax.vjp(product, *arrays)[1](gradient), None),
)
