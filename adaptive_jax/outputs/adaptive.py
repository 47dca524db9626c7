"""The adaptive softmax: frequent words first, rare words behind one column each of the head."""

from flax import linen as nn

from adaptive_jax.errors import check_rates
from adaptive_jax.outputs.banded import Regularisation
from adaptive_jax.outputs.softmax import Softmax


class AdaptiveSoftmax(Softmax):
    """Adaptive softmax (Grave et al. 2017) with the tail dropout of Baevski & Auli 2019, section 5.4.

    The head holds the words of the table's band 0 and, for every further band, a row of its own, Xavier-uniform at first.
    Tying is done by the table that is given: `TiedTable(input, features)` for ADP-T, `OwnTable(...)` for ADP.

    Attributes:
        tail_dropout: rate of dropout after the first projection of every cluster but the head (Table 6: 0.2).
        The others: as those of `Softmax`.
    """

    tail_dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_rates(self, "tail_dropout")

    def setup(self):
        super().setup()
        (words, _), *tails = self.table.bands()
        shape = (len(tails), words.shape[1])
        self.clusters = self.param("clusters", nn.initializers.xavier_uniform(), shape) if tails else None

    def _regularisation(self):
        return Regularisation(self.tail_dropout, self.label_smoothing, self.z_loss)

    def _bands(self):
        bands, _ = super()._bands()
        return bands, self.clusters
