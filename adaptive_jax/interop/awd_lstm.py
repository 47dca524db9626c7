"""Tensors of AWD-LSTM (salesforce/awd-lstm-lm) become parameters of this project.

encoder.weight                               input/table
rnns.0.weight_ih_l0                          body/input_0, transposed
rnns.0.weight_hh_l0,                         body/recurrent_0, transposed
    or rnns.0.module.weight_hh_l0_raw
rnns.0.bias_ih_l0, rnns.0.bias_hh_l0         body/bias_0, body/recurrent_bias_0;
                                             or their sum, body/bias_0
decoder.bias,                                output/table/bias, output/table/table_0
    decoder.weight if not the encoder's
"""

import re
from collections.abc import Mapping

import numpy as np

from adaptive_jax.errors import InputError

_LAYER = re.compile(
    r"rnns\.(\d+)\.(?:module\.)?(weight_ih_l0|weight_hh_l0|weight_hh_l0_raw|bias_ih_l0|bias_hh_l0)"
)
_NAMES = {
    "weight_ih_l0": "input",
    "weight_hh_l0": "recurrent",
    "bias_ih_l0": "bias",
    "bias_hh_l0": "recurrent_bias",
}


def settings_of(state: Mapping[str, np.ndarray]) -> dict[str, object]:
    """What a config needs to describe the model of a state dict, by dotted key; dropout and
    penalties are not in it.

    Raises:
        InputError: as `parameters_of`.
    """
    body, output = (parameters_of(state)[group] for group in ("body", "output"))
    widths = tuple(body[f"recurrent_{i}"].shape[0] for i in range(len(body) // 4))
    table = "own" if "table_0" in output["table"] else "tied"
    return {
        "input.name": "lookup",
        "body.name": "awd_lstm",
        "body.features": body["input_0"].shape[0],
        "body.widths": widths,
        "body.biases": 2,
        "output.name": "softmax",
        "output.table.name": table,
        "output.table.bias": True,
    }


def parameters_of(state: Mapping[str, np.ndarray], biases: int = 2) -> dict:
    """The parameters of a model with the bodies `lstm` or `awd_lstm`, input `lookup` and a full
    softmax with bias.

    Args:
        state: tensors by name. A matrix that WeightDrop made in training is left out; the raw one
            counts.
        biases: as the body's field; 1 adds the two of PyTorch, which computes the same.

    Raises:
        InputError: a tensor is missing or has no place here.
    """
    raw = {name.removesuffix("_raw") for name in state if name.endswith("_raw")}
    tensors = {
        name.removesuffix("_raw"): tensor for name, tensor in state.items() if name not in raw
    }
    groups = {"input": {}, "body": {}, "output": {"table": {}}}
    for name, tensor in tensors.items():
        if match := _LAYER.fullmatch(name):
            groups["body"][f"{_NAMES[match[2]]}_{match[1]}"] = tensor.T
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
    layers = len(groups["body"]) // 4
    wanted = {f"{name}_{i}" for name in _NAMES.values() for i in range(max(layers, 1))}
    if (
        groups["body"].keys() != wanted
        or "table" not in groups["input"]
        or "bias" not in groups["output"]["table"]
    ):
        raise InputError(
            f"{len(state)} tensors, among them {', '.join(sorted(state)[:4])}, are no whole"
            " AWD-LSTM: give encoder.weight, decoder.bias, and two matrices and two biases of each"
            " layer, rnns.0.weight_ih_l0 and so on"
        )
    if biases == 1:
        for i in range(layers):
            groups["body"][f"bias_{i}"] = groups["body"][f"bias_{i}"] + groups["body"].pop(
                f"recurrent_bias_{i}"
            )
    return groups
