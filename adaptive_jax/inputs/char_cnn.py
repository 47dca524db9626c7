"""Character CNN: a word's vector is computed from its spelling, once for every distinct word that is asked for."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.arrays import check_dtype, ids, look_up
from adaptive_jax.bands import Band
from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.inputs.letters import Reader, check_letters, places_of, read_words

# See `Reader`.
CHUNK = 256
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
        check_at_least(1, **sizes)
        check_dtype(self.dtype)
        check_letters(self)

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
            # The letter 0 is padding.
            "characters": jnp.pad(self.characters, [(1, 0), (0, 0)]),
            "symbols": self.symbols,
            "convolutions": self.convolutions,
            "highways": self.highways,
            "projection": (self.projection, self.projection_bias),
        }
        chunk = min(CHUNK, len(words), self.vocabulary_size)
        reader = Reader((1,) * len(self.filters), "relu", self.dtype, chunk, SHORT)
        return read_words(reader, weights, places_of(words, self.spelling.value), self.spelling.value)

    def _blank(self):
        words = jnp.zeros(self.vocabulary_size, jnp.int32)
        letters = jnp.zeros((self.vocabulary_size, self.length), jnp.uint8)
        return {"letters": letters, "symbols": words.astype(jnp.int8), "lengths": words, "places": words}


def _uniform(bound):
    return lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def _carry_first(key, shape):
    """Biases of a highway layer: at first its gates mostly pass their input on."""
    return jnp.repeat(jnp.array([0.0, 1.0]), shape[0] // 2)
