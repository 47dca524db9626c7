"""Input of a model: one batch of rows of tokens."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # processes that only read text should not wait for JAX
    import jax
    import numpy as np

    Array = jax.Array | np.ndarray


class Batch(NamedTuple):
    """Rows of tokens with the targets and row information that layers need.

    Attributes:
        inputs: token ids, int32 `[rows, time]`. Padding has ids of words, too.
        targets: the token after each input, int32 `[rows, time]`; any number, such as -1, where the
            weight is 0.
        weights: float32 `[rows, time]`, the weight of each target in the loss, 0 for padding. None:
            all 1.
        row_ids: int32 `[rows]`, the number of each row in its update. Dropout depends on it, so no
            layout of devices and microbatches changes the masks. None: 0, 1, 2 …
        segment_ids: int32 `[rows, time]`, or None if each row is one example. A token sees tokens
            of its own segment only; 0 is padding.
        reset: bool `[rows]`, True for rows that start anew and ignore the carry. None: no row.

    The batches of one update have a leading axis, `[microbatches, rows, ...]`.
    """

    inputs: "Array"
    targets: "Array"
    weights: "Array | None"
    row_ids: "Array | None"
    segment_ids: "Array | None" = None
    reset: "Array | None" = None
