"""The full softmax: one band, no clusters."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.dropout import Dropout
from adaptive_jax.errors import check_rates
from adaptive_jax.outputs import banded


class Softmax(nn.Module):
    """Softmax over all words of a table of one band, its logits never held for all tokens at once.

    Attributes:
        table: a module with `bands()`, see `adaptive_jax.outputs.tables`.
        input_dropout: rate of dropout on the hidden states that reach the output. The paper has none; its released code
            sets it to the tail dropout.
        label_smoothing, z_loss: see `adaptive_jax.outputs.banded.Regularisation`.
    """

    table: nn.Module
    input_dropout: float = 0.0
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_rates(self, "input_dropout", "label_smoothing")

    def setup(self):
        self.dropout = Dropout(self.input_dropout)

    def loss(self, hidden: jax.Array, targets: jax.Array, weights: jax.Array, rows=None, *, train: bool = False):
        """Training loss and its report.

        Args:
            hidden: `[batch, ..., features]`.
            targets: `[batch, ...]` word ids.
            weights: `[batch, ...]`, 0 for padding.
            rows: int32 `[batch]`, by whose numbers dropout is drawn, by default 0, 1, 2 …
            train: draw dropout (from the rng stream "dropout") and add label smoothing and z-loss.

        Returns:
            `(loss, nll)`: the scalar `sum(weights · loss)` in nats, to differentiate, and the plain `nll [...]` in nats,
            which carries no gradient.
        """
        hidden = self.dropout(hidden, rows, train=train)
        regularisation = self._regularisation() if train else banded.PLAIN
        key = self.make_rng("dropout") if regularisation.tail_dropout else None
        bands, clusters = self._bands()
        each = targets.size // len(targets)
        rows = jnp.arange(len(targets)) if rows is None else rows
        loss, nll = banded.loss(
            hidden.reshape(-1, hidden.shape[-1]),
            targets.ravel(),
            weights.ravel(),
            bands,
            clusters,
            regularisation=regularisation,
            key=key,
            numbers=(rows[:, None] * each + jnp.arange(each)[None]).ravel(),
        )
        return loss, nll.reshape(targets.shape)

    def nll(self, hidden: jax.Array, targets: jax.Array) -> jax.Array:
        """Negative log-likelihood of each target in nats, `[...]`, in the order given."""
        bands, clusters = self._bands()
        flat = banded.nll(hidden.reshape(-1, hidden.shape[-1]), targets.ravel(), bands, clusters)
        return flat.reshape(targets.shape)

    def log_probs(self, hidden: jax.Array) -> jax.Array:
        """Log-probabilities of all words, `[..., vocabulary]`: give only the positions that are asked for."""
        bands, clusters = self._bands()
        flat = banded.log_probs(hidden.reshape(-1, hidden.shape[-1]), bands, clusters)
        return flat.reshape(*hidden.shape[:-1], -1)

    def _regularisation(self):
        return banded.Regularisation(label_smoothing=self.label_smoothing, z_loss=self.z_loss)

    def _bands(self):
        return tuple(self.table.bands()), None
