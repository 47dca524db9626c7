"""The exact cross-entropy of large vocabularies for models of any kind: pure functions of arrays,
on the core of this library.

Logits of all tokens never exist at once. Loss and gradients are computed in one pass, chunk by
chunk of tokens, see `adaptive_jax.losses.banded`. Both functions run under `jax.jit`, `jax.grad`,
`jax.vmap`, `jax.lax.scan`, `jax.checkpoint` and `jax.shard_map`. They have first derivatives only.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from adaptive_jax.errors import check_known
from adaptive_jax.losses import banded
from adaptive_jax.numerics.bands import Band

REDUCTIONS = "mean", "sum", "none"


def linear_cross_entropy(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    weights: jax.Array | None = None,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    axis_name: str | None = None,
    words: int | None = None,
) -> jax.Array:
    """Cross-entropy, in nats, of the softmax over `hidden @ table.T + bias`, without the logits
    `[..., words]`.

    It is exact and has exact gradients for hidden, table, bias and weights. Matrix products run in
    the dtype of hidden, sums and logarithms in float32.

    Args:
        hidden: `[..., width]`, float32 or bfloat16.
        table: `[words, width]`: the output matrix of a language model; transpose a kernel `[width,
            words]`.
        targets: `[...]` word ids. Where the weight is 0, any number may stand, such as -1. Any
            other id outside the vocabulary gives NaN under jit.
        bias: `[words]`, added to the logits.
        weights: `[...]`, such as a mask, 0 for padding; None: all 1.
        soft_cap: every logit becomes `soft_cap · tanh(logit / soft_cap)` (Gemma 2); None: it stays.
        label_smoothing: share of the target's probability that is spread evenly over all words.
        z_loss: adds `z_loss · logsumexp(logits)²` for each token (PaLM, section 5: 1e-4).
        reduction: "mean": sum of weights · loss over the sum of weights, of the tokens on this
            device, 0 without weights; "sum"; or "none": weights · loss of every token `[...]`,
            whose gradient needs a second pass over the logits.
        axis_name: an axis of `jax.shard_map` over which table and bias are cut by words: device i
            holds rows `i · rows` to `(i + 1) · rows - 1`. Hidden, targets and weights must be the
            same on each of its devices, and the loss is. Gradients of rows stay on their device,
            that of hidden is summed. Needs `check_vma` of `shard_map`, which is on by default.
        words: words of the vocabulary, where the table, on all devices, has more rows: those behind
            are padding. None: all rows.

    Raises:
        InputError: shapes that do not fit, a setting out of range, a target that is known and does
            not exist, a second derivative.
    """
    given = None if words is None else (words,)
    settings = banded.Settings(0.0, label_smoothing, z_loss, None, soft_cap, axis_name, given)
    return _reduced(reduction, hidden, targets, weights, [Band(table, None, bias)], None, settings)


def adaptive_cross_entropy(
    hidden: jax.Array,
    bands: Sequence[Band],
    clusters: Band | None,
    targets: jax.Array,
    *,
    weights: jax.Array | None = None,
    soft_cap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    axis_name: str | None = None,
    words: Sequence[int] | None = None,
) -> jax.Array:
    """Cross-entropy, in nats, of the adaptive softmax (Grave et al. 2017) with these bands.

    A word of band 0 costs the head alone, a word of another band the head and that band. Soft cap,
    label smoothing and z-loss act in each softmax that a token visits; all else is as in
    `linear_cross_entropy`.

    Args:
        bands: a `Band(table, projection, bias)` for each range of words, frequent words first. The
            logits of a band are `(hidden @ projection.T) @ table.T + bias`; word ids count through
            the bands in order.
        clusters: `Band(table [len(bands) - 1, width_0], None, bias)`, the rows that stand for the
            further bands in the head; None with one band.
        axis_name: each band is cut by rows, table and bias; projections and clusters are whole on
            every device.
        words: words of each band, where its rows on all devices are more.

    Raises:
        InputError: as `linear_cross_entropy`, or bands and clusters that do not fit together.
    """
    given = None if words is None else tuple(words)
    settings = banded.Settings(0.0, label_smoothing, z_loss, None, soft_cap, axis_name, given)
    return _reduced(reduction, hidden, targets, weights, bands, clusters, settings)


def _reduced(reduction, hidden, targets, weights, bands, clusters, settings):
    check_known(f"reduction={reduction!r}", reduction, REDUCTIONS)
    if reduction == "none":
        return banded.losses(hidden, targets, weights, bands, clusters, settings)
    total, nll = banded.loss(hidden, targets, weights, bands, clusters, settings)
    if reduction == "sum":
        return total
    count = nll.size if weights is None else jnp.sum(jnp.asarray(weights, jnp.float32))
    return total / jnp.where(count == 0, 1, count)
