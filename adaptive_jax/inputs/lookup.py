"""Lookup table: one vector per word, all of the same width."""

from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from adaptive_jax.errors import check_at_least, check_rates, check_within
from adaptive_jax.numerics.arrays import check_dtype, ids, look_up, nan_if_missing
from adaptive_jax.numerics.bands import Band, rows_per_device
from adaptive_jax.numerics.layers import WordDropout, uniform
from adaptive_jax.numerics.meshes import by_token
from adaptive_jax.numerics.products import product


class Lookup(nn.Module):
    """Fixed-size word vectors (the row "SM" of Baevski & Auli 2019, Table 3).

    Vectors whose width is not `features` pass a linear projection without bias (section 4.1).

    Attributes:
        vocabulary_size: number of words.
        features: width of the vectors that `__call__` returns.
        width: width of a word's vector; 0 means `features`.
        word_dropout: rate at which words are dropped in training, the same words throughout an
            update (Merity et al. 2018, section 4.3). A tied output uses the table without dropout.
        init_range: the table starts uniform between -init_range and init_range; 0: normal, with
            init_deviation, which otherwise has no effect.
        init_deviation: standard deviation of a table that starts normal, 0.1 in fairseq's gated
            convolutional network; 0: width^-0.5.
        dtype: of the vectors that `__call__` returns; parameters are float32.
        word_axes: one or several axes of `jax.shard_map` over which words are sharded, like the
            rows of a batch, see `adaptive_jax.losses.sharded`; (): none.

    Raises:
        InputError: a number out of range, a dtype that is not a float, or token ids outside of the
            vocabulary. Inside `jax.jit`, where values are unknown, the vectors of such ids are NaN.
    """

    vocabulary_size: int
    features: int
    width: int = 0
    word_dropout: float = 0.0
    init_range: float = 0.0
    init_deviation: float = 0.0
    dtype: jnp.dtype = jnp.float32
    word_axes: str | Sequence[str] = ()

    cuts_words: ClassVar[bool] = True  # over devices

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, vocabulary_size=self.vocabulary_size, features=self.features)
        check_at_least(0, width=self.width)
        check_rates(self, "word_dropout")
        check_within("[0, inf)", init_range=self.init_range, init_deviation=self.init_deviation)
        check_dtype(self.dtype)

    def setup(self):
        width = self.width or self.features
        init = nn.initializers.normal(self.init_deviation or width**-0.5)
        if self.init_range:
            init = uniform(self.init_range)
        rows = rows_per_device(self.vocabulary_size, self.word_axes)
        self.table = self.param("table", init, (rows, width), jnp.float32)
        self.drop = WordDropout(self.word_dropout)
        self.projection = None
        if width != self.features:
            init, shape = nn.initializers.xavier_uniform(), (width, self.features)
            self.projection = self.param("projection", init, shape, jnp.float32)

    def __call__(self, tokens: jax.Array, batch=None, *, train: bool = False) -> jax.Array:
        """Maps token ids `[...]` to vectors `[..., features]`."""
        tokens = ids("tokens", tokens, self.vocabulary_size, ...)
        if self.word_axes:
            vectors = self._look_up_for_all(tokens)
        else:
            vectors = by_token(_rows, tokens, self.table).astype(self.dtype)
        vectors = self.drop(vectors, tokens, train=train)
        if self.projection is not None:
            vectors = by_token(product, vectors, self.projection)
        return nan_if_missing(vectors, tokens, self.vocabulary_size)

    def _look_up_for_all(self, tokens):
        """Vectors of tokens from the devices that hold them; 0 for ids outside of the
        vocabulary.
        """
        rows = lax.all_gather(tokens, self.word_axes, tiled=True)
        rows -= lax.axis_index(self.word_axes) * len(self.table)
        vectors = look_up(self.table, rows, missing=0)
        return lax.psum_scatter(vectors.astype(self.dtype), self.word_axes, tiled=True)

    def words(self) -> list[int]:
        """Number of words of each band."""
        return [self.vocabulary_size]

    def word_tables(self) -> dict[str, list[int]]:
        """The parameter with a row for each word, and the number of words of each band in it."""
        return {"table": self.words()}

    def bands(self, *, train: bool = False) -> list[Band]:
        """The only band: `table [words, width]` and, unless `width` is `features`, `projection
        [width, features]`.
        """
        return [Band(self.table, self.projection)]


def _rows(tokens, table):
    return look_up(table, tokens, missing=0)
