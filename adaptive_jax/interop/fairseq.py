"""The tensors of fairseq's `transformer_lm` as parameters of this project.

Both number the bands alike, and both order the columns of the head alike: words first, then one
column for each cluster.
"""

from collections.abc import Iterator
from fnmatch import fnmatchcase

import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.interop.tensors import Place, fill

INPUT, SOFTMAX = "decoder.embed_tokens", "decoder.adaptive_softmax"
POSITIONS = "decoder.embed_positions.weight"  # of learned positions
# Its row of the first token: fairseq counts from the id after that of <pad>, 1, and reads no row
# before it
FIRST_POSITION = 2
# Entries of a state that are not parameters: versions, markers of the device, and sinusoids, which
# are computed here.
NOT_PARAMETERS = (
    "decoder.version",
    f"{SOFTMAX}.version",
    "*._float_tensor",
    "decoder.embed_positions.weights",
)


def parameters_of(state: dict[str, np.ndarray], config: dict) -> dict:
    """The parameters, float32, of `build(config, ...)`, from the state of a fairseq model.

    Gradients under the names of the state are converted in the same way.

    Raises:
        InputError: tensors are left over, missing or of another shape, all in one line; or two
            tensors that the options tie differ.
    """
    tensors = _without_empty_character(_newest_names(state, config))
    _drop_tied(tensors, config)
    return fill(tensors, dict(_places(config)), config)


def _newest_names(state, config):
    """The parameters of a state under fairseq's present names; tensors that are several
    parameters here are split.
    """
    tensors = {}
    for name, tensor in state.items():
        first, _, last = name.rpartition(".")
        if any(fnmatchcase(name, pattern) for pattern in NOT_PARAMETERS):
            continue
        if last in ("in_proj_weight", "in_proj_bias"):  # until 2019
            features = config["body"]["features"]
            for part, rows in zip("qkv", np.split(tensor, [features, 2 * features]), strict=True):
                tensors[f"{first}.{part}_proj.{last.removeprefix('in_proj_')}"] = rows
        elif name == POSITIONS:
            tensors[f"{name}[{FIRST_POSITION}:]"] = np.atleast_1d(tensor)[FIRST_POSITION:]
        elif name == "decoder.embed_out":  # until 2020
            tensors["decoder.output_projection.weight"] = tensor
        elif name == f"{SOFTMAX}.head.weight" and (cutoffs := config["output"]["table"]["cutoffs"]):
            tensors |= {
                f"{name}[:words]": tensor[: cutoffs[0]],
                f"{name}[words:]": tensor[cutoffs[0] :],
            }
        else:  # with the norms' names until 2018
            name = name.replace("layer_norms.0", "self_attn_layer_norm").replace(
                "layer_norms.2", "final_layer_norm"
            )
            tensors[name] = tensor
    return tensors


def _without_empty_character(tensors):
    """The tensors of a character CNN whose vector for "no character", beyond the end of a word, is
    zero, as it is here.

    fairseq's is row 0, which starts as zero and is not trained. If it is not zero, it is subtracted
    from all characters, and its response in each filter, which is the same everywhere, is added to
    the filter's bias: the outputs stay the same.
    """
    characters = tensors.pop(f"{INPUT}.char_embeddings.weight", None)
    if characters is None:
        return tensors
    empty = characters[0]
    tensors[f"{INPUT}.char_embeddings.weight[1:]"] = characters[1:] - empty
    if empty.any():
        for name in [
            name for name in tensors if fnmatchcase(name, f"{INPUT}.convolutions.*.weight")
        ]:
            bias = name.replace("weight", "bias")
            tensors[bias] = tensors[bias] + tensors[name].sum(axis=2) @ empty
    return tensors


def _drop_tied(tensors, config):
    """Drops the second copy of tensors that a checkpoint holds under two names, after comparing
    both.
    """
    for name, copy in _tied(config):
        if name in tensors and copy in tensors:
            if not np.array_equal(tensors[name], tensors[copy]):
                raise InputError(
                    f"the checkpoint's options tie {name} and {copy}, but they differ: give another"
                    " checkpoint"
                )
            del tensors[copy]


def _tied(config):
    table = config["output"]["table"]
    if table["name"] != "tied":
        return
    if config["output"]["name"] == "softmax":
        yield f"{INPUT}.weight", "decoder.output_projection.weight"
        return
    yield f"{INPUT}.embeddings.0.0.weight", f"{SOFTMAX}.head.word_proj.weight"
    for i in range(len(config["input"]["cutoffs"])):
        yield f"{INPUT}.embeddings.{i + 1}.0.weight", f"{SOFTMAX}.tail.{i}.2.weight"
        if table["share_projections"]:
            yield f"{INPUT}.embeddings.{i + 1}.1.weight", f"{SOFTMAX}.tail.{i}.0.weight"


def _places(config) -> Iterator[tuple[str, Place]]:
    """The place of every tensor that a model of this config may have, by its name in
    `_newest_names`.
    """
    source = {"adaptive": _adaptive_input, "char_cnn": _char_cnn, "lookup": _lookup}[
        config["input"]["name"]
    ]
    yield from source(config["input"])
    yield from _body(config["body"])
    yield from _output(config)


def _linear(name, weight, bias, part=()):
    yield f"{name}.weight", Place(weight, part, transposed=True)
    yield f"{name}.bias", Place(bias, part)


def _lookup(_):
    yield f"{INPUT}.weight", Place("input/table")
    yield "decoder.project_in_dim.weight", Place("input/projection", transposed=True)


def _adaptive_input(settings):
    for i in range(len(settings["cutoffs"]) + 1):
        yield f"{INPUT}.embeddings.{i}.0.weight", Place(f"input/table_{i}")
        yield f"{INPUT}.embeddings.{i}.1.weight", Place(f"input/projection_{i}", transposed=True)


def _char_cnn(settings):
    yield f"{INPUT}.char_embeddings.weight[1:]", Place("input/characters")
    yield f"{INPUT}.symbol_embeddings", Place("input/symbols")
    yield from _linear(f"{INPUT}.projection", "input/projection", "input/projection_bias")
    for i in range(len(settings["filters"])):
        yield from _linear(
            f"{INPUT}.convolutions.{i}", f"input/filter_{i}", f"input/filter_bias_{i}"
        )
    for i in range(settings["highway_layers"]):
        yield from _linear(
            f"{INPUT}.highway.layers.{i}", f"input/highway_{i}", f"input/highway_bias_{i}"
        )


def _body(settings):
    features, blocks = settings["features"], "body/blocks"
    norms = {"self_attn_layer_norm": "norm_attention", "final_layer_norm": "norm_feed_forward"}
    for i in range(settings["layers"]):
        layer = f"decoder.layers.{i}"
        for j, part in enumerate("qkv"):
            columns, joint = slice(j * features, (j + 1) * features), f"{blocks}/query_key_value"
            yield (
                f"{layer}.self_attn.{part}_proj.weight",
                Place(f"{joint}/kernel", (i, slice(None), columns), transposed=True),
            )
            yield f"{layer}.self_attn.{part}_proj.bias", Place(f"{joint}/bias", (i, columns))
        for name, ours in {
            "self_attn.out_proj": "attended",
            "fc1": "inner",
            "fc2": "outer",
        }.items():
            yield from _linear(
                f"{layer}.{name}", f"{blocks}/{ours}/kernel", f"{blocks}/{ours}/bias", (i,)
            )
        for name, ours in norms.items():
            yield f"{layer}.{name}.weight", Place(f"{blocks}/{ours}/scale", (i,))
            yield f"{layer}.{name}.bias", Place(f"{blocks}/{ours}/bias", (i,))
    yield f"{POSITIONS}[{FIRST_POSITION}:]", Place("body/learned_positions/table")
    yield "decoder.layer_norm.weight", Place("body/norm/scale")
    yield "decoder.layer_norm.bias", Place("body/norm/bias")


def _output(config):
    table = config["output"]["table"]
    yield "decoder.project_out_dim.weight", Place("output/table/projection_0")
    if config["output"]["name"] == "softmax":
        yield "decoder.output_projection.weight", Place("output/table/table_0")
        return
    cutoffs = table["cutoffs"]
    if table["name"] == "tied":
        yield f"{SOFTMAX}.head.class_proj.weight", Place("output/clusters")
        cutoffs = config["input"]["cutoffs"]
    elif cutoffs:
        yield f"{SOFTMAX}.head.weight[:words]", Place("output/table/table_0")
        yield f"{SOFTMAX}.head.weight[words:]", Place("output/clusters")
    else:
        yield f"{SOFTMAX}.head.weight", Place("output/table/table_0")
    for i in range(len(cutoffs)):
        yield f"{SOFTMAX}.tail.{i}.0.weight", Place(f"output/table/projection_{i + 1}")
        yield f"{SOFTMAX}.tail.{i}.2.weight", Place(f"output/table/table_{i + 1}")
