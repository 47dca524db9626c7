"""Tables that an output is built on: its own, or one shared with the input.

A table answers `bands(train=False) -> list[Band]`, frequent words first; `train` draws its dropout,
if it has any. Every input of this project is one too.

Where band 0 is narrower or wider than the hidden states, one linear projection without bias brings
the hidden states to its width (Baevski & Auli 2019, section 4.1). Head and tails share it: a tail's
own projection starts from that width.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.numerics.bands import (
    MANY_BANDS,
    Band,
    axes_of_words,
    band_shapes,
    band_sizes,
    make_tables,
    split_rows,
    words_in_tables,
)
from adaptive_jax.numerics.layers import norms, weight_norm, word_layer
from adaptive_jax.numerics.meshes import as_tuple


def xavier_uniform(key: jax.Array, shape: Sequence[int], dtype=jnp.float32) -> jax.Array:
    """Matrices `[..., rows, columns]`, each Xavier-uniform."""
    init = nn.initializers.xavier_uniform(batch_axis=tuple(range(len(shape) - 2)))
    return init(key, shape, dtype)


def check_bands(name: str, module, cuts_words: bool = False) -> None:
    """Raises InputError if the `table` of an output, or the `source` of a table, has no bands, or
    has those of one device and they must be whole.
    """
    if not hasattr(module, "bands"):
        cure = {"table": "OwnTable(...) or TiedTable(...)", "source": "an AdaptiveInput(...)"}
        raise InputError(f"{name}={module!r} has no bands(): use {cure[name]}")
    if isinstance(module, type):
        raise InputError(f"{name}={module.__name__} is a class: use {module.__name__}(...)")
    if not isinstance(module, nn.Module):
        raise InputError(
            f"{name} must be a linen module, got {type(module).__name__}: for one of nnx, use"
            " adaptive_jax.nnx.AdaptiveSoftmax(source=...)"
        )
    if (axes := axes_of_words(module)) and not cuts_words:
        raise InputError(f"word_axes={axes} of {name} must be (): this layer needs all words")


class OwnTable(nn.Module):
    """A table that belongs to the output alone.

    Without cutoffs it has one band, for a full softmax; with them the narrowing bands of an
    adaptive softmax (Grave et al. 2017). The first band has a projection only where its width is
    not `features`, since the head multiplies hidden states and words directly (Baevski & Auli 2019,
    section 3). Projections start Xavier-uniform.

    Attributes: as those of `adaptive_jax.inputs.adaptive.AdaptiveInput`, and
        bias: add a bias to the logit of every word, 0 at first.
        weight_norm: learn norm and direction of every word's vector apart (Salimans & Kingma 2016),
            as fairseq's gated convolutional network does under a full softmax.
        projected: give bands a projection where their width is not `features`. Without, only a
            differentiated softmax of slices can read them.
        table_init, projection_init: how every table and projection starts, functions `(key, shape,
            dtype)`, as flax's `Embed` takes one: with the names of their axes if they come from
            `nn.with_partitioning`. The projections of many tails of one width are one array
            `[tails, width, features]`.
        word_axes: as the input's.

    Raises:
        InputError: cutoffs that do not increase or do not lie within the vocabulary, or a number
            out of range.
    """

    vocabulary_size: int
    features: int
    cutoffs: Sequence[int] = ()
    factor: int = 4
    width: int = 0
    bias: bool = False
    weight_norm: bool = False
    projected: bool = True
    table_init: Callable = nn.initializers.xavier_uniform()
    projection_init: Callable = xavier_uniform
    word_axes: str | Sequence[str] = ()

    cuts_words: ClassVar[bool] = True  # over devices

    def __post_init__(self):
        super().__post_init__()
        band_shapes(self)

    def words(self) -> list[int]:
        """Words of each band."""
        return band_sizes(self.vocabulary_size, self.cutoffs)

    def word_tables(self) -> dict[str, list[int]]:
        """The parameters with a row for each word, and the words of the bands in each."""
        norms = {f"norm_{i}": [n] for i, n in enumerate(self.words())} if self.weight_norm else {}
        return words_in_tables(self) | norms | ({"bias": self.words()} if self.bias else {})

    def setup(self):
        tables = make_tables(self)
        if self.weight_norm:
            for i, v in enumerate(tables):
                lengths = self.param(f"norm_{i}", lambda _, v=v: norms(v, axis=1))
                tables[i] = weight_norm(v, lengths, axis=1)
        projections = [None] * len(tables)
        if self.projected:
            widths = [table.shape[1] for table in tables]
            projections = _own_projections(self, self.projection_init, widths, {})
        self.word_bands = list(map(Band, tables, projections, _biases(self, tables)))

    def bands(self, *, train: bool = False) -> list[Band]:
        """See the module."""
        return list(self.word_bands)


class TiedTable(nn.Module):
    """The table of the input, shared with the output (Baevski & Auli 2019, "Weight sharing" and
    Table 7).

    By default as the paper's ADP-T: embeddings and projections are shared, and the head has no
    projection.

    Attributes:
        source: the module whose `bands()` are shared.
        features: width of the hidden states; None: the source's own `features`.
        share_projections: use the source's projections of the tails; otherwise this module has its
            own.
        share_head_projection: use the source's projection of band 0 as well; otherwise the head has
            one of its own where the band's width is not `features`, and else none.
        cutoffs: cut a source of one band here, so that all bands have its width: "no dimension
            reduction, tied" (Merity et al. 2018; Table 7), whose tails have projections of their
            own. Empty: the source's own bands.
        bias: add a bias to the logit of every word, 0 at first; the input has none.
        own_head: the words of band 0 have vectors of the output's own, Xavier-uniform at first;
            only the tails' are shared. So are the counts of Apostoae 2019, Table 5.1: the head of
            torch's adaptive softmax is a matrix of its own.

    Raises:
        InputError: a source without bands or without features, or whose projections take other
            features; cutoffs for a source that has several bands, or cutoffs beyond the vocabulary.
    """

    source: nn.Module
    features: int | None = None
    share_projections: bool = True
    share_head_projection: bool = False
    cutoffs: Sequence[int] = ()
    bias: bool = False
    own_head: bool = False

    cuts_words: ClassVar[bool] = True  # over devices

    def __post_init__(self):
        check_bands("source", self.source, self.cuts_words)
        if self.features is None:
            self.features = getattr(self.source, "features", None)
        super().__post_init__()
        if self.features is None:
            raise InputError(
                f"features=None needs a source that has features, and {type(self.source).__name__}"
                " has none: use the width of the hidden states"
            )
        check_at_least(1, features=self.features)
        if self.cutoffs and self.word_axes:
            raise InputError(
                f"cutoffs={tuple(self.cutoffs)} cut the table of a source whose"
                f" word_axes={as_tuple(self.word_axes)} cut it, too: use an AdaptiveInput, or an"
                " OwnTable"
            )

    def setup(self):
        bands = self.source.bands()
        if self.cutoffs:
            bands = _split_band(bands, self.cutoffs)
        if self.own_head:
            head = self.param("head", xavier_uniform, bands[0].table.shape, jnp.float32)
            bands = [bands[0]._replace(table=head), *bands[1:]]
        of_tails = self.share_projections and not self.cutoffs
        take = [self.share_head_projection, *[of_tails] * (len(bands) - 1)]
        shared = {i: band.projection for i, band in enumerate(bands) if take[i]}
        widths = [band.table.shape[1] for band in bands]
        projections = _own_projections(self, xavier_uniform, widths, shared)
        for i, projection in shared.items():
            if projection is not None and projection.shape[1] != self.features:
                raise InputError(
                    f"hidden states of width {self.features} do not fit the projections of band"
                    f" {i} of the input, to {(width := projection.shape[1])}: use a body that ends"
                    f" in {width}, as by the last of body.widths or body.blocks, or"
                    " output.table.share_projections=False"
                )
        tables = [band.table for band in bands]
        self.shared = list(map(Band, tables, projections, _biases(self, tables)))

    @property
    def word_axes(self) -> Sequence[str]:
        """The source's."""
        return axes_of_words(self.source)

    def words(self) -> list[int]:
        """Words of each band."""
        source = word_layer(self.source)
        return band_sizes(source.vocabulary_size, self.cutoffs) if self.cutoffs else source.words()

    def word_tables(self) -> dict[str, list[int]]:
        """The parameters of its own with a row for each word, and the words of the bands in
        each; none beside a source that composes its vectors.
        """
        if not hasattr(word_layer(self.source), "words"):
            return {}
        head = {"head": self.words()[:1]} if self.own_head else {}
        return head | ({"bias": self.words()} if self.bias else {})

    def bands(self, *, train: bool = False) -> list[Band]:
        """See the module."""
        return list(self.shared)


def _split_band(bands, cutoffs):
    """The single band of `bands` as several, of one width."""
    if len(bands) > 1:
        raise InputError(
            f"output.table.cutoffs={tuple(cutoffs)} cannot cut an input that has {len(bands)}"
            " bands: leave them empty, or use input.name='lookup'"
        )
    [(table, projection, _)] = bands
    return Band(table, projection).split(band_sizes(len(table), cutoffs))


def _biases(module, tables):
    """A bias `[words]` for every table, parts of one parameter, or None."""
    if not module.bias:
        return [None] * len(tables)
    sizes = [len(table) for table in tables]
    bias = module.param("bias", nn.initializers.zeros, (sum(sizes),), jnp.float32)
    return split_rows(bias, sizes)


def _own_projections(module, init, widths, shared):
    """A projection `[width_i, features]` for every band: the one in `shared`, or one of the
    module's own, or None.

    Where the hidden states are first projected to the width of band 0, a tail's own projection
    starts from there, so the two are multiplied: a product of weights alone, small beside one of
    tokens. The projections of many tails are one parameter.
    """
    features, first = module.features, None
    if 0 not in shared and widths[0] != features:
        first = module.param("projection_0", init, (widths[0], features), jnp.float32)

    def projection(name, *shape):
        start = features if first is None else widths[0]
        matrix = module.param(name, init, (*shape, start), jnp.float32)
        return matrix if first is None else matrix @ first

    tails = [i for i in range(1, len(widths)) if i not in shared]
    if len(tails) == len(widths) - 1 >= MANY_BANDS and len(set(widths)) == 1:
        matrices = projection("projections", len(tails), widths[0])
        matrices = split_rows(matrices.reshape(-1, features), widths[1:])
    else:
        matrices = [projection(f"projection_{i}", widths[i]) for i in tails]
    projections = {0: first} | shared | dict(zip(tails, matrices, strict=True))
    return [projections[i] for i in range(len(widths))]
