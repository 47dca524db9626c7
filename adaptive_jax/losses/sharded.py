"""Vocabulary sharded over one mesh axis of `jax.shard_map`: of every band, device i holds rows
`i · rows` to `(i + 1) · rows - 1`.

Hidden states and targets are the same on all devices; or every device has tokens of its own, and
`for_all` gathers the tokens of all. So tables and their gradients stay in place, and only as many
numbers as hidden states have cross devices. If a band has fewer words than rows on all devices, the
last rows are padding. Without an axis, every device has all words.
"""

import itertools
import numbers
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.errors import InputError
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.meshes import axes_of, pvary

ABSENT = -(2**30)  # a column outside every softmax, even after shifts


def words_of(
    bands: Sequence[Band], words: Sequence[int] | None, axis_name: str | None
) -> tuple[int, ...]:
    """Checked number of words of every band; for None, the number of rows on all devices.

    Raises:
        InputError: more words than rows, or an axis that does not exist.
    """
    try:
        devices = 1 if axis_name is None else lax.axis_size(axis_name)
    except NameError as error:
        raise InputError(
            f"axis_name={axis_name!r} must be an axis of a jax.shard_map around the call"
        ) from error
    rows = [devices * len(band.table) for band in bands]
    words = tuple(rows if words is None else words)
    if len(words) != len(rows) or not all(
        isinstance(count, numbers.Integral) and min(limit, 1) <= count <= limit
        for count, limit in zip(words, rows, strict=False)
    ):
        raise InputError(
            f"words={words} must be one whole number per band, at most its rows:"
            f" {rows} on {devices} device(s)"
        )
    return words


def for_all(function: Callable, axes: str | Sequence[str], tokens, softmax, dim: int = 0):
    """Calls `function(tokens, softmax)`, as `adaptive_jax.losses.partitioned.run` takes it, with
    the tokens of all devices of these axes. Returns the results and gradients of the device's own
    tokens, and the gradient of `softmax` from all tokens.

    tokens: a tree of arrays, sharded evenly over `axes` along axis `dim`.
    """
    count = jax.tree.leaves(tokens)[0].shape[dim]
    gathered = jax.tree.map(lambda a: lax.all_gather(a, axes, axis=dim, tiled=True), tokens)
    results, d_tokens, d_softmax = function(gathered, softmax)
    first = lax.axis_index(axes) * count

    def local(array):
        return lax.dynamic_slice_in_dim(array, first, count, axis=dim)

    def local_sum(array):
        return lax.psum_scatter(array, axes, scatter_dimension=dim, tiled=True)

    return jax.tree.map(local, results), jax.tree.map(local_sum, d_tokens), d_softmax


def same_axes(axis_name: str | None, hidden, softmax, *by_token):
    """Casts all arrays to vary over the same axes of `shard_map`; those in `by_token`, and the
    settings at the end of `softmax`, do not vary over the axis that shards the words.

    It does nothing outside `shard_map` or without `check_vma`. Its transpose sums gradients over
    devices.

    Raises:
        InputError: tokens that vary over `axis_name`, or tables that do not.
    """
    tokens, tables = axes_of((hidden, by_token)), axes_of(softmax)
    if axis_name is not None:
        if axis_name in tokens:
            raise InputError(
                f"axis_name={axis_name!r} must not shard hidden, targets or weights, as it shards"
                " words: replicate them over it"
            )
        if axis_name not in tables:
            raise InputError(
                f"axis_name={axis_name!r} must shard the tables: use shard_map in_specs that do,"
                " and leave its check_vma on"
            )
    axes = tokens | tables
    *tables, array_settings = softmax
    return (
        pvary(hidden, axes),
        (*pvary(tables, axes), pvary(array_settings, axes - {axis_name})),
        *(pvary(array, axes - {axis_name}) for array in by_token),
    )


def words_on_device(
    axis_name: str | None, rows: Sequence[int], words: Sequence[int]
) -> jax.Array | None:
    """Number of words among each band's rows on this device; the other rows are padding. None if
    there is no padding.
    """
    devices = 1 if axis_name is None else lax.axis_size(axis_name)
    if all(devices * size == count for size, count in zip(rows, words, strict=True)):
        return None
    first = 0 if axis_name is None else lax.axis_index(axis_name) * jnp.array(rows)
    return jnp.clip(jnp.array(words) - first, 0, jnp.array(rows))


def columns_on_device(axis_name: str, position, band, rows):
    """The columns `[tokens]` of targets on this device, in the head and in their tail; `ABSENT` if
    another device holds them. A target is the word at `position [tokens]` of `band [tokens]`; bands
    have `rows [bands]` rows on each device.
    """
    row = position - lax.axis_index(axis_name) * rows[band]
    row = jnp.where((row >= 0) & (row < rows[band]), row, ABSENT)
    of_cluster = jnp.where(is_first(axis_name), rows[0] + band - 1, ABSENT)
    return jnp.where(band == 0, row, of_cluster), row


def is_first(axis_name: str):
    """True on device 0 of the axis, which alone counts the columns that all devices hold."""
    return lax.axis_index(axis_name) == 0


def sum_over(axis_name: str, *arrays):
    """The sums over all devices of arrays `[tokens, ...]` of one dtype, in one all-reduce; None
    stays None.
    """
    columns = [a.reshape(len(a), -1) for a in arrays if a is not None]
    widths = itertools.accumulate(a.shape[1] for a in columns)
    sums = iter(jnp.split(lax.psum(jnp.concatenate(columns, axis=1), axis_name), [*widths], axis=1))
    return tuple(None if a is None else next(sums).reshape(a.shape) for a in arrays)
