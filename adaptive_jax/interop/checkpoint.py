"""Reads the checkpoints that can be converted, and tells by their content what they are."""

import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from adaptive_jax.errors import InputError
from adaptive_jax.interop import torch_files

MOST = 75_000  # words of an AWD-LSTM with one softmax, by the public main.py


class Loaded(NamedTuple):
    """The content of a checkpoint.

    Attributes:
        kind: the code and the model: "transformer_lm" and "fconv_lm" of fairseq, or "awd_lstm".
        options: settings of training by name; of AWD-LSTM the attributes of the model and `splits`
            of its loss, if they are known.
        state: tensors of the model by name.
        updates: number of updates done, 0 if the checkpoint does not say.
        nll: validation loss in nats a word, None if the checkpoint has none.
    """

    kind: str
    options: dict
    state: dict[str, np.ndarray]
    updates: int = 0
    nll: float | None = None


def read(path: Path) -> Loaded:
    """Reads a checkpoint of fairseq, or a state dict or model.pt of AWD-LSTM.

    Raises:
        InputError: the file is damaged or none of these.
    """
    content = torch_files.read(path)
    loaded = _awd_lstm(content) or _fairseq(content)
    if not loaded:
        raise InputError(
            f"{path} has no model with its args or cfg, nor the layers of an AWD-LSTM: give a"
            " checkpoint that fairseq saved during training, or the model.pt or state dict of an"
            " AWD-LSTM"
        )
    return loaded


def _fairseq(content):
    """A checkpoint of fairseq. The groups of a `cfg` are merged into one dict, like `args`."""
    parts = content if isinstance(content, dict) else {}
    if parts.get("cfg"):
        groups = {name: _fields(group) for name, group in _fields(parts["cfg"]).items()}
        options = {
            key: value for group in groups.values() for key, value in group.items()
        } | groups.get("model", {})
        options |= {name: group["_name"] for name, group in groups.items() if "_name" in group}
        options.setdefault("arch", options.get("model"))
    else:
        options = _fields(parts.get("args"))
    state = parts.get("model")
    if not options or not isinstance(state, dict) or not _tensors(state):
        return None
    history, extra = (parts.get("optimizer_history") or [{}])[-1], parts.get("extra_state") or {}
    loss = (
        extra.get("val_loss") if options.get("best_checkpoint_metric", "loss") == "loss" else None
    )
    nll = math.inf if loss is None else float(loss) * math.log(2)  # fairseq reports bits
    kind = "fconv_lm" if str(options.get("arch")).startswith("fconv_lm") else "transformer_lm"
    return Loaded(
        kind,
        options,
        dict(state),
        int(history.get("num_updates", 0)),
        nll if math.isfinite(nll) else None,
    )


def _awd_lstm(content):
    """A state dict of AWD-LSTM, its model as a module, or its model.pt: a list of model, loss
    and optimizer.
    """
    model, *rest = content if isinstance(content, list | tuple) and content else [content]
    if isinstance(model, types.SimpleNamespace) and hasattr(model, "_modules"):
        options, state = vars(model), _state_of(model)
        # A loss that splits the words into classes has parameters, on which the probabilities
        # depend too.
        for loss in rest[:1]:
            if hasattr(loss, "_modules"):
                options, state = (
                    options | {"splits": getattr(loss, "splits", ())},
                    state | _state_of(loss),
                )
    else:
        options, state = {}, model
    if not isinstance(state, Mapping) or not _tensors(state) or "encoder.weight" not in state:
        return None
    if not any(name.startswith("rnns.") for name in state):
        return None
    if len(state["encoder.weight"]) > MOST and not rest:
        raise InputError(
            f"the checkpoint has {len(state['encoder.weight']):,} words and no loss; above {MOST:,}"
            " words the public main.py splits the softmax, and its loss is a part of the model:"
            " give the model.pt, which holds both"
        )
    return Loaded("awd_lstm", options, _plainly_named(state))


def _plainly_named(state):
    """The tensors of an AWD-LSTM without the names of the module WeightDrop, which may hold a
    matrix under two.
    """
    tensors = {}
    for name, tensor in state.items():
        name = name.replace(".module.", ".").removesuffix("_raw")
        if name in tensors and not np.array_equal(tensors[name], tensor):
            raise InputError(
                f"the checkpoint has two tensors {name}, and they differ: give the model as it is"
                " after training"
            )
        tensors[name] = tensor
    return tensors


def _state_of(module, prefix=""):
    """What `module.state_dict()` gives, for a module that was saved as it was."""
    own = {**module._parameters, **getattr(module, "_buffers", {})}
    state = {f"{prefix}{name}": tensor for name, tensor in own.items() if tensor is not None}
    for name, inner in module._modules.items():
        state |= _state_of(inner, f"{prefix}{name}.")
    return state


def _tensors(state):
    return all(isinstance(tensor, np.ndarray) for tensor in state.values())


def _fields(group):
    return (
        vars(group)
        if isinstance(group, types.SimpleNamespace)
        else group
        if isinstance(group, dict)
        else {}
    )
