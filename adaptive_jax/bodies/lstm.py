"""LSTMs: plain, and with the dropouts and penalties of AWD-LSTM."""

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.bodies.blocks import (
    ParameterGroup,
    Rows,
    as_stored,
    continued,
    gathered_twice,
    save_for_backward,
)
from adaptive_jax.bodies.positions import positions_in_segments
from adaptive_jax.errors import InputError, check_at_least, check_rates, check_within
from adaptive_jax.numerics.arrays import check_dtype, floats
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.layers import Dropout, WeightDropout, uniform
from adaptive_jax.numerics.meshes import axes_of, pvary, vary_alike
from adaptive_jax.numerics.products import bits_on_cpu, flat, of_bits, sum_dtype
from adaptive_jax.numerics.step_products import dot, in_blocks, over_rows, step_product

_barrier = jax.lax.optimization_barrier


class Weights(NamedTuple):
    """Parameters of a layer of width H. Columns are the gates i, f, g, o in this order, H each.

    Attributes:
        input: `[features, 4 H]`.
        recurrent: `[H, 4 H]`.
        bias: `[4 H]`.
    """

    input: jax.Array
    recurrent: jax.Array
    bias: jax.Array


class State(NamedTuple):
    """Recurrent state of a layer.

    Attributes:
        hidden: `[rows, H]` in the layer's dtype.
        cell: `[rows, H]`, float32.
    """

    hidden: jax.Array
    cell: jax.Array


def lstm(x: jax.Array, weights: Weights, state: State, starts=None) -> tuple[jax.Array, State]:
    """An LSTM layer (Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000).

        i, f, o = sigmoid(…), g = tanh(…) of x_t input + h_(t-1) recurrent + bias
        c_t = f c_(t-1) + i g,  h_t = o tanh(c_t)

    One matrix product computes the inputs of all steps; a loop over time adds the products of
    hidden states. The backward pass is written by hand: a loop computes the gradients of the gates,
    and the gradient of each matrix is one product over all steps, where autodiff of the loop would
    add up one product per step. Products of inputs, gates and their gradients share one buffer.

    Args:
        x: `[rows, time, features]`; its dtype is that of the products. Sums, gates and
            cells are float32.
        weights: float32.
        state: the state before the first step: zeros, or the state that an earlier call returned.
        starts: bool `[rows, time]`, True where a token begins with a state of zeros; None: nowhere.

    Returns:
        Hidden states `[rows, time, H]` in the dtype of `x`, and the state after the last step.
    """
    x, weights, state, starts = vary_alike((x, weights, state, starts))
    keep = None if starts is None else ~jnp.asarray(starts).astype(bool).T[..., None]
    hidden, state = _scan(jnp.swapaxes(x, 0, 1), weights, state, keep)
    return jnp.swapaxes(hidden, 0, 1), state


class LSTM(nn.Module):
    """A stack of LSTM layers.

    Every weight and bias of a layer of width H starts uniform between -1/sqrt(H) and 1/sqrt(H), as
    in PyTorch. The carry is a tuple of one `State` per layer. It continues a stream in training and
    is the memory of decoding, so rows can have any length.

    Attributes:
        features: width of the vectors that the first layer takes.
        widths: width of each layer's hidden states, such as (1150, 1150, 400); the last is the
            width that the output takes.
        dropout: rate after each layer, with a new mask at every step.
        biases: bias vectors per layer, 1 or 2. PyTorch has two, which it only ever adds: the
            function is the same, but both get the gradient. Their sum moves twice as far, counts
            twice in the norm for clipping, and starts with twice the variance.
        dtype: of the matrix products and hidden states; parameters, cells and sums are float32.
        gather: turns a layer's stored parameters into the ones it computes with; see
            `adaptive_jax.bodies.blocks`.

    Raises:
        InputError: no widths, or a number out of range.
    """

    features: int = 256
    widths: Sequence[int] = (512, 256)
    dropout: float = 0.1
    biases: int = 1
    dtype: jnp.dtype = jnp.float32
    gather: Callable = as_stored

    locked: ClassVar[bool] = False  # one mask for all steps

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, features=self.features)
        if not isinstance(self.widths, Sequence) or not self.widths:
            raise InputError(f"widths={self.widths!r} must be one width for each layer")
        check_at_least(1, **{f"widths[{i}]": width for i, width in enumerate(self.widths)})
        check_rates(self, "dropout")
        if self.biases not in (1, 2):
            raise InputError(f"biases={self.biases!r} must be 1 or 2")
        check_dtype(self.dtype)

    @property
    def output_features(self) -> int:
        """Width of the hidden states."""
        return self.widths[-1]

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """The groups of parameters to gather, one per layer, in float32 as gradients are summed in
        it.
        """
        kinds = "input", "recurrent", *("bias", "recurrent_bias")[: self.biases]
        return tuple(
            ParameterGroup(tuple(f"{kind}_{i}" for kind in kinds)) for i in range(len(self.widths))
        )

    @nn.compact
    def __call__(
        self, vectors: jax.Array, carry=(), batch: Batch | None = None, *, train: bool = False
    ):
        """Maps vectors `[rows, time, features]` and a carry to `(hidden states [rows, time,
        widths[-1]], next carry)`.

        Args:
            carry: `()` for rows that stand alone, and `()` is returned; or a `State` for each
                layer, which the rows continue.
            batch: its `row_ids` (for dropout), `segment_ids`, `reset` and `weights` (for penalties)
                are used. The state is zeros at the start of each segment and of rows that are
                reset. None: rows 0, 1, 2 … of one segment each.

        Raises:
            InputError: shapes that do not fit, or segments together with a carry.
        """
        vectors = floats("vectors", vectors, "rows", "time", self.features)
        rows = Rows.of(batch, vectors, carry)
        starts = None if rows.segment_ids is None else rows.positions() == 0
        states = list(self.initial_carry(len(vectors)))
        if len(carry):
            states = continued(carry, states, rows)
        drops = [
            Dropout(rate, self.locked, name=f"dropout_{i}") for i, rate in enumerate(self._rates())
        ]
        hidden = drops[0](vectors.astype(self.dtype), rows.ids, train=train)
        for i, drop in enumerate(drops[1:]):
            raw, states[i] = self._layer(i, train)(self, hidden, states[i], starts)
            hidden = drop(raw, rows.ids, train=train)
        if train:
            weights = None if batch is None else batch.weights
            self._penalise(raw, hidden, rows.segment_ids, weights)
        return hidden, tuple(states) if len(carry) else ()

    def initial_carry(self, rows: int) -> tuple[State, ...]:
        """The training carry before the first batch of a stream: zeros."""
        check_at_least(1, rows=rows)
        dtypes = State(self.dtype, sum_dtype(self.dtype))
        return tuple(
            State(*(jnp.zeros((rows, width), dtype) for dtype in dtypes)) for width in self.widths
        )

    def cache(self, rows: int, length: int) -> tuple[State, ...]:
        """An empty decoding memory, the same for every length."""
        return self.initial_carry(rows)

    def _rates(self):
        """Rates of dropout on the input and after each layer."""
        return (0.0, *[self.dropout] * len(self.widths))

    def _recurrent(self, i, matrix, train):
        """The recurrent matrix that layer `i` computes with."""
        return matrix

    def _penalise(self, raw, hidden, segment_ids, weights):
        """Sows penalties on the last layer's hidden states, before and after dropout."""

    def _layer(self, i, train):
        """Layer `i` as a function of this module, vectors, a state and starts."""

        def layer(module, hidden, state, starts):
            return lstm(hidden, module._weights(i, train), state, starts)

        if self.gather is as_stored:
            return layer
        names = self.parameter_groups[i].names

        def gather(params):
            matrices = {name: self.gather(name, params[name]) for name in names}
            return dict(params) | matrices

        return gathered_twice(layer, gather)

    def _weights(self, i, train):
        width, inputs = self.widths[i], (self.features, *self.widths)[i]

        def param(name, *shape):
            return self.param(f"{name}_{i}", uniform(width**-0.5), shape, jnp.float32)

        bias = sum(param(name, 4 * width) for name in ("bias", "recurrent_bias")[: self.biases])
        return Weights(
            param("input", inputs, 4 * width),
            self._recurrent(i, param("recurrent", width, 4 * width), train),
            bias,
        )


class AWDLSTM(LSTM):
    """The LSTM of Merity et al. 2018: dropout of recurrent weights, dropout with one mask for all
    steps, and two penalties.

    Both penalties are means of squares, as in the authors' code, and not norms, as in the paper.
    They are sown per token: the weighted sum over a batch, divided by its tokens, is the mean.
    Embedding dropout is `word_dropout` of the input.

    Attributes: as those of `LSTM`, and
        input_dropout: rate on the input vectors, with one mask for all steps of a row.
        hidden_dropout: rate between layers, likewise.
        dropout: rate after the last layer, likewise.
        weight_drop: rate on the entries of the recurrent matrices, with one mask per update.
        ar: weight of activation regularisation (the paper's alpha), the mean square of the hidden
            states after dropout.
        tar: weight of temporal activation regularisation (beta), the mean square of the difference
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
        check_within("[0, inf)", ar=self.ar, tar=self.tar)

    def _rates(self):
        return (self.input_dropout, *[self.hidden_dropout] * (len(self.widths) - 1), self.dropout)

    def _recurrent(self, i, matrix, train):
        return WeightDropout(self.weight_drop, name=f"weight_dropout_{i}")(matrix, train=train)

    def _penalise(self, raw, hidden, segment_ids, weights):
        if self.ar:
            squares = jnp.square(hidden.astype(jnp.float32))
            self.sow("penalties", "ar", self.ar * jnp.mean(squares, axis=-1))
        if self.tar:
            changes = _squared_changes(raw.astype(jnp.float32), segment_ids, weights)
            self.sow("penalties", "tar", self.tar * changes)


def _squared_changes(hidden, segment_ids, weights):
    """The mean square of each hidden state's difference from the one before, `[rows, time]`; 0 for
    the first token of a segment.

    A row of T tokens has T - 1 pairs, so each pair is scaled by T / (T - 1): the mean over tokens
    is then the mean over pairs.
    """
    shape = hidden.shape[:2]
    weights = jnp.asarray(jnp.ones(shape) if weights is None else weights, hidden.dtype)
    segment_ids = jnp.zeros(shape, jnp.int32) if segment_ids is None else segment_ids
    pairs = positions_in_segments(segment_ids) > 0
    squares = jnp.mean(jnp.square(jnp.diff(hidden, axis=1, prepend=hidden[:, :1])), axis=-1)
    tokens, pair_weights = (
        jnp.sum(summands, axis=1, keepdims=True)
        for summands in (weights, weights * pairs.astype(weights.dtype))
    )
    scale = tokens / jnp.where(pair_weights > 0, pair_weights, 1)
    return jnp.where(pairs & (pair_weights > 0), squares * scale, 0)


@jax.custom_vjp
def _scan(x, weights, state, keep):
    """Computes `lstm` with time as the first axis: `x [time, rows, features]`; `keep [time, rows,
    1]` is False where a state of zeros begins, or None.
    """
    return _forward(x, weights, state, keep)[0]


def _reset(keep, time, *arrays):
    return arrays if keep is None else tuple(jnp.where(keep[time], a, 0) for a in arrays)


def _put(array, time, row):
    """`array` with `row` at index `time`, updated in place."""
    return jax.lax.dynamic_update_index_in_dim(array, row, time, 0)


def _forward(x, weights, state, keep):
    dtype = x.dtype
    recurrent = in_blocks(weights.recurrent.astype(dtype), len(x))
    pushed = dot(flat(x), weights.input.astype(dtype)).reshape(*x.shape[:2], -1)

    def step(time, loop):
        # Entries of `gates` for later steps still hold the products of their inputs.
        before, (hiddens, cells, gates) = loop
        hidden, cell = _reset(keep, time, *before)
        recurred = step_product(hidden, recurrent, len(weights.bias))
        i, f, g, o = jnp.split(gates[time] + weights.bias[None] + recurred, 4, axis=1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        cell = f * cell + i * g
        hidden = (o * jnp.tanh(cell)).astype(dtype)
        gates = _put(gates, time, jnp.concatenate([i, f, g, o], axis=1))
        hiddens = _put(hiddens, time, bits_on_cpu(hidden))
        return (hidden, cell), (hiddens, _put(cells, time, cell), gates)

    zeros = [bits_on_cpu(jnp.zeros((len(x), *a.shape), a.dtype)) for a in state]
    hiddens, cells = pvary(zeros, axes_of(x))
    after, (hiddens, cells, gates) = jax.lax.fori_loop(
        0, len(x), step, (tuple(state), (hiddens, cells, pushed))
    )
    saved = save_for_backward((of_bits(hiddens, dtype), cells, gates))
    return (saved[0], State(*after)), (x, weights, state, keep, *saved)


def _backward(saved, gradient):
    x, weights, state, keep, hidden, cells, gates = saved
    d_hiddens, d_state = gradient
    dtype, wide = x.dtype, cells.dtype
    back = _barrier(in_blocks(weights.recurrent.astype(dtype).T, len(x)))

    def step(number, loop):
        # Entries of `gates` for later steps hold the gradients of their preactivations.
        (d_hidden, d_cell), gates = loop
        time = len(x) - 1 - number
        i, f, g, o = jnp.split(gates[time], 4, axis=1)
        (before,) = _reset(keep, time, jnp.where(time > 0, cells[time - 1], state.cell))
        squashed = jnp.tanh(cells[time])
        d_hidden += d_hiddens[time].astype(wide)
        d_cell = _barrier(d_cell + d_hidden * o * (1 - squashed**2))
        d_i, d_f, d_g, d_o = d_cell * g, d_cell * before, d_cell * i, d_hidden * squashed
        d_sums = [d_i * i * (1 - i), d_f * f * (1 - f), d_g * (1 - g**2), d_o * o * (1 - o)]
        # Concatenate all that is computed from the gates before writing it over them; otherwise XLA
        # copies `gates` at every step.
        joined = _barrier(jnp.concatenate([*d_sums, d_cell * f], axis=1))
        d_sums, d_cell = joined[:, : gates.shape[2]], joined[:, gates.shape[2] :]
        d_hidden = step_product(d_sums.astype(dtype), back, hidden.shape[-1])
        return _reset(keep, time, d_hidden, d_cell), _put(gates, time, d_sums)

    after = d_state.hidden.astype(wide), d_state.cell
    d_state, d_sums = jax.lax.fori_loop(0, len(x), step, (after, gates))
    befores = jnp.concatenate([state.hidden[None], hidden[:-1]])
    befores = befores if keep is None else jnp.where(keep, befores, 0)
    gate_gradients = flat(d_sums.astype(dtype))
    d_weights = (
        over_rows(flat(x), gate_gradients),
        over_rows(flat(befores), gate_gradients),
        jnp.sum(gate_gradients, axis=0, dtype=wide),
    )
    d_weights = Weights(*(a.astype(b.dtype) for a, b in zip(d_weights, weights, strict=True)))
    d_x = dot(gate_gradients, weights.input.astype(dtype), 1, 1).reshape(x.shape).astype(dtype)
    return d_x, d_weights, State(d_state[0].astype(dtype), d_state[1]), None


_scan.defvjp(_forward, _backward)
