"""What a prepared corpus is: a vocabulary, and ids for each split."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from adaptive_jax.data.vocabulary.words import Vocabulary

SPLITS = ("train", "validation", "test")


class Corpus(NamedTuple):
    """A vocabulary, and int32 `[tokens]` for each split, read-only: a memory-mapped file, or
    `storage.Ids` of a URL.

    unseen: for each split where it is known, the share of its words, `<eos>` included, that the
        vocabulary was not learnt from: words that it lacks; for sub-word units, words that the
        train split lacks. `<unk>` itself is not one of them.
    """

    vocabulary: Vocabulary
    ids: dict[str, np.ndarray]
    unseen: Mapping[str, float] = {}
