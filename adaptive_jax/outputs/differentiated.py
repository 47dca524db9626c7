"""The differentiated softmax: one softmax over bands of words, rarer ones with shorter vectors."""

import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp

from adaptive_jax.errors import InputError
from adaptive_jax.losses.plans import TABLE_SHARE, TAIL_CHUNK, chunk_size
from adaptive_jax.numerics.arrays import floats
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.layers import Dropout
from adaptive_jax.numerics.meshes import by_token
from adaptive_jax.numerics.platforms import platform
from adaptive_jax.outputs import scanned
from adaptive_jax.outputs.output import Loss, Output


class Differentiated(Output):
    """A full softmax whose words have vectors of the width of their band (Chen et al. 2016,
    "Differentiated Softmax").

    The logits of all words are computed for every token, a chunk of tokens at a time; rare words
    cost fewer parameters and less work. There are no clusters: bands share one normaliser.

    Attributes:
        table: a module with `bands()`, see `adaptive_jax.outputs.tables`. Each band reads a linear
            projection of the hidden states, the D-softmax [*] of Grave et al. 2017. With
            projected=False, bands read consecutive slices of the hidden states, each as wide as the
            band's vectors (D-softmax; Chen et al. 2016).
        input_dropout: rate of dropout on the hidden states.

    Raises:
        InputError: a rate out of range; slices that are wider than the hidden states in total.
    """

    input_dropout: float = 0.0

    reads_slices: ClassVar[bool] = True

    def setup(self):
        self.dropout = Dropout(self.input_dropout)

    def bands(self, *, train: bool = False) -> list[Band]:
        """The bands of the table; `train` applies the table's dropout."""
        bands, features = super().bands(train=train), self.table.features
        widths = [band.table.shape[1] for band in bands]
        narrow = any(band.features != features for band in bands)
        if narrow and sum(widths) > features:
            most = widths[0] * features // sum(widths)
            raise InputError(
                f"slices of {', '.join(map(str, widths))} do not fit hidden states of {features}:"
                f" use output.table.width={most} or less"
            )
        return bands

    def loss(
        self,
        hidden: jax.Array,
        targets: jax.Array,
        weights: jax.Array | None = None,
        row_ids=None,
        *,
        train: bool = False,
    ) -> Loss:
        """See `adaptive_jax.outputs.output.Output.loss`."""
        hidden = floats("hidden", hidden, ..., self.table.features)
        hidden = self.dropout(hidden, row_ids, train=train)
        bands = self.bands(train=train)
        return Loss(*scanned.total_and_nll(self._chunked(bands), hidden, targets, weights, bands))

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Negative log-likelihood of each target `[...]` in nats; NaN for a target outside of the
        vocabulary.
        """
        hidden = floats("hidden", hidden, ..., self.table.features)
        bands = self.bands()
        return scanned.losses_of(self._chunked(bands), hidden, targets, bands)

    def _chunked(self, bands):
        """The loss of a chunk of tokens."""
        words = sum(len(band.table) for band in bands)
        chunk = chunk_size(0, words, self.table.features)
        if platform() == "cpu":
            # Logits of fewer tokens stay in cache; but each chunk adds to the gradients of all
            # tables, so wide tables need more tokens (benchmarks/outputs.py, small and large).
            chunk = min(chunk, max(TAIL_CHUNK, self.table.features // TABLE_SHARE))
        return scanned.ChunkedLoss(_bands, _losses, words, chunk)

    def log_probs(self, hidden: jax.Array) -> jax.Array:
        """Log-probabilities of all words, `[..., vocabulary]`: pass only the positions that you
        need.
        """
        hidden = floats("hidden", hidden, ..., self.table.features)
        return by_token(_log_probs, hidden, self.bands())


def _log_probs(hidden, bands):
    logits = _logits(bands, hidden.reshape(-1, hidden.shape[-1]))
    log_probs = jax.nn.log_softmax(jnp.concatenate(logits, axis=1), axis=1)
    return log_probs.reshape(*hidden.shape[:-1], -1)


def _logits(bands, hidden):
    """The logits `[tokens, words]` of each band. A band without projection reads a slice of the
    hidden states, or all of them if it is as wide.
    """
    ends = list(itertools.accumulate(band.table.shape[1] for band in bands))
    logits = []
    for (table, projection, bias), end in zip(bands, ends, strict=True):
        is_projected = projection is not None or table.shape[1] == hidden.shape[1]
        x = hidden if is_projected else hidden[:, end - table.shape[1] : end]
        band_logits = scanned.product(scanned.project(x, projection), table, hidden.dtype)
        if bias is not None:
            band_logits += bias[None].astype(band_logits.dtype)
        logits.append(band_logits)
    return logits


def _bands(targets, bands, constants):
    """All tokens read all bands."""
    return (), bands


def _losses(static, hidden, targets, rows, bands, constants):
    """The nll `[tokens]`, twice."""
    first, scored, normalisers = 0, 0.0, []
    for logits in _logits(bands, hidden):
        hit = first + jnp.arange(logits.shape[1])[None] == targets[:, None]
        scored += jnp.sum(jnp.where(hit, logits, 0.0), axis=1)
        normalisers.append(jax.nn.logsumexp(logits, axis=1))
        first += logits.shape[1]
    nll = jax.nn.logsumexp(jnp.stack(normalisers), axis=0) - scored
    return nll, nll
