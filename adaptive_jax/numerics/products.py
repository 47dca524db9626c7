"""Matrix products, computed in the way that is fastest on the backend.

The gradient of a matrix [256, 1024] over 2,048 vectors is a product [256, 2048] @ [2048, 1024], as
much work as the product itself. It is summed in the matrix's own dtype, float32, even if the
vectors are bfloat16. In a complete update, XLA on a CPU transposes and copies the larger operand,
which doubles the time; `product` avoids this.

On a CPU with bfloat16 instructions, XLA multiplies twice as fast in bfloat16 as in float32, but
only row-major matrices with a float32 result. It converts all others to float32 first, which is
slower than float32 itself. So `wide` makes its operands row-major.

JAX's default for a product of two float32 arrays is TF32, with 10 bits, on an NVIDIA GPU, and one
bfloat16 pass, with 7 bits, on a TPU. So `full_precision` requests float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.numerics.meshes import vary_alike
from adaptive_jax.numerics.platforms import platform


def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """`x [..., n] @ matrix [n, m]`, with the matrix cast to the dtype of x.

    It has no forward-mode derivative.
    """
    return _product(*vary_alike((x, matrix)))


@jax.custom_vjp
def _product(x, matrix):
    if not is_cpu_bfloat16(x):
        return x @ matrix.astype(x.dtype)
    return wide(flat(x), matrix.astype(x.dtype)).astype(x.dtype).reshape(*x.shape[:-1], -1)


def added(vectors: jax.Array, bias: jax.Array) -> jax.Array:
    """`vectors [..., n]` with a float32 bias `[n]` added, in the dtype of the vectors.

    The sum is in float32, and so is the gradient of the bias: in bfloat16, XLA on a CPU would add
    up thousands of tokens slowly and to two digits.
    """
    shape = (1,) * (vectors.ndim - 1) + bias.shape
    return (vectors.astype(bias.dtype) + bias.reshape(shape)).astype(vectors.dtype)


def wide(left: jax.Array, right: jax.Array) -> jax.Array:
    """The product of matrices `[n, k]` and `[k, m]` of one dtype, in float32, or their dtype if
    wider.
    """
    return _of_rows(left, right) if is_cpu_bfloat16(left) else _widened(left, right)


def inner(left: jax.Array, right: jax.Array) -> jax.Array:
    """`left [n, k] @ right [m, k].T`, in the dtype of `wide`.

    The program must not transpose the result: for bfloat16 on a CPU, XLA has no product with a
    column-major result. `wide` would prevent that at the cost of one more copy.
    """
    if is_cpu_bfloat16(left):
        return _widened(_in_rows(left), _in_rows(right.T))
    return _widened(left, right.T)


def is_cpu_bfloat16(array: jax.Array) -> bool:
    """True for bfloat16 on a CPU."""
    return array.dtype == jnp.bfloat16 and platform() == "cpu"


def bits_on_cpu(array: jax.Array) -> jax.Array:
    """The array, or in bfloat16 on a CPU its bits, for a loop that writes parts of it: for each
    part, XLA would convert the whole array to float32 and back.
    """
    return jax.lax.bitcast_convert_type(array, jnp.uint16) if is_cpu_bfloat16(array) else array


def of_bits(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Inverse of `bits_on_cpu`, for this dtype."""
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


def _of_rows(left, right):
    """`wide` with row-major operands and result."""
    return _in_rows(_widened(_in_rows(left), _in_rows(right)))


def _in_rows(matrix):
    return jax.lax.optimization_barrier(matrix.ravel()).reshape(matrix.shape)


def _widened(left, right):
    return jnp.matmul(left, right, preferred_element_type=sum_dtype(left.dtype))


def sum_dtype(dtype) -> jnp.dtype:
    """The dtype in which numbers of `dtype` are summed: float32, or `dtype` if wider."""
    # JAX's promote_types raises under strict promotion.
    return jnp.dtype(np.promote_types(dtype, np.float32))


def flat(x: jax.Array) -> jax.Array:
    """`[..., n]` as a matrix."""
    return x.reshape(-1, x.shape[-1])


def _forward(x, matrix):
    return _product(x, matrix), (x, matrix)


def _backward(saved, gradient):
    x, matrix = saved
    of_x = _product(gradient, matrix.T)
    x, gradient = flat(x), flat(gradient)
    if platform() != "cpu":
        return of_x, jnp.matmul(x.T, gradient, preferred_element_type=matrix.dtype)
    # Transpose the narrower operand, so that the sum over vectors runs along rows; `_of_rows` keeps
    # XLA from undoing it.
    if x.shape[1] <= gradient.shape[1]:
        return of_x, _of_rows(x.T, gradient).astype(matrix.dtype)
    return of_x, _of_rows(gradient.T, x).T.astype(matrix.dtype)


_product.defvjp(_forward, _backward)


def full_precision(function: Callable, body: Any) -> Callable:
    """Wraps a function that JAX traces, so that its products, and their gradients, run in float32
    if the model's body has the dtype float32, or none.

    JAX_DEFAULT_MATMUL_PRECISION takes precedence if it is set, for example to tensorfloat32. On a
    CPU nothing changes: its products are in float32 anyway.
    """

    narrow = getattr(body, "dtype", jnp.float32) != jnp.float32

    @functools.wraps(function)
    def traced(*arguments):
        if narrow or jax.config.jax_default_matmul_precision is not None or platform() == "cpu":
            return function(*arguments)
        with jax.default_matmul_precision("highest"):
            return function(*arguments)

    return traced
