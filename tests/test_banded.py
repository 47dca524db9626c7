"""The one-pass banded softmax against its slow twin: masked, dense, in float64, a few lines long."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax import dropout
from adaptive_jax.outputs import banded
from adaptive_jax.outputs.banded import Regularisation

# float32 against float64: rounding of sums over at most a few hundred terms of size 1.
TOLERANCE = {"rtol": 2e-5, "atol": 2e-5}

# words and widths of each band, features, whether the head has a projection
SHAPES = {
    "prime": ([11, 30, 60], [16, 4, 1], 16, False),
    "one word in each tail": ([7, 1, 1], [8, 4, 2], 8, False),
    "267,735 words scaled down": ([20, 40, 208], [32, 8, 2], 32, False),
    "one cutoff": ([40, 80], [12, 3], 12, False),
    "three cutoffs, prime": ([17, 31, 60, 103], [16, 8, 4, 2], 16, False),
    "four cutoffs": ([5, 3, 7, 4, 84], [32, 16, 8, 4, 2], 32, False),
    "factor 1": ([13, 20, 20], [12, 12, 12], 12, False),
    "head projected": ([13, 40, 48], [8, 8, 8], 12, True),
    "full softmax": ([101], [16], 16, False),
    "full softmax, projected": ([101], [6], 16, True),
}
TARGETS = ("everywhere", "head only", "one tail only", "an empty tail")
TOKENS = 24


def arrays(shape, targets="everywhere", seed=0):
    """hidden, targets, weights, bands, clusters of a case."""
    sizes, widths, features, projected = SHAPES[shape]
    rng = np.random.default_rng(seed)

    def normal(*dims):
        return rng.standard_normal(dims).astype(np.float32)

    bands = tuple(
        (normal(words, width), normal(width, features) / 4 if i or projected else None)
        for i, (words, width) in enumerate(zip(sizes, widths, strict=True)))
    clusters = normal(len(sizes) - 1, widths[0]) if len(sizes) > 1 else None
    starts = np.cumsum([0, *sizes])
    allowed = {
        "everywhere": range(starts[-1]),
        "head only": range(sizes[0]),
        "one tail only": range(starts[-2], starts[-1]),
        "an empty tail": [*range(sizes[0]), *range(starts[min(2, len(sizes))], starts[-1])],
    }[targets]
    ids = rng.choice(allowed, TOKENS).astype(np.int32)
    if targets == "everywhere":
        edges = [edge for start in starts[:-1] for edge in (start, start + 1)] + [starts[-1] - 1]
        ids[:len(edges)] = np.minimum(edges, starts[-1] - 1)
    weights = rng.integers(0, 3, TOKENS).astype(np.float32)
    return normal(TOKENS, features), ids, weights, bands, clusters


def slow_log_softmaxes(hidden, bands, clusters, kept=()):
    """Logits of the head (clusters last) and of every tail, for every token; `kept` are dropout factors of the tails."""
    logits = []
    for i, (table, projection) in enumerate(bands):
        x = hidden if projection is None else hidden @ projection.T
        if i and len(kept):
            x = x * kept[i - 1]
        rows = table if i or clusters is None else jnp.concatenate([table, clusters])
        logits.append(x @ rows.T)
    return logits


def slow_losses(hidden, targets, bands, clusters, regularisation=banded.PLAIN, kept=()):
    """`(loss, nll)` of every token: each softmax evaluated for every token, what it does not visit masked."""
    loss = nll = 0.0
    first = 0
    for i, logits in enumerate(slow_log_softmaxes(hidden, bands, clusters, kept)):
        words = len(bands[i][0])
        inside = (targets >= first) & (targets < first + words)
        column = jnp.where(inside, targets - first, 0)
        if i == 0:
            ends = np.cumsum([len(table) for table, _ in bands])
            tail = sum((targets >= end).astype(int) for end in ends[:-1])
            column, inside = jnp.where(inside, column, words - 1 + tail), True
        normaliser = jax.nn.logsumexp(logits, axis=1)
        log_probs = logits - normaliser[:, None]
        each = -jnp.take_along_axis(log_probs, column[:, None], axis=1)[:, 0]
        share = regularisation.label_smoothing
        smoothed = (1 - share) * each - share * log_probs.mean(axis=1) + regularisation.z_loss * normaliser**2
        nll += jnp.where(inside, each, 0.0)
        loss += jnp.where(inside, smoothed, 0.0)
        first += words
    return loss, nll


def in_float64(function, *values):
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda a: jnp.asarray(a, jnp.float64 if np.issubdtype(a.dtype, np.floating) else jnp.int64), values)
        return jax.tree.map(np.asarray, function(*wide))


def check(fast, slow, **tolerance):
    assert jax.tree.structure(fast) == jax.tree.structure(slow)
    for one, other in zip(jax.tree.leaves(fast), jax.tree.leaves(slow), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), other, **(TOLERANCE | tolerance))


@functools.partial(jax.jit, static_argnames=("regularisation", "chunk"))
def fast_loss(hidden, targets, weights, bands, clusters, regularisation=banded.PLAIN, key=None, numbers=None, chunk=None):
    def loss(hidden, weights, bands, clusters):
        return banded.loss(hidden, targets, weights, bands, clusters, regularisation=regularisation, key=key, numbers=numbers,
                           chunk=chunk)

    argnums = (0, 1, 2, 3) if clusters is not None else (0, 1, 2)
    return jax.value_and_grad(loss, argnums, has_aux=True)(hidden, weights, bands, clusters)


@functools.partial(jax.jit, static_argnames="regularisation")
def slow_loss(hidden, targets, weights, bands, clusters, regularisation=banded.PLAIN, kept=()):
    def loss(hidden, weights, bands, clusters):
        each, nll = slow_losses(hidden, targets, bands, clusters, regularisation, kept)
        return jnp.sum(weights * each), nll

    argnums = (0, 1, 2, 3) if clusters is not None else (0, 1, 2)
    return jax.value_and_grad(loss, argnums, has_aux=True)(hidden, weights, bands, clusters)


@pytest.mark.parametrize("targets", TARGETS)
@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_every_gradient(shape, targets):
    """Sum, report and all gradients equal the twin's, wherever the targets lie; zero weights are among the weights."""
    values = arrays(shape, targets)
    check(fast_loss(*values), in_float64(slow_loss, *values))


@pytest.mark.parametrize("chunk", [1, 5, 8, TOKENS, 64])
@pytest.mark.parametrize("shape", ["prime", "full softmax", "head projected"])
def test_chunks_that_divide_do_not_divide_and_exceed(shape, chunk):
    """No size of chunk changes anything."""
    values = arrays(shape)
    check(fast_loss(*values, chunk=chunk), in_float64(slow_loss, *values))


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_batches_smaller_than_a_chunk(tokens):
    """A batch may have fewer tokens than anything else has of anything."""
    hidden, targets, weights, bands, clusters = arrays("prime", seed=3)
    values = hidden[:tokens], targets[:tokens], weights[:tokens] + 1, bands, clusters
    check(fast_loss(*values), in_float64(slow_loss, *values))


@pytest.mark.parametrize("shape", SHAPES)
def test_label_smoothing_and_z_loss(shape):
    """Both act in each softmax a token visits, in the loss and its gradients, and leave the report plain."""
    regularisation = Regularisation(label_smoothing=0.2, z_loss=0.03)
    values = arrays(shape)
    fast = fast_loss(*values, regularisation=regularisation, chunk=7)
    check(fast, in_float64(lambda *a: slow_loss(*a, regularisation=regularisation), *values))
    check(fast[0][1], in_float64(slow_loss, *values)[0][1])


def test_zero_weights_give_zero():
    """A batch of padding has no loss and no gradient but that of the weights themselves."""
    hidden, targets, weights, bands, clusters = arrays("prime")
    (loss, _), (d_hidden, d_weights, *others) = fast_loss(hidden, targets, 0 * weights, bands, clusters)
    assert loss == 0 and all((leaf == 0).all() for leaf in jax.tree.leaves((d_hidden, others)))
    assert (d_weights > 0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_nll_with_any_cotangent(shape):
    """nll and its pull-back by a random cotangent equal the twin's."""
    hidden, targets, _, bands, clusters = arrays(shape)
    pull = np.random.default_rng(1).standard_normal(TOKENS).astype(np.float32)

    def both(nll):
        def run(hidden, bands, clusters, pull):
            values, back = jax.vjp(nll, hidden, bands, clusters)
            return values, back(pull)

        return run

    fast = jax.jit(both(lambda h, b, c: banded.nll(h, targets, b, c, chunk=5)))(hidden, bands, clusters, pull)
    slow = in_float64(jax.jit(both(lambda h, b, c: slow_losses(h, targets, b, c)[1])), hidden, bands, clusters, pull)
    check(fast, slow)


@pytest.mark.parametrize("shape", SHAPES)
def test_log_probs(shape):
    """All log-probabilities equal minus the twin's losses with every word as the target."""
    hidden, _, _, bands, clusters = arrays(shape)
    words = sum(len(table) for table, _ in bands)

    @jax.jit
    def every_word(hidden, bands, clusters):
        return -jax.vmap(lambda word: slow_losses(hidden, jnp.full(len(hidden), word), bands, clusters)[1], out_axes=1)(
            jnp.arange(words))

    slow = in_float64(every_word, hidden[:4], bands, clusters)
    check(jax.jit(banded.log_probs)(hidden[:4], bands, clusters), slow)


@functools.partial(jax.jit, static_argnums=1)
def dropout_factors(key, rate, bands, numbers):
    """Factors of every tail for all tokens, a token at a time."""

    def factors(number, width):
        return dropout.kept(dropout.row_seeds(key, number[None])[0], jnp.arange(width, dtype=jnp.uint32), rate) / (1 - rate)

    return tuple(jax.vmap(functools.partial(factors, width=table.shape[1]))(numbers) for table, _ in bands[1:])


@pytest.mark.parametrize("chunk", [5, 64])
@pytest.mark.parametrize("shape", ["267,735 words scaled down", "four cutoffs", "head projected"])
def test_tail_dropout(shape, chunk):
    """Under the mask of key and number alone loss and gradients equal the twin's, whatever the chunk; the head is never dropped."""
    values = arrays(shape)
    key, regularisation = jax.random.key(7), Regularisation(tail_dropout=0.3)
    numbers = np.random.default_rng(5).permutation(1000)[:TOKENS].astype(np.int32)
    fast = fast_loss(*values, regularisation=regularisation, key=key, numbers=numbers, chunk=chunk)
    kept = jax.tree.map(np.asarray, dropout_factors(key, 0.3, values[3], numbers))
    check(fast, in_float64(lambda *a: slow_loss(*a[:5], kept=a[5]), *values, kept))
    head = arrays(shape, "head only")
    fast = fast_loss(*head, regularisation=regularisation, key=key, chunk=chunk)
    check(fast, in_float64(slow_loss, *head))


def test_tail_dropout_goes_with_the_number():
    """Half of the tokens, in another order and under their own numbers, lose what they lose among all; other numbers do not."""
    hidden, targets, weights, bands, clusters = arrays("four cutoffs", "one tail only")
    settings = {"regularisation": Regularisation(tail_dropout=0.3), "key": jax.random.key(7)}
    (_, nll), (d_hidden, *_) = fast_loss(hidden, targets, weights, bands, clusters, **settings)
    half = np.random.default_rng(2).permutation(TOKENS)[: TOKENS // 2]
    values = hidden[half], targets[half], weights[half], bands, clusters
    (_, same), (d_same, *_) = fast_loss(*values, numbers=half, **settings)
    check((same, d_same), (nll[half], d_hidden[half]))
    (_, other), _ = fast_loss(*values, numbers=half + TOKENS, **settings)
    assert (abs(other - same) > 1e-4).mean() > 0.5


def test_tail_dropout_needs_a_key():
    """Forgetting the key is an error that says so, not a mask drawn from nothing."""
    with pytest.raises(ValueError, match=r"tail_dropout=0\.2 needs a key"):
        banded.loss(*arrays("prime"), regularisation=Regularisation(tail_dropout=0.2))


def test_huge_logits():
    """Logits of thousands, where exp overflows, give the twin's finite numbers."""
    hidden, targets, weights, bands, clusters = arrays("prime")
    values = 300 * hidden, targets, weights, bands, clusters
    fast = fast_loss(*values)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(fast))
    slow = in_float64(slow_loss, *values)
    # A float32 logit of 4,000 comes in steps of 2.4e-4: so far are the losses, the probabilities, and, times the hidden
    # states of up to 1,000, the tables' gradients.
    check(fast[0], slow[0], rtol=1e-5, atol=2e-3)
    check(fast[1], slow[1], rtol=1e-4, atol=2.4e-4 * np.abs(values[0]).max())


def test_bfloat16():
    """Products in bfloat16, sums in float32, and every gradient in the dtype of its array.

    bfloat16 rounds to 2^-9 of a number. A gradient has at most four roundings behind it (rows, projected vectors,
    d_logits and the projected vectors' gradient), so 4 · 2^-9 in norm; a logit of up to 8 moves by up to 8 · 2^-9. Rounded
    independently, the losses' errors average out in their sum.
    """
    hidden, targets, weights, bands, clusters = arrays("267,735 words scaled down")
    half = jnp.asarray(hidden / 4, jnp.bfloat16)
    (loss, nll), gradients = fast_loss(half, targets, weights, bands, clusters, chunk=5)
    assert loss.dtype == nll.dtype == jnp.float32 and gradients[0].dtype == jnp.bfloat16
    tables = jax.tree.leaves(gradients[2:])
    assert {leaf.dtype for leaf in tables} == {jnp.dtype("float32")}
    # The program itself is read, since on a CPU XLA keeps float32 where it is asked to round: only the tails' projected
    # vectors, 8 and 2 wide, leave a product in bfloat16.
    program = fast_loss.lower(half, targets, weights, bands, clusters, chunk=5).as_text()
    products = re.findall(r"dot_general.*-> tensor<([0-9x]+)x(\w+)>", program)
    assert {kind for _, kind in products} == {"f32", "bf16"}
    assert {dims for dims, kind in products if kind == "bf16"} == {"5x8", "5x2"}
    values = np.asarray(half, np.float32), targets, weights, bands, clusters
    slow = in_float64(slow_loss, *values)
    check(nll, slow[0][1], rtol=0, atol=2**-6)
    check(loss, slow[0][0], rtol=2**-10, atol=0)
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(slow[1]), strict=True):
        assert np.linalg.norm(np.asarray(one, np.float64) - other) < 2**-7 * np.linalg.norm(other)


def test_order_of_tokens():
    """Shuffling the tokens shuffles their results and leaves the tables' gradients as they are."""
    hidden, targets, weights, bands, clusters = arrays("four cutoffs")
    order = np.random.default_rng(2).permutation(TOKENS)
    (loss, nll), (d_hidden, d_weights, *tables) = fast_loss(hidden, targets, weights, bands, clusters)
    (loss2, nll2), (d_hidden2, d_weights2, *tables2) = fast_loss(
        hidden[order], targets[order], weights[order], bands, clusters)
    check((loss2, nll2, d_hidden2, d_weights2), (loss, nll[order], d_hidden[order], d_weights[order]))
    check(tables2, tables)


def test_the_report_carries_no_gradient():
    """The nll returned beside the loss is a report: differentiating it gives zeros, as documented."""
    hidden, targets, weights, bands, clusters = arrays("prime")
    gradients = jax.jit(jax.grad(lambda *a: banded.loss(a[0], targets, *a[1:])[1].sum(), (0, 1, 2, 3)))(
        hidden, weights, bands, clusters)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


def lowered_gradient(tokens, chunk, sizes, widths, features):
    """The loss and its gradients for such shapes, traced and not yet compiled."""
    shapes = tuple(
        (jax.ShapeDtypeStruct((n, w), jnp.float32), jax.ShapeDtypeStruct((w, features), jnp.float32) if i else None)
        for i, (n, w) in enumerate(zip(sizes, widths, strict=True)))
    hidden = jax.ShapeDtypeStruct((tokens, features), jnp.float32)
    return fast_loss.lower(
        hidden, jax.ShapeDtypeStruct((tokens,), jnp.int32), jax.ShapeDtypeStruct((tokens,), jnp.float32), shapes,
        jax.ShapeDtypeStruct((len(sizes) - 1, widths[0]), jnp.float32) if len(sizes) > 1 else None, chunk=chunk)


def test_only_tables_and_chunks_grow_with_the_vocabulary():
    """Shapes in the program with one more word in a band: only `[chunk, words]`, `[words, width]` and less have changed."""
    tokens, chunk, sizes, widths, features = 509, 16, [101, 307, 1009], [64, 8, 4], 64
    largest = max(chunk, *widths)

    def shapes(sizes):
        text = lowered_gradient(tokens, chunk, sizes, widths, features).as_text()
        return {tuple(map(int, dims.split("x")[:-1])) for dims in re.findall(r"tensor<((?:\d+x)+)\w+>", text)}

    before = shapes(sizes)
    assert {(tokens, features), (chunk, sizes[-1]), (sizes[-1], widths[-1])} <= before
    for band, words in enumerate(sizes):
        after = shapes([*sizes[:band], words + 1, *sizes[band + 1:]])
        for grown, odd in (before - after, words), (after - before, words + 1):
            assert grown and all(odd in shape and np.prod(shape) <= largest * odd for shape in grown)
    assert max(np.prod(shape) for shape in before) < tokens * sum(sizes) / 8


def test_nothing_as_large_as_tokens_times_vocabulary():
    """The compiled gradient needs room for the logits of a chunk, the tables' gradients and the hidden states, no more."""
    tokens, chunk, sizes, widths, features = 512, 16, (100, 900, 9_000), (64, 16, 4), 64
    compiled = lowered_gradient(tokens, chunk, sizes, widths, features).compile()
    tables = sum(n * w for n, w in zip(sizes, widths, strict=True))
    # logits and their gradient of the widest band, two copies of the tables' gradients, a few of the hidden states
    allowed = 4 * (3 * chunk * sizes[-1] + 2 * tables + 8 * tokens * features)
    assert compiled.memory_analysis().temp_size_in_bytes < allowed < 4 * tokens * sum(sizes) / 2


def test_memory_at_full_size():
    """9,216 tokens, 267,744 words, d 1024: half a GiB is enough beside parameters, gradients and hidden states."""
    lowered = lowered_gradient(9_216, None, (20_000, 40_000, 207_744), (1024, 256, 64), 1024)
    compiled = lowered.compile({"xla_backend_optimization_level": 0})
    assert compiled.memory_analysis().temp_size_in_bytes <= 2**29


@pytest.mark.parametrize("backend, head, long_head, tail, long_tail", [
    ("cpu", 512, 128, 96, 33), ("gpu", 3_328, 896, 512, 67), ("tpu", 3_328, 896, 512, 67)])
def test_chunk_sizes(backend, head, long_head, tail, long_tail):
    """By backend, band and words; never more than 2^26 logits at a time, nor fewer than 8 tokens."""
    sizes = [banded.chunk_size(band, words, backend) for band, words in ((0, 20_002), (0, 70_000), (1, 40_000), (2, 1_000_000))]
    assert sizes == [head, long_head, tail, long_tail]
    assert banded.chunk_size(1, 10**8, backend) == 8


def test_full_softmax_over_the_words_of_wikitext103_is_bounded():
    """All 267,735 logits of 4,096 tokens would be 4 GiB; with the chunk taken by default there are two of 128 MiB."""
    tokens, words, width = 4_096, 267_735, 8
    compiled = lowered_gradient(tokens, None, (words,), (width,), width).compile()
    chunk = banded.chunk_size(0, words)
    allowed = 4 * (3 * chunk * words + 2 * words * width + 8 * tokens * width)
    assert compiled.memory_analysis().temp_size_in_bytes < allowed < 4 * tokens * words / 8


PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec
from adaptive_jax.outputs import banded
from tests.test_banded import TOKENS, arrays
hidden, targets, weights, bands, clusters = arrays("four cutoffs")
targets = np.sort(targets)  # every device has other bands
regularisation = banded.Regularisation(tail_dropout=0.3)
def loss(tables, hidden, targets, weights, numbers):
    return banded.loss(hidden, targets, weights, *tables, regularisation=regularisation, key=jax.random.key(1), numbers=numbers)
def local(tables, hidden, *rows):
    (value, nll), (d_tables, d_hidden) = jax.value_and_grad(loss, (0, 1), has_aux=True)(tables, hidden, *rows)
    return jax.lax.psum((value, d_tables), "data"), (nll, d_hidden)
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
every, rows = PartitionSpec(), PartitionSpec("data")
run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(every, rows, rows, rows, rows), out_specs=(every, rows), check_vma=False))
results = run((bands, clusters), hidden, targets, weights, np.arange(TOKENS))
np.savez(sys.argv[1], devices=mesh.size, *jax.tree.leaves(results))
"""


def test_one_device_against_eight(tmp_path):
    """Each device sorts its own tokens alone; loss, report and gradients are those of one device, under tail dropout too."""
    files = {devices: tmp_path / f"{devices}.npz" for devices in (1, 8)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, file], cwd=Path(__file__).parents[1],
            env={"PATH": "/usr/bin", "JAX_PLATFORMS": "cpu",
                 "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=1"})
        for devices, file in files.items()]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    results = [dict(np.load(file)) for file in files.values()]
    assert [int(result.pop("devices")) for result in results] == [1, 8]
    assert len(results[0]) > 10
    for name in results[0]:
        np.testing.assert_allclose(results[1][name], results[0][name], rtol=1e-5, atol=1e-5)
