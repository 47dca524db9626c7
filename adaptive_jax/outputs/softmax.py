"""The softmax output: full over a table of one band, adaptive over a table of several, and the
hierarchical softmax of two levels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import InitVar
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.losses import banded, distribution
from adaptive_jax.numerics import dropout
from adaptive_jax.numerics.arrays import floats
from adaptive_jax.numerics.bands import Band, axes_of_words, softmax_flops
from adaptive_jax.numerics.layers import Dropout
from adaptive_jax.numerics.meshes import as_tuple
from adaptive_jax.outputs.output import Loss, Output
from adaptive_jax.outputs.tables import OwnTable, check_bands


class Softmax(Output):
    """Softmax over all words of a table; the logits of all tokens never exist at once.

    With one band this is the full softmax. With several it is the adaptive softmax (Grave et al.
    2017): its head holds the words of band 0 and, for every further band, a row of its own, the
    parameter `clusters [tails, width_0]`, Xavier-uniform at first, with a bias `cluster_bias
    [tails]` where the words of the head have one.

    The table decides what is tied: `TiedTable(input, features)` for ADP-T, `OwnTable(...)` for ADP.

    Attributes:
        table: a module with `bands()`, see `adaptive_jax.outputs.tables`.
        tail_dropout: rate of dropout after the projection of every tail (Baevski & Auli 2019,
            section 5.4; Table 6: 0.2).
        input_dropout: rate of dropout on the hidden states. The paper has none; its released code
            sets it to the tail dropout.
        label_smoothing: share of the target's probability that is spread evenly over the columns of
            each softmax that the token visits, in training alone.
        z_loss: weight of the squared log-normaliser of each softmax that the token visits, in
            training alone (PaLM, section 5: 1e-4).
        clusters_init: initializer of `clusters`, a function `(key, shape, dtype)`;
            `nn.with_partitioning` names their axes.

    Raises:
        InputError: a rate or label_smoothing outside [0, 1), a negative z_loss, or a table without
            bands.
    """

    table: nn.Module
    tail_dropout: float = 0.0
    input_dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    clusters_init: Callable = nn.initializers.xavier_uniform()

    cuts_words: ClassVar[bool] = True

    def __post_init__(self):
        super().__post_init__()
        banded.Settings(self.tail_dropout, self.label_smoothing, self.z_loss).checked()

    def setup(self):
        self.dropout = Dropout(self.input_dropout)
        head, *tails = self.bands()
        shape = (len(tails), head.table.shape[1])
        self.clusters = None
        if tails:
            rows, bias = self.param("clusters", self.clusters_init, shape, jnp.float32), None
            if head.bias is not None:
                bias = self.param("cluster_bias", nn.initializers.zeros, shape[:1], jnp.float32)
            self.clusters = Band(rows, None, bias)

    def flops(self, bands: Sequence[Band]) -> float:
        """FLOPs per token of the loss's forward pass over `bands`, arrays or shapes; words occur by
        Zipf's law.
        """
        return softmax_flops(bands)

    def arrays(self, *, train: bool = False) -> tuple[list[Band], Band | None]:
        """`(bands, clusters)`, as `adaptive_jax.adaptive_cross_entropy` takes them."""
        return self.bands(train=train), self.clusters

    def __call__(
        self,
        hidden: jax.Array,
        targets: jax.Array,
        weights: jax.Array | None = None,
        *,
        reduction: str = "mean",
        ignore_index: int | None = -100,
        train: bool = False,
        reports: Sequence[str] = (),
        top_k: int = 0,
    ) -> Any:
        """The loss in nats, as `adaptive_jax.adaptive_cross_entropy` reduces it.

        Args:
            hidden, targets, weights, train: as in `loss`.
            reduction: "mean", the sum of weights · loss over the sum of weights; "sum"; or "none",
                weights · loss of every token `[batch, ...]`.
            ignore_index: a target that counts as one of weight 0; None: no target does.
            reports, top_k: as in `adaptive_jax.linear_cross_entropy`, from the same pass and its
                dropout; with several bands only "nll", "z_loss" and "correct".

        Returns:
            The loss, an array; with `reports`, `(loss, adaptive_jax.losses.reports.Report)`.

        Raises:
            InputError: as `loss`, an unknown reduction or report, or the reduction "none" with tail
                dropout, which works with sums and means alone.
        """
        hidden, settings, seeds = self._with_dropout(hidden, None, train)
        settings = settings._replace(
            ignore_index=ignore_index, reports=as_tuple(reports), top_k=top_k
        )
        arguments = hidden, targets, weights, *self.arrays(train=train), settings
        return banded.reduced(reduction, *arguments, seeds=seeds)

    def loss(
        self,
        hidden: jax.Array,
        targets: jax.Array,
        weights: jax.Array | None = None,
        row_ids=None,
        *,
        train: bool = False,
    ) -> Loss:
        """See `adaptive_jax.outputs.output.Output.loss`; training adds smoothing and z-loss."""
        hidden, settings, seeds = self._with_dropout(hidden, row_ids, train)
        softmax = self.arrays(train=train)
        return Loss(*banded.loss(hidden, targets, weights, *softmax, settings, seeds))

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Negative log-likelihood of each target `[...]` in nats, in the order of `targets`; see
        `banded.losses`.
        """
        return banded.losses(hidden, targets, None, *self.arrays(), self._sharded(banded.PLAIN))

    def log_probs(self, hidden: jax.Array) -> jax.Array:
        """Log-probabilities of all words, `[..., vocabulary]`: pass only the positions that you
        need.

        Raises:
            InputError: a table that is sharded over words.
        """
        return distribution.log_probs(hidden, *self._arrays_of_all_words())

    def predict(self, hidden: jax.Array) -> jax.Array:
        """The most probable word of each token, int32 `[...]`: the argmax of `log_probs`, without
        that matrix. A tail is computed only for tokens whose best word may be in it.

        Raises:
            InputError: as `log_probs`.
        """
        return distribution.predict(hidden, *self._arrays_of_all_words())

    def _with_dropout(self, hidden, row_ids, train):
        """Hidden states after dropout, the settings of the loss, and the seeds of tail dropout."""
        hidden = floats("hidden", hidden, ...)
        hidden = self.dropout(hidden, row_ids, train=train)
        settings, seeds = banded.PLAIN, None
        if train:
            tail_dropout = self.tail_dropout if self.clusters else 0.0
            settings = banded.Settings(tail_dropout, self.label_smoothing, self.z_loss)
        if settings.tail_dropout:
            rows = hidden.shape[0] if hidden.ndim > 1 else 1
            row_ids = jnp.arange(rows) if row_ids is None else jnp.asarray(row_ids)
            per_row = math.prod(hidden.shape[1:-1])
            numbers = row_ids[:, None] * per_row + jnp.arange(per_row)[None]
            seeds = dropout.row_seeds(self.make_rng("dropout"), numbers.ravel())
        return hidden, self._sharded(settings), seeds

    def _arrays_of_all_words(self):
        """`arrays()` of all words."""
        check_bands("table", self.table)
        return self.arrays()

    def _sharded(self, settings):
        """The settings, extended if the table's words are sharded over devices."""
        if not (axes := axes_of_words(self.table)):
            return settings
        words = tuple(self.table.words())
        return settings._replace(axis_name=as_tuple(axes), gathers=True, words=words)


class FullSoftmax(Softmax):
    """A `Softmax` that refuses a table of several bands: "softmax" in a config, where "adaptive" is
    `Softmax`.

    Attributes: as those of `adaptive_jax.outputs.softmax.Softmax`.
    """

    many_bands: ClassVar[bool] = False


class Hierarchical(Softmax):
    """Softmax over classes, then over the words of one class (Goodman 2001; Chen et al. 2016,
    "Hierarchical Softmax"):

        p(word) = p(class of word) · p(word | class of word)

    It is exact and normalised. Classes are ranges of words: the bands of a table with cutoffs, in
    the order of frequency or of clusters, or `classes` equal parts of a table of one band. It is
    computed as an adaptive softmax whose band 0 has no words, so the first level consists of the
    parameter `clusters [classes, features]`, with `cluster_bias [classes]` where words have a bias.
    The first band of a table of several bands, the head of an adaptive softmax, has no projection;
    here the first class has one like the others, the parameter `projection`, as counted by Apostoae
    2019, Table 5.1.

    Attributes: as those of `adaptive_jax.outputs.softmax.Softmax`, and
        classes: number of equal classes of a table of one band; 0: the bands of the table or, if it
            has one band, the square root of the number of words, which minimises the work per word
            (Chen et al. 2016).

    Raises:
        InputError: as `Softmax`; `classes` for a table of several bands; more classes than words.
    """

    classes: int = 0

    cuts_words: ClassVar[bool] = False

    def __post_init__(self):
        super().__post_init__()
        check_at_least(0, classes=self.classes)

    def setup(self):
        first, *classes = self.table.bands()
        self.projection = None
        if first.projection is None and any(band.projection is not None for band in classes):
            init, width = nn.initializers.xavier_uniform(), first.table.shape[1]
            self.projection = self.param("projection", init, (width, width), jnp.float32)
        super().setup()

    def bands(self, *, train: bool = False) -> list[Band]:
        """A band 0 without words, and a band for each class."""
        bands = self.table.bands(train=train)
        if self.projection is not None:
            bands[0] = bands[0]._replace(projection=self.projection)
        words = sum(len(band.table) for band in bands)
        if self.classes and len(bands) > 1:
            raise InputError(
                f"output.classes={self.classes} cannot cut a table that has {len(bands)} bands:"
                " use 0 for these"
            )
        if self.classes > words:
            raise InputError(
                f"output.classes={self.classes} is more than the {words} words: use fewer"
            )
        if len(bands) == 1:
            classes = self.classes or round(math.sqrt(words))
            sizes = [len(part) for part in np.array_split(np.arange(words), classes)]
            bands = bands[0].split(sizes)
        first = bands[0]
        empty = jnp.zeros((0, first.features), first.table.dtype)
        return [Band(empty, None, None if first.bias is None else first.bias[:0]), *bands]


class AdaptiveSoftmax(Softmax):
    """The adaptive softmax (Grave et al. 2017), on a new table or on an existing one:

        AdaptiveSoftmax(vocabulary_size=267_735, features=1024, cutoffs=(20_000, 60_000))
        AdaptiveSoftmax(TiedTable(self.embed), tail_dropout=0.2)

    The first is `Softmax(OwnTable(...))`. Word ids must be in order of frequency, 0 the most
    frequent.

    Attributes: as those of `adaptive_jax.outputs.softmax.Softmax`. Without a table, these are those
        of its `adaptive_jax.outputs.tables.OwnTable`: vocabulary_size, features, cutoffs, factor,
        width, bias, table_init, projection_init.

    Raises:
        InputError: as `Softmax` and `OwnTable`; both a table and a size of one, or neither.
    """

    table: nn.Module = None  # type: ignore[assignment]  # made below, where None is given
    vocabulary_size: InitVar[int | None] = None
    features: InitVar[int | None] = None
    cutoffs: InitVar[Sequence[int]] = ()
    factor: InitVar[int] = OwnTable.factor
    width: InitVar[int] = OwnTable.width
    bias: InitVar[bool] = OwnTable.bias
    table_init: InitVar[Callable | None] = None  # as the next, that of OwnTable
    projection_init: InitVar[Callable | None] = None

    def __post_init__(self, *sizes):
        names = "vocabulary_size", "features", "cutoffs", "factor", "width", "bias"
        names += "table_init", "projection_init"
        fields = {
            name: value
            for name, value in zip(names, sizes, strict=False)  # flax calls it again without any
            if value is not getattr(AdaptiveSoftmax, name)  # an array is neither equal nor not
        }
        if self.table is None:
            if missing := [name for name in names[:2] if name not in fields]:
                raise InputError(
                    f"table=None needs vocabulary_size and features, and {missing[0]} is missing:"
                    " use both, or a table such as TiedTable(...)"
                )
            # Without a parent, the table is adopted by this layer, wherever that is made.
            self.table = OwnTable(**fields, parent=None)
        elif fields:
            name, value = next(iter(fields.items()))
            raise InputError(
                f"{name}={value!r} must be left out beside a table: set it in the table"
            )
        super().__post_init__()
