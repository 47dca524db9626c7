"""Gated convolutional networks: residual blocks of causal convolutions whose outputs are gated
(Dauphin et al. 2017).

Convolutions are matrix products. A convolution of kernel width 3 reads zeros before the start of a
row, and its output at token t depends on tokens t-2, t-1 and t:

    tokens            a  b  c  d
    two before        0  0  a  b
    one before        0  a  b  c
    current           a  b  c  d

The last three lines side by side, `[rows, time, 3 * width]`, times one matrix `[3 * width,
outputs]` are the convolution. On two CPU cores this product is about as fast as XLA's convolution,
forward and backward, and faster than a sum of three products (benchmarks/RESULTS.md). Unlike XLA's
convolution it can stop at the start of a segment.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn

from adaptive_jax.bodies.blocks import (
    ParameterGroup,
    Rows,
    as_stored,
    continued,
    gathered_twice,
    save_for_backward,
    unrolled,
)
from adaptive_jax.errors import InputError, check_at_least, check_known, check_rates
from adaptive_jax.numerics.arrays import check_dtype, floats
from adaptive_jax.numerics.batch import Batch
from adaptive_jax.numerics.layers import Dropout, norms, weight_norm
from adaptive_jax.numerics.products import added, product


class Convolution(nn.Module):
    """A causal convolution with a bias, which is 0 at first.

    Attributes:
        kernel: number of inputs that an output depends on: the current one and `kernel - 1` before
            it.
        outputs: width of the outputs.
        variance: initial variance of the outputs where the inputs have mean square 1.
        dtype: of the product.
        normed: apply weight normalisation: the parameter v is the direction of each output's
            weights, and g, which starts as the norm of v, their norm.
    """

    kernel: int
    outputs: int
    variance: float
    dtype: jnp.dtype
    normed: bool = False

    @nn.compact
    def __call__(self, x, before=None, positions=None):
        """Maps `x [rows, time, width]` to `[rows, time, outputs]`.

        Args:
            before: the inputs before `x`, `[rows, kernel - 1, width]`; not needed if the kernel is
                1.
            positions: int `[rows, time]`: an output at position p reads zeros for inputs more than
                p tokens before it. None: it reads all `kernel` inputs.
        """
        inputs = self.kernel * x.shape[-1]
        initial = nn.initializers.normal(math.sqrt(self.variance / inputs))
        v = self.param("v", initial, (self.kernel, x.shape[-1], self.outputs), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.outputs,), jnp.float32)
        v = v.reshape(inputs, self.outputs)
        g = self.param("g", lambda _: norms(v, axis=0)) if self.normed else None
        return save_for_backward(added(_convolve(x, before, positions, v, g), bias))


@functools.partial(jax.checkpoint, prevent_cse=False)
def _convolve(x, before, positions, v, g):
    """A convolution with the matrix `v [kernel * width, outputs]`, with norms `g [outputs]` unless
    that is None. The backward pass recomputes the windows, which are `kernel` times as large as the
    inputs, and the matrix.
    """
    matrix = (v if g is None else weight_norm(v, g)).astype(x.dtype)
    kernel = len(matrix) // x.shape[-1]
    return product(x if kernel == 1 else _windows(x, before, positions, kernel), matrix)


def _windows(x, before, positions, kernel):
    """The inputs that each output reads, concatenated from the oldest to the current one: `[rows,
    time, kernel * width]`.
    """
    time, x = x.shape[1], jnp.concatenate([before, x], axis=1)
    shifted = [x[:, start : start + time] for start in range(kernel)]
    if positions is not None:
        shifted = [
            jnp.where((positions >= kernel - 1 - start)[..., None], inputs, 0)
            for start, inputs in enumerate(shifted)
        ]
    return jnp.concatenate(shifted, axis=-1)


class Activation(NamedTuple):
    """Nonlinearity after a convolution.

    Attributes:
        function: maps `maps` arrays of one shape to one array of that shape.
        maps: outputs of the convolution per unit, 2 where one multiplies the other.
        variance: initial variance of the convolution's outputs, for inputs of mean square 1, that
            preserves the mean square of small inputs (derived for ReLU by He et al. 2015). None:
            `Form.variance`.
    """

    function: Callable
    maps: int
    variance: float | None


ACTIVATIONS = {
    "glu": Activation(lambda a, b: a * jax.nn.sigmoid(b), 2, None),
    "gtu": Activation(lambda a, b: jnp.tanh(a) * jax.nn.sigmoid(b), 2, None),
    "bilinear": Activation(lambda a, b: a * b, 2, 1.0),
    "relu": Activation(jax.nn.relu, 1, 2.0),
    "tanh": Activation(jnp.tanh, 1, 1.0),
    "linear": Activation(lambda a: a, 1, 1.0),
}


class Form(NamedTuple):
    """Choices that the paper leaves open.

    Attributes:
        entry: whether dropout and a linear layer to the width of the first convolution come first.
        residual_scale: factor of the sum of a block's input and output.
        variance: of a gated layer, see `Activation`. Gates are half open at first, so 4 preserves
            the mean square, and 2 halves it.
    """

    entry: bool
    residual_scale: float
    variance: float


FORMS = {"paper": Form(False, 1.0, 2.0), "fairseq": Form(True, math.sqrt(0.5), 4.0)}


class Stage(NamedTuple):
    """A sequence of `count` equal blocks: `layers` are pairs (kernel, units), `width` is that of a
    block's input.
    """

    count: int
    layers: tuple[tuple[int, int], ...]
    width: int

    @property
    def projected(self) -> bool:
        """True if a block's input must be projected before it is added to the output."""
        return self.width != self.layers[-1][1]


class Block(nn.Module):
    """A residual block.

    Attributes:
        stage: the layers and the width of the input.
        convolution: a function of kernel, outputs, variance and name that makes a convolution.
        activation: nonlinearity after each convolution.
        form: the scale of the residual sum, and the initial variance of gated layers.
        dropout: rate on the input of each convolution; the residual connection has no dropout.
        train: whether to apply dropout.
    """

    stage: Stage
    convolution: Callable
    activation: Activation
    form: Form
    dropout: float
    train: bool

    @nn.compact
    def __call__(self, x, memory, positions, row_ids):
        """Maps `x [rows, time, width]` and the memory `[rows, kernel - 1, ...]` of each layer to
        both after this block.
        """
        variance = (self.activation.variance or self.form.variance) * (1 - self.dropout)
        y, after = x, []
        for i, ((kernel, units), before) in enumerate(zip(self.stage.layers, memory, strict=True)):
            y = Dropout(self.dropout)(y, row_ids, train=self.train)
            last = None
            if before is not None:
                last = jnp.concatenate([before, y], axis=1)[:, y.shape[1] :]
            after.append(last)
            layer = self.convolution(
                kernel, self.activation.maps * units, variance, name=f"layer_{i}"
            )
            maps = layer(y, before, positions)
            y = self.activation.function(*jnp.split(maps, self.activation.maps, axis=-1))
        if self.stage.projected:
            x = self.convolution(1, y.shape[-1], 1.0, name="projection")(x)
        return (x + y) * jnp.asarray(self.form.residual_scale, y.dtype), tuple(after)


class GatedConv(nn.Module):
    """The gated convolutional network of Dauphin et al. 2017, sections 2 and 3 and Table 1.

    Each layer is a causal convolution and an activation; equation 1 is the activation "glu". A
    block adds its input to its output, through a linear projection where the widths differ. Equal
    blocks run under one scan, and their parameters have a leading axis of blocks; see `stages`.

    `form` decides what the paper leaves open. "paper": the first convolution reads the vectors, and
    sums are not scaled. "fairseq", as in the released code: dropout and a linear layer to the width
    of the first convolution come first, and sums are scaled by sqrt(1/2).

    Initial weights are normal (He et al. 2015). Their variance preserves that of a layer's inputs,
    with one exception: where sums are not scaled, weights of gated layers have 2 / inputs, the
    formula of He et al. that the paper names, and not 4 / inputs. With 4 the hidden states of
    GCNN-14B, at a quarter of its widths, would start 34,000 times as large as its vectors; with 2,
    2.7 times. Dropout with rate p raises the variance of inputs, so the variance of weights behind
    it is multiplied by 1 - p, as in the released code.

    "glu", "gtu" and "bilinear" convolve twice per unit, so with the same number of units a layer of
    another activation has half as many parameters; with 1.41 times the units it has as many.

    Attributes:
        features: width of the vectors that the body takes.
        blocks: the blocks, each as (repeat, k, n, k, n, ...): its layers' kernel widths and units.
            (3, 1, 512, 5, 512, 1, 1024) are the three blocks of three layers that Table 1 writes as
            [1,512; 5,512; 1,1024] x 3.
        form: choices that Table 1 leaves open: paper or fairseq.
        activation: nonlinearity after each convolution: glu, gtu, relu, tanh, linear or bilinear
            (sections 3 and 5.2, 5.3).
        weight_norm: use weight normalisation (section 4.2).
        dropout: rate on the input of every convolution and of the first linear layer, and on the
            output of the last one. The paper has none.
        output_width: width of a last linear layer, as the released code has before a full softmax;
            0: no such layer.
        dtype: of the matrix products; parameters are float32.
        gather: turns a block's stored parameters into the ones it computes with; see
            `adaptive_jax.bodies.blocks`.

    Raises:
        InputError: blocks in another format or of more than 5 layers, an unknown name, or a number
            out of range.
    """

    features: int = 256
    blocks: tuple[tuple[int, ...], ...] = ((8, 4, 256),)
    form: str = "paper"
    activation: str = "glu"
    weight_norm: bool = True
    dropout: float = 0.0
    output_width: int = 0
    dtype: jnp.dtype = jnp.float32
    gather: Callable = as_stored

    def __post_init__(self):
        super().__post_init__()
        check_at_least(1, features=self.features)
        check_at_least(0, output_width=self.output_width)
        check_dtype(self.dtype)
        check_rates(self, "dropout")
        check_known(f"form={self.form!r}", self.form, FORMS)
        check_known(f"activation={self.activation!r}", self.activation, ACTIVATIONS)
        _check_blocks(self.blocks)

    @property
    def output_features(self) -> int:
        """Width of the hidden states."""
        return self.output_width or self.blocks[-1][-1]

    @property
    def receptive_field(self) -> int:
        """Number of vectors that a hidden state depends on: its own and those before it."""
        return 1 + sum(
            stage.count * (kernel - 1) for stage in self.stages for kernel, _ in stage.layers
        )

    @property
    def stages(self) -> list[Stage]:
        """The blocks, grouped into stages of equal blocks; stage i has the parameters `blocks_i`. A
        block that changes the width is a stage by itself.
        """
        width = self.blocks[0][2] if FORMS[self.form].entry else self.features
        groups = []
        for repeat, *sizes in self.blocks:
            layers = tuple(zip(sizes[::2], sizes[1::2], strict=True))
            alone = int(width != layers[-1][1])
            groups += [
                Stage(count, layers, width_after)
                for count, width_after in ((alone, width), (repeat - alone, layers[-1][1]))
                if count
            ]
            width = layers[-1][1]
        return groups

    @property
    def parameter_groups(self) -> tuple[ParameterGroup, ...]:
        """The groups of parameters to gather: one per block, and the first and last linear layer.
        Weights that are normalised are gathered in float32, in which their norms are computed.
        """
        dtype, linear = jnp.float32 if self.weight_norm else self.dtype, []
        linear += ["entry"] if FORMS[self.form].entry else []
        linear += ["output"] if self.output_width else []
        return (
            *(ParameterGroup((name,), dtype) for name in linear),
            *(
                ParameterGroup((f"blocks_{i}",), dtype, stacked=stage.count > 1)
                for i, stage in enumerate(self.stages)
            ),
        )

    @nn.compact
    def __call__(
        self, vectors: jax.Array, carry=(), batch: Batch | None = None, *, train: bool = False
    ):
        """Maps vectors `[rows, time, features]` and a carry to `(hidden states [rows, time,
        output_features], next carry)`.

        Args:
            carry: `()` for rows that stand alone, and `()` is returned; or a carry of the structure
                of `initial_carry`, which the rows continue.
            batch: its `row_ids` (for dropout), `segment_ids` and `reset` are used. Convolutions
                read zeros before the start of a token's segment, and rows that are reset read zeros
                instead of the carry. None: rows 0, 1, 2 … of one segment each.

        Raises:
            InputError: shapes that do not fit, or segments together with a carry.
        """
        vectors = floats("vectors", vectors, "rows", "time", self.features)
        rows, memory = Rows.of(batch, vectors, carry), self.initial_carry(len(vectors))
        if len(carry):
            memory = continued(carry, memory, rows)
        row_ids, positions = rows.ids, rows.positions()
        sizes = {"dtype": self.dtype, "normed": self.weight_norm}
        convolution, form, after = functools.partial(Convolution, **sizes), FORMS[self.form], []
        x = vectors.astype(self.dtype)
        if form.entry:
            x = Dropout(self.dropout)(x, row_ids, train=train)
            entry = self._gathered(Convolution, "entry")
            x = entry(1, self.blocks[0][2], 1 - self.dropout, **sizes, name="entry")(x)
        for i, stage in enumerate(self.stages):
            name, activation = f"blocks_{i}", ACTIVATIONS[self.activation]
            unroll = stage.count if unrolled(x, train) else 1
            kind = self._gathered(Block, name, looped=stage.count > unroll)
            if stage.count > 1:
                kind = nn.scan(  # axes of memory: rows, then blocks
                    kind,
                    variable_axes={"params": 0, "penalties": 0, "intermediates": 0},
                    split_rngs={"params": True, "dropout": True},
                    in_axes=(1, nn.broadcast, nn.broadcast),
                    out_axes=1,
                    length=stage.count,
                    unroll=unroll,
                )
            block = kind(stage, convolution, activation, form, self.dropout, train, name=name)
            x, state = block(x, memory[i], positions, row_ids)
            after.append(state)
        if self.output_width:
            output = self._gathered(Convolution, "output")
            x = output(1, self.output_width, 1.0, **sizes, name="output")(x)
            x = Dropout(self.dropout)(x, row_ids, train=train)
        return x, tuple(after) if carry else ()

    def _gathered(self, layer, name, looped=False):
        """The class `layer`, wrapped to gather the parameters stored under `name`."""
        if self.gather is as_stored:
            return layer
        return gathered_twice(layer, functools.partial(self.gather, name), looped=looped)

    def initial_carry(self, rows: int) -> tuple:
        """The carry of new rows: zeros for the last `kernel - 1` inputs of every layer.

        Each stage has a tuple with an entry per layer: None for a kernel of 1, otherwise `[rows,
        kernel - 1, width]`, or `[rows, count, kernel - 1, width]` for a stage of several blocks.
        """
        check_at_least(1, rows=rows)

        def zeros(stage):
            widths = stage.width, *(units for _, units in stage.layers[:-1])
            count = () if stage.count == 1 else (stage.count,)
            shapes = [
                (rows, *count, kernel - 1, width)
                for (kernel, _), width in zip(stage.layers, widths, strict=True)
            ]
            return tuple(jnp.zeros(shape, self.dtype) if shape[-2] else None for shape in shapes)

        return tuple(map(zeros, self.stages))

    def cache(self, rows: int, length: int) -> tuple:
        """An empty decoding memory, the same as `initial_carry`, whatever the length."""
        return self.initial_carry(rows)


def _check_blocks(blocks):
    for i, block in enumerate(blocks if isinstance(blocks, list | tuple) and blocks else [blocks]):
        if not isinstance(block, tuple) or len(block) not in (3, 5, 7, 9, 11):
            raise InputError(
                f"blocks[{i}]={block!r} must be a block of 1 to 5 layers: (repeat, kernel,"
                " units, kernel, units, ...)"
            )
        check_at_least(1, **{f"blocks[{i}][{j}]": number for j, number in enumerate(block)})
