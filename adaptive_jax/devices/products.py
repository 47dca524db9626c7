"""Products of vectors with parameter matrices, whose gradients are computed in the way that is fastest on the backend.

The gradient of a matrix [256, 1024] over 2,048 vectors is a product [256, 2048] @ [2048, 1024], as much work as the product
itself. In a complete update, XLA on a CPU transposes and copies the larger operand, which doubles the time.
"""

import jax

from adaptive_jax.devices.platforms import platform


def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Vectors times a matrix of the same dtype: `x [..., n] @ matrix [n, m]` is `[..., m]`. No forward-mode derivative on a CPU."""
    return _transposing(x, matrix) if platform() == "cpu" else x @ matrix


def dot_general(x, matrix, dimensions, **_):
    """`product` with the signature that flax's Dense expects: the last axis of `x` with the first of `matrix`."""
    assert dimensions == (((x.ndim - 1,), (0,)), ((), ()))
    return product(x, matrix)


_barrier = jax.lax.optimization_barrier


@jax.custom_vjp
def _transposing(x, matrix):
    return x @ matrix


def _forward(x, matrix):
    return x @ matrix, (x, matrix)


def _backward(saved, gradient):
    x, matrix = saved
    of_x = gradient @ matrix.T
    x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    # Transpose the narrower operand, so that the sum over vectors runs along rows; the barriers stop XLA from undoing it.
    if x.shape[1] <= gradient.shape[1]:
        return of_x, _barrier(x.T) @ gradient
    return of_x, _barrier(_barrier(gradient.T) @ x).T


_transposing.defvjp(_forward, _backward)
