"""Tables that an output is built on: its own, or one shared with the input.

A table answers `bands() -> [(table [words_i, width_i], projection [width_i, features] | None), ...]`, frequent words
first. Every input of this project is one too.

Where band 0 is narrower or wider than the hidden states, one linear projection without bias brings the hidden states to
its width (Baevski & Auli 2019, section 4.1). Head and tails share it: a tail's own projection starts from that width.
"""

from collections.abc import Sequence

import jax
from flax import linen as nn

from adaptive_jax.bands import band_sizes, band_widths
from adaptive_jax.errors import InputError


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
        tables = [
            self.param(f"table_{i}", nn.initializers.xavier_uniform(), (words, width))
            for i, (words, width) in enumerate(zip(sizes, widths, strict=True))
        ]
        self.pairs = list(zip(tables, _own_projections(self, widths, {}), strict=True))

    def bands(self) -> list[tuple[jax.Array, jax.Array | None]]:
        """See the module."""
        return self.pairs


class TiedTable(nn.Module):
    """The table of the input, shared with the output (Baevski & Auli 2019, "Weight sharing" and Table 7).

    By default as the paper's ADP-T: embeddings and projections are shared, and the head has no projection.

    Attributes:
        source: the module whose `bands()` are shared.
        features: width of the hidden states.
        share_projections: use the source's projections of the tails; otherwise this module has its own.
        share_head_projection: use the source's projection of band 0 as well; otherwise the head has one of its own where
            the band's width is not `features`, and else none.
        cutoffs: cut a source of one band here, so that all bands have its width: "no dimension reduction, tied" (Merity et
            al. 2018; Table 7), whose tails have projections of their own. Empty: the source's own bands.

    Raises:
        InputError: cutoffs for a source that has several bands, or cutoffs beyond the vocabulary.
    """

    source: nn.Module
    features: int
    share_projections: bool = True
    share_head_projection: bool = False
    cutoffs: Sequence[int] = ()

    def setup(self):
        bands = self.source.bands()
        if self.cutoffs:
            bands = _cut(bands, self.cutoffs)
        given = [self.share_head_projection] + [self.share_projections] * (len(bands) - 1)
        shared = {i: bands[i][1] for i, take in enumerate(given) if take and not (i and self.cutoffs)}
        projections = _own_projections(self, [table.shape[1] for table, _ in bands], shared)
        self.pairs = [(table, projection) for (table, _), projection in zip(bands, projections, strict=True)]

    def bands(self) -> list[tuple[jax.Array, jax.Array | None]]:
        """See the module."""
        return self.pairs


def _cut(bands, cutoffs):
    """The single band of `bands` as several, of one width."""
    if len(bands) > 1:
        raise InputError(
            f"output.table.cutoffs={tuple(cutoffs)} cannot cut an input that has {len(bands)} bands: leave them empty, or use "
            "input.name='lookup'"
        )
    [(table, projection)] = bands
    band_sizes(table.shape[0], cutoffs)  # refuses what does not fit
    firsts, ends = (0, *cutoffs), (*cutoffs, table.shape[0])
    return [(table[first:end], projection) for first, end in zip(firsts, ends, strict=True)]


def _own_projections(module, widths, shared):
    """A projection `[width_i, features]` for every band: that of `shared`, or one of the module's own, or None.

    Where the hidden states are first projected to the width of band 0, a tail's own projection starts from there, so the
    two are multiplied: a product of weights alone, small beside one of tokens.
    """

    def own(i, inner):
        return module.param(f"projection_{i}", nn.initializers.xavier_uniform(), (widths[i], inner))

    outer = None if 0 in shared or widths[0] == module.features else own(0, module.features)
    projections = [shared.get(0, outer)]
    for i in range(1, len(widths)):
        if i in shared:
            projections.append(shared[i])
        else:
            projections.append(own(i, module.features) if outer is None else own(i, widths[0]) @ outer)
    return projections
