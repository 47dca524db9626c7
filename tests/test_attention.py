"""Attention: every path against one written out in float64, with the same weights dropped; decoding; what each path refuses."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.bodies import attention as module
from adaptive_jax.bodies.attention import attention, cached
from adaptive_jax.dropout import kept, places, row_seeds
from adaptive_jax.errors import InputError

RATE = 0.3
HASTE = {"xla_backend_optimization_level": 0}


def tensors(batch, time, heads, width, dtype=jnp.float32):
    """Queries, keys, values and the gradient of what is attended, `[batch, time, heads, width]`."""
    return [jax.random.normal(jax.random.key(i), (batch, time, heads, width)).astype(dtype) for i in range(4)]


def parts(batch, time):
    """Segments of 1 to 40 tokens, other ones in every row, int32 `[batch, time]`."""
    cuts = np.random.default_rng(0).random((batch, time)) < 0.05
    return jnp.asarray(np.cumsum(cuts, axis=1) % 3, jnp.int32)


def seeds_of(rows):
    return row_seeds(jax.random.key(5), jnp.asarray(rows))


def with_gradients(attend, queries, keys, values, gradient):
    """What is attended, and the gradients of queries, keys and values."""

    def both(queries, keys, values, gradient):
        attended, pull = jax.vjp(attend, queries, keys, values)
        return attended, *pull(gradient)

    return jax.jit(both, compiler_options=HASTE)(queries, keys, values, gradient)


def slow_twin(arrays, segments, stays):
    """The same in float64, all pairs at once, as section 3.2.1 of Vaswani et al. has it; `stays` bool `[batch, heads, q, k]`."""
    arrays = [np.asarray(x).astype(np.float64) for x in arrays]
    time, width = arrays[0].shape[1], arrays[0].shape[3]
    seen = np.tri(time, dtype=bool)[None, None]
    if segments is not None:
        segments = np.asarray(segments)
        seen = seen & (segments[:, None, :, None] == segments[:, None, None])

    def attend(queries, keys, values):
        scores = jnp.einsum("bqhw,bkhw->bhqk", queries, keys) / np.sqrt(width)
        weights = jnp.where(seen, jnp.exp(scores), 0)
        weights /= weights.sum(axis=-1, keepdims=True)
        if stays is not None:
            weights *= stays / (1 - RATE)
        return jnp.einsum("bhqk,bkhw->bqhw", weights, values)

    with jax.enable_x64(True):
        return [np.asarray(x) for x in with_gradients(attend, *map(jnp.asarray, arrays))]


EVERY = [(time, segmented, dropout) for time in (7, 64, 130) for segmented in (False, True) for dropout in (0.0, RATE)]


@pytest.mark.parametrize("time, segmented, dropout", [(1, False, 0.0), *EVERY, (520, True, RATE), (1100, True, RATE)])
def test_paths_equal_the_slow_twin(time, segmented, dropout):
    """Values and gradients, of lengths below a chunk, of whole chunks and of a part more, of one group of heads and of several."""
    shape = batch, time, heads, _ = {520: (1, time, 3, 8), 1100: (1, time, 4, 8)}.get(time, (3, time, 4, 8))
    arrays = tensors(*shape)
    segments = parts(batch, time) if segmented else None
    seeds = seeds_of(range(batch))
    stays = np.asarray(kept(seeds, places((heads, time, time)), dropout)) if dropout else None
    expected = slow_twin(arrays, segments, stays)
    for path in ("plain", "chunked"):
        attend = functools.partial(attention, segments=segments, dropout=dropout, seeds=seeds, path=path)
        for ours, right in zip(with_gradients(attend, *arrays), expected, strict=True):
            assert ours.dtype == jnp.float32 and ours.shape == shape
            np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-5 * max(np.abs(right).max(), 1), err_msg=path)


def test_sizes_of_the_tests_cross_chunks_and_groups():
    """Or the test above would be of one chunk and one group only: 3 and 4 groups of one head, 2 of six side by side."""
    counts = []
    for heads, time in ((12, 7), (12, 130), (3, 520), (4, 1100)):
        module._in_groups(lambda x: counts.append(len(x)) or x, (jnp.zeros((heads, time, 1)),))
    assert counts == [12, 6, 6, 1, 1, 1, 1, 1]
    assert module._stages(130) == [(0, 64, 64), (64, 128, 64), (128, 130, 2)]
    assert module._stages(1100) == [*((first, first + 256, 128) for first in (0, 256, 512, 768)), (1024, 1100, 76)]


def test_in_bfloat16():
    """Products in bfloat16, scores and softmax in float32: as close to float64 as bfloat16 numbers are to each other."""
    arrays = tensors(2, 130, 2, 16, jnp.bfloat16)
    expected = slow_twin(arrays, None, None)
    for path in ("plain", "chunked"):
        for ours, right in zip(with_gradients(functools.partial(attention, path=path), *arrays), expected, strict=True):
            assert ours.dtype == jnp.bfloat16
            np.testing.assert_allclose(np.asarray(ours, np.float64), right, atol=0.02 * np.abs(right).max(), err_msg=path)


def test_large_scores_stay_finite():
    """Scores of thousands, whose exponentials are beyond float32."""
    queries, keys, values, gradient = tensors(1, 130, 1, 8)
    for path in ("plain", "chunked"):
        for each in with_gradients(functools.partial(attention, path=path), queries * 300, keys * 300, values, gradient):
            assert np.all(np.isfinite(each)), path


def weights_of(path, seeds, time=130, heads=3):
    """The weights themselves, times the tokens seen, `[batch, heads, queries, keys]`: queries are 0 and values one-hot."""
    zeros = jnp.zeros((len(seeds), time, heads, time))
    values = jnp.broadcast_to(jnp.eye(time)[None, :, None], zeros.shape)
    attend = functools.partial(attention, dropout=RATE, seeds=seeds, path=path)
    attended = jax.jit(attend, compiler_options=HASTE)(zeros, zeros, values)
    return np.moveaxis(np.asarray(attended), 2, 1) * (1 + np.arange(time))[:, None]


@pytest.mark.parametrize("path", ["plain", "chunked"])
def test_weights_are_dropped_as_asked(path):
    """A share `dropout` of them, the others divided by the rest; none tells of another head's or row's; rows keep their own."""
    weights = weights_of(path, seeds_of(range(4)))
    lower = np.tri(130, dtype=bool)
    assert np.all(weights[..., ~lower] == 0)
    of_pairs = weights[..., lower].reshape(12, -1)
    stays = of_pairs > 0
    np.testing.assert_allclose(of_pairs[stays], 1 / (1 - RATE), rtol=1e-5)
    error = np.sqrt(RATE * (1 - RATE) / stays.shape[1])
    assert np.all(np.abs((~stays).mean(axis=1) - RATE) < 5 * error)
    correlation = np.corrcoef(stays)
    assert np.abs(correlation - np.eye(12)).max() < 5 / np.sqrt(stays.shape[1])
    np.testing.assert_array_equal(weights_of(path, seeds_of([2, 0])), weights[[2, 0]])


@pytest.mark.parametrize("path, power", [("plain", 2), ("chunked", 1)])
def test_memory_grows_with_time(path, power):
    """Of the compiled forward and backward pass: with time when chunked, with its square when plain."""

    def both(*arrays):
        attended, pull = jax.vjp(functools.partial(attention, path=path), *arrays[:3])
        return attended, *pull(arrays[3])

    short, long = (
        jax.jit(both).lower(*[jax.ShapeDtypeStruct((1, time, 1, 8), jnp.float32)] * 4).compile(HASTE).memory_analysis()
        for time in (1536, 3072)
    )
    ratio = long.temp_size_in_bytes / short.temp_size_in_bytes
    assert 0.8 * 2**power < ratio < 1.2 * 2**power


def test_decoding_equals_the_whole():
    """Token by token and in pieces, against a cache whose places after the last token hold anything."""
    queries, keys, values, _ = tensors(2, 9, 3, 8)
    whole = attention(queries, keys, values)
    stale = [jnp.pad(x, ((0, 0), (0, 4), (0, 0), (0, 0)), constant_values=7.0) for x in (keys, values)]
    for first, end in ((0, 1), (1, 2), (2, 6), (6, 9)):
        attended = jax.jit(cached)(queries[:, first:end], *stale, jnp.asarray(first))
        np.testing.assert_allclose(attended, whole[:, first:end], atol=1e-6)


def on(monkeypatch, backend):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)


def chosen(monkeypatch, time=128, width=16, dtype=jnp.bfloat16, **asked):
    """Which path "auto" takes."""
    seen = []
    monkeypatch.setattr(module, "_plain", lambda *_: seen.append("plain"))
    monkeypatch.setattr(module, "_chunked", lambda *_: seen.append("chunked"))
    monkeypatch.setattr(jax.nn, "dot_product_attention", lambda *_, implementation, is_causal: seen.append(implementation))
    attention(*[jnp.zeros((1, time, 2, width), dtype)] * 3, **asked)
    return seen


def test_auto_takes_what_can_do_it(monkeypatch):
    """On a CPU chunks, where there is more than one; on a GPU cuDNN, unless dropout, segments or numbers are beyond it."""
    assert chosen(monkeypatch) == ["chunked"]
    assert chosen(monkeypatch, time=64) == ["plain"]
    on(monkeypatch, "gpu")
    assert chosen(monkeypatch) == ["cudnn"]
    assert chosen(monkeypatch, dtype=jnp.float32) == chosen(monkeypatch, width=12) == ["chunked"]
    assert chosen(monkeypatch, dropout=0.1, seeds=seeds_of([0])) == ["chunked"]
    assert chosen(monkeypatch, segments=parts(1, 128)) == ["chunked"]
    on(monkeypatch, "tpu")
    assert chosen(monkeypatch) == ["chunked"]


@pytest.mark.parametrize("platform, backend", [("cuda", "gpu"), ("tpu", "tpu")])
def test_chunks_lower_for_accelerators(monkeypatch, platform, backend):
    """All heads at once, without a loop over them, and with float32 sums of bfloat16 products."""
    on(monkeypatch, backend)
    attend = functools.partial(attention, dropout=RATE, seeds=seeds_of(range(8)), segments=parts(8, 300))
    step = jax.jit(jax.grad(lambda *arrays: attend(*arrays).sum().astype(jnp.float32), argnums=(0, 1, 2)))
    text = step.trace(*tensors(8, 300, 16, 64, jnp.bfloat16)[:3]).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" not in text
    assert "tensor<128x128x256xbf16>" in text and "-> tensor<128x128x256xf32>" in text


@pytest.mark.parametrize(
    "asked, says",
    [
        ({"path": "chunkd"}, "chunked"),
        ({"path": "cudnn"}, "needs a GPU.*choose body.attention='chunked'"),
        ({"path": "cudnn", "backend": "gpu", "dropout": 0.1}, "dropout=0.1.*choose"),
        ({"path": "cudnn", "backend": "gpu", "segments": parts(1, 128)}, "segments.*choose"),
        ({"path": "cudnn", "backend": "gpu"}, "not float32.*choose"),
        ({"path": "cudnn", "backend": "gpu", "dtype": jnp.bfloat16, "width": 12}, "not 12.*choose"),
        ({"time": 65_537, "dropout": 0.1}, "2 heads over 65537 tokens.*choose"),
    ],
)
def test_what_a_path_cannot_do_is_said(monkeypatch, asked, says):
    """In one line, with the value and the cure."""
    asked = dict(asked)
    on(monkeypatch, asked.pop("backend", "cpu"))
    shape = 1, asked.pop("time", 128), 2, asked.pop("width", 16)
    like = jax.ShapeDtypeStruct(shape, asked.pop("dtype", jnp.float32))
    with pytest.raises(InputError, match=says):
        jax.eval_shape(functools.partial(attention, **asked), like, like, like)


def test_the_benchmark_times_every_path(command, tmp_path):
    """Of which there are plain and chunked on a CPU, each with and without dropout, and torch where it is installed."""
    done = command(
        "-m", "benchmarks.attention", "--times=70", "--heads=2", "--width=8", "--rows=2", "--repeats=1",
        f"--json={tmp_path / 'rows.json'}")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    ours = [row for row in rows if row["path"] != "torch"]
    assert [(row["time"], row["dropout"], row["path"]) for row in ours] == [
        (70, dropout, path) for dropout in (0.1, 0.0) for path in ("plain", "chunked")]
    for row in ours:
        assert row["seconds"] >= row["fastest"] > 0 and row["peak_bytes"] > 0
        pairs = 2 * 2 * row["time"] * (row["time"] + 1) / 2
        assert row["gflops_per_second"] == pytest.approx(12 * pairs * 8 / row["seconds"] / 1e9)
    assert len(done.stdout.splitlines()) == 2 + len(rows)
