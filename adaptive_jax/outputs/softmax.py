"""The softmax output: full over a table of one band, adaptive over a table of several."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.errors import InputError, check_rates
from adaptive_jax.losses import banded
from adaptive_jax.numerics import dropout
from adaptive_jax.numerics.arrays import floats, whole_numbers
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.dropout_layers import Dropout


class Loss(NamedTuple):
    """Loss of a batch and its report.

    Attributes:
        total: the scalar `sum(weights · loss)` in nats, to be differentiated.
        nll: the plain negative log-likelihood of each target in nats, `[batch, ...]`; it carries no
            gradient.
    """

    total: jax.Array
    nll: jax.Array


class Softmax(nn.Module):
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
        input_dropout: rate of dropout on the hidden states that reach the output. The paper has
            none; its released code sets it to the tail dropout.
        label_smoothing, z_loss, tails: see `adaptive_jax.losses.settings.Settings`.

    Raises:
        InputError: a rate or label_smoothing outside [0, 1), a negative z_loss, or a table without
            bands.
    """

    table: nn.Module
    tail_dropout: float = 0.0
    input_dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    tails: str = "auto"

    def __post_init__(self):
        super().__post_init__()
        check_rates(self, "input_dropout")
        banded.Settings(
            self.tail_dropout, self.label_smoothing, self.z_loss, tails=self.tails
        ).check()
        if not hasattr(self.table, "bands"):
            raise InputError(
                f"table={self.table!r} has no bands(): give OwnTable(...) or TiedTable(...)"
            )

    def setup(self):
        self.dropout = Dropout(self.input_dropout)
        head, *tails = self.bands()
        shape = (len(tails), head.table.shape[1])
        self.clusters = None
        if tails:
            rows = self.param("clusters", nn.initializers.xavier_uniform(), shape)
            bias = (
                None
                if head.bias is None
                else self.param("cluster_bias", nn.initializers.zeros, shape[:1])
            )
            self.clusters = Band(rows, None, bias)

    def bands(self, *, train: bool = False) -> list[Band]:
        """The bands of the softmax, the head first; `train` draws the table's dropout."""
        return self.table.bands(train=train)

    def loss(
        self,
        hidden: jax.Array,
        targets: jax.Array,
        weights: jax.Array | None = None,
        row_ids=None,
        *,
        train: bool = False,
    ) -> Loss:
        """The training loss.

        Args:
            hidden: `[batch, ..., features]`.
            targets: `[batch, ...]` word ids. Where the weight is 0, any number may stand, such as
                -1. Any other id outside the vocabulary gives NaN under jit.
            weights: `[batch, ...]`, 0 for padding; None: all 1.
            row_ids: int32 `[batch]`, the rows' numbers in the update, on which dropout depends; by
                default 0, 1, 2 …
            train: draw dropout (from the rng stream "dropout") and add label smoothing and z-loss.

        Raises:
            InputError: shapes that do not fit, or a target that is known and does not exist.
        """
        hidden = floats("hidden", hidden, ...)
        row_ids = None if row_ids is None else whole_numbers("row_ids", row_ids, len(hidden))
        hidden = self.dropout(hidden, row_ids, train=train)
        settings, seeds = banded.Settings(tails=self.tails), None
        if train:
            tail_dropout = self.tail_dropout if self.clusters else 0.0
            settings = banded.Settings(
                tail_dropout, self.label_smoothing, self.z_loss, tails=self.tails
            )
        if settings.tail_dropout:
            row_ids = jnp.arange(len(hidden)) if row_ids is None else row_ids
            per_row = math.prod(hidden.shape[1:-1])
            numbers = row_ids[:, None] * per_row + jnp.arange(per_row)[None]
            seeds = dropout.row_seeds(self.make_rng("dropout"), numbers.ravel())
        return Loss(
            *banded.loss(
                hidden, targets, weights, self.bands(train=train), self.clusters, settings, seeds
            )
        )

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Negative log-likelihood of each target `[...]` in nats, in the order given; see
        `banded.nll`.
        """
        return banded.losses(
            hidden, targets, None, self.bands(), self.clusters, banded.Settings(tails=self.tails)
        )

    def log_probs(self, hidden: jax.Array) -> jax.Array:
        """Log-probabilities of all words, `[..., vocabulary]`: give only the positions that are
        needed.
        """
        return banded.log_probs(hidden, self.bands(), self.clusters)


AdaptiveSoftmax = Softmax  # the paper's name for it where the table has several bands
