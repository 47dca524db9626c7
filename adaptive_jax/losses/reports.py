"""Statistics of each token beside its loss, such as the entropy of the prediction, computed while
the token's logits exist.

Logits may come in several parts, which `merge` adds one by one. Columns are numbered through the
parts, and through the devices of an axis that shards the words.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.numerics.meshes import axes_of, pvary
from adaptive_jax.numerics.products import sum_dtype

LOG_PROBS = "log_probs"  # of several targets per token, for `linear_log_probs` alone
LOW = -1e30  # below every logit, and finite: the difference of two such is 0


class TopK(NamedTuple):
    """The most probable words of each token in descending order. If fewer than `top_k` words have a
    finite logit, the other entries have log-probability -inf and any id.

    Attributes:
        log_probs: `[..., top_k]`, in nats.
        words: int32 `[..., top_k]`, their ids.
    """

    log_probs: jax.Array
    words: jax.Array


class Report(NamedTuple):
    """The requested statistics of each token, in nats; None for those not requested. For tokens of
    weight 0 they are 0, and `correct` is False.

    Attributes:
        nll: `[...]`, the plain negative log-likelihood of the target; for soft targets, the
            cross-entropy.
        z_loss: `[...]`, the part of the loss that `z_loss` adds.
        predicted: int32 `[...]`, the most probable word.
        correct: bool `[...]`, True if that is the target. For an adaptive softmax, True if the head
            and, for a word of a tail, the tail give the target their largest logit, as in torch's
            `AdaptiveLogSoftmaxWithLoss.predict`.
        logsumexp: `[...]`, the log-normaliser of the logits.
        entropy: `[...]`, of the predicted distribution.
        top_k: a `TopK`.
    """

    nll: jax.Array | None = None
    z_loss: jax.Array | None = None
    predicted: jax.Array | None = None
    correct: jax.Array | None = None
    logsumexp: jax.Array | None = None
    entropy: jax.Array | None = None
    top_k: TopK | None = None


REPORTS = Report._fields


def start(settings, x: jax.Array) -> dict:
    """Initial statistics by name, before any column, for states `x [tokens, width]`."""
    dtype, tokens, names = sum_dtype(x.dtype), len(x), settings.reports
    low, zero = jnp.full(tokens, LOW, dtype), jnp.zeros(tokens, dtype)
    stats = {}
    if "entropy" in names:
        stats["moments"] = low, zero, zero
    if "predicted" in names or "correct" in names:
        stats["best"] = low, jnp.zeros(tokens, jnp.int32)
    if "top_k" in names:
        shape = tokens, settings.top_k
        stats["top"] = jnp.full(shape, LOW, dtype), jnp.zeros(shape, jnp.int32)
    return pvary(stats, axes_of(x))


def merge(stats: dict, logits: jax.Array, first) -> dict:
    """Adds `logits [tokens, columns]`, which start at column `first`, to `stats`. Columns that are
    not words have logits of -inf.
    """
    merged = {}
    if "moments" in stats:
        merged["moments"] = _moments(stats["moments"], logits)
    if "best" in stats:
        peak, column = stats["best"]
        higher = jnp.max(logits, axis=1)
        place = (first + jnp.argmax(logits, axis=1)).astype(jnp.int32)
        merged["best"] = jnp.maximum(peak, higher), jnp.where(higher > peak, place, column)
    if "top" in stats:
        values, columns = stats["top"]
        highest, place = lax.top_k(logits, min(values.shape[1], logits.shape[1]))
        candidates = jnp.concatenate([values, highest], axis=1)
        columns = jnp.concatenate([columns, (first + place).astype(jnp.int32)], axis=1)
        merged["top"] = _best_of(candidates, columns, values.shape[1])
    return merged


def observed(settings, stats: dict, logsumexp, scored, column, columns: int) -> dict:
    """The reports `[tokens, ...]` of one softmax, by name; `correct` counts errors, so its sum over
    the softmaxes of a token is 0 if all are right.

    Args:
        stats: of all columns on this device.
        logsumexp: `[tokens]`, of all devices.
        scored: the logits of the targets, `[tokens]` or `[tokens, k]`.
        column: the columns of the targets on this device, in the shape of scored.
        columns: the number of columns of a device.
    """
    axis, out = settings.axis_name, {}
    shift = 0 if axis is None else lax.axis_index(axis) * columns
    if "z_loss" in settings.reports:
        out["z_loss"] = settings.z_loss * logsumexp**2
    if "logsumexp" in settings.reports:
        out["logsumexp"] = logsumexp
    if LOG_PROBS in settings.reports:
        out[LOG_PROBS] = scored - logsumexp[:, None]
    if "moments" in stats:
        peak, total, moment = stats["moments"]
        if axis is not None:
            peak = lax.pmax(peak, axis)
            fall = jnp.exp(stats["moments"][0] - peak)
            moment = fall * (moment + (stats["moments"][0] - peak) * total)
            total, moment = lax.psum((total * fall, moment), axis)
        out["entropy"] = jnp.log(total) - moment / total
    if "best" in stats:
        peak, best = stats["best"]
        out["predicted"], column = best + shift, column + shift
        if axis is not None:
            highest = (peak == lax.pmax(peak, axis)) | jnp.isnan(peak)
            candidate = jnp.where(highest, out["predicted"], jnp.iinfo(jnp.int32).max)
            out["predicted"] = lax.pmin(candidate, axis)
            column = lax.pmax(column, axis)  # of a word on another device it is `ABSENT`
        if "correct" in settings.reports:
            out["correct"] = (out["predicted"] != column).astype(jnp.int32)
    if "top" in stats:
        values, best = stats["top"]
        best = best + shift
        if axis is not None:
            values, best = _everywhere(axis, values), _everywhere(axis, best)
            values, best = _best_of(values, best, settings.top_k)
        values = jnp.where(values > LOW, values, -jnp.inf)
        out["top_k"] = TopK(values - logsumexp[:, None], best)
    return {name: out[name] for name in settings.reports if name in out}


def empty(settings, weight: jax.Array, column: jax.Array) -> dict:
    """Zeros in the shapes of the results of `observed`, for tokens of `weight [tokens]` and targets
    in the shape of `column`.
    """
    zero, integer_zero = jnp.zeros_like(weight), jnp.zeros_like(weight, jnp.int32)
    arrays = zero, integer_zero
    of_top_k = (jnp.repeat(array[:, None], settings.top_k, axis=1) for array in arrays)
    other_shapes = {"predicted": integer_zero, "correct": integer_zero, "top_k": TopK(*of_top_k)}
    if LOG_PROBS in settings.reports:  # the columns differ between devices, the weights do not
        other_shapes[LOG_PROBS] = jnp.broadcast_to(zero[:, None], column.shape)
    return {name: other_shapes.get(name, zero) for name in settings.reports}


def _moments(moments, logits):
    """The largest logit, the sum of powers relative to it, and the sum of powers times the logits'
    distance to it.
    """
    peak, total, moment = moments
    higher = jnp.maximum(peak, jnp.max(logits, axis=1))
    fall, away = jnp.exp(peak - higher), logits - higher[:, None]
    powers = jnp.exp(away)
    weighted = jnp.where(powers > 0, powers * away, 0.0)
    moment = fall * (moment + (peak - higher) * total) + jnp.sum(weighted, axis=1)
    return higher, total * fall + jnp.sum(powers, axis=1), moment


def _best_of(values, columns, count):
    values, best = lax.top_k(values, count)
    return values, jnp.take_along_axis(columns, best, axis=1)


def _everywhere(axis, values):
    """Concatenates `values [tokens, k]` of all devices, the same on each."""
    devices = lax.axis_size(axis)
    is_local = jnp.arange(devices)[None, :, None] == lax.axis_index(axis)
    spread = jnp.where(is_local, values[:, None], jnp.zeros((), values.dtype))
    return lax.psum(spread, axis).reshape(len(values), -1)
