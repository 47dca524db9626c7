"""Converts and checks the caller's arrays: NumPy arrays and lists become JAX arrays, and a wrong
shape or dtype is a one-line error.

Sizes are written as `"rows", "time", 16`: a name stands for any size, and a leading `...` for any
axes. Shapes and dtypes are checked inside `jax.jit`, too. Values are unknown there, so a missing id
gives NaN instead of an error.
"""

import reprlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.numerics.products import sum_dtype


def floats(name: str, values, *sizes) -> jax.Array:
    """Converts `values` to an array of floats of these sizes; whole numbers become float32.

    Raises:
        InputError: another shape, or a dtype that is not real.
    """
    array = _array(name, values, sizes)
    if jnp.issubdtype(array.dtype, jnp.floating):
        return array
    if array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer):
        return array.astype(jnp.float32)
    raise InputError(f"{name} must have a real dtype such as float32, got {array.dtype}")


def whole_numbers(name: str, values, *sizes) -> jax.Array:
    """Converts `values` to an array of whole numbers of these sizes.

    Raises:
        InputError: another shape, or a dtype that is not an integer.
    """
    array = _array(name, values, sizes)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise InputError(f"{name} must have an integer dtype, got {array.dtype}")
    return array


def ids(name: str, values, count: int, *sizes, weights=None, ignored=None) -> jax.Array:
    """Converts `values` to an array of ids of these sizes; ids from 0 to `count - 1` exist. Ids of
    weight 0, and `ignored`, are not checked.

    Nor are traced values, or values with traced weights: see `exists`.

    Raises:
        InputError: as `whole_numbers`, or an id that does not exist; names the first one.
    """
    concrete, weights = _concrete(values), np.ones(()) if weights is None else _concrete(weights)
    # Check numbers beyond 32 bits before JAX truncates them; in lists, JAX refuses them.
    array = whole_numbers(
        name, concrete if isinstance(values, Sequence) and concrete is not None else values, *sizes
    )
    if concrete is not None and weights is not None and weights.shape in ((), concrete.shape):
        invalid = ((concrete < 0) | (concrete >= count)) & (weights != 0)
        invalid &= True if ignored is None else concrete != ignored
        if invalid.any():
            place = tuple(map(int, np.argwhere(invalid)[0]))
            raise InputError(
                f"{name}{list(place)}={concrete[place]} does not exist: use ids from 0 to"
                f" {count - 1}"
            )
    return array if array.dtype in (jnp.int32, jnp.int64) else array.astype(int)


def exists(array: jax.Array, count: int) -> jax.Array:
    """Mask of the ids from 0 to `count - 1`, as bools."""
    return (array >= 0) & (array < count)


def distinct(places: jax.Array, count: int, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Sorted unique places, padded by `count` to a multiple of `chunk`, and the index of each place
    among them.
    """
    room = -(-min(len(places), count) // chunk) * chunk
    return jnp.unique(places, return_inverse=True, size=room, fill_value=count)


def look_up(table: jax.Array, array: jax.Array, missing: float = jnp.nan) -> jax.Array:
    """Looks up rows `[..., width]` of a table `[rows, width]` by ids `[...]`; an id that does not
    exist gives a row of `missing`. Gradients of repeated ids are summed in float32.
    """
    table = jnp.asarray(table)
    rows = table.astype(sum_dtype(table.dtype)).at[array]
    rows = rows.get(mode="fill", fill_value=missing, wrap_negative_indices=False)
    return rows.astype(table.dtype)


def nan_if_missing(vectors: jax.Array, array: jax.Array, count: int) -> jax.Array:
    """Makes vectors `[..., width]` NaN where the id in `array [...]` does not exist.

    Call it after the last product: a factor of NaN makes gradients NaN even if the caller masks the
    vector.
    """
    # Adding -0.0 changes no bit, and the backward pass has nothing to select.
    return vectors + jnp.where(exists(array, count), -0.0, jnp.nan)[..., None]


def check_dtype(dtype) -> None:
    """Checks that `dtype` is a float type.

    Raises:
        InputError: it is not.
    """
    try:
        is_float = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        is_float = False
    if dtype is None or not is_float:  # NumPy takes None for float64
        name = getattr(dtype, "__name__", dtype)
        raise InputError(f"dtype must be a float type such as float32 or bfloat16, got {name}")


def in_chunks(array: jax.Array, size: int) -> jax.Array:
    """Splits rows into chunks, `[chunks, size, ...]`; zeros fill the last one."""
    padding = [(0, -len(array) % size)] + [(0, 0)] * (array.ndim - 1)
    return jnp.pad(array, padding).reshape(-1, size, *array.shape[1:])


def _array(name, values, sizes):
    """Converts values to an array of these sizes that is not empty."""
    try:
        array = jnp.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{name}={reprlib.repr(values)} must be an array of numbers, or lists of equal lengths"
        ) from error
    expected, shape = sizes, array.shape
    if sizes[:1] == (...,):
        expected = sizes[1:]
        shape = shape[max(array.ndim - len(expected), 0) :]
    fits = len(shape) == len(expected) and not any(
        isinstance(size, int) and dim != size for dim, size in zip(shape, expected, strict=True)
    )
    if not fits:
        names = ", ".join("..." if size is ... else str(size) for size in sizes)
        raise InputError(f"{name} must have shape [{names}], got {list(array.shape)}")
    if not array.size:
        raise InputError(f"{name} must have at least one entry, got shape {list(array.shape)}")
    return array


def _concrete(values):
    """The values as a NumPy array; None if they are traced or not held by this process."""
    if isinstance(values, jax.core.Tracer) or not getattr(values, "is_fully_addressable", True):
        return None
    try:
        return np.asarray(jax.device_get(values) if isinstance(values, jax.Array) else values)
    except (TypeError, ValueError):  # a list of traced numbers, or no array at all
        return None
