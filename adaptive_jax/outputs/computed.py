"""Output tables whose vectors are computed from the input's table or from the spelling of words.

Like the tables of `adaptive_jax.outputs.tables` they have a method `bands()`. `compose` computes
the vectors of all words once per update or evaluation and stores them in the collection "tables",
see `adaptive_jax.model.composition`; otherwise `bands` computes them.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.errors import InputError, check_at_least, check_known, check_rates
from adaptive_jax.numerics import dropout
from adaptive_jax.numerics.arrays import look_up
from adaptive_jax.numerics.bands import Band, band_sizes
from adaptive_jax.numerics.layers import ACTIVATIONS, uniform, word_layer
from adaptive_jax.outputs.tables import check_bands

BIASES = ("none", "own", "predicted")
_matrix = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")


class ComputedTable(nn.Module):
    """Base class of the tables in this file, which define `vectors(words, train)`.

    Attributes:
        features: width of the hidden states, and of the vectors.
        bias: of every word: "none"; "own", a parameter; or "predicted", `tanh(w · vector + a)`
            (GroC 2020, equation 5, whose public code also drops entries of the vector).
        source: the input from whose vectors the table is computed, if there is one.
        dropout: the rate of dropout on the source's vectors.
    """

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, features=self.features)
        check_known(f"bias={self.bias!r}", self.bias, BIASES)
        if hasattr(self, "source"):
            check_rates(self, "dropout")
            check_bands("source", self.source)

    def words(self) -> int:
        """The number of words."""
        return self.source.vocabulary_size

    def bands(self, *, train: bool = False) -> list[Band]:
        """The only band, `[words, features]`: stored by `compose`, or computed now, with dropout if
        `train`.
        """
        words = self.words()
        vectors, bias = self._tables(jnp.arange(words), train)
        if self.bias == "own":
            bias = self.own_bias
        return [Band(vectors[:words], None, None if bias is None else bias[:words])]

    def compose(self, words: jax.Array, *, train: bool = False) -> None:
        """Stores the vectors of `words [n]`, and their predicted biases, if any, in the collection
        "tables".
        """
        vectors, bias = self._tables(words, train)
        self.put_variable("tables", "vectors", vectors)
        if bias is not None:
            self.put_variable("tables", "bias", bias)

    def _tables(self, words, train):
        """Vectors of `words [n]`, and their predicted biases or None; computed unless "tables" has
        them.
        """
        vectors, bias = (self.get_variable("tables", name) for name in ("vectors", "bias"))
        if vectors is None:
            vectors = self.vectors(words, train)
        if bias is None and self.bias == "predicted":
            weights, offset = self.bias_weights
            bias = jnp.tanh(vectors.astype(weights.dtype) @ weights[:, 0] + offset)
        return vectors, bias

    def _of_source(self, table, words):
        """Rows of the source's `table` for `words [n]`; a table that the source composed has only
        these rows.
        """
        composed = word_layer(self.source).has_variable("tables", "vectors")
        return table if composed else look_up(table, words)

    def _set_up_bias(self):
        if self.bias == "own":
            self.own_bias = self.param("bias", nn.initializers.zeros, (self.words(),), jnp.float32)
        if self.bias == "predicted":
            weights = self.param("bias_weights", _matrix, (self.features, 1), jnp.float32)
            self.bias_weights = weights, self.param("bias", nn.initializers.zeros, (), jnp.float32)

    def _mask(self, rate, train):
        """Dropout factors `[1, features]` that all words and tokens of an update share."""
        if not train or not rate:
            return 1.0
        seeds = dropout.shared_seeds(self.make_rng("dropout"))
        mask = dropout.keep_mask(seeds, dropout.positions((self.features,)), rate)
        return jnp.atleast_2d(mask).astype(jnp.float32) / (1 - rate)


class MappedTable(ComputedTable):
    """A map of the input's table E, with few parameters that all words share.

        bilinear:   E W + b                                    (Gulordava et al. 2018)
        residual:   E_j = g(E_(j-1) W_j + b_j) + E,  E_0 = E   (Pappas & Henderson 2019;
                                                               GroC 2020, equation 4)

    Attributes:
        source: the module whose one band is E.
        features: width of the hidden states, and of E.
        cutoffs: divide the table into bands of its width, for an adaptive softmax; empty: one band.
        form: "bilinear" or "residual".
        depth: layers of the residual form; 0 is E itself.
        activation: g, the activation of the residual form: relu, selu, tanh or sigmoid.
        dropout: rate of dropout on E, the input's table. All words and tokens of an update share
            one mask over the features, as in the variational dropout of GroC 2020, section 3.2.
        layer_dropout: rate of dropout on the input of each map, each with a mask like that of
            `dropout`.
        bias: of every word: "none"; "own", a parameter; or "predicted", `tanh(w · vector + a)`
            (GroC 2020, equation 5, whose public code also drops entries of the vector).

    Raises:
        InputError: a source without bands, with several or of another width; cutoffs outside of the
            vocabulary; a name or a number out of range.
    """

    source: nn.Module
    features: int
    cutoffs: Sequence[int] = ()
    form: str = "residual"
    depth: int = 1
    activation: str = "selu"
    dropout: float = 0.0
    layer_dropout: float = 0.0
    bias: str = "none"

    def __post_init__(self):
        super().__post_init__()
        check_at_least(0, depth=self.depth)
        check_rates(self, "layer_dropout")
        check_known(f"form={self.form!r}", self.form, ("bilinear", "residual"))
        if self.form == "bilinear" and self.depth != 1:
            raise InputError(f"depth={self.depth} must be 1 with form='bilinear', which is one map")
        check_known(f"activation={self.activation!r}", self.activation, ACTIVATIONS)

    def setup(self):
        bands = self.source.bands()
        projected = any(band.projection is not None for band in bands)
        shapes = [tuple(band.table.shape[1:]) for band in bands]
        if shapes != [(self.features,)] or projected:
            widths = ", ".join(str(width) for (width,) in shapes) + " and a projection" * projected
            raise InputError(
                f"output.table.name='mapped' takes an input of one band of width {self.features},"
                f" and this one has width {widths}: use input.name='lookup' with input.width=0,"
                " 'char_cnn' or 'groc', and a body as wide"
            )
        square, layers = (self.features, self.features), []
        start = uniform(self.features**-0.5)  # of biases, as torch starts those of a linear layer
        for i in range(1 if self.form == "bilinear" else self.depth):
            kernel = self.param(f"kernel_{i}", _matrix, square, jnp.float32)
            layers.append((kernel, self.param(f"kernel_bias_{i}", start, square[:1], jnp.float32)))
        self.layers = layers
        self._set_up_bias()

    def bands(self, *, train: bool = False) -> list[Band]:
        """See `ComputedTable`; with cutoffs, frequent words first."""
        [band] = super().bands(train=train)
        return band.split(band_sizes(self.words(), self.cutoffs))

    def vectors(self, words: jax.Array, train: bool) -> jax.Array:
        """Vectors `[n, features]` of `words [n]`."""
        [(table, *_)] = self.source.bands()
        table = vectors = self._of_source(table, words) * self._mask(self.dropout, train)
        for kernel, bias in self.layers:
            vectors = (vectors * self._mask(self.layer_dropout, train)) @ kernel + bias[None]
            if self.form == "residual":
                vectors = ACTIVATIONS[self.activation](vectors) + table
        return vectors


class AssembledTable(ComputedTable):
    """The projected bands of the input, concatenated to one table for a full softmax.

    This reproduces row "Adaptive" of GroC 2020, Table 2: an adaptive embedding (Baevski & Auli
    2019) without their adaptive softmax. Vectors are multiplied by sqrt(features), as in GroC's
    public code.

    Attributes:
        source: the module whose bands are assembled.
        features: width of the hidden states and of the projected bands.
        dropout: rate of dropout on the table, as in `MappedTable`.
        bias: of every word: "none"; "own", a parameter; or "predicted", as in `MappedTable`.

    Raises:
        InputError: a source without bands, or with bands of another width; a name or a number out
            of range.
    """

    source: nn.Module
    features: int
    dropout: float = 0.0
    bias: str = "none"

    def setup(self):
        widths = {band.features for band in self.source.bands()}
        if widths != {self.features}:
            raise InputError(
                "output.table.name='assembled' takes an input whose vectors are as wide as the"
                f" hidden states, {self.features}, and this one has width"
                f" {', '.join(map(str, sorted(widths)))}: use a body with output_width=0"
            )
        self._set_up_bias()

    def vectors(self, words: jax.Array, train: bool) -> jax.Array:
        """Vectors `[n, features]` of `words [n]`."""
        table = jnp.concatenate([band.vectors() for band in self.source.bands()])
        scale = self._mask(self.dropout, train) * self.features**0.5
        return self._of_source(table, words) * scale


class ComposedTable(ComputedTable):
    """Vectors from spelling, by a character CNN that belongs to the output, with a linear
    correction for every word.

        CNN(letters of w) + M correction_w         (Józefowicz et al. 2016, section 3.2)

    Attributes:
        cnn: the CNN; in a config, a group with the keys of
            `adaptive_jax.inputs.char_cnn.CharacterCNN`.
        features: width of the hidden states, and of the CNN's vectors.
        correction: width of a word's correction (128 in the paper), which a matrix M that all words
            share maps to `features`; 0: no correction.
        bias: of every word: "none"; "own", a parameter; or "predicted", `tanh(w · vector + a)`, as
            in `MappedTable`.

    Raises:
        InputError: a name or number out of range.
    """

    cnn: nn.Module
    features: int
    correction: int = 128
    bias: str = "none"

    def __post_init__(self):
        super().__post_init__()
        check_at_least(0, correction=self.correction)
        if self.cnn.features != self.features:
            raise InputError(
                f"features={self.features} must be those of the CNN, {self.cnn.features}"
            )

    @property
    def lexicon_spec(self) -> dict:
        """Lexicon arrays that the layer reads, see `adaptive_jax.data.vocabulary.lexicon`."""
        return {"cnn": self.cnn.lexicon_spec}

    def lexicon_shapes(self, words: int) -> dict:
        """Shapes and dtypes of the arrays in `lexicon_spec`, for this number of words."""
        return {"cnn": self.cnn.lexicon_shapes(words)}

    def setup(self):
        if self.correction:
            shape = self.words(), self.correction
            self.corrections = self.param("corrections", nn.initializers.zeros, shape, jnp.float32)
            shape = self.correction, self.features
            self.correction_map = self.param("correction_map", _matrix, shape, jnp.float32)
        self._set_up_bias()

    def words(self) -> int:
        """The number of words."""
        return self.cnn.vocabulary_size

    def vectors(self, words: jax.Array, train: bool) -> jax.Array:
        """Float32 vectors `[n, features]` of `words [n]`."""
        vectors = self.cnn(words).astype(jnp.float32)
        if self.correction:
            vectors += look_up(self.corrections, words) @ self.correction_map
        return vectors
