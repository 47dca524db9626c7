"""One LSTM layer as a function of arrays. Several implementations, called paths, give the same
numbers.

`scan` runs on every device: one matrix product for the inputs of all steps, then a loop over time
that adds the products of hidden states. Its backward pass is written by hand: a loop finds the
gradients of the gates, and each matrix gets its gradient from one product over all steps, where
differentiating the loop would add up one product a step. Products of inputs, gates and gradients
follow each other in the same memory. `cudnn` calls NVIDIA's kernel.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import rnn

from adaptive_jax.errors import InputError, check_known
from adaptive_jax.numerics.platforms import platform, present
from adaptive_jax.numerics.products import halved, wide

PATHS = ("auto", "scan", "cudnn")
FEW_ROWS = 48  # rows of a step's product, up to which Eigen is the faster one
_barrier = jax.lax.optimization_barrier


class Weights(NamedTuple):
    """Parameters of a layer of width H; columns are the gates i, f, g, o in turn, H each.

    Attributes:
        input: `[features, 4 H]`.
        recurrent: `[H, 4 H]`.
        bias: `[4 H]`.
    """

    input: jax.Array
    recurrent: jax.Array
    bias: jax.Array


class State(NamedTuple):
    """What a layer hands on from step to step.

    Attributes:
        hidden: `[rows, H]` in the layer's dtype.
        cell: `[rows, H]`, float32.
    """

    hidden: jax.Array
    cell: jax.Array


def zero_state(rows: int, width: int, dtype=jnp.float32) -> State:
    """The state before the first step."""
    return State(jnp.zeros((rows, width), dtype), jnp.zeros((rows, width), _wide(dtype)))


def lstm(
    x: jax.Array, weights: Weights, state: State, starts=None, path: str = "auto"
) -> tuple[jax.Array, State]:
    """A layer of LSTM (Hochreiter & Schmidhuber 1997, with the forget gate of Gers et al. 2000).

        i, f, o = sigmoid(…), g = tanh(…) of x_t input + h_(t-1) recurrent + bias
        c_t = f c_(t-1) + i g,  h_t = o tanh(c_t)

    Args:
        x: `[rows, time, features]`; its dtype is that of the products. Sums and cells are float32.
        weights: float32.
        state: from `zero_state`, or what a call before returned.
        starts: bool `[rows, time]`, where a token begins with a state of zeros; None: nowhere.
        path: one of `PATHS`. "auto" takes cudnn where it can compute this.

    Returns:
        Hidden states `[rows, time, H]` in the dtype of `x`, and the state after the last step.

    Raises:
        InputError: the path is unknown or cannot compute this.
    """
    check_known(f"body.path={path!r}", path, PATHS)
    refusal = _cudnn_refusal(x.dtype, starts)
    if path == "cudnn" and refusal:
        raise InputError(f"body.path='cudnn' {refusal}: choose body.path='scan'")
    if path == "scan" or refusal:
        keep = None if starts is None else ~jnp.asarray(starts).T[..., None]
        hidden, state = _scan(jnp.swapaxes(x, 0, 1), weights, state, keep)
        return jnp.swapaxes(hidden, 0, 1), state
    rows, time, features = x.shape
    width = weights.recurrent.shape[0]
    given = (
        x,
        state.hidden[None],
        state.cell[None],
        pack_for_cudnn(weights),
        jnp.full(rows, time, jnp.int32),
    )
    hidden, *state = rnn.lstm(*given, features, width, 1, 0.0, False)
    return hidden, State(*(each[0] for each in state))


def pack_for_cudnn(weights: Weights) -> jax.Array:
    """One vector of all parameters as cuDNN reads them: matrices `[4 H, …]` row after row, then
    its two biases.
    """
    matrices = [weights.input.T.ravel(), weights.recurrent.T.ravel()]
    return jnp.concatenate([*matrices, weights.bias, jnp.zeros_like(weights.bias)])


def _cudnn_refusal(dtype, starts):
    """Why cuDNN cannot compute this, as the end of a sentence; empty if it can."""
    if platform() != "gpu":
        return f"needs a GPU, and this is a {platform()}"
    if not present():
        return "needs its own library and GPU to be compiled"
    if starts is not None:
        return "does not support segments"
    if dtype != jnp.float32:
        return f"computes in float32, not {dtype}"
    return ""


def _wide(dtype):
    """The dtype of sums and cells."""
    return jnp.promote_types(dtype, jnp.float32)


@jax.custom_vjp
def _scan(x, weights, state, keep):
    """`lstm` with time first: `x [time, rows, features]`; `keep [time, rows, 1]`, False where a
    state of zeros begins, or None.
    """
    return _forward(x, weights, state, keep)[0]


def _dot(a, b, axis_of_a=1, axis_of_b=0):
    """The product of two matrices over these axes, in their dtype, summed in the wide one."""
    if halved(a):
        return wide(a if axis_of_a else a.T, b.T if axis_of_b else b)
    return jax.lax.dot_general(
        a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=_wide(a.dtype)
    )


def _step_product(a, b):
    """`a @ b` inside the loop over time.

    XLA on a CPU gives products to YNNPACK, which in float32 takes a third longer than Eigen for a
    few rows. A left side that lies transposed goes to Eigen; the barrier stops XLA from transposing
    it back.
    """
    eigen = platform() == "cpu" and a.dtype == jnp.float32 and len(a) < FEW_ROWS
    return _dot(_barrier(a.T), b, axis_of_a=0) if eigen else _dot(a, b)


def _flat(a):
    """`[time, rows, width]` to `[time * rows, width]`."""
    return a.reshape(-1, a.shape[-1])


def _kept(keep, at, *arrays):
    return arrays if keep is None else tuple(jnp.where(keep[at], a, 0) for a in arrays)


def _put(array, at, row):
    """`array` with this row at `at`, in the same memory."""
    return jax.lax.dynamic_update_index_in_dim(array, row, at, 0)


def _forward(x, weights, state, keep):
    dtype = x.dtype
    recurrent = weights.recurrent.astype(dtype)
    pushed = _dot(_flat(x), weights.input.astype(dtype)).reshape(*x.shape[:2], -1)

    def step(at, loop):
        before, (hiddens, cells, gates) = (
            loop  # what later steps of `gates` hold is still the product of their inputs
        )
        hidden, cell = _kept(keep, at, *before)
        i, f, g, o = jnp.split(
            gates[at] + weights.bias[None] + _step_product(hidden, recurrent), 4, axis=1
        )
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        cell = f * cell + i * g
        hidden = (o * jnp.tanh(cell)).astype(dtype)
        gates = _put(gates, at, jnp.concatenate([i, f, g, o], axis=1))
        return (hidden, cell), (_put(hiddens, at, hidden), _put(cells, at, cell), gates)

    hiddens, cells = (jnp.zeros((len(x), *a.shape), a.dtype) for a in state)
    after, (hidden, cells, gates) = jax.lax.fori_loop(
        0, len(x), step, (tuple(state), (hiddens, cells, pushed))
    )
    return (hidden, State(*after)), (x, weights, state, keep, hidden, cells, gates.astype(dtype))


def _backward(saved, gradient):
    x, weights, state, keep, hidden, cells, gates = saved
    of_hiddens, of_state = gradient
    dtype, wide = x.dtype, cells.dtype
    back = _barrier(weights.recurrent.astype(dtype).T)

    def step(number, loop):
        (of_hidden, of_cell), gates = (
            loop  # what later steps of `gates` hold is the gradient of their sums
        )
        at = len(x) - 1 - number
        i, f, g, o = jnp.split(gates[at].astype(wide), 4, axis=1)
        (before,) = _kept(keep, at, jnp.where(at > 0, cells[at - 1], state.cell))
        squashed = jnp.tanh(cells[at])
        of_hidden += of_hiddens[at]
        of_cell = _barrier(of_cell + of_hidden * o * (1 - squashed**2))
        of_i, of_f, of_g, of_o = of_cell * g, of_cell * before, of_cell * i, of_hidden * squashed
        of_sums = [of_i * i * (1 - i), of_f * f * (1 - f), of_g * (1 - g**2), of_o * o * (1 - o)]
        # All that is made of the gates becomes one array before it takes their place: else XLA
        # copies `gates` at every step.
        made = _barrier(jnp.concatenate([*of_sums, of_cell * f], axis=1))
        of_sums, of_cell = made[:, : gates.shape[2]].astype(dtype), made[:, gates.shape[2] :]
        return _kept(keep, at, _step_product(of_sums, back), of_cell), _put(gates, at, of_sums)

    after = of_state.hidden.astype(wide), of_state.cell
    of_state, of_sums = jax.lax.fori_loop(0, len(x), step, (after, gates))
    befores = jnp.concatenate([state.hidden[None], hidden[:-1]])
    befores = befores if keep is None else jnp.where(keep, befores, 0)
    flat = _flat(of_sums)
    of_weights = (
        _dot(_flat(x), flat, 0, 0),
        _dot(_flat(befores), flat, 0, 0),
        jnp.sum(flat, axis=0, dtype=wide),
    )
    of_weights = Weights(*(a.astype(b.dtype) for a, b in zip(of_weights, weights, strict=True)))
    of_x = _dot(flat, weights.input.astype(dtype), 1, 1).reshape(x.shape).astype(dtype)
    return of_x, of_weights, State(of_state[0].astype(dtype), of_state[1]), None


_scan.defvjp(_forward, _backward)
