"""Position encodings of a transformer.

sinusoidal   a vector of sines and cosines is added to each token (Vaswani et al. 2017, section 3.5)
learned      a row of a table is added to each token; positions beyond the table do not exist
alibi        nothing is added; scores fall in proportion to distance (Press, Smith & Lewis 2022)
none         nothing but the causal mask
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.errors import InputError

POSITIONS = ("sinusoidal", "learned", "alibi", "none")


def positions_in_segments(segment_ids: jax.Array) -> jax.Array:
    """The position of each token in its segment, of the shape of `segment_ids [rows, time]`:
    1 1 1 2 2 0 gives 0 1 2 0 1 0.
    """
    columns = jnp.arange(segment_ids.shape[1])[None]
    begins = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1]) != 0
    return columns - jax.lax.cummax(jnp.where(begins, columns, 0), axis=1)


def sinusoids(positions: jax.Array, features: int) -> jax.Array:
    """Sinusoidal position vectors of `positions [time]`: `[time, features]`, sines first, then
    cosines.

    Position 0 is row 2 of the released table. Frequencies fall from 1 to 1/10000 in features/2
    steps, so the exponent is divided by features/2 - 1 (Vaswani et al. 2017, section 3.5, divide by
    features/2).
    """
    half = features // 2
    frequencies = 10_000.0 ** (-jnp.arange(half) / max(half - 1, 1))
    angles = jnp.outer((positions + 2).astype(frequencies.dtype), frequencies)
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


class LearnedPositions(nn.Module):
    """A table of position vectors, `table [count, features]`, initialised as N(0, 1 / features)
    like fairseq's.
    """

    count: int
    features: int

    @nn.compact
    def __call__(self, positions: jax.Array) -> jax.Array:
        """Vectors `[time, features]` of `positions [time]`; NaN for positions beyond the table."""
        table = self.param(
            "table",
            nn.initializers.normal(self.features**-0.5),
            (self.count, self.features),
            jnp.float32,
        )
        return jnp.asarray(table).at[positions].get(mode="fill", fill_value=jnp.nan)


def check_table(count: int, time: int) -> None:
    """Raises InputError if `time` tokens, read at once, exceed the `count` learned positions."""
    if time > count:
        raise InputError(
            f"tokens must be {count} or fewer, body.max_positions, got {time}: train with"
            f" batches.sequence_length={count} or less, read with --window={count}"
        )


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """ALiBi slopes: how much each head's scores fall per token of distance (Press et al. 2022,
    section 3).

    8 heads have 1/2, 1/4 … 1/256; any power of two has a geometric sequence that ends at 1/256. For
    other numbers the authors' code takes the slopes of the next lower power of two, followed by
    every second slope of the next higher one.

    >>> alibi_slopes(3)
    (0.0625, 0.00390625, 0.25)
    """
    lower = 2 ** (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (i + 1) / lower) for i in range(lower)]
    return (*first, *(2.0 ** (-4 * (2 * i + 1) / lower) for i in range(heads - lower)))


def biases(slopes: jax.Array, first, time: int, length: int) -> jax.Array:
    """ALiBi biases, minus slope times distance, float32 `[heads, time, length]`, for the scores of
    `time` queries, the first at position `first`, with the keys at positions 0 to `length - 1`.

    slopes: `[heads]`, see `alibi_slopes`.
    """
    distances = (first + jnp.arange(time))[:, None] - jnp.arange(length)[None]
    return -slopes[:, None, None] * distances.astype(jnp.float32)[None]
