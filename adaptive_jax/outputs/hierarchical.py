"""The hierarchical softmax of two levels: first the class of a word, then the word in its class."""

import math

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from adaptive_jax.errors import InputError, check_at_least
from adaptive_jax.numerics.bands import Band, split_rows
from adaptive_jax.outputs.softmax import Softmax


class Hierarchical(Softmax):
    """Softmax over classes, then over the words of one class (Goodman 2001; Chen et al. 2016,
    "Hierarchical Softmax"):

        p(word) = p(class of word) · p(word | class of word)

    It is exact and normalised. Classes are ranges of words: the bands of a table with cutoffs, in
    the order of frequency or of clusters, or `classes` equal parts of a table of one band. It is
    computed as an adaptive softmax whose band 0 has no words, so the parameter `clusters [classes,
    features]`, with `cluster_bias [classes]` where words have a bias, is all of the first level. A
    table of several bands leaves out the projection of its first one, the head of an adaptive
    softmax; here that class has one as
    the others do, the parameter `projection`: so counts Apostoae 2019, Table 5.1.

    Attributes: as those of `adaptive_jax.outputs.softmax.Softmax`, and
        classes: n equal classes of a table of one band; 0: the bands of the table or, if it has
            one, as many classes as the square root of the number of words, the least work for every
            word (Chen et al. 2016).

    Raises:
        InputError: as `Softmax`; a table of several bands that is to be cut again; more classes
            than words.
    """

    classes: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_at_least(0, classes=self.classes)

    def setup(self):
        (table, projection, _), *others = self.table.bands()
        square = (table.shape[1],) * 2
        lacks = projection is None and any(band.projection is not None for band in others)
        self.projection = (
            self.param("projection", nn.initializers.xavier_uniform(), square) if lacks else None
        )
        super().setup()

    def bands(self, *, train: bool = False) -> list[Band]:
        """A band 0 without words, and a band for each class."""
        bands = self.table.bands(train=train)
        if self.projection is not None:
            bands[0] = bands[0]._replace(projection=self.projection)
        words = sum(len(band.table) for band in bands)
        if self.classes and len(bands) > 1:
            raise InputError(
                f"output.classes={self.classes} would cut a table that has {len(bands)} bands: use"
                " 0 for these"
            )
        if self.classes > words:
            raise InputError(
                f"output.classes={self.classes} is more than the {words} words: give fewer"
            )
        if len(bands) == 1:
            [(table, projection, bias)], classes = bands, self.classes or round(math.sqrt(words))
            sizes = [len(part) for part in np.array_split(np.arange(words), classes)]
            biases = [None] * classes if bias is None else split_rows(bias, sizes)
            bands = [
                Band(rows, projection, own)
                for rows, own in zip(split_rows(table, sizes), biases, strict=True)
            ]
        table, projection, bias = bands[0]
        features = (table if projection is None else projection).shape[1]
        return [
            Band(jnp.zeros((0, features), table.dtype), None, None if bias is None else bias[:0]),
            *bands,
        ]
