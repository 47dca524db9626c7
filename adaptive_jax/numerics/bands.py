"""Bands: ranges of a vocabulary in order of frequency, each with its own table."""

import itertools
import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from adaptive_jax.errors import InputError, check_at_least

if TYPE_CHECKING:  # processes that only read text should not wait for JAX
    import jax


# With at least this many similar bands, the loss uses one loop, and tables of one width are one
# array.
MANY_BANDS = 8


class Band(NamedTuple):
    """The vectors of one range of words, as inputs hand them over and outputs read them.

    The logit of word w for hidden states h is `(projection @ h) @ table[w] + bias[w]`.

    Attributes:
        table: `[words, width]`.
        projection: `[width, features]`, or None if the table has the width of the hidden states.
        bias: `[words]`, or None.
    """

    table: "jax.Array"
    projection: "jax.Array | None" = None
    bias: "jax.Array | None" = None

    @property
    def features(self) -> int:
        """Width of the hidden states, before the projection."""
        return (self.table if self.projection is None else self.projection).shape[1]

    def vectors(self) -> "jax.Array":
        """The words' vectors `[words, features]`."""
        return self.table if self.projection is None else self.table @ self.projection

    def split(self, sizes: Sequence[int]) -> "list[Band]":
        """Splits the band into bands of these numbers of words, all with its projection."""
        tables = split_rows(self.table, sizes)
        biases = [None] * len(sizes) if self.bias is None else split_rows(self.bias, sizes)
        return [
            Band(table, self.projection, bias) for table, bias in zip(tables, biases, strict=True)
        ]


def band_sizes(vocabulary_size: int, cutoffs: Sequence[int]) -> list[int]:
    """Words in each band: cutoffs 20,000 and 60,000 of 267,735 words give 20,000, 40,000 and
    207,735.

    A cutoff is the id of the first word of the next band, so n cutoffs make n + 1 bands.

    Raises:
        InputError: cutoffs that are not whole numbers, do not increase, or leave a band empty.
    """
    check_at_least(1, vocabulary_size=vocabulary_size)
    listed = isinstance(cutoffs, Sequence)
    if not listed or not all(isinstance(cutoff, numbers.Integral) for cutoff in cutoffs):
        raise InputError(
            f"cutoffs {cutoffs!r} must be a tuple of whole numbers, such as (20_000, 60_000)"
        )
    ends = [0, *cutoffs, vocabulary_size]
    for before, after in itertools.pairwise(ends):
        if before >= after and after == vocabulary_size:
            raise InputError(
                f"cutoff {before:,} is not below the vocabulary size {vocabulary_size:,}: "
                "use cutoffs that leave at least one word for the last band"
            )
        if before >= after:
            raise InputError(
                f"cutoffs {tuple(cutoffs)} do not increase from 1: {after:,} follows {before:,};"
                " use them in rising order"
            )
    return [after - before for before, after in itertools.pairwise(ends)]


def band_widths(width: int, factor: int, bands: int) -> list[int]:
    """Width of the vectors of each band, `width / factor^i` (Baevski & Auli 2019, section 3): 1024,
    256, 64.

    Raises:
        InputError: a factor that is not a whole number, or a last band of width 0.
    """
    check_at_least(1, factor=factor)
    widths = [width // factor**i for i in range(bands)]
    if widths[-1] < 1:
        raise InputError(
            f"{bands} bands of factor {factor} are too many for width {width}: "
            "use fewer cutoffs, a smaller factor or a larger width"
        )
    return widths


def band_shapes(layer) -> list[tuple[int, int]]:
    """`(words, width)` of each band of a layer with the fields vocabulary_size, features, cutoffs,
    factor and width.

    Raises:
        InputError: as `band_sizes` and `band_widths`, or a width that is not a whole number.
    """
    check_at_least(1, features=layer.features)
    check_at_least(0, width=layer.width)
    sizes = band_sizes(layer.vocabulary_size, layer.cutoffs)
    widths = band_widths(layer.width or layer.features, layer.factor, len(sizes))
    return list(zip(sizes, widths, strict=True))


def band_flops(rows, width, columns, features=0):
    """FLOPs of one band's forward pass for `rows` hidden states.

        2 · rows · width · (columns + features)

    columns: words of the band; in the head, one more for every tail. features: width of the hidden
    states, or 0 for a band without projection. All arguments may be arrays that broadcast.
    """
    return 2.0 * rows * width * (columns + features)


def softmax_flops(bands: Sequence[Band], visits: Sequence[float] | None = None) -> float:
    """FLOPs of the forward pass of a softmax over `bands`, arrays or their shapes, the head first.

    visits: number of hidden states that visit each band: the head has all, a tail those whose
        target is in its band. By default the expected number per token, see `zipf_visits`.
    """
    total, tails = 0.0, len(bands) - 1
    visits = zipf_visits(bands) if visits is None else visits
    for (table, projection, _), rows in zip(bands, visits, strict=True):
        words, width = table.shape
        features = 0 if projection is None else projection.shape[1]
        total += band_flops(rows, width, words + tails, features)
        tails = 0
    return float(total)


def zipf_visits(bands: Sequence[Band]) -> np.ndarray:
    """Visits per token to each band, if the word of rank r has a probability proportional to
    1/r (Zipf's law).
    """
    ends = np.cumsum([band.table.shape[0] for band in bands])
    reached = np.cumsum(np.append(0.0, 1 / np.arange(1, ends[-1] + 1)))
    return np.append(1.0, np.diff(reached[ends]) / reached[-1])


def words_in_tables(layer) -> dict[str, list[int]]:
    """The parameters of `make_tables` by name, each with the sizes of its consecutive bands."""
    sizes, widths = zip(*band_shapes(layer), strict=True)
    if len(sizes) < MANY_BANDS or len(set(widths)) > 1:
        return {f"table_{i}": [size] for i, size in enumerate(sizes)}
    return {"table": list(sizes)}


def make_tables(layer) -> "list[jax.Array]":
    """The tables of a flax layer's bands: its parameters `table_0`, `table_1` …, initialised by its
    `table_init`.

    The layer has the fields that `band_shapes` reads. `MANY_BANDS` or more bands of one width share
    one parameter, `table`, which is initialised like the table of a full softmax. With `word_axes`,
    a table has the rows of one device, see `rows_per_device`.
    """
    import jax.numpy as jnp  # processes that only read text should not wait for JAX

    widths = iter([width for _, width in band_shapes(layer)])
    tables = []
    for name, words in words_in_tables(layer).items():
        rows, width = [rows_per_device(count, layer.word_axes) for count in words], next(widths)
        table = layer.param(name, layer.table_init, (sum(rows), width), jnp.float32)
        tables += split_rows(table, rows) if len(rows) > 1 else [jnp.asarray(table)]
    return tables


def axes_of_words(layer) -> str | Sequence[str]:
    """The `word_axes` of an input or a table; () where it has none."""
    # Ask the type: a missing attribute of a flax module would run its setup.
    return layer.word_axes if hasattr(type(layer), "word_axes") else ()


def rows_per_device(words: int, axes: Sequence[str]) -> int:
    """Rows per device when `words` rows are sharded over `axes` of `jax.shard_map`; the last ones
    may be padding.

    Raises:
        InputError: axes that do not exist.
    """
    from jax import lax  # processes that only read text should not wait for JAX

    try:
        return -(-words // lax.axis_size(axes)) if axes else words
    except NameError as error:
        raise InputError(
            f"word_axes={axes} must be axes of a jax.shard_map around the call"
        ) from error


def split_rows(array: "jax.Array", sizes: Sequence[int]) -> "list[jax.Array]":
    """Splits an array into row blocks of these sizes, whose gradients are concatenated in one
    operation. Explicit axes that shard the rows but do not divide every size are gathered.
    """
    import jax  # processes that only read text should not wait for JAX

    sharding = jax.typeof(array).sharding
    mesh, (rows, *other_axes) = sharding.mesh, (*sharding.spec, None)
    names = (rows,) if isinstance(rows, str) else rows or ()
    if any(size % math.prod(mesh.shape[name] for name in names) for size in sizes):
        replicated = jax.sharding.PartitionSpec(None, *other_axes[:-1])
        array = jax.sharding.reshard(array, jax.sharding.NamedSharding(mesh, replicated))
    return jax.lax.split(array, sizes)
