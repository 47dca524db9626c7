"""Matrix products, computed in the way that is fastest on the backend.

The gradient of a matrix [256, 1024] over 2,048 vectors is a product [256, 2048] @ [2048, 1024], as
much work as the product itself. It is summed in the matrix's own dtype: float32, though the vectors
may be bfloat16. In a complete update, XLA on a CPU transposes and copies the larger operand, which
doubles the time.

In bfloat16, XLA on a CPU with such instructions multiplies twice as fast as in float32, but only
matrices that lie row after row, into a result of float32. It widens all others first, which is
slower than float32 itself. So `wide` lays them out.
"""

import jax
import jax.numpy as jnp

from adaptive_jax.devices.platforms import platform


@jax.custom_vjp
def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Vectors times a matrix, which is cast to their dtype: `x [..., n] @ matrix [n, m]` is `[...,
    m]`.

    It has no forward-mode derivative.
    """
    if not halved(x):
        return x @ matrix.astype(x.dtype)
    return wide(_flat(x), matrix.astype(x.dtype)).astype(x.dtype).reshape(*x.shape[:-1], -1)


def wide(left: jax.Array, right: jax.Array) -> jax.Array:
    """The product of two matrices `[n, k]` and `[k, m]` of one dtype, summed and returned in
    float32, or their dtype if wider.
    """
    return _of_rows(left, right) if halved(left) else _widened(left, right)


def halved(array: jax.Array) -> bool:
    """Whether this is bfloat16 on a CPU."""
    return array.dtype == jnp.bfloat16 and platform() == "cpu"


def _of_rows(left, right):
    """`wide` of matrices that lie row after row, as does the result."""
    return _in_rows(_widened(_in_rows(left), _in_rows(right)))


def _in_rows(matrix):
    return jax.lax.optimization_barrier(matrix.ravel()).reshape(matrix.shape)


def _widened(left, right):
    return jnp.matmul(
        left, right, preferred_element_type=jnp.promote_types(left.dtype, jnp.float32)
    )


def _flat(x):
    """`[..., n]` as a matrix."""
    return x.reshape(-1, x.shape[-1])


def _forward(x, matrix):
    return product(x, matrix), (x, matrix)


def _backward(saved, gradient):
    x, matrix = saved
    of_x = product(gradient, matrix.T)
    x, gradient = _flat(x), _flat(gradient)
    if platform() != "cpu":
        return of_x, jnp.matmul(x.T, gradient, preferred_element_type=matrix.dtype)
    # Transpose the narrower operand, so that the sum over vectors runs along rows; the layouts stop
    # XLA from undoing it.
    if x.shape[1] <= gradient.shape[1]:
        return of_x, _of_rows(x.T, gradient).astype(matrix.dtype)
    return of_x, _of_rows(gradient.T, x).T.astype(matrix.dtype)


product.defvjp(_forward, _backward)
