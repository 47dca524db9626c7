"""Character CNN: a word's vector is computed from its spelling, once for every distinct word that is asked for."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from adaptive_jax.arrays import check_dtype, ids, look_up
from adaptive_jax.bands import Band
from adaptive_jax.errors import InputError, check_at_least

# Distinct words whose characters are in memory at a time.
CHUNK = 256
# The convolutions over a chunk of words no longer than this cover only that many columns; longer words take the full length.
SHORT = (8, 16)


class CharacterCNN(nn.Module):
    """Word vectors from spelling (Kim et al. 2016, as in Baevski & Auli 2019, section 4.4).

    Every byte of a word has a vector. Filters of several lengths run over them; the largest response of each, after a ReLU,
    passes highway layers and a linear projection with bias. Bytes beyond `length` are not read. `<eos>` and `<unk>` have
    vectors of their own. Initial weights follow the paper's public code.

    The spelling of all words is the variable `spelling` of the collection "lexicon", see `adaptive_jax.data.vocabulary.spelling`:
    `apply({"params": ..., "lexicon": {"spelling": ...}}, tokens)`.

    Cost: each distinct word is computed once. Words are sorted by length and computed `CHUNK` at a time, in a loop whose trip
    count depends on the data; the backward pass repeats the loop and recomputes each chunk. Where the collection "tables" holds
    vectors that `compose` made, they are looked up instead.

    Attributes:
        vocabulary_size: number of words.
        features: width of the vectors that `__call__` returns.
        width: width of a character's vector (the paper's 128).
        filters: for each filter, the characters it spans and the features it gives: `((1, 128), (2, 256), ...)`.
        highway_layers: 1 for WikiText-103, 2 for Billion Word.
        length: bytes of a word that are read (released code: 50), at least the span of the longest filter.
        dtype: dtype of the matrix products; parameters are float32.

    Raises:
        InputError: filters that are not pairs of positive integers; a length shorter than the longest filter; a number out of
            range; a dtype that is no float; no lexicon, or one of another vocabulary; token ids that do not exist. Inside
            `jax.jit`, where ids are not known, those have vectors of NaN.
    """

    vocabulary_size: int
    features: int
    width: int
    filters: Sequence[Sequence[int]]
    highway_layers: int
    length: int
    dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        super().__post_init__()
        sizes = {"vocabulary_size": self.vocabulary_size, "features": self.features}
        check_at_least(1, width=self.width, length=self.length, **sizes)
        check_dtype(self.dtype)
        check_at_least(0, highway_layers=self.highway_layers)
        if not isinstance(self.filters, Sequence) or not self.filters or not all(_is_filter(pair) for pair in self.filters):
            raise InputError(f"filters={self.filters} must be pairs of characters and features: ((1, 128), (2, 256))")
        longest = max(span for span, _ in self.filters)
        if self.length < longest:
            raise InputError(f"length={self.length} is shorter than a filter over {longest} characters: give {longest} or more")

    @property
    def wants(self) -> dict:
        """What the layer needs from `adaptive_jax.data.vocabulary.lexicon`."""
        return {"spelling": {"length": self.length}}

    def setup(self):
        if not (self.is_initializing() or self.has_variable("lexicon", "spelling")):
            raise InputError('a character CNN needs its words\' spelling: apply({"params": ..., "lexicon": lexicon(...)}, ...)')
        self.spelling = self.variable("lexicon", "spelling", self._blank)
        if (words := len(self.spelling.value["lengths"])) != self.vocabulary_size:
            raise InputError(f"a lexicon of {words} words does not fit vocabulary_size={self.vocabulary_size}: give one of as many")
        init = nn.initializers
        pooled = sum(out for _, out in self.filters)
        self.characters = self.param("characters", init.xavier_normal(), (256, self.width))
        self.symbols = self.param("symbols", init.xavier_normal(), (2, self.features))
        self.convolutions = [
            (
                self.param(f"filter_{i}", init.variance_scaling(1 / 3, "fan_in", "uniform"), (span, self.width, out)),
                self.param(f"filter_bias_{i}", _uniform((span * self.width) ** -0.5), (out,)),
            )
            for i, (span, out) in enumerate(self.filters)
        ]
        self.highways = [
            (
                self.param(f"highway_{i}", init.xavier_normal(), (pooled, 2 * pooled)),
                self.param(f"highway_bias_{i}", _carry_first, (2 * pooled,)),
            )
            for i in range(self.highway_layers)
        ]
        self.projection = self.param("projection", init.xavier_uniform(), (pooled, self.features))
        self.projection_bias = self.param("projection_bias", init.zeros, (self.features,))

    def __call__(self, tokens: jax.Array, batch=None, *, train: bool = False) -> jax.Array:
        """Token ids `[...]` to vectors `[..., features]`; with composed vectors, their rows `[...]`."""
        if self.has_variable("tables", "vectors"):
            [(table, _, _)] = self.bands()
            return look_up(table, ids("tokens", tokens, len(table), ...)).astype(self.dtype)
        tokens = ids("tokens", tokens, self.vocabulary_size, ...)
        return self._encode(tokens.ravel()).reshape(*tokens.shape, self.features)

    def compose(self, words: jax.Array, *, train: bool = False) -> None:
        """Puts the vectors of `words [n]`, float32 `[n, features]`, into the collection "tables".

        Float32, because the gradients of a word's many occurrences are summed in it.
        """
        words = ids("words", words, self.vocabulary_size, "words")
        self.put_variable("tables", "vectors", self._encode(words).astype(jnp.float32))

    def bands(self, *, train: bool = False) -> list[Band]:
        """The one band, `[words, features]`: the vectors of all words, composed before or computed now."""
        if self.has_variable("tables", "vectors"):
            return [Band(self.get_variable("tables", "vectors")[: self.vocabulary_size])]
        return [Band(self._encode(jnp.arange(self.vocabulary_size)))]

    def _encode(self, words):
        weights = {
            "characters": self.characters,
            "symbols": self.symbols,
            "convolutions": self.convolutions,
            "highways": self.highways,
            "projection": (self.projection, self.projection_bias),
        }
        weights, spelling = jax.tree.map(jnp.asarray, (weights, self.spelling.value))
        # Words are known by their places in the order of length, so that the distinct ones come out sorted by it.
        chunk = min(CHUNK, len(words), self.vocabulary_size)
        places = spelling["places"].at[words].get(mode="fill", fill_value=self.vocabulary_size, wrap_negative_indices=False)
        vectors = _of_distinct((self.dtype, chunk), weights, places, spelling)
        return jnp.where((places < self.vocabulary_size)[:, None], vectors, jnp.nan)

    def _blank(self):
        words = jnp.zeros(self.vocabulary_size, jnp.int32)
        letters = jnp.zeros((self.vocabulary_size, self.length), jnp.uint8)
        return {"letters": letters, "symbols": words.astype(jnp.int8), "lengths": words, "places": words}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_distinct(static, weights, places, spelling):
    """Vectors `[tokens, features]` of the words at `places [tokens]` of `spelling`, each distinct word computed once."""
    dtype, chunk = static
    words, index = _distinct(places, spelling, chunk)

    def visit(columns, trip, vectors):
        rows = lax.dynamic_slice_in_dim(words, trip * chunk, chunk)
        return lax.dynamic_update_slice_in_dim(vectors, _vectors(dtype, weights, rows, spelling, columns), trip * chunk, 0)

    vectors = jnp.zeros((len(words), weights["projection"][0].shape[1]), dtype)
    for columns, begin, end in _runs(weights, words, spelling, chunk):
        vectors = lax.fori_loop(begin, end, functools.partial(visit, columns), vectors)
    return vectors[index]


def _forward(static, weights, places, spelling):
    return _of_distinct(static, weights, places, spelling), (weights, places, spelling)


def _backward(static, residuals, cotangent):
    dtype, chunk = static
    weights, places, spelling = residuals
    words, index = _distinct(places, spelling, chunk)
    pulls = jnp.zeros((len(words), cotangent.shape[1]), jnp.float32).at[index].add(cotangent.astype(jnp.float32))

    def visit(columns, trip, gradient):
        rows, pull = (lax.dynamic_slice_in_dim(array, trip * chunk, chunk) for array in (words, pulls))
        _, vjp = jax.vjp(lambda w: _vectors(dtype, w, rows, spelling, columns), weights)
        return jax.tree.map(jnp.add, gradient, vjp(pull.astype(dtype))[0])

    gradient = jax.tree.map(jnp.zeros_like, weights)
    for columns, begin, end in _runs(weights, words, spelling, chunk):
        gradient = lax.fori_loop(begin, end, functools.partial(visit, columns), gradient)
    return gradient, None, None


_of_distinct.defvjp(_forward, _backward)


def _distinct(places, spelling, chunk):
    """The distinct places in ascending order, padded to whole chunks, and the index of each token's place among them."""
    known = len(spelling["lengths"])
    room = -(-min(len(places), known) // chunk) * chunk
    return jnp.unique(places, return_inverse=True, size=room, fill_value=known)


def _runs(weights, words, spelling, chunk):
    """Yields `(columns, begin, end)`: chunks `begin` to `end - 1` of `words` need that many columns of letters.

    One loop for each number of columns, not one loop with a branch: jaxlib 0.11 crashes compiling that for many CPU devices.
    """
    full, known = spelling["letters"].shape[1], len(spelling["lengths"])
    widest = max(kernel.shape[0] for kernel, _ in weights["convolutions"])
    longest = spelling["lengths"].at[words].get(mode="fill", fill_value=0).reshape(-1, chunk).max(axis=1)
    used = (words < known).reshape(-1, chunk).any(axis=1)
    begin = 0
    for most in (*SHORT, full):
        # Enough columns that a filter sees only padding after a word exactly where it would with the full length.
        if most == full or most + widest < full:
            end = jnp.sum(used & (longest <= most))
            yield min(most + widest, full), begin, end
            begin = end


def _vectors(dtype, weights, rows, spelling, columns):
    """Vectors `[chunk, features]` of rows of `spelling`; rows beyond its end are padding."""
    letters, symbol = (spelling[name].at[rows].get(mode="fill", fill_value=0) for name in ("letters", "symbols"))
    vectors = _read_letters(dtype, weights, letters.astype(jnp.int32), columns=columns)
    own = weights["symbols"].astype(dtype)[jnp.maximum(symbol, 0)]
    return jnp.where(symbol[:, None] >= 0, own, vectors)


def _read_letters(dtype, weights, letters, *, columns):
    """Vectors `[chunk, features]` of words whose letters `[chunk, length]` all stand in the first `columns`."""
    # Cast after the lookup: the gradients of a character's many occurrences are summed in float32.
    x = jnp.pad(weights["characters"], [(1, 0), (0, 0)])[letters[:, :columns]].astype(dtype)
    weights = jax.tree.map(lambda a: a.astype(dtype), weights)
    pooled = []
    for kernel, bias in weights["convolutions"]:
        span, width, out = kernel.shape
        windows = jnp.stack([x[:, i : columns - span + 1 + i] for i in range(span)], axis=2)
        responses = windows.reshape(*windows.shape[:2], span * width) @ kernel.reshape(span * width, out)
        pooled.append(nn.relu(responses.max(axis=1) + bias[None]))
    x = jnp.concatenate(pooled, axis=1)
    for kernel, bias in weights["highways"]:
        new, gate = jnp.split(x @ kernel + bias[None], 2, axis=1)
        gate = nn.sigmoid(gate)
        x = gate * x + (1 - gate) * nn.relu(new)
    kernel, bias = weights["projection"]
    return x @ kernel + bias[None]


def _is_filter(pair):
    return isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(n, int) and n > 0 for n in pair)


def _uniform(bound):
    return lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def _carry_first(key, shape):
    """Biases of a highway layer: at first its gates mostly pass their input on."""
    return jnp.repeat(jnp.array([0.0, 1.0]), shape[0] // 2)
