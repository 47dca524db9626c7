"""Character CNN: computes a word's vector from its spelling, once for each distinct word of the
batch.
"""

from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.errors import InputError, check_at_least, check_known
from adaptive_jax.inputs.letters import Chunks, Reader, read_words
from adaptive_jax.numerics.arrays import check_dtype, ids, look_up
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.layers import ACTIVATIONS, from_lexicon, uniform
from adaptive_jax.numerics.platforms import platform

FILTERS = ((1, 128), (2, 256), (3, 384), (4, 512), (5, 512), (6, 512), (7, 512))
LETTERS = {"bytes": 256, "elmo": 262}  # number of letters, without the padding of "bytes"


class CharacterCNN(nn.Module):
    """Word vectors from spelling (Kim et al. 2016, as in Baevski & Auli 2019, section 4.4).

    Every letter of a word has a vector. Filters of several lengths run over them; the largest
    response of each, after a ReLU, passes highway layers and a linear projection. Letters beyond
    `length` are ignored. Initial weights follow the public code of the paper that `letters` names.

    The spelling of all words is the variable `spelling` of the collection "lexicon", see
    `adaptive_jax.data.vocabulary.spelling`:
    `apply({"params": ..., "lexicon": {"spelling": ...}}, tokens)`.

    Cost: each distinct word is computed once, see `adaptive_jax.inputs.letters`. Where the
    collection "tables" holds vectors that `compose` made, they are looked up instead.

    Attributes:
        vocabulary_size: number of words.
        features: width of the vectors that `__call__` returns.
        width: width of a character's vector (128 in the paper).
        filters: for each filter, its span in characters and the number of its features: `((1, 128),
            (2, 256), ...)`.
        highway_layers: number of highway layers: 1 for WikiText-103, 2 for Billion Word.
        length: the most letters of a word that are read (50 in the released code), at least the
            span of the longest filter.
        strides: stride of each filter, in letters; empty: 1.
        activation: of filters and highway layers: relu, selu, tanh or sigmoid.
        letters: "bytes", where padding is 0, `<eos>` and `<unk>` have vectors of their own, and the
            projection has a bias (Baevski & Auli 2019); or "elmo", bytes between marks of a word's
            beginning and end, where padding has a vector, every word is spelt, and the projection
            has no bias (GroC 2020, after Peters et al. 2018).
        dtype: dtype of the matrix products; parameters are float32.

    Raises:
        InputError: filters that are not pairs of positive integers; strides of another number than
            filters; a length shorter than the longest filter; a name or number out of range; a
            dtype that is not a float; no lexicon, or that of another vocabulary; token ids outside
            of the vocabulary. Inside `jax.jit`, where values are unknown, the vectors of such ids
            are NaN.
    """

    vocabulary_size: int
    features: int
    width: int = 128
    filters: Sequence[Sequence[int]] = FILTERS
    highway_layers: int = 1
    length: int = 50
    strides: Sequence[int] = ()
    activation: str = "relu"
    letters: str = "bytes"
    dtype: jnp.dtype = jnp.float32

    on_cpu: ClassVar[Chunks] = Chunks(256, short=(8, 16))
    # Each chunk launches many kernels, so chunks are few and large.
    on_accelerators: ClassVar[Chunks] = Chunks(1024, short=(8, 16))

    def __post_init__(self):
        super().__post_init__()
        sizes = {"vocabulary_size": self.vocabulary_size, "features": self.features}
        check_at_least(1, width=self.width, length=self.length, **sizes)
        check_at_least(0, highway_layers=self.highway_layers)
        check_dtype(self.dtype)
        check_known(f"activation={self.activation!r}", self.activation, ACTIVATIONS)
        check_known(f"letters={self.letters!r}", self.letters, LETTERS)
        filters, strides = self.filters, self.strides
        pairs = isinstance(filters, Sequence) and all(map(_is_filter, filters))
        if not filters or not pairs:
            raise InputError(f"filters={filters} must be pairs of characters and features")
        check_at_least(max(span for span, _ in filters), length=self.length)
        if not isinstance(strides, Sequence) or len(strides) not in (0, len(filters)):
            raise InputError(f"strides={strides} must be one for each of {len(filters)} filters")
        for stride in strides:
            check_at_least(1, strides=stride)

    @property
    def lexicon_spec(self) -> dict:
        """Lexicon arrays that the layer reads, see `adaptive_jax.data.vocabulary.lexicon`."""
        return {"spelling": {"length": self.length, "marks": self.letters == "elmo"}}

    def lexicon_shapes(self, words: int) -> dict:
        """Shapes and dtypes of the arrays in `lexicon_spec`, for this number of words."""

        def array(dtype, *shape):
            return jax.ShapeDtypeStruct((words, *shape), dtype)

        letters = {"letters": array(jnp.int16, self.length)}
        if self.letters == "bytes":
            letters = {"letters": array(jnp.uint8, self.length), "symbols": array(jnp.int8)}
        lengths = {name: array(jnp.int32) for name in ("lengths", "row_of_word")}
        return {"spelling": letters | lengths}

    def setup(self):
        self.spelling = from_lexicon(self, "spelling", self.vocabulary_size)

        def param(name, start, *shape):
            return self.param(name, start, shape, jnp.float32)

        init, pooled = nn.initializers, sum(out for _, out in self.filters)
        elmo, xavier = self.letters == "elmo", init.xavier_normal()
        letters = init.normal(1.0) if elmo else xavier
        self.characters = param("characters", letters, LETTERS[self.letters], self.width)
        self.symbols = None if elmo else param("symbols", xavier, 2, self.features)
        convolutions, highways = [], []
        for i, (span, out) in enumerate(self.filters):
            fan_in = span * self.width
            kernel = param(f"filter_{i}", self._start(fan_in), span, self.width, out)
            convolutions.append((kernel, param(f"filter_bias_{i}", uniform(fan_in**-0.5), out)))
        start = self._start(pooled) if elmo else xavier
        carry_first = _carry_first(pooled**-0.5 if elmo else 0.0)
        for i in range(self.highway_layers):
            kernel = param(f"highway_{i}", start, pooled, 2 * pooled)
            highways.append((kernel, param(f"highway_bias_{i}", carry_first, 2 * pooled)))
        self.convolutions, self.highways = convolutions, highways
        last = self._start(pooled) if elmo else init.xavier_uniform()
        self.projection = param("projection", last, pooled, self.features)
        self.projection_bias = None
        if not elmo:
            self.projection_bias = param("projection_bias", init.zeros, self.features)

    def _start(self, fan_in):
        """Initializer of filters and, with the letters "elmo", of the layers after them."""
        return uniform(fan_in**-0.5)

    def __call__(self, tokens: jax.Array, batch=None, *, train: bool = False) -> jax.Array:
        """Maps token ids `[...]` to vectors `[..., features]`; with composed vectors, `tokens` are
        row numbers of these.
        """
        if self.has_variable("tables", "vectors"):
            [(table, _, _)] = self.bands()
            return look_up(table, ids("tokens", tokens, len(table), ...)).astype(self.dtype)
        tokens = ids("tokens", tokens, self.vocabulary_size, ...)
        return self._encode(tokens.ravel()).reshape(*tokens.shape, self.features)

    def compose(self, words: jax.Array, *, train: bool = False) -> None:
        """Stores the vectors of `words [n]`, `[n, features]`, in the collection "tables".

        They are float32, in which the gradients of a word's many occurrences are summed.
        """
        words = ids("words", words, self.vocabulary_size, "words")
        self.put_variable("tables", "vectors", self._encode(words).astype(jnp.float32))

    def bands(self, *, train: bool = False) -> list[Band]:
        """The only band: vectors of all words, `[words, features]`, stored by `compose` or computed
        now.
        """
        if self.has_variable("tables", "vectors"):
            return [Band(self.get_variable("tables", "vectors")[: self.vocabulary_size])]
        return [Band(self._encode(jnp.arange(self.vocabulary_size)))]

    def _encode(self, words):
        weights = {
            "characters": self.characters,
            "convolutions": self.convolutions,
            "highways": self.highways,
            "projection": (self.projection, self.projection_bias),
        }
        if self.letters == "bytes":  # the letter 0 is padding
            weights["characters"] = jnp.pad(self.characters, [(1, 0), (0, 0)])
            weights["symbols"] = self.symbols
        strides = tuple(self.strides or (1,) * len(self.filters))
        chunks = self.on_cpu if platform() == "cpu" else self.on_accelerators
        size = chunks.size(min(self.vocabulary_size, len(words)))
        reader = Reader(strides, self.activation, self.dtype, size, chunks.short)
        return read_words(reader, weights, words, self.spelling)


def _is_filter(pair):
    return isinstance(pair, Sequence) and [*map(type, pair)] == [int, int] and min(pair) > 0


def _carry_first(bound):
    """Initializer of a highway layer's biases: at first its gates mostly pass the input on."""

    def init(key, shape, dtype):
        half = (shape[0] // 2,)
        return jnp.concatenate([uniform(bound)(key, half, dtype), jnp.ones(half, dtype)])

    return init
