"""Products of vectors with matrices of parameters, and gradients formed in the way that the backend does fastest.

The gradient of a matrix [256, 1024] over 2,048 vectors is a product [256, 2048] @ [2048, 1024], as much work as the product itself.
In a whole update XLA on a CPU turns and copies the larger operand of it, unless told otherwise, and takes twice the time.
"""

import jax


def product(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """Vectors times a matrix: `x [..., n] @ matrix [n, m]`, of one dtype, to `[..., m]`; no forward-mode derivative on a CPU."""
    return _turning(x, matrix) if jax.default_backend() == "cpu" else x @ matrix


def dot_general(x, matrix, dimensions, **_):
    """`product` in the form in which flax's Dense asks for it: the last axis of `x` with the first of `matrix`."""
    assert dimensions == (((x.ndim - 1,), (0,)), ((), ()))
    return product(x, matrix)


_barrier = jax.lax.optimization_barrier


@jax.custom_vjp
def _turning(x, matrix):
    return x @ matrix


def _forward(x, matrix):
    return x @ matrix, (x, matrix)


def _backward(kept, gradient):
    x, matrix = kept
    of_x = gradient @ matrix.T
    x, gradient = x.reshape(-1, x.shape[-1]), gradient.reshape(-1, gradient.shape[-1])
    # The narrower operand is turned, and the sum over vectors goes along rows; without barriers the compiler turns it back.
    if x.shape[1] <= gradient.shape[1]:
        return of_x, _barrier(x.T) @ gradient
    return of_x, _barrier(_barrier(gradient.T) @ x).T


_turning.defvjp(_forward, _backward)
