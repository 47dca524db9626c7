"""Exact cross-entropy over large vocabularies, as pure functions of arrays for any model.

The logits of all tokens never exist at once: loss and gradients are computed in one pass over
chunks of tokens, see `adaptive_jax.losses.banded`. All three functions run under `jax.jit`,
`jax.grad`, `jax.vmap`, `jax.lax.scan`, `jax.checkpoint` and `jax.shard_map`. They have first
derivatives only.

Tokens of weight 0 are not computed: they cost no time, and their hidden states may be NaN.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from adaptive_jax.errors import InputError
from adaptive_jax.losses.arguments import Settings, Table, loss_arguments, used
from adaptive_jax.losses.banded import log_probs_of_targets, reduced
from adaptive_jax.numerics.arrays import whole_numbers
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.meshes import as_tuple


def linear_cross_entropy(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    weights: jax.Array | None = None,
    ignore_index: int | None = -100,
    target_probs: jax.Array | None = None,
    logit_scale: float | jax.Array | None = None,
    soft_cap: float | jax.Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float | jax.Array = 0.0,
    reduction: str = "mean",
    token_axes: str | Sequence[str] = (),
    axis_name: str | None = None,
    words: int | None = None,
    reports: Sequence[str] = (),
    top_k: int = 0,
    chunk: int | None = None,
) -> Any:
    """Cross-entropy, in nats, of the softmax over `hidden @ table.T + bias`, without the logits
    `[..., words]`.

    It is exact and has exact gradients for hidden, table, bias and weights. Matrix products run in
    the dtype of hidden, sums and logarithms in float32, or in float64 where hidden is.

    Args:
        hidden: `[..., width]`, float32, bfloat16, float16, or float64 under x64.
        table: `[words, width]`: the output matrix of a language model; transpose a kernel `[width,
            words]`.
        targets: `[...]` word ids; any number where the weight is 0. Elsewhere an id outside the
            vocabulary is an error, or under `jax.jit` makes its loss NaN.
        bias: `[words]`, added to the logits.
        weights: `[...]`, such as a mask, 0 for padding; None: all 1. The loss of a token of weight
            0 counts as 0, so its weight has no gradient except through the mean's denominator.
        ignore_index: target id whose tokens get weight 0, as in torch, or None. With None and
            without weights, the program is a plain loop over tokens, which `jax.vmap` batches best.
        target_probs: `[..., k]`: then targets are `[..., k]`, such as a teacher's k best words, and
            the loss is `-sum_i target_probs_i · log p(target_i)`. The probabilities need not sum to
            1, and have no gradient. A target of probability 0 may be any number.
        logit_scale: logits become `logit_scale · (hidden @ table.T + bias)`, before the soft cap: a
            number, or an array `[]` with a gradient. It multiplies hidden states and bias.
        soft_cap: every logit becomes `soft_cap · tanh(logit / soft_cap)` (Gemma 2); None: no cap.
        label_smoothing: share of the target's probability that is spread evenly over all words.
        z_loss: adds `z_loss · logsumexp(logits)²` for each token (PaLM, section 5: 1e-4). It and
            soft_cap may be arrays `[]` that change from update to update; they have no gradient.
        reduction: "mean": sum of weights · loss, divided by the sum of the weights, or by 1 if that
            is 0; "sum"; or "none": weights · loss of every token `[...]`, whose gradient needs a
            second pass over the logits.
        token_axes: the axis, or axes, of `jax.shard_map` that shard the tokens. "mean" and "sum"
            are then over all devices and the same on each, and so are their gradients, whether
            `jax.grad` is inside or outside `shard_map`. Without it, a mean inside `shard_map` is
            over the device's own tokens. It and axis_name need `check_vma` of `shard_map`.
        axis_name: an axis of `jax.shard_map` that shards table and bias by words: device i holds
            rows `i · rows` to `(i + 1) · rows - 1` and their gradients. Tokens may be replicated
            over the axis; then the loss is, too. Or the axis shards the tokens as well; then each
            device returns the loss of its own tokens, and all must scale it by the same number, or
            gradients of the table are NaN.
        words: size of the vocabulary, if the table has more rows on all devices; the last rows are
            padding. None: all rows.
        reports: names of fields of `adaptive_jax.losses.reports.Report` to return beside the loss,
            from the same pass, without another matrix product. Only nll, logsumexp, entropy and the
            log_probs of top_k have gradients, and only with reduction="none".
        top_k: number of words in the report "top_k".
        chunk: tokens whose logits exist at a time; None: chosen from the device, the vocabulary and
            the number of tokens, see `adaptive_jax.losses.plans`.

    Returns:
        The loss, an array; with `reports`, `(loss, adaptive_jax.losses.reports.Report)`.

    Raises:
        InputError: mismatched shapes, a setting out of range, a concrete target outside the
            vocabulary, a second derivative.
    """
    settings = Settings(
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        soft_cap=soft_cap,
        axis_name=axis_name,
        words=None if words is None else (words,),
        ignore_index=ignore_index,
        reports=as_tuple(reports),
        top_k=top_k,
        chunk=chunk,
    )
    if target_probs is not None and (used(label_smoothing) or "correct" in settings.reports):
        raise InputError(
            "target_probs takes no label_smoothing and no report 'correct', which need one target"
            " per token: smooth target_probs instead, or compare the report 'predicted'"
        )
    arguments = hidden, targets, weights, Table(table, bias), None, settings
    return reduced(
        reduction,
        *arguments,
        probs=target_probs,
        token_axes=token_axes,
        logit_scale=logit_scale,
    )


def adaptive_cross_entropy(
    hidden: jax.Array,
    bands: Sequence[Band],
    clusters: Band | None,
    targets: jax.Array,
    *,
    weights: jax.Array | None = None,
    ignore_index: int | None = -100,
    logit_scale: float | jax.Array | None = None,
    soft_cap: float | jax.Array | None = None,
    label_smoothing: float = 0.0,
    z_loss: float | jax.Array = 0.0,
    reduction: str = "mean",
    token_axes: str | Sequence[str] = (),
    axis_name: str | None = None,
    words: Sequence[int] | None = None,
    reports: Sequence[str] = (),
    chunk: int | None = None,
) -> Any:
    """Cross-entropy, in nats, of the adaptive softmax (Grave et al. 2017) with these bands.

    A word of band 0 costs the head alone, a word of another band the head and that band. Logit
    scale, soft cap, label smoothing and z-loss act in each softmax that a token visits; all else is
    as in `linear_cross_entropy`.

    Args:
        bands: a `Band(table, projection, bias)` for each range of words, frequent words first. The
            logits of a band are `(hidden @ projection.T) @ table.T + bias`; word ids count through
            the bands in order.
        clusters: `Band(table [len(bands) - 1, width_0], None, bias)`, the rows that stand for the
            further bands in the head; None with one band.
        axis_name: an axis that shards table and bias of each band by rows; projections and clusters
            are replicated.
        words: words of each band, if its table has more rows on all devices.
        reports: "nll", "z_loss" and "correct" with several bands; the others need softmaxes that a
            token does not visit. All but "top_k" with one band.
        chunk: tokens of a chunk, in the head and in tails.

    Raises:
        InputError: as `linear_cross_entropy`, or bands and clusters that do not match.
    """
    settings = Settings(
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        soft_cap=soft_cap,
        axis_name=axis_name,
        words=None if words is None else tuple(words),
        ignore_index=ignore_index,
        reports=as_tuple(reports),
        chunk=chunk,
    )
    arguments = hidden, targets, weights, bands, clusters, settings
    return reduced(reduction, *arguments, token_axes=token_axes, logit_scale=logit_scale)


def linear_log_probs(
    hidden: jax.Array,
    table: jax.Array,
    targets: jax.Array,
    *,
    bias: jax.Array | None = None,
    weights: jax.Array | None = None,
    ignore_index: int | None = -100,
    logit_scale: float | jax.Array | None = None,
    soft_cap: float | jax.Array | None = None,
    axis_name: str | None = None,
    words: int | None = None,
    reports: Sequence[str] = (),
    top_k: int = 0,
    chunk: int | None = None,
) -> Any:
    """Log-probabilities, in nats, of chosen words under the softmax over `hidden @ table.T + bias`,
    without the logits `[..., words]`: actions of a policy, answers to a question, a student's best
    words under the teacher.

    They have exact gradients, by a second pass over the logits: 8 · tokens · words · width FLOPs in
    all, whatever the number of chosen words. Hidden states, ids and one normaliser per token are
    kept between the passes.

    Args:
        targets: `[..., k]` word ids, which may repeat. A target equal to `ignore_index` has
            log-probability 0, without gradient. One outside the vocabulary is an error, or under
            `jax.jit` makes the k log-probabilities of its token NaN.
        weights: `[...]`, such as a mask: tokens of weight 0 are not computed and have
            log-probabilities 0; other weights change nothing.
        hidden, table, bias, logit_scale, soft_cap, axis_name, words, reports, top_k, chunk: as in
            `linear_cross_entropy`. Reports have gradients as with reduction="none"; there are no
            "nll", "z_loss" and "correct", which need one target per token.

    Returns:
        `[..., k]`; with `reports`, `(log_probs, adaptive_jax.losses.reports.Report)`.

    Raises:
        InputError: as `linear_cross_entropy`.
    """
    reports = as_tuple(reports)
    if refused := [name for name in reports if name in ("nll", "z_loss", "correct")]:
        raise InputError(
            f"reports={refused[0]!r} needs one target per token: use linear_cross_entropy"
        )
    settings = Settings(
        soft_cap=soft_cap,
        axis_name=axis_name,
        words=None if words is None else (words,),
        ignore_index=ignore_index,
        reports=reports,
        top_k=top_k,
        chunk=chunk,
        target_log_probs=True,
    )
    shape = whole_numbers("targets", targets, *jnp.shape(hidden)[:-1], "k").shape
    ones = jnp.ones(shape, jnp.float32)
    arguments = hidden, targets, weights, Table(table, bias), None, settings
    arguments = loss_arguments(*arguments, ones, logit_scale)
    values, report = log_probs_of_targets(arguments)
    return (values, report) if reports else values
