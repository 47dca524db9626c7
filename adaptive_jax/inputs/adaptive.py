"""Adaptive input representations: wide vectors for frequent words, narrow ones for rare words."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.bands import band_sizes, band_widths
from adaptive_jax.devices.products import product


class AdaptiveInput(nn.Module):
    """Adaptive input representations (Baevski & Auli 2019, section 3 and Figure 1).

    The vocabulary, most frequent word first, is cut into bands. Words of band i have vectors of `width / factor^i`,
    which a linear map of the band's own takes to `features`; the first band has one too.

    Tables start as N(0, width_i^-0.5), projections Xavier-uniform, as in the paper's public code. The vectors are not
    scaled here: the body does that.

    Attributes:
        vocabulary_size: words.
        features: width of what `__call__` returns.
        cutoffs: id of the first word of every band but the first: `(20_000, 60_000)`.
        factor: by which each band is narrower than the one before it.
        width: width of the first band; 0 means `features`.
        dtype: of what `__call__` returns; parameters are float32.

    Raises:
        InputError: cutoffs that do not increase or do not lie within the vocabulary.
    """

    vocabulary_size: int
    features: int
    cutoffs: Sequence[int]
    factor: int = 4
    width: int = 0
    dtype: jnp.dtype = jnp.float32

    def setup(self):
        sizes = band_sizes(self.vocabulary_size, self.cutoffs)
        widths = band_widths(self.width or self.features, self.factor, len(sizes))
        self.tables = [
            self.param(f"table_{i}", nn.initializers.normal(width**-0.5), (words, width))
            for i, (words, width) in enumerate(zip(sizes, widths, strict=True))
        ]
        self.projections = [
            self.param(f"projection_{i}", nn.initializers.xavier_uniform(), (width, self.features))
            for i, width in enumerate(widths)
        ]

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Token ids `[...]` to vectors `[..., features]`."""
        vectors, first = 0.0, 0
        for table, projection in self.bands():
            # A word of another band reads behind the table, hence zeros, and the gradient's scatter leaves it out. Were it to read
            # row 0, most tokens of a batch would add their zeros to that one row, one after another.
            place = jnp.where(tokens < first, len(table), tokens - first)
            rows = table.at[place].get(mode="fill", fill_value=0.0)
            vectors += product(rows.astype(self.dtype), projection.astype(self.dtype))
            first += len(table)
        return vectors

    def bands(self) -> list[tuple[jax.Array, jax.Array]]:
        """Every band's `(table [words_i, width_i], projection [width_i, features])`, frequent words first."""
        return list(zip(self.tables, self.projections, strict=True))
