"""Adaptive input representations: wide vectors for frequent words, narrow ones for rare words."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.errors import check_rates
from adaptive_jax.inputs import distinct
from adaptive_jax.numerics.arrays import check_dtype, ids, nan_if_missing
from adaptive_jax.numerics.bands import (
    Band,
    band_shapes,
    band_sizes,
    make_tables,
    words_in_tables,
)
from adaptive_jax.numerics.layers import WordDropout


def normal_by_width(key: jax.Array, shape: Sequence[int], dtype=jnp.float32) -> jax.Array:
    """Draws a table `[words, width]` from N(0, 1 / width)."""
    return nn.initializers.normal(shape[1] ** -0.5)(key, shape, dtype)


class AdaptiveInput(nn.Module):
    """Adaptive input representations (Baevski & Auli 2019, section 3 and Figure 1).

    The vocabulary, most frequent word first, is divided into bands. Words of band i have vectors of
    width `width / factor^i`; a linear map for each band, the first included, projects them to
    `features`.

    By default tables start as N(0, 1 / width_i) and projections Xavier-uniform, as in the paper's
    public code. A transformer scales the vectors itself.

    Attributes:
        vocabulary_size: words.
        features: width of the vectors that `__call__` returns.
        cutoffs: id of the first word of every band but the first: `(20_000, 60_000)`.
        factor: ratio of the widths of one band and the next.
        width: width of the first band; 0 means `features`.
        word_dropout: rate at which words are dropped in training, the same words throughout an
            update (Merity et al. 2018, section 4.3). A tied output uses the table without dropout.
        scaled: multiply vectors by sqrt(features), as GroC's public code does for an LSTM; a tied
            output uses the table unscaled.
        dtype: of the vectors that `__call__` returns; parameters are float32.
        table_init, projection_init: initializers of tables and projections, functions `(key, shape,
            dtype)` like that of flax's `Embed`; `nn.with_partitioning` names their axes.
        word_axes: one or several axes of `jax.shard_map` over which the words of every band are
            sharded, like the rows of a batch, see `adaptive_jax.losses.sharded`; (): none.

    Raises:
        InputError: cutoffs that do not increase or lie outside of the vocabulary, a number out of
            range, a dtype that is not a float, or token ids outside of the vocabulary. Inside
            `jax.jit`, where values are unknown, the vectors of such ids are NaN.
    """

    vocabulary_size: int
    features: int
    cutoffs: Sequence[int] = ()
    factor: int = 4
    width: int = 0
    word_dropout: float = 0.0
    scaled: bool = False
    dtype: jnp.dtype = jnp.float32
    table_init: Callable = normal_by_width
    projection_init: Callable = nn.initializers.xavier_uniform()
    word_axes: str | Sequence[str] = ()

    cuts_words: ClassVar[bool] = True  # over devices

    def __post_init__(self):
        super().__post_init__()
        band_shapes(self)
        check_rates(self, "word_dropout")
        check_dtype(self.dtype)

    def setup(self):
        tables = make_tables(self)
        shapes = [(table.shape[1], self.features) for table in tables]
        self.drop = WordDropout(self.word_dropout)
        init = self.projection_init
        projections = [
            self.param(f"projection_{i}", init, s, jnp.float32) for i, s in enumerate(shapes)
        ]
        self.table_bands = list(map(Band, tables, projections))

    def __call__(self, tokens: jax.Array, batch=None, *, train: bool = False) -> jax.Array:
        """Maps token ids `[...]` to vectors `[..., features]`."""
        tokens = ids("tokens", tokens, self.vocabulary_size, ...)
        vectors = distinct.vectors(
            tokens, self.table_bands, self.dtype, self.words(), self.word_axes
        )
        vectors = vectors * self.features**0.5 if self.scaled else vectors
        vectors = self.drop(vectors, tokens, train=train)
        return nan_if_missing(vectors, tokens, self.vocabulary_size)

    def words(self) -> list[int]:
        """Number of words of each band."""
        return band_sizes(self.vocabulary_size, self.cutoffs)

    def word_tables(self) -> dict[str, list[int]]:
        """See `adaptive_jax.numerics.bands.words_in_tables`."""
        return words_in_tables(self)

    def bands(self, *, train: bool = False) -> list[Band]:
        """The bands, each with `table [words_i, width_i]` and `projection [width_i, features]`,
        frequent words first.
        """
        return list(self.table_bands)
