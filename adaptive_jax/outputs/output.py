"""Base class of outputs: a table, its bands, and a loss from the log-probabilities of all words."""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.errors import InputError, check_rates
from adaptive_jax.numerics.arrays import exists, floats, ids, whole_numbers
from adaptive_jax.numerics.bands import Band, softmax_flops
from adaptive_jax.numerics.products import sum_dtype
from adaptive_jax.outputs.tables import check_bands


class Loss(NamedTuple):
    """Loss of a batch and its report.

    Attributes:
        total: the scalar `sum(weights · loss)` in nats, to be differentiated.
        nll: the plain negative log-likelihood of each target in nats, `[batch, ...]`, 0 where the
            weight is 0; it carries no gradient.
    """

    total: jax.Array
    nll: jax.Array


class Output(nn.Module):
    """Output layer on a table. A subclass defines `log_probs`; the other methods have defaults.

    The defaults compute log-probabilities of all words for every token, `[..., vocabulary]`: right
    for every output, and slow for many words. The outputs of this package override `loss` and
    `nll`.

    Attributes:
        table: a module with `bands()`, see `adaptive_jax.outputs.tables`.

    Raises:
        InputError: a table without bands, or, where `many_bands` is False, of several; a rate
            `input_dropout`, where the subclass has one, outside [0, 1).
    """

    table: nn.Module

    many_bands: ClassVar[bool] = True  # whether the table may have several bands
    cuts_words: ClassVar[bool] = False  # whether words may be sharded over devices
    reads_slices: ClassVar[bool] = False  # whether bands may read slices, see `Differentiated`

    def __post_init__(self):
        super().__post_init__()
        if hasattr(self, "input_dropout"):
            check_rates(self, "input_dropout")
        check_bands("table", self.table, self.cuts_words)

    def bands(self, *, train: bool = False) -> list[Band]:
        """The bands of the table, frequent words first; `train` applies the table's dropout."""
        bands = self.table.bands(train=train)
        if len(bands) > 1 and not self.many_bands:
            raise InputError(
                f"this output takes a table of one band, and its table has {len(bands)}: use"
                " config.output.name='adaptive', config.output.table.name='own' without cutoffs, or"
                " 'assembled'"
            )
        return bands

    def flops(self, bands: Sequence[Band]) -> float:
        """FLOPs per token of the loss's forward pass over `bands`, arrays or shapes."""
        return sum(softmax_flops([band], [1]) for band in bands)

    def loss(
        self,
        hidden: jax.Array,
        targets: jax.Array,
        weights: jax.Array | None = None,
        row_ids=None,
        *,
        train: bool = False,
    ) -> Loss:
        """The training loss: a sum, not a mean, so that microbatches and devices add up.

        Args:
            hidden: `[batch, ..., features]`.
            targets: `[batch, ...]` word ids. They may have any value, such as -1, where the weight
                is 0. Elsewhere, an id outside of the vocabulary gives NaN under jit.
            weights: `[batch, ...]`, 0 for padding; None: all 1.
            row_ids: int32 `[batch]`, the rows' numbers in the update, on which dropout depends; by
                default 0, 1, 2 …
            train: whether to apply dropout, from the rng stream "dropout".

        Raises:
            InputError: shapes that do not fit, or, outside of `jax.jit`, a target outside of the
                vocabulary.
        """
        hidden = floats("hidden", hidden, ...)
        shape = hidden.shape[:-1]
        targets = whole_numbers("targets", targets, *shape)
        weights = jnp.ones(shape) if weights is None else floats("weights", weights, *shape)
        has_weight = weights != 0  # 0 · NaN is NaN
        hidden = jnp.where(has_weight[..., None], hidden, 0)
        nll = self.nll(hidden, jnp.where(has_weight, targets, 0))
        nll = jnp.where(has_weight, nll, 0).astype(sum_dtype(nll.dtype))
        total = jnp.sum(weights.astype(nll.dtype) * nll)
        return Loss(total, jax.lax.stop_gradient(nll))

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Negative log-likelihood of each target `[...]` in nats; NaN for a target outside of the
        vocabulary.
        """
        log_probs = self.log_probs(hidden)
        words = log_probs.shape[-1]
        targets = ids("targets", targets, words, *hidden.shape[:-1])
        valid = exists(targets, words)
        index = jnp.where(valid, targets, 0)[..., None]
        return jnp.where(valid, -jnp.take_along_axis(log_probs, index, axis=-1)[..., 0], jnp.nan)
