"""Tables that an output is built on: its own, or one shared with the input.

A table answers `bands() -> [(table [words_i, width_i], projection [width_i, features] | None), ...]`, frequent words
first. Every input of this project is one too.
"""

from collections.abc import Sequence

import jax
from flax import linen as nn

from adaptive_jax.cutoffs import band_sizes, band_widths


class OwnTable(nn.Module):
    """A table that belongs to the output alone.

    Without cutoffs it has one band, for a full softmax; with them the narrowing bands of an adaptive softmax (Grave et
    al. 2017). The first band has a projection only where its width is not `features`, since the head multiplies hidden
    states and words directly (Baevski & Auli 2019, section 3). All arrays start Xavier-uniform.

    Attributes: as those of `adaptive_jax.inputs.adaptive.AdaptiveInput`.

    Raises:
        InputError: cutoffs that do not increase or do not lie within the vocabulary.
    """

    vocabulary_size: int
    features: int
    cutoffs: Sequence[int] = ()
    factor: int = 4
    width: int = 0

    def setup(self):
        sizes = band_sizes(self.vocabulary_size, self.cutoffs)
        widths = band_widths(self.width or self.features, self.factor, len(sizes))
        xavier = nn.initializers.xavier_uniform()
        self.tables = [
            self.param(f"table_{i}", xavier, (words, width))
            for i, (words, width) in enumerate(zip(sizes, widths, strict=True))
        ]
        self.projections = [_own_projection(self, i, width, self.features) for i, width in enumerate(widths)]

    def bands(self) -> list[tuple[jax.Array, jax.Array | None]]:
        """See the module."""
        return list(zip(self.tables, self.projections, strict=True))


class TiedTable(nn.Module):
    """The table of the input, shared with the output (Baevski & Auli 2019, "Weight sharing" and Table 7).

    By default as the paper's ADP-T: embeddings and projections are shared, and the head has no projection.

    Attributes:
        source: the module whose `bands()` are shared.
        features: width of the hidden states.
        share_projections: use the source's projections of the tails; otherwise this module has its own.
        share_head_projection: use the source's projection of band 0 as well; otherwise the head has one of its own where
            the band's width is not `features`, and else none.
    """

    source: nn.Module
    features: int
    share_projections: bool = True
    share_head_projection: bool = False

    def setup(self):
        shared = self.source.bands()
        share = [self.share_head_projection] + [self.share_projections] * (len(shared) - 1)
        self.pairs = [
            (table, projection if take else _own_projection(self, i, table.shape[1], self.features))
            for i, ((table, projection), take) in enumerate(zip(shared, share, strict=True))
        ]

    def bands(self) -> list[tuple[jax.Array, jax.Array | None]]:
        """See the module."""
        return self.pairs


def _own_projection(module, band, width, features):
    if band == 0 and width == features:
        return None
    return module.param(f"projection_{band}", nn.initializers.xavier_uniform(), (width, features))
