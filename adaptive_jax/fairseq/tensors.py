"""The tensors of a model that fairseq trained, as parameters of this project.

A weight of fairseq's is `[outputs, inputs]`, a kernel here `[inputs, outputs]`. Bands count the same way in both, and so do
the columns of the head: words first, then the clusters in order.
"""

import fnmatch
import math
from typing import NamedTuple

import numpy as np
from flax import traverse_util

from adaptive_jax.errors import InputError
from adaptive_jax.model import build
from adaptive_jax.plans.costs import parameter_shapes

# What a model's state holds besides weights: versions, and devices' markers; positions are computed.
BOOKKEEPING = (
    "decoder.version",
    "decoder.adaptive_softmax.version",
    "*._float_tensor",
    "decoder.embed_positions.weights",
)


def words_of(state: dict[str, np.ndarray]) -> int:
    """How many words a model's state has rows for; 0 if it has no table that this project knows."""

    def rows(pattern):
        return [
            tensor.shape[0] for name, tensor in state.items() if tensor.ndim == 2 and fnmatch.fnmatchcase(name, pattern)
        ]

    tables = ("embed_tokens.embeddings.*.0.weight", "embed_tokens.weight", "output_projection.weight", "embed_out")
    for table in tables:
        if found := rows(f"decoder.{table}"):
            return sum(found)
    tails = rows("decoder.adaptive_softmax.tail.*.2.weight")
    return max(0, sum(rows("decoder.adaptive_softmax.head.weight")) + sum(tails) - len(tails))


class Place(NamedTuple):
    """Where a tensor goes: the parameter's path, the part of it, and whether the tensor's axes are reversed."""

    path: str
    at: tuple = ()
    turned: bool = False


def parameters_of(state: dict[str, np.ndarray], config: dict) -> dict:
    """The state of a fairseq model as the parameters, float32, of `build(config, ...)`.

    Gradients, by the same names, are converted alike.

    Raises:
        InputError: a tensor that is left over, missing or of another shape, all in one line; a tensor that should equal the
            one it is tied to and does not.
    """
    shapes = {
        path: leaf.shape
        for path, leaf in traverse_util.flatten_dict(
            parameter_shapes(build(config, config["data"]["vocabulary_size"])), sep="/"
        ).items()
    }
    tensors = _without_partners(_newest_names(state, config), config)
    places = {name: place for name, place in _places(config).items() if place.path in shapes}
    parts = {name: np.broadcast_to(np.float32(0), shapes[place.path])[place.at] for name, place in places.items()}
    expected = {name: part.T.shape if places[name].turned else part.shape for name, part in parts.items()}
    filled = dict.fromkeys(shapes, 0)
    for name, part in parts.items():
        filled[places[name].path] += part.size
    other = [name for name in expected if name in tensors and tensors[name].shape != expected[name]]
    wrong = {
        "left over in the checkpoint": [
            f"{name} {list(tensors[name].shape)}" for name in tensors if name not in expected
        ],
        "missing in it": [f"{name} {list(shape)}" for name, shape in expected.items() if name not in tensors],
        "of another shape": [f"{n} {list(tensors[n].shape)}, not {list(expected[n])}" for n in other],
        "without a source": [
            f"{path} {list(shape)}" for path, shape in shapes.items() if filled[path] != math.prod(shape)
        ],
    }
    if any(wrong.values()):
        raise InputError(
            "the checkpoint's tensors are not those of the model that its options describe: "
            + "; ".join(f"{what}: {_listed(names)}" for what, names in wrong.items() if names)
        )
    parameters = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    for name, (path, at, turned) in places.items():
        parameters[path][at] = tensors[name].T if turned else tensors[name]
    return traverse_util.unflatten_dict(parameters, sep="/")


def _listed(names, most=4):
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _newest_names(state, config):
    """The weights of a state under the names that fairseq uses today, those cut up that are several parameters here."""
    features, tensors = config["body"]["features"], {}
    for name, tensor in state.items():
        first, _, last = name.rpartition(".")
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in BOOKKEEPING):
            continue
        if last in ("in_proj_weight", "in_proj_bias"):  # until 2019
            for i, part in enumerate("qkv"):
                rows = tensor[i * features : None if i == 2 else (i + 1) * features]
                tensors[f"{first}.{part}_proj.{last.removeprefix('in_proj_')}"] = rows
        elif ".layer_norms." in name:  # until 2018
            tensors[
                name.replace("layer_norms.0", "self_attn_layer_norm").replace("layer_norms.2", "final_layer_norm")
            ] = tensor
        elif name == "decoder.embed_out":  # until 2020
            tensors["decoder.output_projection.weight"] = tensor
        elif name == "decoder.adaptive_softmax.head.weight" and (cutoffs := config["output"]["table"]["cutoffs"]):
            words = cutoffs[0]
            tensors |= {f"{name}[:{words}]": tensor[:words], f"{name}[{words}:]": tensor[words:]}
        else:
            tensors[name] = tensor
    return _without_empty_character(tensors)


def _without_empty_character(tensors):
    """Characters counted from the vector that stands beyond a word's end, which is zero here.

    fairseq's is row 0, zero from the start and never trained. Where it is not, the others are taken relative to it, and what
    it adds to each response of a filter, the same everywhere, goes to the filter's bias: the function stays the same.
    """
    source = "decoder.embed_tokens"
    characters = tensors.pop(f"{source}.char_embeddings.weight", None)
    if characters is None:
        return tensors
    empty, tensors[f"{source}.char_embeddings.weight[1:]"] = characters[:1], characters[1:] - characters[:1]
    if empty.any():
        for name in [name for name in tensors if fnmatch.fnmatchcase(name, f"{source}.convolutions.*.weight")]:
            bias = name.replace("weight", "bias")
            tensors[bias] = tensors[bias] + tensors[name].sum(axis=2) @ empty[0]
    return tensors


def _without_partners(tensors, config):
    """Tied tensors are saved under both names: the second is checked and dropped."""
    for name, partner in _partners(config):
        if name in tensors and partner in tensors:
            if not np.array_equal(tensors[name], tensors[partner]):
                raise InputError(
                    f"{name} and {partner} are tied by the checkpoint's options and yet differ: it cannot be converted"
                )
            del tensors[partner]
    return tensors


def _partners(config):
    output = config["output"]
    if output["table"]["name"] != "tied":
        return
    if output["name"] == "softmax":
        yield "decoder.embed_tokens.weight", "decoder.output_projection.weight"
        return
    softmax, table = "decoder.adaptive_softmax", "decoder.embed_tokens.embeddings"
    yield f"{table}.0.0.weight", f"{softmax}.head.word_proj.weight"
    for i in range(len(config["input"]["cutoffs"])):
        yield f"{table}.{i + 1}.0.weight", f"{softmax}.tail.{i}.2.weight"
        if output["table"]["share_projections"]:
            yield f"{table}.{i + 1}.1.weight", f"{softmax}.tail.{i}.0.weight"


def _places(config):
    """The place of every tensor of a model of this config, by its name in `_newest_names`."""
    source = {"adaptive": _adaptive_input, "char_cnn": _char_cnn, "lookup": _lookup}[config["input"]["name"]]
    return source(config["input"]) | _body(config["body"]) | _output(config)


def _lookup(_):
    return {
        "decoder.embed_tokens.weight": Place("input/table"),
        "decoder.project_in_dim.weight": Place("input/projection", turned=True),
    }


def _adaptive_input(settings):
    places = {}
    for i in range(len(settings["cutoffs"]) + 1):
        places[f"decoder.embed_tokens.embeddings.{i}.0.weight"] = Place(f"input/table_{i}")
        places[f"decoder.embed_tokens.embeddings.{i}.1.weight"] = Place(f"input/projection_{i}", turned=True)
    return places


def _char_cnn(settings):
    def linear(name, weight, bias):
        return {
            f"decoder.embed_tokens.{name}.weight": Place(f"input/{weight}", turned=True),
            f"decoder.embed_tokens.{name}.bias": Place(f"input/{bias}"),
        }

    places = {
        "decoder.embed_tokens.char_embeddings.weight[1:]": Place("input/characters"),
        "decoder.embed_tokens.symbol_embeddings": Place("input/symbols"),
    } | linear("projection", "projection", "projection_bias")
    for i in range(len(settings["filters"])):
        places |= linear(f"convolutions.{i}", f"filter_{i}", f"filter_bias_{i}")
    for i in range(settings["highway_layers"]):
        places |= linear(f"highway.layers.{i}", f"highway_{i}", f"highway_bias_{i}")
    return places


def _body(settings):
    places, features = {}, settings["features"]
    for i in range(settings["layers"]):
        layer, blocks = f"decoder.layers.{i}", "body/blocks"
        for j, part in enumerate("qkv"):
            columns = slice(j * features, (j + 1) * features)
            name = f"{layer}.self_attn.{part}_proj"
            places[f"{name}.weight"] = Place(f"{blocks}/query_key_value/kernel", (i, slice(None), columns), turned=True)
            places[f"{name}.bias"] = Place(f"{blocks}/query_key_value/bias", (i, columns))
        for name, ours in {"self_attn.out_proj": "attended", "fc1": "inner", "fc2": "outer"}.items():
            places[f"{layer}.{name}.weight"] = Place(f"{blocks}/{ours}/kernel", (i,), turned=True)
            places[f"{layer}.{name}.bias"] = Place(f"{blocks}/{ours}/bias", (i,))
        for name, ours in {"self_attn_layer_norm": "norm_attention", "final_layer_norm": "norm_feed_forward"}.items():
            places[f"{layer}.{name}.weight"] = Place(f"{blocks}/{ours}/scale", (i,))
            places[f"{layer}.{name}.bias"] = Place(f"{blocks}/{ours}/bias", (i,))
    places["decoder.layer_norm.weight"] = Place("body/norm/scale")
    places["decoder.layer_norm.bias"] = Place("body/norm/bias")
    return places


def _output(config):
    output, softmax = config["output"], "decoder.adaptive_softmax"
    table = output["table"]
    places = {"decoder.project_out_dim.weight": Place("output/table/projection_0")}
    if output["name"] == "softmax":
        return places | {"decoder.output_projection.weight": Place("output/table/table_0")}
    if table["name"] == "tied":
        places[f"{softmax}.head.class_proj.weight"] = Place("output/clusters")
        cutoffs = config["input"]["cutoffs"]
    elif cutoffs := table["cutoffs"]:
        places[f"{softmax}.head.weight[:{cutoffs[0]}]"] = Place("output/table/table_0")
        places[f"{softmax}.head.weight[{cutoffs[0]}:]"] = Place("output/clusters")
    else:
        places[f"{softmax}.head.weight"] = Place("output/table/table_0")
    for i in range(len(cutoffs)):
        places[f"{softmax}.tail.{i}.0.weight"] = Place(f"output/table/projection_{i + 1}")
        places[f"{softmax}.tail.{i}.2.weight"] = Place(f"output/table/table_{i + 1}")
    return places
