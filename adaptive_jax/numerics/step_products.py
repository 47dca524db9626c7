"""The products of a loop over time: one per step, of a few rows and a constant matrix, and one over
all steps.
"""

import jax
import jax.numpy as jnp

from adaptive_jax.numerics.platforms import platform
from adaptive_jax.numerics.products import is_cpu_bfloat16, sum_dtype, wide

FEW_ROWS = 48  # with fewer rows in a step's product, Eigen is faster
LARGE, MANY_STEPS = 2**20, 16  # least size of a matrix and steps for blocks on a CPU
COLUMNS = 576  # of a block: whole SIMD vectors of every width, and no power of two
FAR = 2048  # float32 columns that are 8 KiB: rows this far apart share few sets of a cache
TILE = 128  # XLA's kernels for GPUs need multiples of this many rows
_barrier = jax.lax.optimization_barrier


def dot(a, b, axis_of_a=1, axis_of_b=0):
    """The product of two matrices over these axes, in float32, or their dtype if wider."""
    if is_cpu_bfloat16(a):
        return wide(a if axis_of_a else a.T, b.T if axis_of_b else b)
    return jax.lax.dot_general(
        a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=sum_dtype(a.dtype)
    )


def in_blocks(matrix, steps):
    """Splits the right operand of a step's product into a list of blocks of columns.

    On a CPU, Eigen packs a matrix at every step. Rows of a large matrix are far apart in memory,
    those of a block near each other, which makes a step of 20 rows 1.2 to 1.9 times as fast; few
    steps are not worth the copy. Zeros fill the last block.

    On a GPU there is one block, padded by zeros to whole tiles of rows: XLA divides the sum among
    several programs, whose parts must be whole, and would pad the matrix in every step.
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
    """`a` times a matrix of `columns` columns that `in_blocks` split, inside the loop over time.

    XLA on a CPU runs products by YNNPACK, which in float32 takes a third longer than Eigen for a
    few rows. It runs a transposed left operand by Eigen; the barrier keeps XLA from transposing it
    back.
    """
    if len(blocks[0]) > a.shape[1]:
        a = jnp.pad(a, ((0, 0), (0, len(blocks[0]) - a.shape[1])))
    eigen = platform() == "cpu" and a.dtype == jnp.float32 and len(a) < FEW_ROWS
    left, axis = (_barrier(a.T), 0) if eigen else (a, 1)
    products = [dot(left, block, axis_of_a=axis) for block in blocks]
    return jnp.concatenate(products, axis=1)[:, :columns]


def over_rows(a, b):
    """`a.T @ b`, over all steps at once.

    On a CPU, Eigen reads both down their columns, which takes 1.7 times as long if rows of `b` are
    a multiple of `FAR` apart (700 rows of 4,096 columns). With a transposed copy of `a`, XLA uses
    YNNPACK, which does not; otherwise the copy costs more than it saves.
    """
    far = platform() == "cpu" and b.dtype == jnp.float32 and b.shape[1] % FAR == 0
    return dot(_barrier(a.T), b) if far else dot(a, b, 0, 0)
