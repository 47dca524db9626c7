"""Models of AWD-LSTM (salesforce/awd-lstm-lm).

encoder.weight                               input/table
rnns.0.weight_ih_l0                          body/input_0, transposed
rnns.0.weight_hh_l0,                         body/recurrent_0, transposed
    or rnns.0.module.weight_hh_l0_raw
rnns.0.bias_ih_l0, rnns.0.bias_hh_l0         body/bias_0, body/recurrent_bias_0
decoder.bias,                                output/table/bias, output/table/table_0
    decoder.weight if not the encoder's
tail_vectors, tail_bias                      of a softmax that the loss splits: output/clusters,
                                             output/cluster_bias
"""

import re
from collections.abc import Mapping

import numpy as np
from flax import traverse_util

from adaptive_jax.errors import InputError
from adaptive_jax.interop.converter import Checkpoint, Converter, assign, completed, scalar_options
from adaptive_jax.interop.words import awd_lstm_words

MAX_WORDS = 75_000  # with more words, the public main.py splits the softmax
_LAYER = re.compile(
    r"rnns\.(\d+)\.(?:module\.)?(weight_ih_l0|weight_hh_l0|weight_hh_l0_raw|bias_ih_l0|bias_hh_l0)"
)
_NAMES = {
    "weight_ih_l0": "input",
    "weight_hh_l0": "recurrent",
    "bias_ih_l0": "bias",
    "bias_hh_l0": "recurrent_bias",
}
# Dropout rates, by attribute of a model that was saved as a module
RATES = {
    "dropout": "body.dropout",
    "dropouti": "body.input_dropout",
    "dropouth": "body.hidden_dropout",
    "dropoute": "input.word_dropout",
    "wdrop": "body.weight_drop",
}
# Parameters of the split softmax, "tombstones": a row and a bias for each class of words
TOMBSTONES = {"tail_vectors": "output/clusters", "tail_bias": "output/cluster_bias"}
_PATHS = {
    "encoder.weight": "input/table",
    "decoder.weight": "output/table/table_0",
    "decoder.bias": "output/table/bias",
} | TOMBSTONES


def detect(content: object) -> Checkpoint | None:
    """The checkpoint in a state dict, a model saved as a module, or a model.pt, which is a list of
    model, loss and optimizer; None for other content. Options are the attributes of the model, and
    `splits` of the loss.

    Raises:
        InputError: the model has many words, and no loss was saved as a module.
    """
    model, *parts = content if isinstance(content, list | tuple) and content else [content]
    options, state = {}, model
    if hasattr(model, "_modules"):
        options, state = dict(vars(model)), _state_of(model)
        layers = getattr(model._modules.get("rnns"), "_modules", {})
        if rates := [layer.dropout for layer in layers.values() if hasattr(layer, "dropout")]:
            options["wdrop"] = rates[0]
        # The probabilities also depend on the parameters of a loss that splits words into classes.
        if parts and hasattr(parts[0], "_modules"):
            options["splits"] = getattr(parts[0], "splits", ())
            state |= _state_of(parts[0])
    if not isinstance(state, Mapping) or "encoder.weight" not in state:
        return None
    if not any(name.startswith("rnns.") for name in state):
        return None
    if not all(isinstance(tensor, np.ndarray) for tensor in state.values()):
        return None
    if (words := len(state["encoder.weight"])) > MAX_WORDS and "splits" not in options:
        raise InputError(
            f"the checkpoint has {words:,} words and no loss, which splits the softmax above"
            f" {MAX_WORDS:,} words: use the model.pt, which holds both"
        )
    options = {name: value for name, value in options.items() if not name.startswith("_")}
    return Checkpoint(scalar_options(options), dict(state))


def config_of(options: Mapping, state: dict[str, np.ndarray], vocabulary_size: int) -> dict:
    """The complete config of the model in a checkpoint, as evaluate.py reads it."""
    settings = settings_of(state)
    if any(name in state for name in TOMBSTONES):
        cutoffs = tuple(options.get("splits", ())[1:-1])
        settings |= {"output.name": "adaptive", "output.table.cutoffs": cutoffs}
        if settings["output.table.name"] == "own":
            settings["output.table.factor"] = 1  # all classes have vectors of one width
    rates = {key: float(options[name]) for name, key in RATES.items() if name in options}
    run = {"batches.sequence_length": 70, "batches.layout": "streams", "tokens_per_update": 80 * 70}
    return completed(run | settings | rates | {"data.vocabulary_size": vocabulary_size})


def settings_of(state: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Config values, by dotted key, that describe the model of a state dict, without dropout and
    penalties.
    """
    tensors = _by_path(state)
    layers = range(max(1, sum(path.startswith("body/input_") for path in tensors)))
    return {
        "input.name": "lookup",
        "body.name": "awd_lstm",
        "body.features": tensors["body/input_0"].shape[0],
        "body.widths": tuple(tensors[f"body/recurrent_{i}"].shape[0] for i in layers),
        "body.biases": 2,
        "output.name": "softmax",
        "output.table.name": "own" if "output/table/table_0" in tensors else "tied",
        "output.table.bias": True,
    }


def parameters_of(state: Mapping[str, np.ndarray]) -> dict:
    """The tensors of a model as parameters of the bodies `lstm` or `awd_lstm`, the input `lookup`
    and a full softmax with bias.

    state: tensors by name. Of each recurrent matrix under WeightDrop, the raw one is used, and the
        one with dropped weights is left out.
    """
    return traverse_util.unflatten_dict(_by_path(state), sep="/")


def converted_parameters(state: dict[str, np.ndarray], config: dict) -> dict:
    """The parameters, float32, of `build(config, ...)`, from the state dict of an AWD-LSTM.

    Raises:
        InputError: tensors are left over, missing or of another shape.
    """
    tensors, cutoffs = _by_path(state), config["output"]["table"]["cutoffs"]
    if cutoffs and (table := tensors.get("output/table/table_0")) is not None:
        for i, rows in enumerate(np.split(table, cutoffs)):
            tensors[f"output/table/table_{i}"] = rows
    for i in range(len(cutoffs)):
        # Tails of AWD-LSTM have no projections.
        width = config["body"]["widths"][-1]
        tensors[f"output/table/projection_{i + 1}"] = np.eye(width, dtype=np.float32)
    return assign(tensors, None, config)


def _by_path(state):
    """The tensors by the paths of their parameters; unknown tensors keep their names."""
    dropped_names = {name.removesuffix("_raw") for name in state if name.endswith("_raw")}
    tensors = {}
    for name, tensor in state.items():
        if name in dropped_names or (
            name == "decoder.weight" and np.array_equal(tensor, state.get("encoder.weight"))
        ):
            continue
        if match := _LAYER.fullmatch(name):
            tensors[f"body/{_NAMES[match[2].removesuffix('_raw')]}_{match[1]}"] = tensor.T
        else:
            # The last tombstone belongs to the first split.
            tensors[_PATHS.get(name, name)] = tensor[::-1] if name in TOMBSTONES else tensor
    return tensors


def _state_of(module, prefix=""):
    """The state dict of a saved module."""
    tensors = {**module._parameters, **getattr(module, "_buffers", {})}
    state = {f"{prefix}{name}": tensor for name, tensor in tensors.items() if tensor is not None}
    for name, inner in module._modules.items():
        state |= _state_of(inner, f"{prefix}{name}.")
    return state


AWD_LSTM = Converter(
    "the model.pt of an AWD-LSTM or the state dict of its model",
    detect,
    awd_lstm_words,
    config_of,
    converted_parameters,
)
