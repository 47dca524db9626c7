"""Tables of an output: its own, or one shared with the input.

A table has a method `bands(train=False) -> list[Band]`, frequent words first; `train` applies its
dropout, if it has any. Every input of this package is a table too.

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


def xavier_uniform(key: jax.Array, shape: Sequence[int], dtype=jnp.float32) -> jax.Array:
    """Draws matrices `[..., rows, columns]`, each Xavier-uniform."""
    init = nn.initializers.xavier_uniform(batch_axis=tuple(range(len(shape) - 2)))
    return init(key, shape, dtype)


def check_bands(name: str, module, cuts_words: bool = False) -> None:
    """Raises InputError if the `table` of an output, or the `source` of a table, has no bands, or
    is sharded over words although `cuts_words` is False.
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

    Without cutoffs it has one band, for a full softmax; with cutoffs, the narrowing bands of an
    adaptive softmax (Grave et al. 2017). The first band has a projection only if its width is not
    `features`, since the head multiplies hidden states and words directly (Baevski & Auli 2019,
    section 3). Projections start Xavier-uniform.

    Attributes: as those of `adaptive_jax.inputs.adaptive.AdaptiveInput`, and
        bias: add a bias to the logit of every word, 0 at first.
        weight_norm: apply weight normalisation to every word's vector (Salimans & Kingma 2016), as
            fairseq's gated convolutional network does under a full softmax.
        projected: give bands a projection where their width is not `features`. Without, only a
            differentiated softmax of slices can use them.
        table_init, projection_init: initializers of tables and projections, functions `(key, shape,
            dtype)` like that of flax's `Embed`; `nn.with_partitioning` names their axes. The
            projections of many tails of one width are one array `[tails, width, features]`.
        word_axes: as those of the input.

    Raises:
        InputError: cutoffs that do not increase or lie outside of the vocabulary, or a number out
            of range.
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

    cuts_words: ClassVar[bool] = True  # whether words may be sharded over devices

    def __post_init__(self):
        super().__post_init__()
        band_shapes(self)  # checks the fields

    def words(self) -> list[int]:
        """Number of words of each band."""
        return band_sizes(self.vocabulary_size, self.cutoffs)

    def word_tables(self) -> dict[str, list[int]]:
        """The parameters with a row for each word, and the number of words of each band in them."""
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

    The defaults are those of the paper's ADP-T: embeddings and projections are shared, and the head
    has no projection.

    Attributes:
        source: the module whose `bands()` are shared.
        features: width of the hidden states; None: `features` of the source.
        share_projections: share the source's projections of the tails; otherwise the output has
            separate ones.
        share_head_projection: share the source's projection of band 0 as well; otherwise the head
            has a separate one where the band's width is not `features`, and none where it is.
        cutoffs: divide a source of one band into bands of its width: "no dimension reduction, tied"
            (Merity et al. 2018; Table 7), whose tails have separate projections. Empty: the bands
            of the source.
        bias: add a bias to the logit of every word, 0 at first; the input has none.
        own_head: give the output separate vectors of the words of band 0, Xavier-uniform at first,
            and share only those of the tails. The parameter counts of Apostoae 2019, Table 5.1,
            assume this: torch's adaptive softmax has its own head matrix.

    Raises:
        InputError: a source without bands or without features, or with projections to another
            width; cutoffs for a source of several bands, or outside of the vocabulary.
    """

    source: nn.Module
    features: int | None = None
    share_projections: bool = True
    share_head_projection: bool = False
    cutoffs: Sequence[int] = ()
    bias: bool = False
    own_head: bool = False

    @property
    def cuts_words(self) -> bool:
        """True if words may be sharded over devices: not if `cutoffs` divide them here."""
        return not self.cutoffs

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

    def setup(self):
        bands = self.source.bands()
        if self.cutoffs:
            bands = _split_band(bands, self.cutoffs)
        if self.own_head:
            head = self.param("head", xavier_uniform, bands[0].table.shape, jnp.float32)
            bands = [bands[0]._replace(table=head), *bands[1:]]
        of_tails = self.share_projections and not self.cutoffs
        is_shared = [self.share_head_projection, *[of_tails] * (len(bands) - 1)]
        shared = {i: band.projection for i, band in enumerate(bands) if is_shared[i]}
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
        """The axes of the source."""
        return axes_of_words(self.source)

    def words(self) -> list[int]:
        """Number of words of each band."""
        source = word_layer(self.source)
        return band_sizes(source.vocabulary_size, self.cutoffs) if self.cutoffs else source.words()

    def word_tables(self) -> dict[str, list[int]]:
        """The parameters of this module with a row for each word, and the number of words of each
        band in them; none if the source composes its vectors.
        """
        if not hasattr(word_layer(self.source), "words"):
            return {}
        head = {"head": self.words()[:1]} if self.own_head else {}
        return head | ({"bias": self.words()} if self.bias else {})

    def bands(self, *, train: bool = False) -> list[Band]:
        """See the module."""
        return list(self.shared)


def _split_band(bands, cutoffs):
    """Divides the only band of `bands` into several of the same width."""
    if len(bands) > 1:
        raise InputError(
            f"output.table.cutoffs={tuple(cutoffs)} cannot cut an input that has {len(bands)}"
            " bands: leave them empty, or use input.name='lookup'"
        )
    [(table, projection, _)] = bands
    return Band(table, projection).split(band_sizes(len(table), cutoffs))


def _biases(module, tables):
    """Biases `[words]` for every table, slices of one parameter, or None for each."""
    if not module.bias:
        return [None] * len(tables)
    sizes = [len(table) for table in tables]
    bias = module.param("bias", nn.initializers.zeros, (sum(sizes),), jnp.float32)
    return split_rows(bias, sizes)


def _own_projections(module, init, widths, shared):
    """A projection `[width_i, features]` for every band: the one in `shared`, a parameter of
    `module`, or None.

    Where the hidden states are first projected to the width of band 0, a tail's projection starts
    from that width, and the two matrices are multiplied, which is little work beside products of
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
