"""What a prepared corpus is: a vocabulary, and ids for each split."""

from typing import NamedTuple

import numpy as np

from adaptive_jax.data.vocabulary.words import Vocabulary

SPLITS = ("train", "validation", "test")


class Corpus(NamedTuple):
    """A vocabulary, and int32 `[tokens]` for each split, read-only: a memory-mapped file, or `storage.Ids` of a URL."""

    vocabulary: Vocabulary
    ids: dict[str, np.ndarray]
