"""Distillation from a teacher with the same vocabulary, without the logits of all tokens."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.errors import InputError, check_at_least, check_within
from adaptive_jax.losses import fused, partitioned
from adaptive_jax.losses.arguments import Table, not_differentiable, token_targets, validate_bands
from adaptive_jax.losses.banded import reduced_weights, weighted
from adaptive_jax.losses.chunks import lifted
from adaptive_jax.losses.fused import FusedLoss
from adaptive_jax.losses.plans import chunk_size, plan
from adaptive_jax.losses.sharded import same_axes, words_of
from adaptive_jax.numerics.arrays import in_chunks
from adaptive_jax.numerics.products import inner, sum_dtype, wide


class _Settings(NamedTuple):
    beta: float
    temperature: float
    hard_weight: float
    words: int | None
    axis_name: str | None
    dtype: jnp.dtype  # of the student's products


def linear_distillation(
    student: tuple,
    teacher: tuple,
    targets: jax.Array | None = None,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    hard_weight: float = 0.0,
    weights: jax.Array | None = None,
    ignore_index: int | None = -100,
    words: int | None = None,
    reduction: str = "mean",
    axis_name: str | None = None,
    token_axes: str | Sequence[str] = (),
) -> jax.Array:
    """Generalised Jensen-Shannon divergence of teacher P and student Q in nats (Agarwal et al.
    2024, "On-policy distillation", equation 1), with the student's own loss from the same logits:

        (1 - hard_weight) · D(P, Q) + hard_weight · nll(targets)
        D = beta · KL(P, M) + (1 - beta) · KL(Q, M),  M = beta · P + (1 - beta) · Q

    It costs 6 · tokens · words · width FLOPs for the student and 2 for the teacher; "none" computes
    the logits of both once more. Only the logits of one chunk of tokens exist at a time. The
    teacher has no gradient.

    Args:
        student, teacher: `(hidden [..., width], table [words, width])`, optionally followed by a
            bias `[words]`; widths and dtypes may differ.
        targets: `[...]` word ids, required if hard_weight is above 0.
        beta: 0 is the forward divergence KL(P, Q), 1 the reverse KL(Q, P).
        temperature: divides the logits of both in D. The loss is not multiplied by its square;
            Hinton et al. 2015 do so to keep the size of gradients.
        hard_weight: in [0, 1].
        weights, ignore_index, reduction, token_axes: as in `linear_cross_entropy`.
        axis_name: as in `linear_cross_entropy`, but tokens must be replicated over it, and both
            tables must have the same number of rows per device.
        words: size of the vocabulary, if tables have more rows; required if their rows differ.

    Raises:
        InputError: as `linear_cross_entropy`, and a number out of range.
    """
    check_within("[0, 1]", beta=beta, hard_weight=hard_weight)
    check_within("(0, inf)", temperature=temperature)
    if hard_weight and targets is None:
        raise InputError(f"hard_weight={hard_weight} needs targets: pass them, or use 0")
    hidden, of_student = _checked("student", student)
    teacher_hidden, of_teacher = _checked("teacher", teacher)
    # A NumPy scalar would promote float32 to float64 under x64.
    rates = float(beta), float(temperature), float(hard_weight)
    settings = _Settings(*rates, words, axis_name, hidden.dtype)
    # Gradients are averaged or scaled in float32 and rounded to float16 last.
    hidden, of_student = jax.tree.map(
        lambda a: a.astype(jnp.float32) if a.dtype == jnp.float16 else a, (hidden, of_student)
    )
    shape, count = hidden.shape[:-1], _shared_words(of_student, of_teacher, words, axis_name)
    if teacher_hidden.shape[:-1] != shape:
        raise InputError(
            f"teacher's hidden must have shape {[*shape, 'width']}, got {[*teacher_hidden.shape]}"
        )
    arrays = [of_student.table, of_student.bias, of_teacher.table, of_teacher.bias]
    if len(of_student.table) != len(of_teacher.table):
        arrays = jax.tree.map(lambda array: array[:words], arrays)
    ids, ignored = (jnp.zeros(shape, int), None) if targets is None else (targets, ignore_index)
    dtype = sum_dtype(hidden.dtype)
    by_token = token_targets(ids, weights, None, shape, count, ignored, dtype)
    weights, axes = reduced_weights(reduction, by_token, token_axes, (hidden, by_token.weights))
    frozen = not_differentiable((teacher_hidden, *arrays[2:]), "the teacher has no gradient here")
    tables = (*arrays[:2], *frozen[1:])
    factors = (weights != 0).astype(dtype) if reduction == "none" else weights
    hidden, (*tables, _), *by_token = same_axes(
        axis_name, hidden, (*tables, {}), frozen[0], by_token.ids, factors
    )
    tokens = hidden, *by_token
    tokens, tables = partitioned.aligned(tokens, tuple(tables), _by_words(tables))
    has_gradient = (*_by_words(tables[:2]), *(False for _ in _by_words(tables[2:])))
    loss = FusedLoss(_pass, settings, _by_words(tables), has_gradient)
    if reduction == "none":
        return weighted(weights, fused.each(loss, tokens, tables))
    total, _ = fused.total(loss, tokens, tables)
    return lax.psum(total, axes) if axes else total


def _checked(name, model):
    """Converts and checks a model `(hidden, table[, bias])`; returns hidden states and a band."""
    got = f"{len(model)} entries" if isinstance(model, tuple | list) else type(model).__name__
    if got not in ("2 entries", "3 entries"):
        raise InputError(f"{name} must be (hidden, table) or (hidden, table, bias), got {got}")
    hidden, [band], _ = validate_bands(model[0], Table(*model[1:]), None)
    return hidden, band


def _shared_words(student, teacher, words, axis_name):
    """Checked number of words of both bands, on all devices."""
    rows = [len(band.table) for band in (student, teacher)]
    [all_rows] = words_of([student], None, axis_name)
    devices = all_rows // rows[0]
    if words is not None:
        check_at_least(1, words=words)
    differ = rows[0] != rows[1] and (words is None or devices > 1)
    if differ or (words or 1) > devices * min(rows):
        raise InputError(f"words={words} must be in both tables, which have {rows} rows")
    return words or all_rows


def _by_words(tables):
    return (True,) * sum(table is not None for table in tables)


def _pass(call, axis_name, tokens, tables):
    """The losses `[...]` of the tokens of one device, and the student's gradients."""
    (settings, gradients), shape = call, tokens[3].shape
    settings = settings._replace(axis_name=axis_name or settings.axis_name)
    hidden, teacher_hidden, ids, weights = (a.reshape(-1, *a.shape[len(shape) :]) for a in tokens)
    live = (weights != 0)[:, None]  # 0 · NaN is NaN
    hidden = hidden.astype(settings.dtype)
    parts = jnp.where(live, hidden, 0), jnp.where(live, teacher_hidden, 0), ids, weights
    count, (rows, width) = len(ids), tables[0].shape
    # The logits of two softmaxes exist at a time.
    chunk = plan(0, (2 * rows,), width, count, hidden.dtype.itemsize)
    # All words of a chunk are computed at once, so the plan of a tile of them does not apply.
    size = chunk.tokens if chunk.keeps_logits else chunk_size(0, 2 * rows, width)
    size = max(1, min(size, count))
    zeros = jax.tree.map(lambda a: jnp.zeros_like(a, sum_dtype(hidden.dtype)), (*tables[:2],))
    visit = functools.partial(_visit, settings, tables, gradients)
    chunks = jax.tree.map(lambda a: in_chunks(a, size), parts)
    sums, (losses, d_hidden) = lax.scan(visit, zeros, chunks)
    losses = jnp.where(live[:, 0], losses.reshape(-1)[:count], 0).reshape(shape)
    if not gradients:
        return (losses,), None, None
    d_tables = [
        None if a is None else d.astype(a.dtype) for a, d in zip(tables, sums, strict=False)
    ]
    d_hidden = d_hidden.reshape(-1, d_hidden.shape[-1])[:count].reshape(tokens[0].shape)
    return (losses,), d_hidden.astype(tokens[0].dtype), (*d_tables, None, None)


def _visit(settings, tables, gradients, sums, part):
    """Adds the gradients of a chunk to `sums`; returns them with the losses of the chunk."""
    (hidden, teacher_hidden, ids, weights), axis = part, settings.axis_name
    table, bias, teacher_table, teacher_bias = tables
    first = 0 if axis is None else lax.axis_index(axis) * len(table)
    column = first + jnp.arange(len(table), dtype=ids.dtype)[None]
    total = lambda a: jnp.sum(a, 1) if axis is None else lax.psum(jnp.sum(a, 1), axis)

    def logits_of(states, table, bias):
        logits = inner(states, table.astype(states.dtype))
        logits = logits if bias is None else logits + bias[None].astype(logits.dtype)
        if settings.words is None:
            return logits
        return jnp.where(column < settings.words, logits, -jnp.inf)

    def log_softmax(logits):
        peak = jnp.max(logits, axis=1)
        peak = peak if axis is None else lax.pmax(peak, axis)
        away = logits - peak[:, None]
        return away - jnp.log(total(jnp.exp(away)))[:, None]

    def times(chances, logs):  # 0 · inf is NaN
        return jnp.where(chances > 0, chances * logs, 0)

    logits, beta = logits_of(hidden, table, bias), settings.beta
    log_q = log_softmax(logits / settings.temperature)
    log_p = log_softmax(
        logits_of(teacher_hidden, teacher_table, teacher_bias) / settings.temperature
    )
    log_p = log_p.astype(log_q.dtype)
    teacher_probs, student_probs = jnp.exp(log_p), jnp.exp(log_q)
    if beta == 0:
        losses, slope = total(times(teacher_probs, log_p - log_q)), student_probs - teacher_probs
    else:
        log_m = (
            log_p if beta == 1 else jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
        )
        weighted_logs = times(student_probs, log_q - log_m) * (1.0 if beta == 1 else 1 - beta)
        losses = total(weighted_logs)
        slope = weighted_logs - student_probs * losses[:, None]
        losses = losses + (0 if beta == 1 else beta * total(times(teacher_probs, log_p - log_m)))
    losses = (1 - settings.hard_weight) * losses
    slope = (1 - settings.hard_weight) / settings.temperature * slope
    if settings.hard_weight:
        log_probs, hit = log_softmax(logits), ids[:, None] == column
        losses = losses - settings.hard_weight * total(jnp.where(hit, log_probs, 0))
        slope = slope + settings.hard_weight * (jnp.exp(log_probs) - hit)
    if not gradients:
        return sums, (losses, None)
    slope = weights[:, None] * slope
    d_bias = None if bias is None else sums[1] + jnp.sum(slope, axis=0)
    slope, lowering = lifted(slope, hidden.dtype)
    d_hidden = lowering * wide(slope, table.astype(hidden.dtype))
    return (sums[0] + lowering * wide(slope.T, hidden), d_bias), (losses, d_hidden)
