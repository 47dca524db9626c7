"""A tail of an adaptive softmax in two kernels for NVIDIA GPUs, in which logits never leave the
chip.

The kernels are flash attention (Dao et al. 2022) with tokens as queries and words as keys and
values. One computes the logsumexp of each token's logits and the mean of the words' vectors under
its softmax, which is all that the token's gradient needs; the other computes the logits again and
sums the gradient of the table. Tokens are sorted by band. Only the device knows which tokens belong
to a tail, so programs run over all tokens, and those without a token of the tail exit at once.

Pallas compiles the kernels by Triton; on a CPU it interprets them, for tests.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from adaptive_jax.losses.arguments import Settings, used
from adaptive_jax.losses.chunks import Results, Tokens, states, through_projection
from adaptive_jax.numerics.bands import Band
from adaptive_jax.numerics.meshes import kernel_arguments
from adaptive_jax.numerics.platforms import LARGE_SHARED_MEMORY, capability, platform

WORDS = 128  # of a block
ROWS = 64  # tokens of a block
SPLITS = 8  # programs that share the words of a block of tokens
LOW = -1e30  # the logit of a row that is no word
WIDTHS = 16, 32, 64, 128, 256
WIDEST = 128  # on GPUs with little shared memory


def fits(settings: Settings, band: Band, tails: int) -> bool:
    """True if the kernels support a group of `tails` tails: one tail in bfloat16, without bias,
    label smoothing, soft cap or reports, all of whose words are on one NVIDIA GPU.
    """
    rows, width = band.table.shape
    soft_cap = used(settings.soft_cap)
    if settings.axis_name or settings.label_smoothing or soft_cap or settings.reports:
        return False
    if tails > 1 or band.bias is not None or band.table.dtype != jnp.bfloat16:
        return False
    if width not in WIDTHS or rows % WORDS:
        return False
    if width > WIDEST and capability() not in LARGE_SHARED_MEMORY:
        return False
    return capability() >= (8, 0)


def visit(stage, queue: Tokens, totals: Results):
    """Runs the tokens of a tail through its softmax; the kernels' counterpart of
    `passes.visit_chunks`.

    Args:
        stage: a `passes.Stage` with one band in the dtype of the hidden states, see `fits`.
        queue: sorted tokens; the columns of the tail's tokens are rows of its table.
        totals: results of all tokens so far.

    Returns:
        `totals` with the results of the tail's tokens added, and the float32 gradients `(band,
        None)`; None for those not wanted.
    """
    settings, band, wanted = stage.settings, stage.group, stage.wanted
    words = len(band.table) if stage.word_counts is None else stage.word_counts[0]
    bounds = stage.begins[0], stage.ends[0], words
    limits = jnp.stack([jnp.asarray(n, jnp.int32) for n in bounds])
    count = len(queue.column)
    queue = jax.tree.map(_in_blocks, queue)
    hidden, column, weight, *_ = queue
    token = jnp.arange(len(column))
    inside = (token >= limits[0]) & (token < limits[1])
    x, mask = states(settings, queue, band.projection)
    logsumexp, mean = _normalised(x, band.table, limits)
    target = band.table[jnp.where(inside, column, 0)].astype(jnp.float32)
    column = column.astype(jnp.int32)
    nll = jnp.where(inside, logsumexp - jnp.sum(x.astype(jnp.float32) * target, axis=1), 0.0)
    loss = nll + settings.z_loss * jnp.where(inside, logsumexp, 0.0) ** 2
    totals = totals._replace(loss=totals.loss + loss[:count], nll=totals.nll + nll[:count])
    if wanted is None:
        return totals, (None, None)
    factor, weight = 1 + 2 * settings.z_loss * logsumexp, weight.astype(jnp.float32)
    d_table = d_projection = None
    if wanted.band.table:
        d_table = _d_table(x, band.table, (logsumexp, weight, factor, column), limits)
    if wanted.hidden or wanted.band.projection:
        d_x = weight[:, None] * (factor[:, None] * mean - target)
        d_x = jnp.where(inside[:, None], d_x, 0.0) * mask
        flags = wanted.hidden, wanted.band.projection
        d_hidden, d_projection = through_projection(d_x, hidden, band.projection, *flags)
        if wanted.hidden:
            totals = totals._replace(d_hidden=totals.d_hidden + d_hidden[:count])
    return totals, (Band(d_table, d_projection, None), None)


def _in_blocks(array):
    """Pads an array to whole blocks of tokens."""
    return jnp.pad(array, [(0, -len(array) % ROWS)] + [(0, 0)] * (array.ndim - 1))


def _call(kernel, grid, specs, out_specs, out_shape, arrays, warps=4):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    arrays, out_shape = kernel_arguments(arrays, out_shape)
    call = pl.pallas_call(
        functools.partial(kernel, pl),
        grid=grid,
        in_specs=[pl.BlockSpec(*spec) for spec in specs],
        out_specs=[pl.BlockSpec(*spec) for spec in out_specs],
        out_shape=out_shape,
        interpret=platform() == "cpu",
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=2),
    )
    with jax.enable_x64(False):  # kernels are made of 32 bits
        return call(*arrays)


def _normalised(x, table, limits):
    """Logsumexp `[tokens]` of the logits and mean `[tokens, width]` of the table's rows under their
    softmax; float32.

    The results of tokens outside the tail are undefined.
    """
    (tokens, width), splits = x.shape, min(SPLITS, len(table) // WORDS)
    by_split = (None, ROWS), lambda i, split: (split, i)
    peaks, sums, means = _call(
        _normalise,
        (tokens // ROWS, splits),
        [
            ((3,), lambda i, split: (0,)),
            ((ROWS, width), lambda i, split: (i, 0)),
            (table.shape, lambda i, split: (0, 0)),
        ],
        [by_split, by_split, ((None, ROWS, width), lambda i, split: (split, i, 0))],
        [
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in (*2 * [(splits, tokens)], (splits, tokens, width))
        ],
        [limits, x, table],
    )
    peak = peaks.max(axis=0)
    share = jnp.exp(peaks - peak[None])
    total = jnp.sum(sums * share, axis=0)
    return peak + jnp.log(total), jnp.sum(means * share[..., None], axis=0) / total[:, None]


def _normalise(pl, limits, x_ref, table_ref, peak_ref, sum_ref, mean_ref):
    first, split, splits = pl.program_id(0) * ROWS, pl.program_id(1), pl.num_programs(1)
    blocks = table_ref.shape[0] // WORDS

    @pl.when((first < limits[1]) & (first + ROWS > limits[0]))
    def _():
        x = x_ref[...]

        def add(i, state):
            peak, total, mean = state
            rows = table_ref[pl.ds(i * WORDS, WORDS), :]
            word = i * WORDS + lax.broadcasted_iota(jnp.int32, (ROWS, WORDS), 1)
            logits = jnp.where(word < limits[2], _product(x, rows.T), LOW)
            higher = jnp.maximum(peak, logits.max(axis=1))
            fall, powers = jnp.exp(peak - higher), jnp.exp(logits - higher[:, None])
            return (
                higher,
                total * fall + powers.sum(axis=1),
                mean * fall[:, None] + _product(powers.astype(rows.dtype), rows),
            )

        start = (
            jnp.full((ROWS,), LOW, jnp.float32),
            jnp.zeros((ROWS,), jnp.float32),
            jnp.zeros(x.shape, jnp.float32),
        )
        begin, end = (lax.div((split + end) * blocks, splits) for end in (0, 1))
        peak_ref[...], sum_ref[...], mean_ref[...] = lax.fori_loop(begin, end, add, start)


def _d_table(x, table, by_token, limits):
    """The gradient `[rows, width]` of the table, float32, of the tail's sum of weight · (factor ·
    logsumexp - logit of the target).

    by_token: `(logsumexp, weight, factor, column)`, each `[tokens]`.
    """
    (tokens, width), all_rows = x.shape, ((len(x),), lambda i: (0,))
    [gradient] = _call(
        _add_tokens,
        (len(table) // WORDS,),
        [
            ((3,), lambda i: (0,)),
            ((tokens, width), lambda i: (0, 0)),
            ((WORDS, width), lambda i: (i, 0)),
            *[all_rows] * 4,
        ],
        [((WORDS, width), lambda i: (i, 0))],
        [jax.ShapeDtypeStruct(table.shape, jnp.float32)],
        [limits, x, table, *by_token],
        warps=4 if width <= 128 else 8,  # 4 lack registers for the sums
    )
    return gradient


def _add_tokens(pl, limits, x_ref, table_ref, *refs):
    *by_token, out_ref = refs
    rows, first = table_ref[...], pl.program_id(0) * WORDS
    # Words by tokens, as the second product reads it.
    word = first + lax.broadcasted_iota(jnp.int32, (WORDS, ROWS), 0)

    def add(i, total):
        block = pl.ds(i * ROWS, ROWS)
        x, token = x_ref[block, :], i * ROWS + lax.iota(jnp.int32, ROWS)
        inside = (token >= limits[0]) & (token < limits[1])
        logsumexp, weight, factor, column = (ref[block] for ref in by_token)
        # Other tokens add nothing: their powers and weights are 0.
        logsumexp = jnp.where(inside, logsumexp, -LOW)[None]
        weight = jnp.where(inside, weight, 0.0)[None]
        chances = jnp.exp(_product(rows, x.T) - logsumexp)
        hits = jnp.where(column[None] == word, 1.0, 0.0)
        scaled = weight * (factor[None] * chances - hits)
        return total + _product(scaled.astype(x.dtype), x)

    begin, end = lax.div(limits[0], ROWS), lax.div(limits[1] + ROWS - 1, ROWS)
    total = lax.fori_loop(begin, end, add, jnp.zeros(rows.shape, jnp.float32))
    is_word = first + lax.broadcasted_iota(jnp.int32, rows.shape, 0) < limits[2]
    out_ref[...] = jnp.where(is_word, total, 0.0)


def _product(left, right):
    return jnp.dot(left, right, preferred_element_type=jnp.float32)
