"""The config of an AWD-LSTM."""

from collections.abc import Mapping

import numpy as np

from adaptive_jax.interop import awd_lstm
from adaptive_jax.interop.config import completed
from adaptive_jax.interop.tensors import fitting

# How the public main.py trains if no option is given: recorded, because its checkpoints do not say
# it.
TRAINING = {
    "seed": 1111,
    "tokens_per_update": 80 * 70,
    "tokens_per_device": 80 * 70,
    "batches.sequence_length": 70,
    "batches.layout": "streams",
    "input.word_dropout": 0.1,
    "input.init_range": 0.1,
    "optimizer.name": "nt_asgd",
    "optimizer.form": "torch",
    "schedule.name": "constant",
    "schedule.warmup_steps": 0,
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


def config_of(options: Mapping, state: dict[str, np.ndarray], vocabulary_size: int) -> dict:
    """The complete config of the model in a checkpoint, as evaluate.py reads it.

    Args:
        options, state: see `Loaded`.
        vocabulary_size: number of words.

    Raises:
        InputError: tensors that are no AWD-LSTM.
    """
    given = {**options, "wdrop": _weight_drop(options)}
    rates = {
        ours: float(given[name])
        for name, ours in RATES.items()
        if isinstance(given.get(name), int | float)
    }
    settings = awd_lstm.settings_of(_without_tombstones(state))
    if any(name in state for name in TOMBSTONES):
        settings |= {
            "output.name": "adaptive",
            "output.table.cutoffs": tuple(options.get("splits", ())[1:-1]),
        }
        if settings["output.table.name"] == "own":
            settings["output.table.factor"] = 1  # all classes have vectors of one width
    return completed(TRAINING | settings | rates | {"data.vocabulary_size": vocabulary_size})


def parameters_of(state: dict[str, np.ndarray], config: dict) -> dict:
    """The parameters, float32, of `build(config, ...)`, from the state dict of an AWD-LSTM.

    Raises:
        InputError: tensors are left over, missing or of another shape.
    """
    parameters = awd_lstm.parameters_of(_without_tombstones(state), config["body"]["biases"])
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
    return fitting(parameters, config)


def _weight_drop(options):
    """The rate on the recurrent matrices, which each layer of a saved module has; None if there
    is no module.
    """
    layers = getattr(options.get("_modules", {}).get("rnns"), "_modules", {})
    return next((getattr(layer, "dropout", None) for layer in layers.values()), None)


def _without_tombstones(state):
    return {name: tensor for name, tensor in state.items() if name not in TOMBSTONES}
