"""The tensors of fairseq's `fconv_lm`, a gated convolutional network, as parameters of this
project.

fairseq writes layers as (units, kernel, residual): residual r adds the state r layers back, 0 adds
none. Here r layers that end so are one block. A weight that is normed is g v / |v| in both.
"""

import ast
import itertools
import operator
from collections.abc import Iterable, Iterator

import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.interop.fairseq import INPUT, SOFTMAX
from adaptive_jax.interop.tensors import Place, fill
from adaptive_jax.model.language_model import build

MOST = 10_000  # layers


def layers_of(text: str) -> list[tuple[int, int, int]]:
    """The option `decoder_layers`, `[(850, 6)] * 3 + [(128, 1, 0)]`, as (units, kernel, residual);
    residual is 1 if not given.

    Raises:
        InputError: anything but sums and multiples of lists of such tuples.
    """
    try:
        layers = _literal(ast.parse(text, mode="eval").body)
        layers = [(units, kernel, *(residual or [1])) for units, kernel, *residual in layers]
        if not all(
            len(layer) == 3 and all(type(number) is int for number in layer) for layer in layers
        ):
            raise ValueError("not two or three whole numbers")
        return layers
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"decoder_layers={text[:200]!r} is no list of layers: give one such as '[(850, 6)] * 3"
            " + [(128, 1, 0), (512, 1, 2)]'"
        ) from error


def _literal(node):
    operators = {ast.Add: operator.add, ast.Mult: _times}
    if isinstance(node, ast.BinOp) and type(node.op) in operators:
        return operators[type(node.op)](_literal(node.left), _literal(node.right))
    return ast.literal_eval(node)


def _times(layers, number):
    if len(layers) * number > MOST:  # a short text can ask for any amount of memory
        raise ValueError("too many layers")
    return layers * number


def blocks_of(layers: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, ...], ...]:
    """Layers (units, kernel, residual) as `GatedConv.blocks`.

    (128, 1, 0), (128, 5, 0), (512, 1, 3) twice in a row are the blocks ((2, 1, 128, 5, 128, 1,
    512),).

    Raises:
        InputError: residuals that do not lead back to the end of the block before.
    """
    blocks, block = [], ()
    for units, kernel, residual in layers:
        block += (kernel, units)
        if residual not in (0, len(block) // 2):
            raise InputError(
                f"decoder_layers: a residual of {residual} after {len(block) // 2} layers of a"
                " block is not known here: give layers whose residual leads back to the one before"
            )
        if residual:
            blocks, block = [*blocks, block], ()
    if block:
        raise InputError(
            f"decoder_layers end with {len(block) // 2} layers without a residual: give the last"
            " one a residual"
        )
    return tuple((len(list(equal)), *block) for block, equal in itertools.groupby(blocks))


def parameters_of(state: dict[str, np.ndarray], config: dict) -> dict:
    """The parameters, float32, of `build(config, ...)`, from the state of a fairseq model.

    Gradients under the names of the state are converted in the same way, if they are of version 2
    or later.

    Raises:
        InputError: tensors are left over, missing or of another shape, all in one line.
    """
    tensors = {name: tensor for name, tensor in state.items() if not name.endswith(".version")}
    for name in [name for name in tensors if name.endswith(".weight_g")]:
        v = f"{name[:-1]}v"
        if v in tensors and tensors[v].ndim == 3 and tensors[name].shape == (len(tensors[v]), 1, 1):
            tensors[v], tensors[name] = _one_norm_for_each_output(tensors[v], tensors[name])
        tensors[name] = tensors[name].ravel()
    head, cutoffs = f"{SOFTMAX}.head.weight", config["output"]["table"]["cutoffs"]
    if head in tensors:
        rows = tensors.pop(head)
        tensors |= {f"{head}[:words]": rows[: cutoffs[0]], f"{head}[words:]": rows[cutoffs[0] :]}
    return fill(tensors, dict(_places(config)), config)


def _one_norm_for_each_output(v, g):
    """v and g of the same weights `[kernel, inputs, outputs]`, whose norms were those of the
    `kernel` matrices before version 2.
    """
    weights = v * (g / np.sqrt(np.sum(v**2, axis=(1, 2), keepdims=True)))
    return weights, np.sqrt(np.sum(weights**2, axis=(0, 1)))


def _places(config) -> Iterator[tuple[str, Place]]:
    """The place of every tensor that a model of this config may have."""
    yield f"{INPUT}.weight", Place("input/table")
    yield from _linear("decoder.fc1", "body/entry")
    layer = itertools.count()
    for i, run in enumerate(build(config, config["data"]["vocabulary_size"]).body.stages):
        for number in range(run.count):
            part = (number,) if run.count > 1 else ()
            for j in range(len(run.layers)):
                source, ours = (
                    f"decoder.convolutions.{(last := next(layer))}",
                    f"body/blocks_{i}/layer_{j}",
                )
                yield f"{source}.weight_v", Place(f"{ours}/v", part)
                yield f"{source}.weight_g", Place(f"{ours}/g", part)
                yield f"{source}.bias", Place(f"{ours}/bias", part)
            yield from _linear(f"decoder.projections.{last}", f"body/blocks_{i}/projection")
    yield from _linear("decoder.fc2", "body/output")
    if config["output"]["name"] == "softmax":
        yield "decoder.fc3.weight_v", Place("output/table/table_0")
        yield "decoder.fc3.weight_g", Place("output/table/norm_0")
        yield "decoder.fc3.bias", Place("output/table/bias")
        return
    yield f"{SOFTMAX}.head.weight[:words]", Place("output/table/table_0")
    yield f"{SOFTMAX}.head.weight[words:]", Place("output/clusters")
    for i in range(len(config["output"]["table"]["cutoffs"])):
        yield f"{SOFTMAX}.tail.{i}.0.weight", Place(f"output/table/projection_{i + 1}")
        yield f"{SOFTMAX}.tail.{i}.2.weight", Place(f"output/table/table_{i + 1}")


def _linear(source, ours):
    """A linear layer, here a convolution of kernel 1."""
    yield f"{source}.weight_v", Place(f"{ours}/v", (0,), transposed=True)
    yield f"{source}.weight_g", Place(f"{ours}/g")
    yield f"{source}.bias", Place(f"{ours}/bias")
