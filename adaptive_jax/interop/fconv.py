"""Models of fairseq's `fconv_lm`, a gated convolutional network.

fairseq lists layers as (units, kernel, residual): residual r adds the state before the last r
layers, 0 adds none. Here these r layers are one block. A normalised weight is g v / |v| in both.
"""

import ast
import itertools
import operator
import reprlib
from collections.abc import Iterable, Iterator

import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.interop.converter import (
    Converter,
    Target,
    assign,
    completed,
    unsupported,
)
from adaptive_jax.interop.fairseq import (
    INPUT,
    RUN,
    SOFTMAX,
    output_of,
    read_content,
    run_settings,
    softmax_targets,
    split_head,
    with_defaults,
)
from adaptive_jax.interop.words import fairseq_words
from adaptive_jax.model.language_model import build

MAX_LAYERS = 10_000

# fairseq's defaults, for options that a checkpoint lacks.
DEFAULTS = {
    "dropout": 0.1,
    "decoder_embed_dim": 128,
    "decoder_layers": "[(1268, 4)] * 13",
    "decoder_attention": "False",
    "adaptive_softmax_cutoff": None,
    "adaptive_softmax_dropout": 0.0,
    "add_bos_token": False,
} | RUN

# Options of the softmax in every fconv_lm, whatever a checkpoint states.
OWN_SOFTMAX = {
    "adaptive_softmax_factor": 4,
    "tie_adaptive_weights": False,
    "share_decoder_input_output_embed": False,
}


def config_of(options: dict, state: dict[str, np.ndarray], vocabulary_size: int) -> dict:
    """The complete config of the model in a checkpoint, as evaluate.py reads it.

    The tensors decide which softmax the model has: fairseq ignores cutoffs if the model was trained
    without them.

    Args:
        options, state: see `Checkpoint`.
        vocabulary_size: number of words, including fairseq's own four.

    Raises:
        InputError: an option has a value that the layers here do not support; the message gives
            both.
    """
    options = with_defaults(DEFAULTS, options) | OWN_SOFTMAX
    adaptive = any(name.startswith(f"{SOFTMAX}.") for name in state)
    differences = {
        "decoder_attention": "True" in str(options["decoder_attention"]),  # one word, or a list
        "add_bos_token": options["add_bos_token"],
        "adaptive_softmax_cutoff": adaptive and not options["adaptive_softmax_cutoff"],
    }
    if any(differences.values()):
        raise unsupported(options, [name for name in differences if differences[name]])
    model = {
        "input.name": "lookup",
        "body.name": "gated_conv",
        "body.form": "fairseq",
        "body.features": options["decoder_embed_dim"],
        "body.blocks": blocks_of(layers_of(options["decoder_layers"])),
        "body.activation": "glu",
        "body.weight_norm": True,
        "body.dropout": options["dropout"],
    }
    options["decoder_output_dim"] = options["decoder_embed_dim"]
    if not adaptive:
        options["adaptive_softmax_cutoff"] = None
        model |= {
            "body.output_width": options["decoder_embed_dim"],
            "output.table.bias": True,
            "output.table.weight_norm": True,
        }
    model |= output_of(options, vocabulary_size)
    return completed(run_settings(options, vocabulary_size) | model)


def layers_of(text: str) -> list[tuple[int, int, int]]:
    """The layers of an option `decoder_layers`, such as `[(850, 6)] * 3 + [(128, 1, 0)]`, each as
    (units, kernel, residual); the residual defaults to 1.

    Raises:
        InputError: anything but sums and multiples of lists of such tuples.
    """
    try:
        layers = _literal(ast.parse(text, mode="eval").body)
        layers = [(units, kernel, *(residual or [1])) for units, kernel, *residual in layers]
        if not all(len(layer) == 3 and {*map(type, layer)} == {int} for layer in layers):
            raise ValueError("not two or three whole numbers")
        return layers
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(
            f"decoder_layers={reprlib.repr(text)} must be a list such as '[(850, 6)] * 3'"
        ) from error


def _literal(node):
    operators = {ast.Add: operator.add, ast.Mult: _times}
    if isinstance(node, ast.BinOp) and type(node.op) in operators:
        return operators[type(node.op)](_literal(node.left), _literal(node.right))
    return ast.literal_eval(node)


def _times(layers, number):
    if len(layers) * number > MAX_LAYERS:  # a short text could fill the memory
        raise ValueError("too many layers")
    return layers * number


def blocks_of(layers: Iterable[tuple[int, int, int]]) -> tuple[tuple[int, ...], ...]:
    """Layers (units, kernel, residual) as `GatedConv.blocks`.

    (128, 1, 0), (128, 5, 0), (512, 1, 3) twice in a row are the blocks ((2, 1, 128, 5, 128, 1,
    512),).

    Raises:
        InputError: residuals that do not start at the end of the previous block.
    """
    blocks, block = [], ()
    for units, kernel, residual in layers:
        block += (kernel, units)
        if residual not in (0, len(block) // 2):
            raise InputError(
                "decoder_layers must have residuals that start at the end of the previous block,"
                f" got {residual} after {len(block) // 2} layers"
            )
        if residual:
            blocks, block = [*blocks, block], ()
    if block:
        raise InputError("decoder_layers must have a residual at its last layer")
    return tuple((len(list(equal)), *block) for block, equal in itertools.groupby(blocks))


def parameters_of(state: dict[str, np.ndarray], config: dict) -> dict:
    """The parameters, float32, of `build(config, ...)`, from the state of a fairseq model.

    Gradients under the names of the state are converted in the same way.

    Raises:
        InputError: tensors are left over, missing or of another shape, all in one line.
    """
    tensors = {
        name: tensor.ravel() if name.endswith(".weight_g") else tensor
        for name, tensor in state.items()
        if not name.endswith(".version")
    }
    return assign(split_head(tensors, config), dict(_targets(config)), config)


def _targets(config) -> Iterator[tuple[str, Target]]:
    """The target of every tensor that a model of this config may have."""
    yield f"{INPUT}.weight", Target("input/table")
    yield from _linear("decoder.fc1", "body/entry")
    layer = itertools.count()
    for i, stage in enumerate(build(config, config["data"]["vocabulary_size"]).body.stages):
        for number in range(stage.count):
            part = (number,) if stage.count > 1 else ()
            for j in range(len(stage.layers)):
                last = next(layer)
                source, path = f"decoder.convolutions.{last}", f"body/blocks_{i}/layer_{j}"
                yield f"{source}.weight_v", Target(f"{path}/v", part)
                yield f"{source}.weight_g", Target(f"{path}/g", part)
                yield f"{source}.bias", Target(f"{path}/bias", part)
            yield from _linear(f"decoder.projections.{last}", f"body/blocks_{i}/projection")
    yield from _linear("decoder.fc2", "body/output")
    if config["output"]["name"] == "softmax":
        yield "decoder.fc3.weight_v", Target("output/table/table_0")
        yield "decoder.fc3.weight_g", Target("output/table/norm_0")
        yield "decoder.fc3.bias", Target("output/table/bias")
    else:
        yield from softmax_targets(config)


def _linear(source, path):
    """A linear layer, here a convolution of kernel 1."""
    yield f"{source}.weight_v", Target(f"{path}/v", (0,), transposed=True)
    yield f"{source}.weight_g", Target(f"{path}/g")
    yield f"{source}.bias", Target(f"{path}/bias")


def _detect(content):
    checkpoint = read_content(content)
    is_fconv = checkpoint and str(checkpoint.options.get("arch")).startswith("fconv_lm")
    return checkpoint if is_fconv else None


FCONV_LM = Converter(
    "a checkpoint that fairseq saved while it trained a fconv_lm",
    _detect,
    fairseq_words,
    config_of,
    parameters_of,
)
