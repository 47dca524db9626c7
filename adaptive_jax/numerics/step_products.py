"""The products of a loop over time: one at each step, of a few rows and a matrix that stays the
same, and one over all steps.
"""

import jax
import jax.numpy as jnp

from adaptive_jax.numerics.platforms import platform
from adaptive_jax.numerics.products import is_cpu_bfloat16, sum_dtype, wide

FEW_ROWS = 48  # rows of a step's product, up to which Eigen is the faster one
LARGE, MANY_STEPS = 2**20, 16  # numbers of a matrix, and steps, from which on it is cut on a CPU
COLUMNS = 576  # of a block: whole vectors of every width, and no power of two
FAR = 2048  # columns of float32 that are 8 KiB: rows so far apart meet in few sets of a cache
TILE = 128  # rows of a matrix, of which XLA's kernels for GPUs want whole multiples
_barrier = jax.lax.optimization_barrier


def dot(a, b, axis_of_a=1, axis_of_b=0):
    """The product of two matrices over these axes, in their dtype, summed in the wide one."""
    if is_cpu_bfloat16(a):
        return wide(a if axis_of_a else a.T, b.T if axis_of_b else b)
    return jax.lax.dot_general(
        a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=sum_dtype(a.dtype)
    )


def in_blocks(matrix, steps):
    """The right side of a step's product, a list of blocks of its columns.

    On a CPU, Eigen copies a matrix at every step into the order in which it multiplies. Rows of a
    large matrix lie far apart, those of a block near each other, and so a step of 20 rows is 1.2
    to 1.9 times as fast; few steps are not worth the copy. Zeros fill the last block.

    On a GPU one block has zeros below it, up to whole tiles: XLA divides the sum over so few rows
    among several programs, whose parts must be whole. It would pad the matrix in every step.
    """
    rows, columns = matrix.shape
    if platform() == "gpu":
        return [jnp.pad(matrix, ((0, -rows % TILE), (0, 0)))]
    large = matrix.size >= LARGE and steps >= MANY_STEPS
    if platform() != "cpu" or matrix.dtype != jnp.float32 or not large:
        return [matrix]
    filled = jnp.pad(matrix, ((0, 0), (0, -columns % COLUMNS)))
    return _barrier(jnp.split(filled, filled.shape[1] // COLUMNS, axis=1))


def step_product(a, blocks, columns):
    """`a` times the matrix of so many columns that `in_blocks` cut, inside the loop over time.

    XLA on a CPU gives products to YNNPACK, which in float32 takes a third longer than Eigen for a
    few rows. A left side that lies transposed goes to Eigen; the barrier stops XLA from transposing
    it back.
    """
    if len(blocks[0]) > a.shape[1]:
        a = jnp.pad(a, ((0, 0), (0, len(blocks[0]) - a.shape[1])))
    eigen = platform() == "cpu" and a.dtype == jnp.float32 and len(a) < FEW_ROWS
    left, axis = (_barrier(a.T), 0) if eigen else (a, 1)
    products = [dot(left, block, axis_of_a=axis) for block in blocks]
    return jnp.concatenate(products, axis=1)[:, :columns]


def over_rows(a, b):
    """`a.T @ b`, of all steps at once.

    On a CPU, Eigen reads down the columns of both, which takes 1.7 times as long where rows of `b`
    lie `FAR` apart (700 rows of 4,096 columns). With a transposed copy of `a`, XLA takes YNNPACK,
    which does not; elsewhere the copy costs more than it gains.
    """
    far = platform() == "cpu" and b.dtype == jnp.float32 and b.shape[1] % FAR == 0
    return dot(_barrier(a.T), b) if far else dot(a, b, 0, 0)
