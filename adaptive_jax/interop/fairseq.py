"""Models of fairseq's `transformer_lm`, and functions that `fconv_lm` shares with it.

fairseq and this package number bands in the same order, and have the same columns in the head:
words first, then one column for each cluster.
"""

import math
import re
import types
from collections.abc import Iterator
from fnmatch import fnmatchcase

import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.interop.converter import (
    Checkpoint,
    Converter,
    Target,
    assign,
    completed,
    parse_list,
    scalar_options,
    unsupported,
)
from adaptive_jax.interop.words import fairseq_words

INPUT, SOFTMAX = "decoder.embed_tokens", "decoder.adaptive_softmax"
POSITIONS = "decoder.embed_positions.weight"  # of learned positions
# Row of the first token in it: fairseq counts from the id after <pad>, which is 1, and never reads
# the rows before
FIRST_POSITION = 2
# Entries of a state that are not parameters: versions, markers of the device, and sinusoids, which
# are computed here.
NOT_PARAMETERS = (
    "decoder.version",
    f"{SOFTMAX}.version",
    "*._float_tensor",
    "decoder.embed_positions.weights",
)
_PART = re.compile(r"(.+\.)([qkv])_proj\.(weight|bias)")
RENAMED = {
    ".in_proj_": ".qkv_proj.",  # until 2019
    "layer_norms.0": "self_attn_layer_norm",  # until 2018
    "layer_norms.2": "final_layer_norm",
    "decoder.embed_out": "decoder.output_projection.weight",  # until 2020
}

# fairseq's defaults of the options that do not belong to the model.
RUN = {
    "tokens_per_sample": 1024,
    "sample_break_mode": "none",
    "max_tokens": None,
    "update_freq": [1],
    "distributed_world_size": 1,
}

# fairseq's defaults, for options that did not exist yet when a checkpoint was saved.
DEFAULTS = {
    "dropout": 0.1,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "relu_dropout": 0.0,
    "decoder_embed_dim": 512,
    "decoder_ffn_embed_dim": 2048,
    "decoder_layers": 6,
    "decoder_attention_heads": 8,
    "decoder_normalize_before": True,
    "no_decoder_final_norm": False,
    "adaptive_input": False,
    "adaptive_input_cutoff": None,
    "adaptive_input_factor": 4,
    "adaptive_softmax_cutoff": None,
    "adaptive_softmax_factor": 4,
    "adaptive_softmax_dropout": 0.0,
    "tie_adaptive_weights": False,
    "tie_adaptive_proj": False,
    "share_decoder_input_output_embed": False,
    "character_embeddings": False,
    "character_embedding_dim": 4,
    "char_embedder_highway_layers": 2,
    "character_filters": "[(1, 64), (2, 128), (3, 192), (4, 256), (5, 256), (6, 256), (7, 256)]",
    "no_scale_embedding": False,
    "decoder_learned_pos": False,
    "no_token_positional_embeddings": False,
} | RUN

# Options that must have fairseq's default, given here: with any other value, no layer of this
# project computes the same.
FIXED = {
    "activation_fn": "relu",
    "layernorm_embedding": False,
    "add_bos_token": False,
    "decoder_layers_to_keep": None,
    "quant_noise_pq": 0,
    "quant_noise_scalar": 0,
    "base_layers": 0,
    "decoder_xformers_att_config": None,
    "scale_fc": False,
    "scale_attn": False,
    "scale_heads": False,
    "scale_resids": False,
}


def read_content(content: object) -> Checkpoint | None:
    """A checkpoint of any model of fairseq, None for other content. The groups of a `cfg` are
    merged into one dict, like `args`.
    """
    parts = content if isinstance(content, dict) else {}
    if parts.get("cfg"):
        groups = {name: _fields(group) for name, group in _fields(parts["cfg"]).items()}
        options = {key: value for group in groups.values() for key, value in group.items()}
        options |= groups.get("model", {})
        options |= {name: group["_name"] for name, group in groups.items() if "_name" in group}
        options.setdefault("arch", options.get("model"))
    else:
        options = _fields(parts.get("args"))
    state = _fields(parts.get("model"))
    if not options or not all(isinstance(tensor, np.ndarray) for tensor in state.values()):
        return None
    history, extra = (parts.get("optimizer_history") or [{}])[-1], parts.get("extra_state") or {}
    loss = extra.get("val_loss")
    if options.get("best_checkpoint_metric", "loss") != "loss" or loss is None:
        loss = math.inf
    nll = float(loss) * math.log(2)  # fairseq reports bits
    updates = int(history.get("num_updates", 0))
    return Checkpoint(scalar_options(options), state, updates, nll if math.isfinite(nll) else None)


def with_defaults(defaults: dict, options: dict) -> dict:
    """Options with defaults for those that a checkpoint lacks."""
    options = defaults | {name: value for name, value in options.items() if value is not None}
    width = options["decoder_embed_dim"]
    return {"decoder_input_dim": width, "decoder_output_dim": width} | options


def run_settings(options: dict, vocabulary_size: int) -> dict[str, object]:
    """The settings of a run with these options by dotted key, without those of the model."""
    length = options["tokens_per_sample"]
    tokens = max(1, (options["max_tokens"] or length) // length) * length
    return {
        "tokens_per_update": tokens
        * options["update_freq"][-1]
        * options["distributed_world_size"],
        "tokens_per_device": tokens,
        "data.vocabulary_size": vocabulary_size,
        "batches.sequence_length": length,
        "batches.break_mode": options["sample_break_mode"],
        "batches.layout": "packed",
    }


def cutoffs_of(options: dict, name: str, vocabulary_size: int) -> tuple[int, ...]:
    """The cutoffs in an option, without the vocabulary size, which fairseq accepts at the end."""
    cutoffs = parse_list(options[name]) if options[name] else ()
    return tuple(cutoff for cutoff in cutoffs if cutoff != vocabulary_size)


def config_of(options: dict, state: dict[str, np.ndarray], vocabulary_size: int) -> dict:
    """The complete config of the model in a checkpoint, as evaluate.py reads it.

    Args:
        options, state: see `Checkpoint`.
        vocabulary_size: number of words, including fairseq's own four.

    Raises:
        InputError: an option has a value that the layers here do not support; the message gives
            both.
    """
    options = _renamed(with_defaults(DEFAULTS, options))
    if names := _unsupported(options):
        raise unsupported(options, names)
    if options["adaptive_softmax_cutoff"] and f"{SOFTMAX}.version" not in state:
        raise InputError(
            "the checkpoint's adaptive softmax has no version: it is older than fairseq itself can"
            " read"
        )
    before = bool(options["decoder_normalize_before"])
    # Since version 3 of its decoder, fairseq normalises after the last block, unless each block
    # ends with a norm.
    version = state.get("decoder.version", np.ones(1)).item()
    model = {
        "body.name": "transformer" if before else "transformer_post_norm",
        "body.layers": options["decoder_layers"],
        "body.features": options["decoder_embed_dim"],
        "body.heads": options["decoder_attention_heads"],
        "body.feed_forward": options["decoder_ffn_embed_dim"],
        "body.dropout": options["dropout"],
        "body.attention_dropout": options["attention_dropout"],
        "body.activation_dropout": options["activation_dropout"] or options["relu_dropout"],
        "body.scaled": not options["no_scale_embedding"],
        "body.final_norm": before and not options["no_decoder_final_norm"] and version > 2,
    }
    model |= _positions_of(options, state) | _input_of(options, vocabulary_size)
    model |= output_of(options, vocabulary_size)
    return completed(run_settings(options, vocabulary_size) | model)


def _fields(group):
    if isinstance(group, types.SimpleNamespace):
        return vars(group)
    return group if isinstance(group, dict) else {}


def _renamed(options):
    """The options under fairseq's current names."""
    # Until 2019: the opposite of the current option, and no model had a final norm.
    if "no_tie_adaptive_proj" in options:
        options["no_decoder_final_norm"] = True
        options["tie_adaptive_proj"] |= options["no_tie_adaptive_proj"] is False
    if "decoder_final_norm" in options:
        options["no_decoder_final_norm"] = not options["decoder_final_norm"]
    return options


def _unsupported(options):
    """Names of options whose values the layers here do not support."""
    names = [] if str(options.get("arch")).startswith("transformer_lm") else ["arch"]
    names += [
        name
        for name, value in FIXED.items()
        if (options.get(name, value) or None) != (value or None)
    ]
    if options["tie_adaptive_weights"]:
        required = {
            "adaptive_input": True,
            "decoder_output_dim": options["decoder_embed_dim"],
            "decoder_input_dim": options["decoder_embed_dim"],
            "adaptive_input_factor": options["adaptive_softmax_factor"],
            "adaptive_input_cutoff": options["adaptive_softmax_cutoff"],
        }
        names += [name for name, value in required.items() if options[name] != value]
    if options["share_decoder_input_output_embed"] and not options["adaptive_softmax_cutoff"]:
        names += [name for name in ("adaptive_input", "character_embeddings") if options[name]]
    factors = ("adaptive_input_factor", "adaptive_softmax_factor")
    return names + [name for name in factors if name not in names and options[name] % 1]


def _width(options, side):
    """The width of the vectors on one side of the body, 0 if it is the body's."""
    width = options[f"decoder_{side}_dim"]
    return 0 if width == options["decoder_embed_dim"] else width


def _positions_of(options, state):
    """Kind and number of positions; the first two rows of a learned table, which fairseq never
    reads, do not count.
    """
    if options["no_token_positional_embeddings"]:
        return {"body.positions": "none"}
    if not options["decoder_learned_pos"]:
        return {"body.positions": "sinusoidal"}
    # A missing table is reported with all other tensors.
    rows = np.atleast_1d(state.get(POSITIONS, ()))
    return {
        "body.positions": "learned",
        "body.max_positions": max(1, len(rows) - FIRST_POSITION),
    }


def _input_of(options, vocabulary_size):
    if options["character_embeddings"]:
        return {
            "input.name": "char_cnn",
            "input.width": options["character_embedding_dim"],
            "input.filters": parse_list(options["character_filters"]),
            "input.highway_layers": options["char_embedder_highway_layers"],
            "input.length": 50,
        }
    if not options["adaptive_input"]:
        return {"input.name": "lookup", "input.width": _width(options, "input")}
    return {
        "input.name": "adaptive",
        "input.cutoffs": cutoffs_of(options, "adaptive_input_cutoff", vocabulary_size),
        "input.factor": int(options["adaptive_input_factor"]),
        "input.width": _width(options, "input"),
    }


def output_of(options: dict, vocabulary_size: int) -> dict[str, object]:
    """The settings of the softmax by dotted key."""
    adaptive = bool(options["adaptive_softmax_cutoff"])
    # fairseq also applies the rate of the tails to the whole input of the softmax.
    rate = options["adaptive_softmax_dropout"] if adaptive else 0.0
    output = {
        "output.name": "adaptive" if adaptive else "softmax",
        "output.tail_dropout": rate,
        "output.input_dropout": rate,
    }
    if options["tie_adaptive_weights" if adaptive else "share_decoder_input_output_embed"]:
        share = bool(adaptive and options["tie_adaptive_proj"])
        return output | {"output.table.name": "tied", "output.table.share_projections": share}
    return output | {
        "output.table.name": "own",
        "output.table.cutoffs": cutoffs_of(options, "adaptive_softmax_cutoff", vocabulary_size),
        "output.table.factor": int(options["adaptive_softmax_factor"]),
        "output.table.width": _width(options, "output"),
    }


def parameters_of(state: dict[str, np.ndarray], config: dict) -> dict:
    """The parameters, float32, of `build(config, ...)`, from the state of a fairseq model.

    Gradients under the names of the state are converted in the same way.

    Raises:
        InputError: as `assign`.
    """
    tensors = _without_empty_character(_newest_names(state, config))
    return assign(tensors, dict(_targets(config)), config)


def _newest_names(state, config):
    """The parameters of a state under fairseq's current names: queries, keys and values are joined,
    and the head of an adaptive softmax is split.
    """
    tensors, joint = {}, {}
    for name, tensor in state.items():
        if any(fnmatchcase(name, pattern) for pattern in NOT_PARAMETERS):
            continue
        if match := _PART.fullmatch(name):
            module, part, kind = match.groups()
            joint.setdefault(f"{module}qkv_proj.{kind}", {})[part] = tensor
        elif name == POSITIONS:
            tensors[f"{name}[{FIRST_POSITION}:]"] = np.atleast_1d(tensor)[FIRST_POSITION:]
        else:
            for old, new in RENAMED.items():
                name = name.replace(old, new)
            tensors[name] = tensor
    for name, parts in joint.items():
        tensors[name] = np.concatenate([parts[part] for part in "qkv"])
    return split_head(tensors, config)


def split_head(tensors: dict[str, np.ndarray], config: dict) -> dict[str, np.ndarray]:
    """Splits the head of an adaptive softmax into words and clusters, in place."""
    head, cutoffs = f"{SOFTMAX}.head.weight", config["output"]["table"].get("cutoffs")
    if head in tensors and cutoffs:
        rows = tensors.pop(head)
        tensors[f"{head}[:words]"], tensors[f"{head}[words:]"] = np.split(rows, cutoffs[:1])
    return tensors


def _without_empty_character(tensors):
    """The tensors of a character CNN without the vector for "no character", which stands beyond the
    end of a word and is zero here.

    In fairseq it is row 0, which starts as zero and is not trained. If it is not zero, it is
    subtracted from all characters, and its response in each filter, a constant, is added to the
    filter's bias: the outputs stay the same.
    """
    characters = tensors.pop(f"{INPUT}.char_embeddings.weight", None)
    if characters is None:
        return tensors
    empty = characters[0]
    tensors[f"{INPUT}.char_embeddings.weight[1:]"] = characters[1:] - empty
    filters = [name for name in tensors if fnmatchcase(name, f"{INPUT}.convolutions.*.weight")]
    for name in filters if empty.any() else ():
        bias = name.replace("weight", "bias")
        tensors[bias] = tensors[bias] + tensors[name].sum(axis=2) @ empty
    return tensors


def _targets(config) -> Iterator[tuple[str, Target]]:
    """The target of every tensor that a model of this config may have, by its name in
    `_newest_names`.
    """
    yield from _input_targets(config["input"])
    yield from _body_targets(config["body"])
    yield "decoder.project_out_dim.weight", Target("output/table/projection_0")
    if config["output"]["name"] == "softmax":
        tied = config["output"]["table"]["name"] == "tied"
        table = "input/table" if tied else "output/table/table_0"
        yield "decoder.output_projection.weight", Target(table)
    else:
        yield from softmax_targets(config)


def softmax_targets(config: dict) -> Iterator[tuple[str, Target]]:
    """The targets of the tensors of an adaptive softmax, its head after `split_head`."""
    table, head = config["output"]["table"], f"{SOFTMAX}.head"
    tied = table["name"] == "tied"
    cutoffs = config["input"]["cutoffs"] if tied else table["cutoffs"]
    if tied:
        yield f"{head}.word_proj.weight", Target("input/table_0")
        yield f"{head}.class_proj.weight", Target("output/clusters")
    elif cutoffs:
        yield f"{head}.weight[:words]", Target("output/table/table_0")
        yield f"{head}.weight[words:]", Target("output/clusters")
    else:
        yield f"{head}.weight", Target("output/table/table_0")
    tables = "input" if tied else "output/table"
    for i in range(len(cutoffs)):
        projection = Target(f"output/table/projection_{i + 1}")
        if tied and table["share_projections"]:
            projection = Target(f"input/projection_{i + 1}", transposed=True)
        yield f"{SOFTMAX}.tail.{i}.0.weight", projection
        yield f"{SOFTMAX}.tail.{i}.2.weight", Target(f"{tables}/table_{i + 1}")


def _linear(name, weight, bias, part=()):
    yield f"{name}.weight", Target(weight, part, transposed=True)
    yield f"{name}.bias", Target(bias, part)


def _input_targets(settings):
    if settings["name"] == "lookup":
        yield f"{INPUT}.weight", Target("input/table")
        yield "decoder.project_in_dim.weight", Target("input/projection", transposed=True)
    if settings["name"] == "adaptive":
        for i in range(len(settings["cutoffs"]) + 1):
            band = f"{INPUT}.embeddings.{i}"
            yield f"{band}.0.weight", Target(f"input/table_{i}")
            yield f"{band}.1.weight", Target(f"input/projection_{i}", transposed=True)
    if settings["name"] == "char_cnn":
        yield f"{INPUT}.char_embeddings.weight[1:]", Target("input/characters")
        yield f"{INPUT}.symbol_embeddings", Target("input/symbols")
        layers = {"projection": ("projection", "projection_bias")}
        for i in range(len(settings["filters"])):
            layers[f"convolutions.{i}"] = f"filter_{i}", f"filter_bias_{i}"
        for i in range(settings["highway_layers"]):
            layers[f"highway.layers.{i}"] = f"highway_{i}", f"highway_bias_{i}"
        for name, (weight, bias) in layers.items():
            yield from _linear(f"{INPUT}.{name}", f"input/{weight}", f"input/{bias}")


def _body_targets(settings):
    linear = {"self_attn.qkv_proj": "query_key_value", "self_attn.out_proj": "attended"}
    linear |= {"fc1": "inner", "fc2": "outer"}
    norms = {"self_attn_layer_norm": "norm_attention", "final_layer_norm": "norm_feed_forward"}
    for i in range(settings["layers"]):
        layer = f"decoder.layers.{i}"
        for name, path in linear.items():
            path = f"body/blocks/{path}"
            yield from _linear(f"{layer}.{name}", f"{path}/kernel", f"{path}/bias", (i,))
        for name, path in norms.items():
            yield f"{layer}.{name}.weight", Target(f"body/blocks/{path}/scale", (i,))
            yield f"{layer}.{name}.bias", Target(f"body/blocks/{path}/bias", (i,))
    yield f"{POSITIONS}[{FIRST_POSITION}:]", Target("body/learned_positions/table")
    yield "decoder.layer_norm.weight", Target("body/norm/scale")
    yield "decoder.layer_norm.bias", Target("body/norm/bias")


TRANSFORMER_LM = Converter(
    "a checkpoint that fairseq saved while it trained a transformer_lm",
    read_content,
    fairseq_words,
    config_of,
    parameters_of,
)
