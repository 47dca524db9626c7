"""The one-pass banded softmax against its slow twin: dense, in float64, a few lines long."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.losses import banded, distribution, plans
from adaptive_jax.losses.banded import PLAIN, Settings
from adaptive_jax.losses.groups import join
from adaptive_jax.numerics import dropout
from adaptive_jax.numerics.bands import Band, split_rows
from tests.programs import dtypes_of_products, hasty_jit

# float32 against float64: rounding of sums over at most a few hundred terms of size 1.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}
ALL = Settings(tail_dropout=0.3, label_smoothing=0.2, z_loss=0.03)

# words and widths of each band, features, which bands have a projection, whether all have a bias
CASES = {
    "prime": ([11, 30, 60], [16, 4, 1], 16, "tails", False),
    "7 words": ([3, 1, 2, 1], [8, 4, 2, 1], 8, "tails", True),
    "four cutoffs": ([5, 3, 7, 4, 84], [32, 16, 8, 4, 2], 32, "tails", False),
    "head projected": ([13, 40, 48], [8, 8, 8], 12, "all", True),
    "full softmax": ([101], [16], 16, "tails", False),
    "a word in each band": ([1] * 10, [4] * 10, 4, "none", False),
    "groups among others": (
        [9, *[5] * 8, 30, *[6, 7] * 4],
        [12, *[3] * 8, 6, *[6] * 8],
        12,
        "tails",
        True,
    ),
    "10,007 words in equal classes": ([107, *[100] * 99], [4] * 100, 8, "all", False),
    "10,007 words in unequal classes": ([*[101] * 7, *[100] * 93], [8] * 100, 8, "none", True),
    "no words in the head": ([0, 5, 1, 40], [8, 8, 4, 2], 8, "tails", True),
    "no words in the head, equal classes": ([0, *[10] * 9], [8] * 10, 8, "none", True),
}
LARGE = [case for case in CASES if len(CASES[case][0]) > 99]
TARGETS = ("everywhere", "head only", "one tail only", "an empty tail")
TOKENS = 24


def arrays(case, targets="everywhere", seed=0):
    """hidden, targets, weights, bands, clusters of a case."""
    sizes, widths, features, projected, biased = CASES[case]
    rng = np.random.default_rng(seed)

    def normal(*dims):
        return rng.standard_normal(dims).astype(np.float32)

    def band(i, words, width):
        has = {"all": True, "tails": i > 0, "none": False}[projected]
        return Band(
            normal(words, width),
            normal(width, features) / 4 if has else None,
            normal(words) if biased else None,
        )

    bands = [band(i, *shape) for i, shape in enumerate(zip(sizes, widths, strict=True))]
    tails = len(sizes) - 1
    clusters = Band(normal(tails, widths[0]), None, normal(tails) if biased else None)
    starts = np.cumsum([0, *sizes])
    allowed = {
        "everywhere": range(starts[-1]),
        "head only": range(sizes[0] or sizes[1]),
        "one tail only": range(starts[-2], starts[-1]),
        "an empty tail": [*range(sizes[0]), *range(starts[min(2, len(sizes))], starts[-1])],
    }[targets]
    ids = rng.choice(allowed, TOKENS).astype(np.int32)
    if targets == "everywhere":
        edges = [starts[-1] - 1, *np.ravel([starts[:-1], starts[:-1] + 1], "F")][:TOKENS]
        ids[: len(edges)] = np.minimum(edges, starts[-1] - 1)
    hidden = normal(TOKENS, features)
    weights = rng.integers(0, 3, TOKENS).astype(np.float32)
    return hidden, ids, weights, bands, clusters if tails else None


def slow_softmaxes(hidden, bands, clusters, masks=None):
    """Every word's logit `[tokens, columns]`, the clusters' behind those of the head, and which
    softmax each column is of.
    """
    sizes = [len(band.table) for band in bands]
    softmax = np.insert(np.repeat(np.arange(len(sizes)), sizes), sizes[0], [0] * (len(sizes) - 1))
    if len(sizes) > 2 and all(band.projection is None for band in bands):
        fields = zip(*bands[1:], strict=True)  # one product does for all tails
        bands = [bands[0], Band(*(None if a[0] is None else jnp.concatenate(a) for a in fields))]
    columns = []
    for i, (table, projection, bias) in enumerate(bands):
        x = hidden if projection is None else hidden @ projection.T
        x = x * masks[table.shape[1]] if i and masks else x
        for rows, shift in [(table, bias), *([clusters[::2]] if i == 0 and clusters else [])]:
            columns.append(x @ rows.T + (0 if shift is None else shift[None]))
    return jnp.concatenate(columns, axis=1), softmax


def slow_losses(hidden, targets, bands, clusters, settings=PLAIN, masks=None):
    """`(loss, nll, log-probabilities [tokens, vocabulary])`; `masks` are the tails' dropout
    factors, by width.
    """
    logits, softmax = slow_softmaxes(hidden, bands, clusters, masks)
    if settings.soft_cap:
        logits = settings.soft_cap * jnp.tanh(logits / settings.soft_cap)
    over = functools.partial(jax.ops.segment_sum, segment_ids=softmax, num_segments=len(bands))
    peak = jax.lax.stop_gradient(jax.ops.segment_max(logits.T, softmax, len(bands)))
    logsumexp = (peak + jnp.log(over(jnp.exp(logits.T - peak[softmax])))).T
    within = logits - logsumexp[:, softmax]
    mean = over(within.T).T / np.bincount(softmax)[None]
    words, tails, share = len(bands[0].table), len(bands) - 1, settings.label_smoothing
    starts = np.cumsum([len(band.table) for band in bands])
    tail = sum((targets >= start).astype(int) for start in starts[:-1]) + 0 * targets
    loss = nll = 0.0
    for visited, column, counts in (
        (0 * tail, jnp.where(tail == 0, targets, words - 1 + tail), 1),
        (tail, targets + tails, tail > 0),
    ):
        each, average, normaliser = (
            jnp.take_along_axis(a, index[:, None], axis=1)[:, 0]
            for a, index in ((within, column), (mean, visited), (logsumexp, visited))
        )
        nll -= counts * each
        loss += counts * (settings.z_loss * normaliser**2 - (1 - share) * each - share * average)
    reached = within[:, np.where(softmax > 0, words + softmax - 1, 0)]
    every = within + jnp.where(softmax[None] > 0, reached, 0.0)
    return loss, nll, jnp.delete(every, np.arange(words, words + tails), axis=1)


def in_float64(function, *values):
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: jnp.asarray(a, jnp.float64 if a.dtype.kind == "f" else jnp.int64), values
        )
        return jax.tree.map(np.asarray, hasty_jit(function)(*wide))


def check(fast, slow, **tolerance):
    for one, other in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, **(TOLERANCE | tolerance))


@functools.partial(jax.jit, static_argnames="settings")
def fast_loss(hidden, targets, weights, bands, clusters, settings=PLAIN, seeds=None):
    def loss(hidden, weights, softmax):
        return banded.loss(hidden, targets, weights, *softmax, settings, seeds)

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hidden, weights, (bands, clusters))


def slow_loss(hidden, targets, weights, bands, clusters, settings=PLAIN, masks=None):
    def loss(hidden, weights, softmax):
        each, nll, _ = slow_losses(hidden, targets, *softmax, settings, masks)
        each, nll = (jnp.where(weights == 0, 0.0, a) for a in (each, nll))
        return jnp.sum(weights * each), nll

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(hidden, weights, (bands, clusters))


def seeds_and_masks(bands, rate, seed=7):
    """Seeds of the tokens, numbered otherwise than in their order, and the dropout factors that
    they stand for, by width.
    """
    numbers = np.random.default_rng(5).permutation(1000)[:TOKENS].astype(np.int32)
    seeds = dropout.row_seeds(jax.random.key(seed), numbers)
    widths = {band.table.shape[1] for band in bands[1:]}

    @functools.partial(jax.jit, static_argnums=1)
    def factors(seeds, width):
        keep = lambda seed: dropout.keep_mask(seed, jnp.arange(width, dtype=jnp.uint32), rate)
        return jax.vmap(keep)(seeds) / (1 - rate)

    return seeds, {width: np.array(factors(seeds, width)) for width in widths}


@pytest.mark.parametrize("case", ["prime", "full softmax", "groups among others"])
def test_loss_and_every_gradient(case):
    """Sum, report and all gradients equal the twin's, wherever the targets lie; zero weights
    are among the weights. The next test does so for all bands, with all that a loss can have.
    """
    for targets in TARGETS:
        values = arrays(case, targets)
        check(fast_loss(*values), in_float64(slow_loss, *values))


@pytest.mark.parametrize("case", [case for case in CASES if case not in LARGE])
def test_dropout_label_smoothing_and_z_loss(case):
    """All three act in each softmax a token visits, the dropout in tails alone; the report has
    the dropout and nothing else. So it is wherever the targets lie.
    """
    slow = lambda *v: slow_loss(*v[:5], ALL, v[5])
    for targets in TARGETS:
        values = arrays(case, targets)
        seeds, masks = seeds_and_masks(values[3], ALL.tail_dropout)
        fast = fast_loss(*values, settings=ALL._replace(chunk=7), seeds=seeds)
        check(fast, in_float64(slow, *values, masks))


@pytest.mark.parametrize("case", LARGE)
def test_hundreds_of_bands(case):
    """Loss, gradients and log-probabilities of bands that are cut from one array, which compile
    fast, equal the twin's.
    """
    hidden, targets, weights, bands, clusters = arrays(case)
    seeds, masks = seeds_and_masks(bands, ALL.tail_dropout)
    sizes, widths = zip(*(band.table.shape for band in bands), strict=True)
    stacked = Band(*(None if a[0] is None else np.concatenate(a) for a in zip(*bands, strict=True)))

    def both(losses):
        def loss(hidden, stacked, clusters, *random):
            fields = [
                [None] * len(sizes) if a is None else split_rows(a, s)
                for a, s in zip(stacked, (sizes, widths, sizes), strict=True)
            ]
            total, nll, log_probs = losses(hidden, list(map(Band, *fields)), clusters, ALL, *random)
            return total, (nll, log_probs[:2])

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))

    def fast(hidden, bands, clusters, *settings):
        log_probs = distribution.log_probs(hidden, bands, clusters)
        return *banded.loss(hidden, targets, weights, bands, clusters, *settings), log_probs

    def slow(hidden, bands, clusters, *settings):
        each, nll, _ = slow_losses(hidden, targets, bands, clusters, *settings)
        nll = jnp.where(weights == 0, 0.0, nll)
        return jnp.sum(weights * each), nll, slow_losses(hidden, targets, bands, clusters)[2]

    check(
        both(fast)(hidden, stacked, clusters, seeds),
        in_float64(both(slow), hidden, stacked, clusters, masks),
    )


@pytest.mark.parametrize("chunk", [1, 8, 64])
def test_chunks_that_divide_and_exceed(chunk):
    """No size of chunk changes anything; those of 7 tokens above do not divide."""
    values = arrays("groups among others")
    check(fast_loss(*values, settings=Settings(chunk=chunk)), in_float64(slow_loss, *values))


@pytest.mark.parametrize("tokens", [1, 7])
def test_batches_smaller_than_a_chunk(tokens):
    """A batch may have fewer tokens than there are bands, words in a band or rows in a chunk."""
    *by_token, bands, clusters = arrays("groups among others", seed=3)
    values = *(array[-tokens:] for array in by_token), bands, clusters
    check(fast_loss(*values), in_float64(slow_loss, *values))


@pytest.mark.parametrize("case", ["head projected", "groups among others", "no words in the head"])
def test_nll_with_any_cotangent_and_log_probs(case):
    """nll, its pull-back by a random cotangent and all log-probabilities equal the twin's."""
    hidden, targets, _, *softmax = arrays(case)
    pull = np.random.default_rng(1).standard_normal(TOKENS).astype(np.float32)

    def both(nll, log_probs):
        def run(hidden, softmax, pull):
            values, back = jax.vjp(lambda h, s: nll(h, targets, *s), hidden, softmax)
            return values, back(pull), log_probs(hidden[:4], *softmax)

        return jax.jit(run)

    in_fives = lambda h, y, *softmax: banded.losses(h, y, None, *softmax, Settings(chunk=5))
    fast = both(in_fives, distribution.log_probs)(hidden, softmax, pull)
    twin = both(
        lambda *a: slow_losses(*a)[1], lambda h, *s: slow_losses(h, np.zeros(4, int), *s)[2]
    )
    check(fast, in_float64(twin, hidden, softmax, pull))


def test_order_of_tokens():
    """Tokens in another order, with their own seeds, lose the same units and have the same
    results; with others they do not.
    """
    hidden, targets, weights, bands, clusters = arrays("four cutoffs", "one tail only")
    settings = Settings(tail_dropout=0.3, chunk=5)
    order = np.random.default_rng(2).permutation(TOKENS)
    seeds, _ = seeds_and_masks([bands[0]], 0.3)
    (loss, nll), (d_hidden, d_weights, tables) = fast_loss(
        hidden, targets, weights, bands, clusters, settings, seeds
    )
    values = hidden[order], targets[order], weights[order], bands, clusters, settings
    shuffled = fast_loss(*values, seeds[order])
    check(shuffled, ((loss, nll[order]), (d_hidden[order], d_weights[order], tables)))
    other = abs(fast_loss(*values, seeds)[0][1] - nll[order]) > 1e-4
    assert other.mean() > 0.3  # a tail 2 wide often loses the same


@pytest.mark.parametrize("case", ["prime", "groups among others"])
def test_huge_logits(case):
    """Logits of thousands, where exp overflows, give the twin's finite numbers."""
    hidden, *others = arrays(case)
    fast, slow = fast_loss(300 * hidden, *others), in_float64(slow_loss, 300 * hidden, *others)
    # A float32 logit of 4,000 comes in steps of 2.4e-4: so far are the losses, the probabilities,
    # and, times the hidden states of up to 1,000, the tables' gradients.
    check(fast[0], slow[0], rtol=1e-5, atol=2e-3)
    check(fast[1], slow[1], rtol=1e-4, atol=2.4e-4 * np.abs(300 * hidden).max())


@pytest.mark.parametrize("case", ["four cutoffs", "groups among others"])
def test_bfloat16(case):
    """Products in bfloat16, sums in float32, and every gradient in the dtype of its array.

    bfloat16 rounds to 2^-9 of a number. A gradient has at most four roundings behind it (rows,
    projected vectors, d_logits and the projected vectors' gradient), so 4 · 2^-9 in norm; a logit
    of up to 8 moves by up to 8 · 2^-9. Rounded independently, the losses' errors average out in
    their sum.
    """
    hidden, *others = arrays(case)
    half = jnp.asarray(hidden / 4, jnp.bfloat16)
    (loss, nll), gradients = fast_loss(half, *others, settings=Settings(chunk=5))
    assert loss.dtype == nll.dtype == jnp.float32 and gradients[0].dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients[2])} == {jnp.dtype("float32")}
    program = fast_loss.lower(half, *others, settings=Settings(chunk=5)).as_text()
    assert dtypes_of_products(program) == {("bf16", "bf16", "f32")}
    slow = in_float64(slow_loss, np.asarray(half, np.float32), *others)
    check(nll, slow[0][1], rtol=0, atol=2**-6)
    check(loss, slow[0][0], rtol=2**-10, atol=0)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(slow[1]), strict=True):
        assert np.linalg.norm(np.asarray(one, np.float64) - other) <= 2**-7 * np.linalg.norm(other)


def shapes(tokens, sizes, widths, projected=True):
    """The shapes of the arrays of `fast_loss`."""

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    bands = [
        Band(shape(n, w), shape(w, widths[0]) if i and projected else None)
        for i, (n, w) in enumerate(zip(sizes, widths, strict=True))
    ]
    clusters = Band(shape(len(sizes) - 1, widths[0])) if len(sizes) > 1 else None
    by_token = shape(tokens, widths[0]), shape(tokens, dtype=jnp.int32), shape(tokens)
    return *by_token, bands, clusters


def test_hundreds_of_bands_make_a_small_program():
    """500 equal bands run in one loop: the program has fewer loops than that of five, and a few
    lines for each array cut apart.
    """
    few, many = (
        fast_loss.lower(*shapes(64, [20] * n, [8] * n, projected=False)).as_text() for n in (5, 500)
    )
    assert many.count("stablehlo.while") < few.count("stablehlo.while")
    assert len(many.splitlines()) < 3 * len(few.splitlines())
    hidden, _, _, *softmax = shapes(4, [20] * 500, [8] * 500, projected=False)
    text = jax.jit(distribution.log_probs).lower(hidden, *softmax).as_text()
    assert text.count("dot_general") == 3


@pytest.mark.parametrize(
    "sizes, groups",
    [
        ([100] * 8, [1] * 8),
        ([100] * 9, [1, 8]),
        ([7, *[100, 101] * 5, 50], [1, 10, 1]),
        ([7, *[100] * 9, *[50] * 9], [1, 9, 9]),
        ([9, *range(100, 20, -2)], [1, 11, 8, *[1] * 21]),
    ],
)
def test_bands_that_are_alike_share_a_loop(sizes, groups):
    """Eight or more tails in a row of one width and nearly one size; fewer have loops of their
    own, as has the head.
    """
    programs = []

    def tables(bands):
        groups, joined = join(bands)
        programs.extend(groups)
        return [band.table for band in joined]

    joined = jax.eval_shape(tables, [Band(np.zeros((n, 2), "f")) for n in sizes])
    assert [len(group) for group in programs] == groups
    assert [len(table) for table in joined] == [sum(group) for group in programs]


@pytest.mark.parametrize(
    "sizes, widths", [((20_000, 40_000, 207_744), (1024, 256, 64)), ((267_735,), (8,))]
)
def test_memory_at_full_size(sizes, widths):
    """Half a GiB is enough beside parameters, gradients and hidden states; all logits of 9,216
    tokens would be 9 GiB.
    """
    compiled = fast_loss.lower(*shapes(9_216, sizes, widths)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 2**29


@pytest.mark.parametrize(
    "backend, head, long_head, tail, long_tail",
    [("cpu", 512, 479, 96, 33), ("gpu", 3_328, 896, 512, 67), ("tpu", 3_328, 896, 512, 67)],
)
def test_chunk_sizes(monkeypatch, backend, head, long_head, tail, long_tail):
    """By backend, band and words; 2^25 or 2^26 logits at a time, or on a CPU a quarter of the
    table, and 8 tokens or more.
    """
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    bands = (0, 20_002, 1024), (0, 70_000, 1024), (1, 40_000, 256), (2, 1_000_000, 64)
    assert [plans.chunk_size(*band) for band in bands] == [
        head,
        long_head,
        tail,
        long_tail,
    ]
    assert plans.chunk_size(0, 262_144, 2048) == {"cpu": 512}.get(backend, 256)
    assert plans.chunk_size(1, 10**8, 16) == 8


PROGRAM = """
import sys
import jax, numpy as np
from jax.sharding import AxisType, PartitionSpec
from tests.losses.test_banded import TOKENS, Settings, arrays, banded, dropout
hidden, targets, weights, *softmax = arrays("groups among others")
targets = np.sort(targets)  # every device has other bands
def loss(softmax, hidden, targets, weights, seeds):
    return banded.loss(hidden, targets, weights, *softmax, Settings(tail_dropout=0.3), seeds)
def local(softmax, *rows):
    (value, nll), (d_softmax, d_hidden) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        softmax, *rows
    )
    return jax.tree.map(lambda a: a[None], (value, d_softmax)), (nll, d_hidden)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
every, rows = PartitionSpec(), PartitionSpec("data")
run = jax.jit(
    jax.shard_map(
        local, mesh=mesh, in_specs=(every, rows, rows, rows, rows), out_specs=rows, check_vma=False
    )
)
values = softmax, hidden, targets, weights, dropout.row_seeds(jax.random.key(1), np.arange(TOKENS))
program = run.lower(*values).compile().as_text()
assert mesh.size == 8 and not any(
    word in program for word in ("all-reduce", "all-gather", "all-to-all", "permute")
)
sums, by_token = run(*values)
np.savez(
    sys.argv[1], *[leaf.sum(axis=0) for leaf in jax.tree.leaves(sums)], *jax.tree.leaves(by_token)
)
"""


def test_one_device_against_eight(eight, tmp_path):
    """Each device sorts its own tokens and talks to no other; results are those of one device,
    under tail dropout too.
    """
    eight(PROGRAM, tmp_path / "eight.npz")
    hidden, targets, *others = arrays("groups among others")
    seeds = dropout.row_seeds(jax.random.key(1), np.arange(TOKENS))
    (total, nll), (d_hidden, _, d_softmax) = fast_loss(
        hidden, np.sort(targets), *others, Settings(tail_dropout=0.3), seeds
    )
    on_eight = np.load(tmp_path / "eight.npz").values()
    check(list(on_eight), [total, *jax.tree.leaves(d_softmax), nll, d_hidden])
