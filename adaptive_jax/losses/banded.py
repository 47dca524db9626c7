"""The core: a softmax over a vocabulary cut into bands, with loss and gradient in one pass.

A banded softmax (Grave et al. 2017; Baevski & Auli 2019, section 3) has a **head**, a softmax over
the frequent words of band 0 and one more column for every **tail**, and the tails, each a softmax
over the words of one further band:

    p(word) = p_head(word)                  for a word of band 0
    p(word) = p_head(tail i) · p_i(word)    for a word of band i

One band is the full softmax. All functions are pure functions of arrays:

- `bands` is a list of `Band(table, projection, bias)`, frequent words first; the logits of a band
  are `(hidden @ projection.T) @ table.T + bias`. Word ids count through the bands in order.
- `clusters` is a Band without projection, `table [tails, width_0]`, whose rows stand for the tails
  in the head: tail i has column `words_0 + i - 1`. It is None if there is one band. With clusters,
  band 0 may have no words, a table `[0, width]`: the head chooses among the tails alone (a
  hierarchical softmax of two levels).

All shapes are static. Tokens are sorted by band once, those of weight 0 last. Every softmax then
runs over its own tokens only, `chunk` tokens at a time, in a loop whose trip count depends on the
data. A token of weight 0 costs nothing and changes nothing, whatever its hidden state. While the
logits of a chunk exist, `softmax - onehot` gives the chunk's share of every requested gradient
(`adaptive_jax.losses.chunks`). So logits are computed once, `[tokens, vocabulary]` never exists,
and the backward pass only scales. Many similar tails share one loop
(`adaptive_jax.losses.groups`); on NVIDIA GPUs, bfloat16 tails run in kernels
(`adaptive_jax.losses.flash_tails`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from adaptive_jax.errors import InputError, check_known
from adaptive_jax.losses import partitioned
from adaptive_jax.losses.arguments import (
    PLAIN,
    Arguments,
    Settings,
    Static,
    Targets,
    by_words,
    loss_arguments,
    not_differentiable,
)
from adaptive_jax.losses.chunks import Cotangents, Normaliser, Tokens
from adaptive_jax.losses.passes import grouped_pass, one_pass
from adaptive_jax.losses.reports import LOG_PROBS, Report
from adaptive_jax.numerics.arrays import whole_numbers
from adaptive_jax.numerics.meshes import as_tuple, axes_of, pvary, vary_alike

REDUCTIONS = "mean", "sum", "none"

ONCE = (
    "this loss has no second derivative: for one, use"
    " optax.softmax_cross_entropy_with_integer_labels on all logits"
)
EACH_NO_GRADIENT = (
    "the report z_loss has no gradient: use z_loss · logsumexp², or jax.lax.stop_gradient"
)
NO_GRADIENT = (
    "reports have no gradient with reduction='mean' or 'sum': use reduction='none', where nll,"
    " logsumexp, entropy and the log_probs of top_k have one, or jax.lax.stop_gradient"
)


def loss(hidden, targets, weights, bands, clusters=None, settings: Settings = PLAIN, seeds=None):
    """Weighted sum of the regularised losses of all tokens; the same pass computes its gradients.

    Args:
        hidden: `[..., features]`, any float dtype: matrix products run in it, sums and logarithms
            in float32, or float64 of those.
        targets: `[...]` word ids; any number, such as -1, where the weight is 0.
        weights: `[...]`, 0 for padding; None: all 1. Tokens of weight 0 are not computed: their
            hidden states may be NaN, all their results are 0, and so is the gradient of their
            weights.
        bands, clusters: see the module.
        settings: see `Settings`.
        seeds: uint32 `[tokens, 2]`, see `dropout.row_seeds`, needed when `tail_dropout > 0`. A
            token's mask depends on its seeds alone, not on the order of tokens or on chunks.

    Returns:
        `(loss, nll)`: the scalar `sum(weights · regularised nll)` in nats, differentiable once, and
        `nll [...]`, the plain negative log-likelihood of every token, a report without gradient.
        With tail dropout both see the same mask. The nll is 0 where the weight is 0. A target
        outside the vocabulary of another weight makes its nll, the loss and the gradients NaN.

    Raises:
        InputError: a concrete target outside the vocabulary; mismatched shapes; settings out of
            range; tail dropout without seeds; a gradient of the nll.
    """
    settings = settings._replace(reports=("nll",))
    arrays = hidden, targets, weights, bands, clusters
    total, report = reduced("sum", *arrays, settings, seeds=seeds)
    return total, report.nll


def losses(hidden, targets, weights, bands, clusters=None, settings: Settings = PLAIN):
    """`weights · regularised nll` `[...]` of every token in nats; arguments as `loss`, settings
    without tail dropout.

    Differentiable for any cotangent, by a second pass over the logits: use `loss` for their sum.

    Raises:
        InputError: as `loss`.
    """
    return reduced("none", hidden, targets, weights, bands, clusters, settings)


def reduced(
    reduction: str,
    hidden,
    targets,
    weights,
    bands,
    clusters,
    settings: Settings,
    *,
    seeds=None,
    probs=None,
    token_axes=(),
    logit_scale=None,
):
    """The loss, or `(loss, Report)` if `settings` names reports, as
    `adaptive_jax.losses.cross_entropy.linear_cross_entropy` reduces it.

    Args:
        bands: also an `adaptive_jax.losses.arguments.Table`.
        seeds: see `loss`.
        probs: `[..., k]`, the probabilities of targets `[..., k]`, for one band.
        token_axes, logit_scale: see `linear_cross_entropy`.

    Raises:
        InputError: as `linear_cross_entropy` and `loss`; tail dropout with the reduction "none",
            which it does not support.
    """
    arguments = hidden, targets, weights, bands, clusters, settings
    arguments = loss_arguments(*arguments, probs, logit_scale)
    static = arguments.static
    weights, axes = reduced_weights(reduction, arguments.targets, token_axes, (hidden, targets))
    if reduction == "none":
        if settings.tail_dropout:
            raise InputError(
                f"reduction must be 'mean' or 'sum' with tail_dropout={settings.tail_dropout},"
                " got 'none': use one of them, or tail_dropout=0"
            )
        has_weight = (weights != 0).astype(weights.dtype)
        token_losses, nll, statistics = _each(static, *arguments.varying(has_weight))
        value = weighted(weights, token_losses)
        return (value, _report(arguments, nll, statistics)) if settings.reports else value
    if not settings.tail_dropout:
        seeds = None
    elif seeds is None:
        raise InputError(
            f"tail_dropout={settings.tail_dropout} needs seeds: use dropout.row_seeds(key,"
            " numbers of the tokens)"
        )
    else:
        seeds = whole_numbers("seeds", seeds, weights.size, 2).reshape(*weights.shape, 2)
    total, nll, statistics = _sum(static, *arguments.varying(weights), seeds)
    total = lax.psum(total, axes) if axes else total
    return (total, _report(arguments, nll, statistics)) if settings.reports else total


def reduced_weights(reduction: str, targets: Targets, token_axes, arrays):
    """The weights by which losses are summed, and the axes over which the sum is taken.

    A mean divides them by their sum before the pass, so that gradients need no scaling after it.

    Raises:
        InputError: an unknown reduction; token_axes that shard none of the arrays, or that have no
            effect.
    """
    weights, axes = targets.weights, as_tuple(token_axes) if token_axes else ()
    if reduction == "none" and axes:
        raise InputError(
            f"token_axes={axes} has no effect with reduction='none': use 'mean' or 'sum'"
        )
    check_known(f"reduction={reduction!r}", reduction, REDUCTIONS)
    if axes and not set(axes) <= axes_of(arrays):
        raise InputError(
            f"token_axes={axes} do not shard the tokens: use jax.shard_map in_specs that do, and"
            " leave its check_vma on"
        )
    if reduction == "mean":
        count = targets.count
        if axes:
            count = lax.psum(pvary(jnp.asarray(count), frozenset(axes)), axes)
        weights = weights / jnp.where(count == 0, 1, count).astype(weights.dtype)
    return weights, axes


def weighted(weights, losses):
    """`weights · losses`, 0 where the weight is 0. Where the cotangent is 0, so are the gradients,
    even for the weight NaN of a target outside the vocabulary.
    """
    return _weighted(*vary_alike((weights, losses)))


@jax.custom_vjp
def _weighted(weights, losses):
    return jnp.where(weights == 0, 0, weights * losses)


def _weighted_backward(saved, cotangent):
    weights, losses = saved
    d_weights = jnp.where(cotangent == 0, 0, losses * cotangent)
    is_zero = (cotangent == 0) | (weights == 0)
    return d_weights, jnp.where(is_zero, 0, weights * cotangent)


_weighted.defvjp(lambda *arrays: (_weighted(*arrays), arrays), _weighted_backward)


def log_probs_of_targets(arguments: Arguments):
    """`(log_probs [..., k], Report)` of the targets `[..., k]`, differentiable, for settings with
    `target_log_probs`; 0 where `probs` is 0.
    """
    targets = arguments.targets
    has_weight = (targets.weights != 0).astype(targets.weights.dtype)
    _, nll, statistics = _each(arguments.static, *arguments.varying(has_weight))
    values = statistics.pop(LOG_PROBS)
    outside = jnp.isnan(targets.weights)[..., None]
    factors = jnp.where(outside, jnp.nan, targets.probs != 0).astype(values.dtype)
    return weighted(factors, values), _report(arguments, nll, statistics)


def _report(arguments: Arguments, nll, statistics) -> Report:
    """The `Report` of tokens, from their nll `[...]` and `reports.observed`, summed over the
    softmaxes that each token visits.
    """
    fields, targets = dict(statistics), arguments.targets
    if "nll" in arguments.static.settings.reports:
        factors = jnp.where(targets.in_vocabulary, 1, 0 * targets.weights)
        fields["nll"] = weighted(factors, nll)
    if "correct" in fields:
        counts = targets.in_vocabulary & (targets.weights != 0)
        fields["correct"] = counts & (fields["correct"] == 0)
    return Report(**fields)


def _unwrapped(primals):
    """`(values, gradients, of_weights)` of the arguments of a forward pass with symbolic zeros:
    values guarded against a second derivative, the gradients to compute of hidden states and
    softmax, and a flag for that of the weights.
    """
    leaves, structure = jax.tree.flatten(
        primals, is_leaf=lambda leaf: isinstance(leaf, CustomVJPPrimal)
    )
    hidden, softmax, weights, ids, probs, *seeds = structure.unflatten(
        [leaf.value for leaf in leaves]
    )
    flags = structure.unflatten([leaf.perturbed for leaf in leaves])
    gradients = partitioned.Gradients(flags[0], tuple(jax.tree.leaves(flags[1])))
    hidden, softmax, weights, probs = not_differentiable((hidden, softmax, weights, probs), ONCE)
    return (hidden, softmax, weights, ids, probs, *seeds), gradients, flags[2]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum(static, hidden, softmax, weights, ids, probs, seeds):
    """`(sum of weights · loss, nll [...], statistics)`."""
    tokens = Tokens(hidden, ids, weights, seeds, probs)
    results, _, _ = partitioned.run(*_run(static, None, tokens, softmax))
    return jnp.sum(weights * results.loss), results.nll, results.reports


def _sum_forward(static, *primals):
    arguments, flags, of_weights = _unwrapped(primals)
    hidden, softmax, weights, ids, probs, seeds = arguments
    tokens = Tokens(hidden, ids, weights, seeds, probs)
    results, *gradients = partitioned.run(*_run(static, flags, tokens, softmax))
    outputs = jnp.sum(weights * results.loss), results.nll, results.reports
    return outputs, (*gradients, results.loss if of_weights else None)


def _sum_backward(static, gradients, cotangents):
    (d_hidden, d_softmax, d_weights), (scale, *of_reports) = gradients, cotangents
    _refuse_cotangents(of_reports, NO_GRADIENT)
    if isinstance(scale, SymbolicZero):
        return (None,) * 6
    of_softmax = scale
    if static.settings.gathers:
        # The gradient of the softmax sums over the tokens of all devices, so it has one scale.
        axes = static.settings.axis_name
        alike = lax.pmax(scale, axes) == lax.pmin(scale, axes)
        of_softmax = jnp.where(alike, scale, jnp.nan)
    d_softmax = jax.tree.map(functools.partial(scaled, of_softmax), d_softmax)
    d_hidden, d_weights = jax.tree.map(functools.partial(scaled, scale), (d_hidden, d_weights))
    return d_hidden, d_softmax, d_weights, None, None, None


_sum.defvjp(_sum_forward, _sum_backward, symbolic_zeros=True)


@jax.jit  # so that eager calls, too, make no array in the dtype of the scale
def scaled(scale, array):
    """`scale · array` in the array's dtype."""
    return (scale * array.astype(scale.dtype)).astype(array.dtype)


def _refuse_cotangents(tree, message):
    """Raises an `InputError` if an array of a tree of cotangents is not a symbolic zero."""
    for leaf in jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, SymbolicZero)):
        if not isinstance(leaf, SymbolicZero) and leaf.dtype != jax.dtypes.float0:
            raise InputError(message)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _each(static, hidden, softmax, has_weight, ids, probs):
    """`(loss [...], nll [...], statistics)` of every token."""
    tokens = Tokens(hidden, ids, has_weight, None, probs)
    results, _, _ = partitioned.run(*_run(static, None, tokens, softmax))
    return results.loss, results.nll, results.reports


class _Residuals(NamedTuple):
    """Residuals of `_each` for its backward pass.

    Attributes:
        logsumexp, entropy: of the one softmax; None where they were not computed.
        words: of the report `top_k`, `[..., k]`, or None.
    """

    hidden: jax.Array
    softmax: tuple
    has_weight: jax.Array
    ids: jax.Array
    probs: jax.Array | None
    logsumexp: jax.Array | None
    entropy: jax.Array | None
    words: jax.Array | None
    gradients: partitioned.Gradients


def _each_forward(static, *primals):
    arguments, gradients, _ = _unwrapped(primals)
    names = static.settings.reports
    if len(static.words) == 1 and "logsumexp" not in names:  # saved for the backward pass
        settings = static.settings._replace(reports=(*names, "logsumexp"))
        static = static._replace(settings=settings)
    outputs = token_losses, nll, statistics = _each(static, *arguments)
    sums = (statistics.get(name) for name in ("logsumexp", "entropy"))
    words = statistics["top_k"].words if "top_k" in statistics else None
    if "logsumexp" not in names:
        outputs = token_losses, nll, {k: v for k, v in statistics.items() if k != "logsumexp"}
    return outputs, _Residuals(*arguments, *sums, words, gradients)


def _each_backward(static, residuals, cotangents):
    """A second pass over the logits. Every token has cotangents of its loss, nll, logsumexp,
    entropy and log-probabilities; `partitioned.run` takes them as targets with a mass.
    """
    mass, ids, slopes = _log_prob_factors(static, residuals, cotangents)
    weight = functools.reduce(jnp.maximum, map(jnp.abs, slopes))
    weight = jnp.maximum(weight, jnp.abs(mass).reshape(*weight.shape, -1).max(axis=-1))
    divisor = jnp.where(weight == 0, 1, weight)
    slopes = jax.tree.map(lambda a: a / divisor, slopes)
    mass = mass / divisor.reshape(*divisor.shape, *[1] * (mass.ndim - divisor.ndim))
    # Hidden states, softmax and probs were guarded in the forward pass.
    weight, mass, slopes = not_differentiable((weight, mass, slopes), ONCE)
    normaliser, logsumexp = None, residuals.logsumexp
    if logsumexp is not None:
        ones = jnp.ones_like(logsumexp)
        normaliser = Normaliser(logsumexp, ones, logsumexp, residuals.entropy)
    settings = static.settings._replace(reports=(), top_k=0, target_log_probs=False)
    static = static._replace(settings=settings, masked=True)
    tokens = Tokens(residuals.hidden, ids, weight, None, mass, slopes, normaliser)
    run = _run(static, residuals.gradients, tokens, residuals.softmax)
    _, *gradients = partitioned.run(*run)
    return *gradients, None, None, None


def _log_prob_factors(static, residuals, cotangents):
    """`(mass, ids, slopes)`: factors of the log-probabilities of the targets and the `top_k` words,
    the ids of these words, and the `Cotangents` of sums over all words; zeros for tokens of weight
    0.
    """
    of_loss, of_nll, statistics = cotangents
    probs, ids, live = residuals.probs, residuals.ids, residuals.has_weight != 0

    def dense(cotangent, mask=live):
        missing = cotangent is None or isinstance(cotangent, SymbolicZero)
        dtype = residuals.has_weight.dtype
        return jnp.zeros_like(mask, dtype) if missing else jnp.where(mask, cotangent, 0)

    statistics = dict(statistics)
    of_log_probs, of_top_k = statistics.pop(LOG_PROBS, None), statistics.pop("top_k", None)
    of_sums = [statistics.pop(name, None) for name in ("logsumexp", "entropy")]
    _refuse_cotangents(statistics, EACH_NO_GRADIENT)
    of_loss, of_nll, *of_sums = map(dense, (of_loss, of_nll, *of_sums))
    mass = of_loss * (1 - static.settings.label_smoothing) + of_nll
    if of_log_probs is not None:
        mass = probs * -dense(of_log_probs, live[..., None])
    elif probs is not None:
        mass = mass[..., None] * probs
    if of_top_k is not None and not isinstance(of_top_k.log_probs, SymbolicZero):
        of_words = -dense(of_top_k.log_probs, live[..., None])
        if probs is None:
            mass, ids = mass[..., None], ids[..., None]
        mass = jnp.concatenate([mass, of_words], axis=-1)
        ids = jnp.concatenate([ids, residuals.words.astype(ids.dtype)], axis=-1)
    return mass, ids, Cotangents(of_loss, *of_sums)


_each.defvjp(_each_forward, _each_backward, symbolic_zeros=True)


def _run(static: Static, gradients, tokens: Tokens, softmax):
    """The arguments of `partitioned.run` for tokens `[...]`."""
    settings, function = static.settings, one_pass if static.sizes else grouped_pass
    axis = settings.axis_name if settings.gathers else None
    return function, (static, gradients), tokens, softmax, by_words(softmax), gradients, axis
