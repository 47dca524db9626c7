"""Values that the loop over blocks carries to the backward pass, keeps outside, and computes again,
read from traced programs.
"""

import contextlib
import functools
import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.bodies import gated_conv, transformer
from adaptive_jax.bodies.blocks import LayerNorm, policy
from adaptive_jax.bodies.gated_conv import GatedConv
from adaptive_jax.bodies.lstm import AWDLSTM
from adaptive_jax.bodies.transformer import PostNormTransformer, Transformer, _relu
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.dropout import Mask, drop
from adaptive_jax.numerics.platforms import tracing_for
from adaptive_jax.numerics.products import added

ROWS, TIME, FEATURES, LAYERS = 16, 256, 512, 5
UNIT = ROWS * TIME * FEATURES * 2  # bytes of the vectors of all tokens in bfloat16
MIB = 2**20


def on_gpu(yes=True):
    return tracing_for("gpu", "NVIDIA H100 80GB HBM3") if yes else contextlib.nullcontext()


@functools.cache
def gradient_program(kind, gpu, **fields):
    """The traced gradient of a body of five blocks, of rows of several segments with every
    dropout.
    """
    rates = {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1}
    fields = rates | {"dtype": jnp.bfloat16} | fields
    body = kind(FEATURES, LAYERS, 8, 4 * FEATURES, **fields)
    vectors = jax.ShapeDtypeStruct((ROWS, TIME, FEATURES), jnp.float32)
    params = jax.eval_shape(body.init, jax.random.key(0), vectors)["params"]
    ids = jax.ShapeDtypeStruct((ROWS, TIME), jnp.int32), jax.ShapeDtypeStruct((ROWS,), jnp.int32)

    def loss(params, vectors, segment_ids, row_ids):
        batch = Batch(None, None, None, row_ids, segment_ids=segment_ids)
        return body.apply(
            {"params": params}, vectors, (), batch, train=True, rngs={"dropout": jax.random.key(1)}
        )[0].sum()

    with on_gpu(gpu):
        return jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(
            params, vectors, *ids
        ).jaxpr, jax.tree.leaves(params)


def equations(jaxpr):
    """All equations, those inside of others too, but for those of kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from equations(inner)


def loops(jaxpr):
    """The loops over blocks, forward and backward."""
    scans = [
        each
        for each in equations(jaxpr)
        if each.primitive.name == "scan" and each.params["length"] == LAYERS
    ]
    assert [each.params["reverse"] for each in scans] == [False, True]
    return scans


def inputs(loop):
    """The shapes that a step of a loop reads whole and does not change, and the stacked ones,
    of which it reads a slice.
    """
    body = loop.params["jaxpr"].jaxpr
    stacked = [
        outer.aval
        for outer, inner in zip(loop.invars, body.invars, strict=True)
        if outer.aval.shape != inner.aval.shape
    ]
    changed = [
        outer
        for outer, inner in zip(loop.outvars, body.outvars, strict=True)
        if outer.aval.shape == inner.aval.shape
    ]
    return [each.aval for each in loop.invars[: -len(stacked) - len(changed)]], stacked


def size(aval):
    return math.prod(aval.shape) * (
        4 if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval.dtype.itemsize
    )


@pytest.mark.parametrize(
    "kind, gpu, fields",
    [
        (Transformer, False, {}),
        (PostNormTransformer, False, {"remat": "elementwise", "attention_dropout": 0.0}),
        (Transformer, True, {}),
    ],
)
def test_loops_read_no_mask(kind, gpu, fields):
    """The arrays that a loop over blocks reads in every step, besides slices of parameters and of
    what the forward pass kept, are small.
    """
    for loop in loops(gradient_program(kind, gpu, **fields)[0]):
        hoisted, _ = inputs(loop)
        assert max(map(size, hoisted), default=0) <= MIB, hoisted


def test_vectors_that_a_gpu_keeps_of_a_block():
    """Ten vectors a token: queries, keys, values, what attention mixed, two sums, four of the
    feed-forward layer; few numbers more.

    So no product is computed twice, and attention is one kernel in each direction.
    """
    jaxpr, params = gradient_program(Transformer, True)
    forward, backward = loops(jaxpr)
    shapes = {each.shape for each in params}
    kept = [each for each in inputs(backward)[1] if each.shape not in shapes]
    large = [each for each in kept if size(each) > LAYERS * UNIT / 8]
    assert (
        all(each.dtype == jnp.bfloat16 for each in large)
        and sum(map(size, large)) == LAYERS * 10 * UNIT
    )
    assert sum(map(size, kept)) < 1.03 * LAYERS * 10 * UNIT
    for loop, products in (forward, 4), (backward, 8):
        every = list(equations(loop.params["jaxpr"].jaxpr))
        assert [each.primitive.name for each in every].count("dot_general") == products
        read = {
            variable
            for each in every
            for variable in each.invars
            if not isinstance(variable, jax.extend.core.Literal)
        }
        assert (
            len(
                [
                    each
                    for each in every
                    if each.primitive.name == "pallas_call" and read.intersection(each.outvars)
                ]
            )
            == 1
        )


def test_gradients_of_matrices_are_summed_in_float32():
    """Products of bfloat16 vectors, whose result the compiler need not round before it is added
    to others.
    """
    backward = loops(gradient_program(Transformer, True)[0])[1]
    made = [
        each.outvars[0].aval
        for each in equations(backward.params["jaxpr"].jaxpr)
        if each.primitive.name == "dot_general"
    ]
    assert sorted(str(each.dtype) for each in made) == ["bfloat16"] * 4 + ["float32"] * 4


def test_auto_is_by_device():
    """A CPU keeps everything, and loops over blocks in float32; a GPU keeps what is worth its
    memory. It trains without a loop, as a CPU does in bfloat16: there XLA would widen and narrow
    all that is kept of all blocks once for each.
    """
    assert policy("auto") is policy("none")
    with on_gpu():
        assert policy("auto") is policy("elementwise")
    wide = {"dtype": jnp.float32}
    for gpu, fields, unroll in (False, wide, 1), (False, {}, LAYERS), (True, {}, LAYERS):
        scans = loops(gradient_program(Transformer, gpu, **fields)[0])
        assert [each.params["unroll"] for each in scans] == [unroll] * 2
    body = Transformer(FEATURES, LAYERS, 8, 4 * FEATURES)
    with on_gpu():  # a forward pass keeps nothing
        read = jax.make_jaxpr(lambda x: body.init_with_output(jax.random.key(0), x)[0])(
            jnp.zeros((1, 64, FEATURES))
        )
    assert {
        each.params["unroll"] for each in equations(read.jaxpr) if each.primitive.name == "scan"
    } == {1}


@pytest.mark.parametrize(
    "module, body",
    [
        (transformer, Transformer(16, 3, 2, 32, dropout=0.1, dtype=jnp.bfloat16)),
        (gated_conv, GatedConv(16, ((3, 2, 16),), dropout=0.1, dtype=jnp.bfloat16)),
    ],
    ids=["transformer", "gated_conv"],
)
def test_unrolled_blocks_are_those_of_a_loop(monkeypatch, module, body):
    """The same hidden states and gradients, with dropout, up to roundings of bfloat16."""
    vectors = jax.random.normal(jax.random.key(0), (2, 6, 16))
    params = jax.jit(body.init)(jax.random.key(1), vectors)["params"]

    def loss(params):
        rngs = {"dropout": jax.random.key(2)}
        hidden = body.apply({"params": params}, vectors, train=True, rngs=rngs)[0]
        return jnp.square(hidden.astype(jnp.float32)).sum()

    made = []
    for unroll in True, False:
        monkeypatch.setattr(module, "unrolled", lambda x, train, unroll=unroll: unroll)
        anew = functools.partial(loss)  # traced again
        program = jax.make_jaxpr(anew)(params).jaxpr
        scans = [each for each in equations(program) if each.primitive.name == "scan"]
        assert [each.params["unroll"] for each in scans] == [3 if unroll else 1]
        made.append(jax.jit(jax.value_and_grad(anew))(params))
    for ours, looped in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_allclose(ours, looped, rtol=0.02, atol=0.02 * np.abs(looped).max())


def test_norms_keep_no_copies():
    """The arrays that accelerators keep of a layer norm are the vectors in their own dtype and a
    few numbers of each; JAX alone keeps float32 copies, which fill a GPU's memory.
    """
    layer, x = LayerNorm(dtype=jnp.bfloat16), jnp.ones((4, 64, 32), jnp.bfloat16)
    params = jax.eval_shape(layer.init, jax.random.key(0), x)
    kept = jax.checkpoint(layer.apply, policy=policy("elementwise"))
    residuals = jax.eval_shape(lambda *given: jax.vjp(kept, *given)[1], params, x)
    assert sum(map(size, jax.tree.leaves(residuals))) < 1.1 * x.nbytes


def test_gradient_of_a_bias():
    """Summed in float32: in bfloat16 a sum of ones ends at 256."""
    x, bias = jnp.ones((8, 512, 3), jnp.bfloat16), jnp.arange(3.0)
    out, back = jax.vjp(jax.jit(added), x, bias)
    of_x, of_bias = back(jnp.ones_like(out))
    assert out.dtype == of_x.dtype == jnp.bfloat16 and of_bias.dtype == jnp.float32
    np.testing.assert_array_equal(out[1, 2], [1, 2, 3])
    np.testing.assert_array_equal(of_bias, [4096] * 3)


@pytest.mark.parametrize("rate", [0.3, 0.0])
def test_relu_with_dropout_in_one(rate):
    """`_relu` and its gradient are those of the two functions one after the other, bit for bit."""
    bits = np.random.default_rng(0)
    x, slope = (jnp.asarray(bits.standard_normal((2, 5, 8)), jnp.float32) for _ in range(2))
    mask = Mask(jnp.asarray(bits.random((2, 5, 8)) > 0.3), jnp.zeros(())) if rate else None

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradient(function, x, slope):
        out, pull = jax.vjp(function, x)
        return out, *pull(slope)

    both = lambda x: _relu(rate, x, mask), lambda x: drop(jax.nn.relu(x), mask, rate)
    for one, other in zip(*(with_gradient(each, x, slope) for each in both), strict=True):
        np.testing.assert_array_equal(one, other)


CONVOLUTIONS = GatedConv(16, ((1, 3, 14), (2, 2, 14, 1, 14)), dropout=0.1, output_width=16)
RECURRENT = AWDLSTM(16, (7, 16))


@pytest.mark.parametrize("body", [CONVOLUTIONS, RECURRENT])
def test_gathering_repeats_no_product(body):
    """Gathered again in the backward pass, layers compute no product and no loop over time
    again.
    """

    def counted(body):
        def loss(params, vectors, key):
            how = {"train": True, "rngs": {"dropout": key}, "mutable": ["penalties"]}
            return body.apply({"params": params}, vectors, **how)[0][0].sum()

        program = jax.make_jaxpr(jax.grad(loss))(params, vectors, jax.random.key(0)).jaxpr
        names = [each.primitive.name for each in equations(program)]
        return [names.count(name) for name in ("dot_general", "scan", "while")]

    vectors = jnp.ones((2, 6, 16))
    params = jax.eval_shape(body.init, jax.random.key(0), vectors)["params"]
    params = jax.tree.map(lambda a: jnp.ones(a.shape), params)
    gathered = counted(body.clone(gather=lambda name, params: jax.tree.map(jnp.negative, params)))
    assert gathered == counted(body) and gathered[0] > 3
