"""Attention: every path against one written out in float64 with the same weights dropped; what
each path refuses.
"""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.bodies import attention as module
from adaptive_jax.bodies import chunked
from adaptive_jax.bodies.attention import Pairs, attention
from adaptive_jax.bodies.positions import alibi_slopes, biases
from adaptive_jax.bodies.splash import splash
from adaptive_jax.bodies.transformer import Transformer
from adaptive_jax.errors import InputError
from adaptive_jax.numerics.devices import GPUS
from adaptive_jax.numerics.dropout import keep_mask, positions, row_seeds
from adaptive_jax.numerics.platforms import tracing_for

RATE = 0.3


def tensors(rows, time, heads, width, dtype=jnp.float32):
    """Queries, keys, values and the gradient of the result, `[rows, time, heads, width]`."""
    bits = np.random.default_rng(0)
    return [jnp.asarray(bits.standard_normal((rows, time, heads, width)), dtype) for _ in range(4)]


def segments(rows, time):
    """Segments of about 20 tokens that differ between rows, int32 `[rows, time]`."""
    begins = np.random.default_rng(0).random((rows, time)) < 0.05
    return jnp.asarray(np.cumsum(begins, axis=1) % 3, jnp.int32)


def seeds_of(rows):
    return row_seeds(jax.random.key(5), jnp.arange(rows))


def with_gradients(attend, **options):
    """A compiled function to the result and the gradients of queries, keys and values."""

    def both(queries, keys, values, gradient):
        attended, pull = jax.vjp(functools.partial(attend, **options), queries, keys, values)
        return attended, *pull(gradient)

    return jax.jit(both)


def slow_twin(arrays, segment_ids=None, stays=None, slopes=()):
    """Section 3.2.1 of Vaswani et al. in float64, all pairs at once; `stays` is bool `[rows, heads,
    queries, keys]`.

    slopes: of ALiBi, Press et al. 2022, section 3.
    """
    time, width = arrays[0].shape[1], arrays[0].shape[3]
    bias = np.zeros((1, 1, 1))
    if slopes:
        bias = np.array(
            [
                [[slope * min(key - query, 0) for key in range(time)] for query in range(time)]
                for slope in slopes
            ]
        )
    mask = np.tri(time, dtype=bool)[None, None]
    if segment_ids is not None:
        segment_ids = np.asarray(segment_ids)
        mask = mask & (segment_ids[:, None, :, None] == segment_ids[:, None, None])

    def attend(queries, keys, values):
        weights = jnp.where(
            mask,
            jnp.exp(jnp.einsum("bqhw,bkhw->bhqk", queries, keys) / np.sqrt(width) + bias[None]),
            0,
        )
        weights /= weights.sum(axis=-1, keepdims=True)
        if stays is not None:
            weights *= stays / (1 - RATE)
        return jnp.einsum("bhqk,bkhw->bqhw", weights, values)

    arrays = [np.asarray(x).astype(np.float64) for x in arrays]
    with jax.enable_x64(True):
        return [np.asarray(x) for x in with_gradients(attend)(*map(jnp.asarray, arrays))]


@pytest.mark.parametrize(
    "rows, time, heads, segmented, dropout, alibi",
    [
        (2, 1, 2, False, 0.0, False),
        (2, 7, 2, True, RATE, False),
        (2, 64, 2, False, RATE, True),
        (3, 130, 4, False, 0.0, False),
        (3, 130, 4, True, 0.0, False),
        (3, 130, 4, True, RATE, True),
        (1, 1100, 3, True, RATE, False),
    ],
)
def test_paths_equal_the_slow_twin(rows, time, heads, segmented, dropout, alibi):
    """Results and gradients: less than a chunk, one chunk, chunks and a part of one; one group
    of heads and several; ALiBi.
    """
    arrays = tensors(rows, time, heads, 8)
    slopes = alibi_slopes(heads) if alibi else ()
    segment_ids = segments(rows, time) if segmented else None
    seeds = seeds_of(rows)
    stays = (
        np.asarray(keep_mask(seeds, positions((heads, time, time)), dropout)) if dropout else None
    )
    expected = slow_twin(arrays, segment_ids, stays, slopes)
    for path in ("plain", "chunked"):
        run = with_gradients(attention, pairs=Pairs(segment_ids, slopes, dropout, seeds), path=path)
        for ours, right in zip(run(*arrays), expected, strict=True):
            assert ours.dtype == jnp.float32 and ours.shape == arrays[0].shape
            np.testing.assert_allclose(
                ours, right, rtol=1e-4, atol=1e-5 * max(np.abs(right).max(), 1), err_msg=path
            )


def test_sizes_of_the_tests_cross_chunks_and_groups():
    """The test above covers all heads at once, two groups of six side by side, three groups of
    one in turn, and stages.
    """
    counts = []
    for heads, time in ((4, 7), (12, 130), (3, 1100)):
        arrays = chunked._Heads(*[jnp.zeros((heads, time, 1))] * 3, None, None, None, None)
        chunked._in_groups(lambda heads: counts.append(len(heads.keys)) or heads, arrays)
    assert counts == [4, 6, 6, 1]  # groups in turn are one loop, whose body is traced once
    assert chunked._stages(130) == [(0, 64, 64), (64, 128, 64), (128, 130, 2)]
    assert chunked._stages(1100) == [
        *((first, first + 256, 128) for first in (0, 256, 512, 768)),
        (1024, 1100, 76),
    ]


@pytest.mark.parametrize("path", ["plain", "chunked"])
def test_bfloat16_and_large_scores(path):
    """In bfloat16 results are as close to float64 as bfloat16 allows; scores whose exponentials
    overflow stay finite.
    """
    arrays = tensors(2, 130, 2, 16, jnp.bfloat16)
    run = with_gradients(attention, path=path)
    for ours, right in zip(run(*arrays), slow_twin(arrays), strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(
            np.asarray(ours, np.float64), right, atol=0.02 * np.abs(right).max()
        )
    for each in run(*(300 * x for x in arrays[:2]), *arrays[2:]):
        assert np.all(np.isfinite(np.asarray(each, np.float32)))


def test_memory_of_chunks_grows_with_time():
    """Of the compiled forward and backward pass: in proportion to time, not to its square."""
    run = with_gradients(attention, path="chunked")
    short, long = (
        run.lower(*[jax.ShapeDtypeStruct((1, time, 1, 8), jnp.float32)] * 4)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for time in (1536, 3072)
    )
    assert 1.6 < long / short < 2.4


def chosen(monkeypatch, time=128, width=16, dtype=jnp.bfloat16, **asked):
    """The path that "auto" takes."""
    calls = []
    monkeypatch.setattr(module, "_plain", lambda *_: calls.append("plain"))
    monkeypatch.setattr(module, "chunked", lambda *_: calls.append("chunked"))
    monkeypatch.setattr(module, "_flash", lambda *_: calls.append("triton"))
    attention(*[jnp.zeros((1, time, 2, width), dtype)] * 3, Pairs(**asked))
    return calls


def test_auto_takes_the_fastest_path_that_can(monkeypatch):
    """On a CPU chunks, if there are several; on a GPU our kernels, unless they lack the length,
    the width or the GPU.
    """
    assert chosen(monkeypatch) == ["chunked"]
    assert chosen(monkeypatch, time=64) == ["plain"]
    with tracing_for("gpu", "NVIDIA H100 80GB HBM3"):
        assert (
            chosen(monkeypatch)
            == chosen(monkeypatch, time=64)
            == chosen(monkeypatch, dtype=jnp.float16)
            == ["triton"]
        )
        assert chosen(monkeypatch, dtype=jnp.float32) == ["chunked"]
        assert chosen(
            monkeypatch, dropout=0.1, seeds=seeds_of(1), segment_ids=segments(1, 128)
        ) == ["triton"]
        assert chosen(monkeypatch, slopes=alibi_slopes(2)) == ["triton"]
        assert chosen(monkeypatch, time=100) == chosen(monkeypatch, width=12) == ["chunked"]
    with tracing_for("gpu", "Tesla V100-SXM2-16GB"):
        assert chosen(monkeypatch) == ["chunked"]
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert chosen(monkeypatch) == ["chunked"]


@pytest.mark.parametrize("platform, backend", [("cuda", "gpu"), ("tpu", "tpu")])
def test_chunks_lower_for_accelerators(monkeypatch, platform, backend):
    """All heads at once, without a loop, and with float32 sums of bfloat16 products."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    attend = functools.partial(
        attention, pairs=Pairs(segments(8, 300), alibi_slopes(16), RATE, seeds_of(8))
    )
    step = jax.jit(
        jax.grad(lambda *arrays: attend(*arrays).sum().astype(jnp.float32), argnums=(0, 1, 2))
    )
    like = jax.ShapeDtypeStruct((8, 300, 16, 64), jnp.bfloat16)
    text = step.trace(like, like, like).lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo.while" not in text
    assert "tensor<128x128x256xbf16>" in text and "-> tensor<128x128x256xf32>" in text


@pytest.mark.parametrize("time", [128, 384])
def test_splash_equals_all_pairs(time):
    """JAX's kernel for TPUs, interpreted: results and gradients, with segments."""
    arrays, pairs = tensors(2, time, 2, 64), Pairs(segments(2, time))
    ours = with_gradients(splash, segment_ids=pairs.segment_ids)(*arrays)
    right = with_gradients(attention, pairs=pairs, path="plain")(*arrays)
    for one, other in zip(ours, right, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=3e-6 * np.abs(other).max())


def test_splash_lowers_for_tpus(monkeypatch):
    """A kernel forward and two backward, in bfloat16, and no scores of all pairs."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    step = jax.jit(
        jax.grad(
            lambda *arrays: attention(*arrays, path="splash").sum().astype(jnp.float32),
            argnums=(0, 1, 2),
        )
    )
    like = jax.ShapeDtypeStruct((8, 512, 16, 64), jnp.bfloat16)
    text = step.trace(like, like, like).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("stablehlo.custom_call @tpu_custom_call") == 3 and "512x512" not in text


@pytest.mark.parametrize(
    "path, on", [("triton", ("gpu", "NVIDIA H100 80GB HBM3")), ("splash", ("tpu", "TPU v5 lite"))]
)
def test_a_model_may_name_the_path_of_its_device(path, on):
    """The path's limits are those of rows, not of the two tokens by which parameters are shaped."""
    body = Transformer(16, layers=1, heads=1, feed_forward=16, attention=path, dtype=jnp.bfloat16)
    like = jax.ShapeDtypeStruct((1, 128, 16), jnp.bfloat16)
    with tracing_for(*on):
        params = jax.eval_shape(
            body.init, jax.random.key(0), jax.ShapeDtypeStruct((1, 2, 16), jnp.bfloat16)
        )
        assert jax.eval_shape(body.apply, params, like)[0].shape == like.shape
        with pytest.raises(InputError, match=f"attention='{path}' takes rows of"):
            jax.eval_shape(body.apply, params, jax.ShapeDtypeStruct((1, 2, 16), jnp.bfloat16))


@pytest.mark.parametrize(
    "asked, says",
    [
        ({"path": "chunkd"}, "chunked"),
        (
            {"path": "triton"},
            "triton' needs a GPU, and this is a cpu: choose body.attention='chunked'",
        ),
        ({"path": "triton", "backend": "h100", "time": 100}, "64, 128, 192 .* not 100: choose"),
        ({"path": "triton", "backend": "h100", "width": 48}, "not 48: choose"),
        (
            {"path": "triton", "backend": "h100", "width": 128},
            "or in float32 of up to 64, not 128: choose",
        ),
        (
            {"path": "triton", "backend": "rtx4090", "width": 64},
            "or in float32 of up to 32, not 64: choose",
        ),
        ({"path": "triton", "backend": "h100", "dtype": jnp.int8}, "not int8: choose"),
        ({"path": "triton", "backend": "gpu"}, "compute capability 8.0 or more: choose"),
        ({"path": "cudnn", "backend": "h100"}, "needs its own library and GPU"),
        ({"path": "cudnn"}, "needs a GPU.*choose body.attention='chunked'"),
        ({"path": "cudnn", "backend": "gpu", "dropout": 0.1}, "dropout=0.1.*choose"),
        (
            {"path": "cudnn", "backend": "gpu", "segment_ids": np.zeros((1, 128))},
            "segments.*choose",
        ),
        (
            {"path": "cudnn", "backend": "gpu", "slopes": (0.5, 0.25)},
            "support body.positions='alibi': choose",
        ),
        ({"path": "cudnn", "backend": "gpu"}, "not float32.*choose"),
        ({"path": "cudnn", "backend": "gpu", "dtype": jnp.bfloat16, "width": 12}, "not 12.*choose"),
        ({"path": "splash"}, "needs a TPU, and this is a cpu: choose body.attention='chunked'"),
        ({"path": "splash", "backend": "tpu", "dropout": 0.1}, "dropout=0.1.*choose"),
        (
            {"path": "splash", "backend": "tpu", "slopes": (0.5, 0.25)},
            "support body.positions='alibi': choose",
        ),
        ({"path": "splash", "backend": "tpu", "time": 100}, "128, 256, 384 .* not 100: choose"),
        ({"path": "splash", "backend": "tpu"}, "not float32.*choose"),
        (
            {"time": 65_537, "dropout": 0.1},
            "2 heads over 65537 tokens.*choose a smaller batches.sequence_length",
        ),
    ],
)
def test_errors_say_what_a_path_does_not_support(monkeypatch, asked, says):
    """In one line, with the value and the cure."""
    asked = {"backend": "cpu", "time": 128, "width": 16, "dtype": jnp.float32} | asked
    backend = asked.pop("backend")
    pairs = Pairs(**{key: asked.pop(key) for key in Pairs._fields if key in asked})
    monkeypatch.setattr(
        jax, "default_backend", lambda: backend if backend in ("gpu", "tpu") else "cpu"
    )
    on = tracing_for("gpu", GPUS[backend].kind) if backend in GPUS else contextlib.nullcontext()
    like = jax.ShapeDtypeStruct((1, asked.pop("time"), 2, asked.pop("width")), asked.pop("dtype"))
    with on, pytest.raises(InputError, match=says):
        jax.eval_shape(functools.partial(attention, pairs=pairs, **asked), like, like, like)


@pytest.mark.parametrize(
    "heads, slopes",
    [
        (8, [2.0**-i for i in range(1, 9)]),
        (16, [2.0 ** (-i / 2) for i in range(1, 17)]),
        (1, [2.0**-8]),
        (6, [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]),
        (12, [2.0**-i for i in range(1, 9)] + [2.0 ** (-i / 2) for i in (1, 3, 5, 7)]),
    ],
)
def test_slopes_of_alibi(heads, slopes):
    """Those of the paper for powers of two, and those of its public code for other numbers."""
    np.testing.assert_allclose(alibi_slopes(heads), slopes)
    assert len(set(alibi_slopes(heads))) == heads


def test_biases_of_alibi():
    """The figure of the paper: 0 for the token itself, minus a slope for each token before it,
    wherever the queries begin.
    """
    whole = biases(jnp.asarray([0.5, 0.25]), 0, 4, 4)
    np.testing.assert_array_equal(
        np.tril(whole[0]), np.tril(-0.5 * np.abs(np.subtract.outer(range(4), range(4))))
    )
    np.testing.assert_array_equal(
        biases(jnp.asarray([0.5, 0.25]), jnp.int32(2), 2, 4), whole[:, 2:]
    )
