"""Lookup table: one vector a word, all of one width."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.arrays import check_dtype, ids, look_up
from adaptive_jax.bands import Band
from adaptive_jax.devices.products import product
from adaptive_jax.errors import check_at_least


class Lookup(nn.Module):
    """Fixed-size word vectors (the row "SM" of Baevski & Auli 2019, Table 3).

    Vectors of another width than `features` pass a linear projection without bias (section 4.1).

    Attributes:
        vocabulary_size: words.
        features: width of what `__call__` returns.
        width: width of a word's vector; 0 means `features`.
        dtype: of what `__call__` returns; parameters are float32.

    Raises:
        InputError: a number out of range, a dtype that is no float, or token ids that do not exist. Inside `jax.jit`, where ids
            are not known, those that do not exist have vectors of NaN.
    """

    vocabulary_size: int
    features: int
    width: int = 0
    dtype: jnp.dtype = jnp.float32

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, vocabulary_size=self.vocabulary_size, features=self.features)
        check_at_least(0, width=self.width)
        check_dtype(self.dtype)

    def setup(self):
        width = self.width or self.features
        self.table = self.param("table", nn.initializers.normal(width**-0.5), (self.vocabulary_size, width))
        shape = (width, self.features)
        init = nn.initializers.xavier_uniform()
        self.projection = None if width == self.features else self.param("projection", init, shape)

    def __call__(self, tokens: jax.Array, batch=None, *, train: bool = False) -> jax.Array:
        """Token ids `[...]` to vectors `[..., features]`."""
        vectors = look_up(self.table, ids("tokens", tokens, self.vocabulary_size, ...)).astype(self.dtype)
        return vectors if self.projection is None else product(vectors, self.projection.astype(self.dtype))

    def bands(self) -> list[Band]:
        """The one band, `table [words, width]` and, where that is not the features' width, `projection [width, features]`."""
        return [Band(self.table, self.projection)]
