"""LSTMs: plain, and with the dropouts and penalties of AWD-LSTM."""

from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.bodies.recurrence import PATHS, State, Weights, lstm, zero_state
from adaptive_jax.errors import (
    InputError,
    check_at_least,
    check_known,
    check_not_negative,
    check_rates,
)
from adaptive_jax.numerics.arrays import check_dtype, floats, whole_numbers
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.dropout_layers import Dropout, WeightDropout


class LSTM(nn.Module):
    """Layers of LSTM, one on another.

    Every weight and bias of a layer of width H starts uniform between -1/sqrt(H) and 1/sqrt(H), as
    in PyTorch. The carry is a tuple of one `State` a layer; it is what continues a stream in
    training and what decoding remembers, so a row can be of any length.

    Attributes:
        features: width of the vectors that the first layer takes.
        widths: width of each layer's hidden states, such as (1150, 1150, 400); the last is the
            width that the output takes.
        dropout: rate after each layer, another mask at every step.
        biases: bias vectors of a layer, 1 or 2. PyTorch has two, which are only ever added: the
            function is the same, but both get the gradient. Their sum moves twice as far, counts
            twice in the norm that is clipped, and starts with twice the variance.
        path: how a layer is computed: auto, scan or cudnn, which give the same numbers and differ
            in speed.
        dtype: of the matrix products and hidden states; parameters, cells and sums are float32.

    Raises:
        InputError: no widths, an unknown path, or a number that is out of range.
    """

    features: int = 256
    widths: Sequence[int] = (512, 256)
    dropout: float = 0.1
    biases: int = 1
    path: str = "auto"
    dtype: jnp.dtype = jnp.float32

    locked: ClassVar[bool] = False  # one mask for all steps

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, features=self.features)
        if not isinstance(self.widths, Sequence) or isinstance(self.widths, str) or not self.widths:
            raise InputError(
                f"body.widths={self.widths!r} must be one width for each layer, such as (1150,"
                " 1150, 400)"
            )
        check_at_least(1, **{f"body.widths[{i}]": width for i, width in enumerate(self.widths)})
        check_rates(self, "dropout")
        if self.biases not in (1, 2):
            raise InputError(f"biases={self.biases!r} of a layer: give 1 or 2")
        check_known(f"body.path={self.path!r}", self.path, PATHS)
        check_dtype(self.dtype)

    @property
    def output_features(self) -> int:
        """Width of the hidden states."""
        return self.widths[-1]

    @nn.compact
    def __call__(
        self, vectors: jax.Array, carry=(), batch: Batch | None = None, *, train: bool = False
    ):
        """Vectors `[rows, time, features]` and a carry to `(hidden states [rows, time, widths[-1]],
        next carry)`.

        Args:
            carry: `()`, where every row stands alone, and `()` is returned; or a `State` for each
                layer, which the rows continue.
            batch: its `row_ids` (for dropout), `segment_ids`, `reset` and `weights` (for penalties)
                are read. The state starts anew in each segment, and in rows that are reset. None:
                rows 0, 1, 2 … of one segment each.

        Raises:
            InputError: shapes that do not fit; `batch` has segments, and a carry is given; the path
                cannot compute this.
        """
        vectors = floats("vectors", vectors, "rows", "time", self.features)
        rows, time = vectors.shape[:2]
        row_ids = (
            jnp.arange(rows) if batch is None else whole_numbers("row_ids", batch.row_ids, rows)
        )
        starts = None
        if batch is not None and batch.segment_ids is not None:
            if carry:
                raise InputError(
                    "a carry continues every row as one segment: give no batch.segment_ids, or the"
                    " carry ()"
                )
            starts = _starts(whole_numbers("segment_ids", batch.segment_ids, rows, time))
        states = self._states(carry, rows, None if batch is None else batch.reset)
        drops = [
            Dropout(rate, self.locked, name=f"dropout_{i}") for i, rate in enumerate(self._rates())
        ]
        hidden = drops[0](vectors.astype(self.dtype), row_ids, train=train)
        for i, drop in enumerate(drops[1:]):
            raw, states[i] = lstm(hidden, self._weights(i, train), states[i], starts, self.path)
            hidden = drop(raw, row_ids, train=train)
        if train:
            self._penalise(raw, hidden, batch)
        return hidden, tuple(states) if carry else ()

    def initial_carry(self, rows: int) -> tuple[State, ...]:
        """The training carry before the first batch of a stream: zeros."""
        return tuple(zero_state(rows, width, self.dtype) for width in self.widths)

    def cache(self, rows: int, length: int) -> tuple[State, ...]:
        """An empty decoding memory, which holds tokens without end."""
        return self.initial_carry(rows)

    def _rates(self):
        """Rates of dropout on the input and after each layer."""
        return (0.0, *[self.dropout] * len(self.widths))

    def _recurrent(self, i, matrix, train):
        """The recurrent matrix of layer `i` to compute with."""
        return matrix

    def _penalise(self, raw, hidden, batch):
        """Sows penalties on the last layer's hidden states, before and after dropout."""

    def _weights(self, i, train):
        width, inputs = self.widths[i], (self.features, *self.widths)[i]

        def uniform(key, shape):
            return jax.random.uniform(key, shape, minval=-(width**-0.5), maxval=width**-0.5)

        def param(name, *shape):
            return self.param(f"{name}_{i}", uniform, shape)

        bias = sum(param(name, 4 * width) for name in ("bias", "recurrent_bias")[: self.biases])
        return Weights(
            param("input", inputs, 4 * width),
            self._recurrent(i, param("recurrent", width, 4 * width), train),
            bias,
        )

    def _states(self, carry, rows, reset):
        """The state of each layer before the first step, in a list."""
        zeros = self.initial_carry(rows)
        if not carry:
            return list(zeros)
        if len(carry) != len(zeros):
            raise InputError(
                f"a carry of {len(carry)} states does not fit {len(zeros)} layers: make it with"
                " body.initial_carry"
            )
        keep = jnp.ones((rows, 1), bool) if reset is None else ~jnp.asarray(reset)[:, None]

        def checked(given, zero):
            return jnp.where(keep, floats("carry", given, *zero.shape).astype(zero.dtype), 0)

        return [State(*map(checked, *pair)) for pair in zip(carry, zeros, strict=True)]


class AWDLSTM(LSTM):
    """The LSTM of Merity et al. 2018: dropout of recurrent weights, dropout with one mask for all
    steps, and two penalties.

    Both penalties are means of squares, as in the authors' code, and not norms, as in the paper.
    Each token has its share: the weighted sum over a batch, divided by its tokens, is the mean.
    Embedding dropout is `word_dropout` of the input.

    Attributes: as those of `LSTM`, and
        input_dropout: rate on the input vectors, one mask for all steps of a row.
        hidden_dropout: rate between layers, likewise.
        dropout: rate after the last layer, likewise.
        weight_drop: rate on the entries of the recurrent matrices, one mask an update.
        ar: activation regularisation (the paper's alpha): times the mean square of the hidden
            states after dropout.
        tar: temporal activation regularisation (beta): times the mean square of the difference
            between the hidden states, before dropout, of neighbouring tokens of a segment. A window
            of one token has none.
    """

    features: int = 400
    widths: Sequence[int] = (1150, 1150, 400)
    dropout: float = 0.4
    biases: int = 2
    input_dropout: float = 0.65
    hidden_dropout: float = 0.3
    weight_drop: float = 0.5
    ar: float = 2.0
    tar: float = 1.0

    locked: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        check_rates(self, "input_dropout", "hidden_dropout", "weight_drop")
        check_not_negative(ar=self.ar, tar=self.tar)

    def _rates(self):
        return (self.input_dropout, *[self.hidden_dropout] * (len(self.widths) - 1), self.dropout)

    def _recurrent(self, i, matrix, train):
        return WeightDropout(self.weight_drop, name=f"weight_dropout_{i}")(matrix, train=train)

    def _penalise(self, raw, hidden, batch):
        if self.ar:
            self.sow(
                "penalties",
                "ar",
                self.ar * jnp.mean(jnp.square(hidden.astype(jnp.float32)), axis=-1),
            )
        if self.tar:
            self.sow(
                "penalties", "tar", self.tar * _squared_changes(raw.astype(jnp.float32), batch)
            )


def _starts(segment_ids):
    """Which tokens begin a segment: bool `[rows, time]`."""
    return jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0


def _squared_changes(hidden, batch):
    """The mean square of each hidden state's difference from the one before: `[rows, time]`, 0 for
    a token that has none before it.

    A row of T tokens has T - 1 pairs, so each is scaled by T / (T - 1): the mean over tokens is the
    mean over pairs.
    """
    weights = (
        jnp.ones(hidden.shape[:2]) if batch is None or batch.weights is None else batch.weights
    )
    pairs = jnp.ones(hidden.shape[:2], bool).at[:, 0].set(False)
    if batch is not None and batch.segment_ids is not None:
        pairs = ~_starts(batch.segment_ids)
    squares = jnp.mean(jnp.square(jnp.diff(hidden, axis=1, prepend=hidden[:, :1])), axis=-1)
    tokens, counted = (jnp.sum(each, axis=1, keepdims=True) for each in (weights, weights * pairs))
    return jnp.where(
        pairs & (counted > 0), squares * (tokens / jnp.where(counted > 0, counted, 1)), 0
    )
