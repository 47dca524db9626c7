"""The core: a softmax over a vocabulary cut into bands, with loss and gradient in one pass.

A banded softmax (Grave et al. 2017; Baevski & Auli 2019, section 3) has a **head**, a softmax over
the frequent words of band 0 and one more column for every **tail**, and the tails, each a softmax
over the words of one further band:

    p(word) = p_head(word)                  for a word of band 0
    p(word) = p_head(tail i) · p_i(word)    for a word of band i

With one band it is the full softmax. Everything here is a pure function of arrays:

- `bands` is a list of `Band(table, projection, bias)`, frequent words first; the logits of a band
  are `(hidden @ projection.T) @ table.T + bias`. Word ids count through the bands in order.
- `clusters` is a Band without projection, `table [tails, width_0]`, whose rows stand for the tails
  in the head: tail i has column `words_0 + i - 1`. It is None if there is one band. Band 0 may then
  have no words, a table `[0, width]`: the head chooses among the tails alone (a hierarchical
  softmax of two levels).

How it stays fast with static shapes: tokens are sorted by band once, those of weight 0 last, then
every softmax runs over its own tokens only, `chunk` tokens at a time, in a loop whose trip count is
read off the data. A token of weight 0 costs nothing and changes nothing, whatever its hidden state.
While the logits of a chunk are alive, `softmax - onehot` gives the chunk's share of every gradient
(`adaptive_jax.losses.chunks`), so logits are computed once, `[tokens, vocabulary]` never exists,
and the backward pass only scales. Many tails that are alike share one loop
(`adaptive_jax.losses.groups`); on NVIDIA GPUs a tail in bfloat16 has kernels instead
(`adaptive_jax.losses.flash_tails`).
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.errors import InputError
from adaptive_jax.losses import flash_tails, long_tables, partitioned, reports
from adaptive_jax.losses.calls import Call, by_words, laid_out, without_derivative
from adaptive_jax.losses.chunks import chunk_size, one_chunk, rows_of_chunk
from adaptive_jax.losses.distribution import in_dtype, log_probs, predict
from adaptive_jax.losses.groups import BandView, num_chunks
from adaptive_jax.losses.reports import DIFFERENTIABLE
from adaptive_jax.losses.settings import PLAIN, Settings, Tokens
from adaptive_jax.losses.sharded import columns_here, for_all, present
from adaptive_jax.numerics.arrays import whole_numbers
from adaptive_jax.numerics.meshes import pvary
from adaptive_jax.numerics.products import is_cpu_bfloat16, sum_dtype

__all__ = ["PLAIN", "Settings", "chunk_size", "log_probs", "loss", "losses", "predict"]

# The gradient of tables narrower than this is summed as its transpose: at width 16, XLA's product
# on a CPU was 2.6 times as fast with the narrow side transposed. For wider tables, transposing the
# sum back costs what is won, but in bfloat16 on a CPU, where the sum's operands must lie row after
# row and the chunk of logits would have to be transposed instead.
NARROW = 32

ONCE = (
    "this loss has no second derivative: for one, use"
    " optax.softmax_cross_entropy_with_integer_labels on all logits"
)


def loss(hidden, targets, weights, bands, clusters=None, settings: Settings = PLAIN, seeds=None):
    """Weighted sum of the regularised losses of all tokens; the same pass computes its gradients.

    Args:
        hidden: `[..., features]`, any float dtype: matrix products run in it, sums and logarithms
            in float32, or float64 of those.
        targets: `[...]` word ids. Where the weight is 0, any number may stand, such as -1.
        weights: `[...]`, 0 for padding; None: all 1. Tokens of weight 0 are not computed: their
            hidden states may be NaN, all their results are 0, and so is the gradient of their
            weights. Time is in proportion to the other tokens.
        bands, clusters: see the module.
        settings: see `Settings`.
        seeds: uint32 `[tokens, 2]`, see `dropout.row_seeds`, needed when `tail_dropout > 0`. A
            token's mask is a function of its seeds alone, so neither the order of tokens nor chunks
            change it.

    Returns:
        `(loss, nll)`: the scalar `sum(weights · regularised nll)` in nats, differentiable once, and
        `nll [...]`, the plain negative log-likelihood of every token in the order given, a report
        without gradient. With tail dropout both see the same mask. The nll is 0 where the weight
        is 0; elsewhere that of a target that does not exist is NaN, as are loss and gradients.

    Raises:
        InputError: a target that is known outside `jax.jit` and does not exist; shapes that do not
            fit; settings out of range; tail dropout without seeds.
    """
    settings = settings._replace(reports=("nll",))
    total, report, _ = loss_and_report(hidden, targets, weights, bands, clusters, settings, seeds)
    return total, report.nll


def loss_and_report(
    hidden,
    targets,
    weights,
    bands,
    clusters=None,
    settings: Settings = PLAIN,
    seeds=None,
    probs=None,
    mean=False,
    axes=(),
):
    """The loss, what `settings.reports` asks for of each token, and the sum of the weights.

    Args:
        probs: `[..., k]`, probabilities of as many targets `[..., k]`, for one band; see
            `adaptive_jax.losses.cross_entropy.linear_cross_entropy`.
        mean: whether the loss will be divided by the sum of the weights.
        axes: of `jax.shard_map`, over which that sum is taken, but not the loss.

    Returns:
        `(loss, report, count)`: as `loss`, a `reports.Report` without gradient, and the sum of the
        weights of targets that are not ignored, an int where all on one device are 1; 1 where the
        loss is divided already.

    Raises:
        InputError: as `loss`.
    """
    call = Call(hidden, targets, weights, bands, clusters, settings, probs)
    if settings.tail_dropout and seeds is None:
        raise InputError(
            f"tail_dropout={settings.tail_dropout} needs seeds: use dropout.row_seeds(key, numbers"
            " of the tokens)"
        )
    if settings.tail_dropout:
        seeds = whole_numbers("seeds", seeds, call.weights.size, 2).reshape(*call.shape, 2)
    else:
        seeds = None
    weights, count = call.weights, call.count
    if axes:
        count = lax.psum(pvary(count, frozenset(axes)), axes)
    if mean and call.static.settings.gathers:
        # Devices have other counts, and the gradient of the softmax is of the tokens of all.
        weights, count = weights / jnp.where(count == 0, 1, count).astype(weights.dtype), 1
    total, each, reported = _loss(call.static, *call.arrays(weights), seeds)
    report = lax.stop_gradient(call.report(each, reported))
    return total, report, count


def losses(hidden, targets, weights, bands, clusters=None, settings: Settings = PLAIN):
    """`weights · regularised nll` `[...]` of every token in nats, in the order given, without tail
    dropout; arguments as `loss`.

    Differentiable for any cotangent, by a second pass: where their sum is all that is needed, use
        `loss`.

    Raises:
        InputError: as `loss`.
    """
    return losses_and_report(hidden, targets, weights, bands, clusters, settings)[0]


def losses_and_report(
    hidden, targets, weights, bands, clusters=None, settings: Settings = PLAIN, probs=None
):
    """`(losses, report)`, as `losses` and `loss_and_report`; nll, logsumexp and entropy are
    differentiable for any cotangent too, by the same second pass.

    Raises:
        InputError: as `loss`.
    """
    call = Call(hidden, targets, weights, bands, clusters, settings, probs)
    counted = (call.weights != 0).astype(call.weights.dtype)
    each, nll, reported = _losses(call.static, *call.arrays(counted))
    report = call.report(nll, reported)
    differentiable = {name: getattr(report, name) for name in DIFFERENTIABLE}
    return call.weights * each, lax.stop_gradient(report)._replace(**differentiable)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _loss(static, hidden, softmax, weights, targets, probs, seeds):
    tokens = Tokens(hidden, targets, weights, seeds, probs)
    (each, *others), _, _ = _computed(static, tokens, softmax, with_gradients=False)
    return jnp.sum(weights * each), *others


def _loss_forward(static, hidden, softmax, weights, targets, probs, seeds):
    hidden, softmax, weights, probs = without_derivative((hidden, softmax, weights, probs), ONCE)
    tokens = Tokens(hidden, targets, weights, seeds, probs)
    (each, *others), *gradients = _computed(static, tokens, softmax, with_gradients=True)
    return (jnp.sum(weights * each), *others), (*gradients, each)


def _loss_backward(static, gradients, cotangents):
    d_hidden, d_softmax, d_weights = gradients
    scale = of_softmax = cotangents[0]
    if static.settings.gathers:
        # The gradient of the softmax is of the tokens of all devices, and has one scale.
        axes = static.settings.axis_name
        alike = lax.pmax(scale, axes) == lax.pmin(scale, axes)
        of_softmax = jnp.where(alike, scale, jnp.nan)

    def times(scale, tree):
        # Without sizes, a mesh may cut the arrays.
        scaled = functools.partial(long_tables.times, scale, in_place=bool(static.sizes))
        return jax.tree.map(scaled, tree)

    changed = times(scale, d_hidden), times(of_softmax, d_softmax), times(scale, d_weights)
    return *changed, None, None, None


_loss.defvjp(_loss_forward, _loss_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(static, hidden, softmax, counted, targets, probs):
    tokens = Tokens(hidden, targets, counted, None, probs)
    return _computed(static, tokens, softmax, with_gradients=False)[0]


def _losses_forward(static, hidden, softmax, counted, targets, probs):
    hidden, softmax, probs = without_derivative((hidden, softmax, probs), ONCE)
    residuals = hidden, softmax, counted, targets, probs
    return _losses(static, *residuals), residuals


def _losses_backward(static, residuals, cotangents):
    hidden, softmax, counted, targets, probs = residuals
    weight, of_nll, of_reported = cotangents
    tokens = Tokens(hidden, targets, weight, None, probs)
    if static.pulled:
        none = jnp.zeros_like(weight)
        pulls = [weight, of_nll, *(of_reported.get(name, none) for name in DIFFERENTIABLE[1:])]
        pulls = jnp.where(counted[..., None] != 0, jnp.stack(pulls, axis=-1), 0.0)
        live = jnp.any(pulls != 0, axis=-1).astype(weight.dtype)
        tokens = tokens._replace(weight=live, pulls=pulls)
    # Hidden states, softmax and probs were guarded in the forward pass.
    weight, pulls = without_derivative((tokens.weight, tokens.pulls), ONCE)
    tokens = tokens._replace(weight=weight, pulls=pulls)
    _, *gradients = _computed(static, tokens, softmax, with_gradients=True)
    return *gradients, None, None, None


_losses.defvjp(_losses_forward, _losses_backward)


def _computed(static, tokens, softmax, with_gradients):
    """`_one_pass` of tokens `[...]`, each computed on the device where it lies, or on all that hold
    words.
    """
    if static.settings.gathers:
        of_all = functools.partial(_local, (static, with_gradients), None)
        return for_all(of_all, static.settings.axis_name, tokens, softmax)
    return partitioned.run(
        _local, (static, with_gradients), tokens, softmax, by_words(softmax), with_gradients
    )


def _local(static, axis_name, tokens, softmax):
    """What `partitioned.run` calls with the tokens of one device: in rows, and with groups for
    bands.
    """
    static, with_gradients = static
    shape, back = tokens.weight.shape, None
    if axis_name is not None:
        static = static._replace(settings=static.settings._replace(axis_name=axis_name))
    tokens = jax.tree.map(lambda a: a.reshape(-1, *a.shape[len(shape) :]), tokens)
    if not static.sizes:
        sizes = []

        def lay_out(softmax):
            rows, laid = laid_out(static.settings, static.words, *softmax[:2])
            sizes.append(rows)  # known when it is traced
            return *laid, softmax[2]

        softmax, back = jax.vjp(lay_out, softmax)
        static = static._replace(sizes=sizes[0])
    *by_token, d_softmax = _one_pass(static, tokens, softmax, with_gradients)
    if back is not None and with_gradients:
        [d_softmax] = back(d_softmax)
    results, d_hidden = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), by_token)
    return results, d_hidden, d_softmax


def _one_pass(static, tokens, softmax, with_gradients):
    """Visits the head with all tokens, then every tail with its own tokens; `tokens.column`
    holds word ids. Those of weight 0 visit nothing, if `static.masked`.

    Returns:
        `((loss [tokens], nll [tokens], reports), d_hidden, d_softmax)`: see `reports.observed`;
        gradients have the dtypes of their arrays, or are None.
    """
    settings, all_words, masked, _, sizes, products = static
    (groups, clusters, numbers), given = softmax, (tokens.hidden, softmax)
    settings = settings._replace(**numbers)
    dtype = sum_dtype(products)
    tokens = tokens._replace(hidden=tokens.hidden.astype(products))
    live = tokens.weight != 0 if masked else None
    if masked:  # 0 · NaN is NaN
        tokens = tokens._replace(hidden=jnp.where(live[:, None], tokens.hidden, 0))
    targets, count, axis_name = tokens.column, len(tokens.column), settings.axis_name
    plans = [
        _plan_of_group(settings.chunk, i, words, group.table.shape[1], count)
        for i, (words, group) in enumerate(zip(sizes, groups, strict=True))
    ]
    most = max(plan.tokens for plan in plans)
    rows = [*itertools.chain(*sizes)]
    tails, first_cluster = len(rows) - 1, rows[0]
    columns = all_words
    if clusters is None and tails:  # they stand in the head, see `laid_out`
        first_cluster, columns = all_words[0], (all_words[0] + tails, *all_words[1:])
    exist = present(axis_name, rows, columns)
    starts = jnp.cumsum(jnp.array([0, *all_words], targets.dtype), dtype=targets.dtype)
    band = jnp.searchsorted(starts[1:-1], targets, side="right").astype(targets.dtype)
    order, back, ends = _sorted(band, live, len(all_words))

    def in_order(array):
        """With room for one chunk behind, so that a slice of one chunk is always in bounds."""
        array = array if order is None else array[order]
        return jnp.pad(array, [(0, most)] + [(0, 0)] * (array.ndim - 1))

    head_column = jnp.where(band == 0, targets, first_cluster + band - 1)
    tail_column = targets - starts[band]
    if axis_name is not None:
        head_column, tail_column = columns_here(axis_name, tail_column, band, jnp.array(rows))
    in_head = jax.tree.map(in_order, tokens._replace(column=head_column))
    in_tail = in_head._replace(column=in_order(tail_column))
    zeros = jnp.zeros_like(in_head.weight, dtype)
    outcome = zeros, zeros, jnp.zeros_like(in_head.hidden, dtype) if with_gradients else None
    if settings.reports:
        outcome += (reports.empty(settings, in_head.weight),)
    first, gradients = 0, []
    for group, words, plan in zip(groups, sizes, plans, strict=True):
        end, own = first + len(words), settings
        own_words = None if exist is None else exist[first:end]
        if first:
            here = in_dtype(group, products), None
            arrays = here, in_tail, (ends[first - 1 : end - 1], ends[first:end], own_words)
        else:  # the paper drops units after the first projection of every cluster but the head
            own = own._replace(tail_dropout=0.0)
            here = tuple(in_dtype(each, products) for each in (group, clusters))
            arrays = here, in_head, ([0], [ends[-1] if masked else count], own_words)
        if first and tokens.pulls is None and flash_tails.fits(own, here[0], len(words)):
            visit = functools.partial(flash_tails.visit, (own, words))
        else:
            visit = functools.partial(_visit, (own, words, plan))
        outcome, gradient = visit(*arrays, outcome, with_gradients)
        gradients.append(gradient)
        first = end

    loss_, nll_, d_hidden, *reported = jax.tree.map(
        lambda a: a[:count] if back is None else a[back], outcome
    )
    results = loss_, nll_, reported[0] if reported else {}
    if not with_gradients:
        return results, None, None
    zeros = jax.tree.map(jnp.zeros_like, numbers)
    d_softmax = tuple(d_group for d_group, _ in gradients), gradients[0][1], zeros
    like = jax.tree.map(lambda g, of: g.astype(of.dtype), (d_hidden, d_softmax), given)
    return results, *like


def _sorted(band, live, bands):
    """Tokens by band, those that are not live behind all: `order`, its inverse, and the end of each
    band.

    live: bool `[tokens]`; None: all. Order and inverse are None where tokens stay where they are.
    """
    at = jnp.arange(len(band))
    if bands > 1:
        key = band if live is None else jnp.where(live, band, bands)
        order = jnp.argsort(key, stable=True)
        ends = jnp.searchsorted(key[order], jnp.arange(bands), side="right")
        return order, jnp.argsort(order), ends
    if live is None:
        return None, None, None
    done = jnp.cumsum(live)
    back = jnp.where(live, done - 1, done[-1] + at - done)
    return jnp.zeros_like(back).at[back].set(at, unique_indices=True), back, done[-1:]


def _visit(static, softmax, queue, spans, outcome, with_gradients):
    """Runs tokens through the bands of a group, a chunk at a time; band i takes
    `queue[begins[i]:ends[i]]`.

    `spans` is `(begins, ends, exist)`; band i has `exist[i]` words here, the rest of its rows being
    padding, or exist is None. Adds loss, nll and gradient of the hidden states to `outcome`, and
    returns it with the gradient of `softmax`.
    """
    settings, sizes, plan = static
    chunk, (begins, ends, exist) = plan.tokens, spans
    narrow = (softmax[0].table.shape[1] < NARROW or is_cpu_bfloat16(softmax[0].table)) and len(
        sizes
    ) == 1
    total, locate = num_chunks(begins, ends, chunk)

    def visit_chunk(trip, state):
        outcome, (d_group, d_clusters) = state
        number, trip = locate(trip)
        at = begins[number] + trip * chunk
        cut = functools.partial(lax.dynamic_slice_in_dim, start_index=at, slice_size=chunk)
        inside = at + jnp.arange(chunk) < ends[number]
        part = jax.tree.map(cut, queue)
        part = part._replace(weight=jnp.where(inside, part.weight, 0.0))
        if part.pulls is not None:
            part = part._replace(pulls=jnp.where(inside[:, None], part.pulls, 0.0))
        member = BandView(softmax[0], sizes, number, exist)
        part = part._replace(column=part.column + member.shift)

        # Rows behind the band's last token belong to the next band: they get 0 here and their own
        # chunk's result there.
        def put(whole, result):
            result = jnp.where(inside.reshape(-1, *[1] * (result.ndim - 1)), result, 0)
            return lax.dynamic_update_slice_in_dim(whole, cut(whole) + result, at, 0)

        how = {"narrow": narrow, "with_gradients": with_gradients}
        if plan.words:
            sums = d_group, d_clusters
            results, sums = long_tables.one_chunk(
                settings, softmax, part, member.valid, sums, plan, **how
            )
            return jax.tree.map(put, outcome, results), sums
        here = member.read(softmax[0]), softmax[1]
        results, gradient = one_chunk(settings, here, part, member.valid, **how)
        outcome = jax.tree.map(put, outcome, results)
        if not with_gradients:
            return outcome, (None, None)
        d_clusters = jax.tree.map(jnp.add, d_clusters, gradient[1])
        return outcome, (member.add(d_group, gradient[0]), d_clusters)

    def transposed(gradient):
        if not (with_gradients and narrow) or plan.words:
            return gradient
        band, clusters = gradient
        return band._replace(table=band.table.T), clusters

    zeros = None, None
    if with_gradients:
        dtype = sum_dtype(queue.hidden.dtype)
        zeros = jax.tree.map(lambda a: jnp.zeros_like(a, dtype), softmax)
    outcome, sums = lax.fori_loop(0, total, visit_chunk, (outcome, transposed(zeros)))
    return outcome, transposed(sums)


def _plan_of_group(chunk, index, sizes, width, tokens):
    """`long_tables.plan`, its chunks shared evenly by the tokens that all visit the head; about
    twice the tokens that a band of a group gets, whose bands are never long.
    """
    plan = long_tables.plan(index, max(1, *sizes), width)
    if chunk:
        return long_tables.Plan(min(tokens, chunk), plan.words)
    if index == 0:
        return plan._replace(tokens=rows_of_chunk(tokens, plan.tokens))
    if len(sizes) == 1:
        return plan._replace(tokens=min(tokens, plan.tokens))
    most = chunk_size(index, max(sizes), width)
    share = max(8, 2 ** math.ceil(math.log2(2 * tokens / len(sizes))))
    return long_tables.Plan(min(tokens, most, share))
