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
import types
from collections.abc import Mapping

import numpy as np
from flax import traverse_util

from adaptive_jax.errors import InputError
from adaptive_jax.interop.converter import Checkpoint, Converter, assign, completed
from adaptive_jax.interop.words import awd_lstm_words

MOST = 75_000  # words of a model with one softmax, by the public main.py
_LAYER = re.compile(
    r"rnns\.(\d+)\.(?:module\.)?(weight_ih_l0|weight_hh_l0|weight_hh_l0_raw|bias_ih_l0|bias_hh_l0)"
)
_NAMES = {
    "weight_ih_l0": "input",
    "weight_hh_l0": "recurrent",
    "bias_ih_l0": "bias",
    "bias_hh_l0": "recurrent_bias",
}
# Dropout rates that a model which was saved as a module has as attributes, by their names here.
RATES = {
    "dropout": "body.dropout",
    "dropouti": "body.input_dropout",
    "dropouth": "body.hidden_dropout",
    "dropoute": "input.word_dropout",
    "wdrop": "body.weight_drop",
}
# Parameters of the split softmax: a row and a bias for each class of words, "tombstones".
TOMBSTONES = {"tail_vectors": "clusters", "tail_bias": "cluster_bias"}


def detect(content: object) -> Checkpoint | None:
    """The state dict of a model, the model as a module, or a model.pt: a list of model, loss and
    optimizer. Its options are the attributes of the model, and `splits` of the loss.

    Raises:
        InputError: two copies of a tensor differ, or the loss of a model with many words is not
            there.
    """
    model, *rest = content if isinstance(content, list | tuple) and content else [content]
    options, state = {}, model
    if isinstance(model, types.SimpleNamespace) and hasattr(model, "_modules"):
        options, state = vars(model), _state_of(model)
        # A loss that splits the words into classes has parameters, on which the probabilities
        # depend too.
        for loss in rest[:1]:
            if hasattr(loss, "_modules"):
                options = options | {"splits": getattr(loss, "splits", ())}
                state |= _state_of(loss)
    if not isinstance(state, Mapping) or "encoder.weight" not in state:
        return None
    if not all(isinstance(tensor, np.ndarray) for tensor in state.values()):
        return None
    if not any(name.startswith("rnns.") for name in state):
        return None
    if len(state["encoder.weight"]) > MOST and not rest:
        raise InputError(
            f"the checkpoint has {len(state['encoder.weight']):,} words and no loss; above {MOST:,}"
            " words the public main.py splits the softmax, and its loss is a part of the model:"
            " give the model.pt, which holds both"
        )
    tensors = {}
    for name, tensor in state.items():
        # The module WeightDrop may hold a matrix under two names.
        name = name.replace(".module.", ".").removesuffix("_raw")
        if name in tensors and not np.array_equal(tensors[name], tensor):
            raise InputError(
                f"the checkpoint has two tensors {name}, and they differ: give the model as it is"
                " after training"
            )
        tensors[name] = tensor
    return Checkpoint(options, tensors)


def config_of(options: Mapping, state: dict[str, np.ndarray], vocabulary_size: int) -> dict:
    """The complete config of the model in a checkpoint, as evaluate.py reads it.

    Raises:
        InputError: tensors that are no AWD-LSTM.
    """
    layers = getattr(options.get("_modules", {}).get("rnns"), "_modules", {})
    weight_drop = next((getattr(layer, "dropout", None) for layer in layers.values()), None)
    given = {**options, "wdrop": weight_drop}
    rates = {
        ours: float(given[name])
        for name, ours in RATES.items()
        if isinstance(given.get(name), int | float)
    }
    settings = settings_of(_without_tombstones(state))
    if any(name in state for name in TOMBSTONES):
        settings |= {
            "output.name": "adaptive",
            "output.table.cutoffs": tuple(options.get("splits", ())[1:-1]),
        }
        if settings["output.table.name"] == "own":
            settings["output.table.factor"] = 1  # all classes have vectors of one width
    run = {"batches.sequence_length": 70, "batches.layout": "streams", "tokens_per_update": 80 * 70}
    return completed(run | settings | rates | {"data.vocabulary_size": vocabulary_size})


def settings_of(state: Mapping[str, np.ndarray]) -> dict[str, object]:
    """What a config needs to describe the model of a state dict, by dotted key; dropout and
    penalties are not in it.

    Raises:
        InputError: as `parameters_of`.
    """
    body, output = (parameters_of(state)[group] for group in ("body", "output"))
    widths = tuple(body[f"recurrent_{i}"].shape[0] for i in range(len(body) // 4))
    return {
        "input.name": "lookup",
        "body.name": "awd_lstm",
        "body.features": body["input_0"].shape[0],
        "body.widths": widths,
        "body.biases": 2,
        "output.name": "softmax",
        "output.table.name": "own" if "table_0" in output["table"] else "tied",
        "output.table.bias": True,
    }


def parameters_of(state: Mapping[str, np.ndarray]) -> dict:
    """The parameters of a model with the bodies `lstm` or `awd_lstm`, input `lookup` and a full
    softmax with bias.

    Args:
        state: tensors by name. A matrix that WeightDrop made in training is left out; the raw one
            counts.

    Raises:
        InputError: a tensor is missing or has no place here.
    """
    raw = {name.removesuffix("_raw") for name in state if name.endswith("_raw")}
    tensors = {
        name.removesuffix("_raw"): tensor for name, tensor in state.items() if name not in raw
    }
    body, groups = {}, {"input": {}, "output": {"table": {}}}
    for name, tensor in tensors.items():
        if match := _LAYER.fullmatch(name):
            body[f"{_NAMES[match[2]]}_{match[1]}"] = tensor.T
        elif name == "encoder.weight":
            groups["input"]["table"] = tensor
        elif name == "decoder.bias":
            groups["output"]["table"]["bias"] = tensor
        elif name != "decoder.weight":
            raise InputError(
                f"{name} {list(tensor.shape)} has no place in an AWD-LSTM with a full softmax: give"
                " its state dict"
            )
        elif not np.array_equal(tensor, tensors.get("encoder.weight")):
            groups["output"]["table"]["table_0"] = tensor
    layers = range(max(len(body) // 4, 1))
    if (
        body.keys() != {f"{name}_{i}" for name in _NAMES.values() for i in layers}
        or not {"encoder.weight", "decoder.bias"} <= tensors.keys()
    ):
        raise InputError(
            f"{len(state)} tensors, among them {', '.join(sorted(state)[:4])}, must be a whole"
            " AWD-LSTM: give encoder.weight, decoder.bias, and two matrices and two biases of each"
            " layer, rnns.0.weight_ih_l0 and so on"
        )
    return groups | {"body": body}


def converted_parameters(state: dict[str, np.ndarray], config: dict) -> dict:
    """The parameters, float32, of `build(config, ...)`, from the state dict of an AWD-LSTM.

    Raises:
        InputError: tensors are left over, missing or of another shape.
    """
    parameters = parameters_of(_without_tombstones(state))
    for name, ours in TOMBSTONES.items():
        if name in state:
            # Split k has the k-th tombstone from the end.
            parameters["output"][ours] = state[name][::-1]
    table, cutoffs = parameters["output"]["table"], config["output"]["table"]["cutoffs"]
    if cutoffs and "table_0" in table:
        table |= {f"table_{i}": rows for i, rows in enumerate(np.split(table["table_0"], cutoffs))}
    for i in range(len(cutoffs)):
        # The AWD-LSTM's tails have no projections.
        table[f"projection_{i + 1}"] = np.eye(config["body"]["widths"][-1], dtype=np.float32)
    return assign(traverse_util.flatten_dict(parameters, sep="/"), None, config)


def _state_of(module, prefix=""):
    """What `module.state_dict()` gives, for a module that was saved as it was."""
    own = {**module._parameters, **getattr(module, "_buffers", {})}
    state = {f"{prefix}{name}": tensor for name, tensor in own.items() if tensor is not None}
    for name, inner in module._modules.items():
        state |= _state_of(inner, f"{prefix}{name}.")
    return state


def _without_tombstones(state):
    return {name: tensor for name, tensor in state.items() if name not in TOMBSTONES}


AWD_LSTM = Converter(
    "the model.pt of an AWD-LSTM or the state dict of its model",
    detect,
    awd_lstm_words,
    config_of,
    converted_parameters,
)
