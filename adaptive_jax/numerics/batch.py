"""Input of a model: one batch of rows of tokens."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # processes that only read text should not wait for JAX
    import jax
    import numpy as np

    Array = jax.Array | np.ndarray


class Batch(NamedTuple):
    """Rows of tokens, and what layers need to know about them.

    Attributes:
        inputs: token ids, int32 `[rows, time]`. Padding has ids of words too.
        targets: the token after each input, int32 `[rows, time]`. Where the weight is 0, any number
            may stand, such as -1.
        weights: float32 `[rows, time]`: how much each target counts in the loss, 0 for padding.
            None: all 1.
        row_ids: int32 `[rows]`, the number of each row in its update. Dropout is a function of it,
            so no layout of devices and microbatches changes what is dropped. None: 0, 1, 2 …
        segment_ids: int32 `[rows, time]`, or None where each row is one example. A token sees
            tokens of its own segment only; 0 is padding.
        reset: bool `[rows]`, or None where no row does: the row starts anew and ignores the carry.

    The batches of one update have one more axis in front, `[microbatches, rows, ...]`.
    """

    inputs: "Array"
    targets: "Array"
    weights: "Array | None"
    row_ids: "Array | None"
    segment_ids: "Array | None" = None
    reset: "Array | None" = None
