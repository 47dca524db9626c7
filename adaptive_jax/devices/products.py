"""Products of vectors with parameter matrices, whose gradients are computed in the way that is fastest on the backend.

The gradient of a matrix [256, 1024] over 2,048 vectors is a product [256, 2048] @ [2048, 1024], as much work as the product
itself. It is summed in the matrix's own dtype: float32, though the vectors may be bfloat16. In a complete update, XLA on a CPU
transposes and copies the larger operand, which doubles the time.
"""

import functools

import jax
import jax.numpy as jnp

from adaptive_jax.devices.platforms import platform


@jax.custom_vjp
def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Vectors times a matrix, which is cast to their dtype: `x [..., n] @ matrix [n, m]` is `[..., m]`.

    It has no forward-mode derivative.
    """
    return x @ matrix.astype(x.dtype)


def dot_general(x, matrix, dimensions, **_):
    """`product` with the signature that flax's Dense expects: the last axis of `x` with the first of `matrix`."""
    assert dimensions == (((x.ndim - 1,), (0,)), ((), ()))
    return product(x, matrix)


def uncast(x, matrix, bias, *, dtype):
    """The `promote_dtype` of a flax Dense with this `dot_general`: the matrix stays as it is, and `product` casts it."""
    return x.astype(dtype), matrix, bias if bias is None else bias.astype(dtype)


_barrier = jax.lax.optimization_barrier


def _forward(x, matrix):
    return x @ matrix.astype(x.dtype), (x, matrix)


def _backward(saved, gradient):
    x, matrix = saved
    of_x = gradient @ matrix.astype(x.dtype).T
    x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    multiply = functools.partial(jnp.matmul, preferred_element_type=matrix.dtype)
    if platform() != "cpu":
        return of_x, multiply(x.T, gradient)
    # Transpose the narrower operand, so that the sum over vectors runs along rows; the barriers stop XLA from undoing it.
    if x.shape[1] <= gradient.shape[1]:
        return of_x, multiply(_barrier(x.T), gradient)
    return of_x, multiply(_barrier(_barrier(gradient.T)), x).T


product.defvjp(_forward, _backward)
