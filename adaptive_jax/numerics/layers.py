"""Parts shared by inputs, bodies and outputs: dropout of hidden states, of words and of matrices as
flax modules, weight normalisation, activations by name, an initializer, and the lexicon's arrays.

It is the only file of this folder that needs flax.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from adaptive_jax.errors import InputError, check_rates, of_extra
from adaptive_jax.numerics.arrays import floats, whole_numbers
from adaptive_jax.numerics.dropout import (
    Mask,
    drop,
    keep_mask,
    positions,
    row_seeds,
    shared_seeds,
    tied,
)

with of_extra("layers"):
    from flax import linen as nn

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "selu": jax.nn.selu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
}


def word_layer(layer: nn.Module) -> nn.Module:
    """The part of an input that makes the vectors of words: its field `words`, or itself."""
    words = getattr(layer, "words", None)
    return words if isinstance(words, nn.Module) else layer


def from_lexicon(layer: nn.Module, name: str, words: int):
    """Arrays `name` of a layer's collection "lexicon", in the shapes of
    `layer.lexicon_shapes(words)`. If the collection is missing while parameters are initialised,
    the arrays are ones.

    Raises:
        InputError: the lexicon is missing, or is of another vocabulary or other settings.
    """
    expected = layer.lexicon_shapes(words)[name]
    if not layer.has_variable("lexicon", name):
        # Inside `nn.remat` and similar transforms, flax runs `setup` without is_initializing().
        tried = layer.is_mutable_collection("params") and not layer.variables.get("params")
        if layer.is_initializing() or tried:
            return jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), expected)
        raise InputError(
            f"{type(layer).__name__} needs the {name} of its words: pass apply"
            ' {"params": ..., "lexicon": lexicon(...)}'
        )
    arrays = layer.get_variable("lexicon", name)
    sizes, sizes_of_arrays = _sizes(name, expected), _sizes(name, arrays)
    for part in sizes | sizes_of_arrays:
        if sizes.get(part) != sizes_of_arrays.get(part):
            wish, got = (part_sizes.get(part, "nothing") for part_sizes in (sizes, sizes_of_arrays))
            raise InputError(
                f"the lexicon's {part} must be {wish}, got {got}: make it of the layer's {words:,}"
                " words, by lexicon(vocabulary, layer.lexicon_spec)"
            )
    return arrays


def _sizes(name, arrays):
    """Descriptions of the shapes of arrays, such as {"spelling lengths": "of shape [10]"}."""
    leaves = jax.tree_util.tree_leaves_with_path({name: arrays})
    return {
        jax.tree_util.keystr(path, simple=True, separator=" "): f"of shape {list(jnp.shape(leaf))}"
        for path, leaf in leaves
    }


def uniform(bound: float) -> Callable:
    """An initializer: uniform between -bound and bound."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


class _WithRate(nn.Module):
    rate: float

    def __post_init__(self):
        super().__post_init__()
        check_rates(self, "rate")


class Dropout(_WithRate):
    """Zeroes entries with probability `rate` and divides the others by 1 - rate (Srivastava et al.
    2014).

    The key comes from the rng stream "dropout".

    Attributes:
        rate: the probability.
        locked: draw one mask for all steps of `x [rows, time, features]` (Gal & Ghahramani 2016;
            Merity et al. 2018, section 4.2). Vectors without a time axis, `x [rows, features]`, are
            one step: under the same key they drop the same entries as every step of a sequence.

    Raises:
        InputError: a rate outside [0, 1), or `row_ids` that are not one whole number per row.
    """

    locked: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, row_ids: jax.Array | None = None, *, train: bool) -> jax.Array:
        """Drops entries of `x [rows, ...]`; `row_ids [rows]` are the rows' numbers in the
        update, by default 0, 1, 2 …
        """
        x = floats("x", x, ...)
        row_ids = None if row_ids is None else whole_numbers("row_ids", row_ids, len(x))
        return drop(x, self.mask(x, row_ids, train=train), self.rate)

    def mask(self, x: jax.Array, row_ids: jax.Array | None = None, *, train: bool) -> Mask | None:
        """The mask for `x`, for callers that fuse `drop` with other operations; None if nothing is
        dropped.
        """
        if not train or not self.rate:
            return None
        ids = jnp.arange(len(x)) if row_ids is None else row_ids
        shape = (1, *x.shape[2:]) if self.locked and x.ndim > 2 else x.shape[1:]
        seeds = row_seeds(self.make_rng("dropout"), ids)
        places = positions(shape, tied(jnp.uint32(0), seeds))
        zero = tied(jnp.zeros((), x.dtype), seeds)
        return Mask(keep_mask(seeds, places, self.rate), zero)


class WordDropout(_WithRate):
    """Drops words: all vectors of a word, wherever it stands, become 0 with probability `rate`; the
    others are divided by 1 - rate.

    Gal & Ghahramani 2016; the embedding dropout of Merity et al. 2018, section 4.3. The mask is a
    hash of the word's id, so it never exists for the whole vocabulary. Its key, from the rng stream
    "dropout", does not depend on rows: all rows of an update drop the same words.

    Raises:
        InputError: a rate outside [0, 1).
    """

    @nn.compact
    def __call__(self, vectors: jax.Array, tokens: jax.Array, *, train: bool) -> jax.Array:
        """Drops words from `vectors [..., features]`, the vectors of the words `tokens [...]`."""
        if not train or not self.rate:
            return vectors
        seeds = shared_seeds(self.make_rng("dropout"))
        mask = keep_mask(seeds, tokens.astype(jnp.uint32), self.rate)
        return vectors * jnp.where(mask, 1 / (1 - self.rate), 0).astype(vectors.dtype)[..., None]


class WeightDropout(_WithRate):
    """Drops entries of a matrix of parameters with probability `rate` and divides the others by 1 -
    rate.

    DropConnect (Wan et al. 2013), as in Merity et al. 2018, section 2: one mask for all rows of an
    update and all time steps.

    Raises:
        InputError: a rate outside [0, 1).
    """

    @nn.compact
    def __call__(self, matrix: jax.Array, *, train: bool) -> jax.Array:
        """The matrix to compute with, of the same shape."""
        if not train or not self.rate:
            return matrix
        mask = keep_mask(shared_seeds(self.make_rng("dropout")), positions(matrix.shape), self.rate)
        return jnp.where(mask, matrix / (1 - self.rate), 0)


def norms(v: jax.Array, axis: int) -> jax.Array:
    """The Euclidean norms of the vectors along `axis`: `v [n, m]` with axis 0 gives `[m]`."""
    return jnp.sqrt(jnp.sum(v * v, axis=axis))


def weight_norm(v: jax.Array, g: jax.Array, axis: int = 0) -> jax.Array:
    """`g v / |v|`, equation 2 of Salimans & Kingma 2016: every vector along `axis` of `v [n, m]`
    has the direction of v and the length `g`, `[m]` with axis 0.

    A layer initialised with g = `norms(v, axis)` starts with the weights v.
    """
    return v * jnp.expand_dims(g / norms(v, axis), axis)
