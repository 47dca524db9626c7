"""Interface of checkpoint converters, which `convert` lists.

A weight of torch is `[outputs, inputs]`; a kernel here is `[inputs, outputs]`.
"""

import ast
import reprlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from flax import traverse_util

from adaptive_jax.config.keys import complete
from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import build, parameter_shapes


class Checkpoint(NamedTuple):
    """The content of a checkpoint.

    Attributes:
        options: settings of the model and its training by name: numbers, text, or lists of them.
        state: tensors of the model by name.
        updates: number of updates, 0 if the checkpoint does not state it.
        nll: validation loss in nats a word, None if the checkpoint has none.
    """

    options: dict
    state: dict[str, np.ndarray]
    updates: int = 0
    nll: float | None = None


class Converter(NamedTuple):
    """Functions that convert checkpoints of one kind. Each raises InputError for bad input.

    Attributes:
        name: description of the checkpoints, for messages.
        detect: `detect(content)` returns the Checkpoint, None for other content.
        words: `words(WORDS, state)` returns the vocabulary, and the tensors with their rows in its
            order.
        config: `config(options, state, vocabulary_size)` returns the complete config.
        parameters: `parameters(state, config)` returns the parameters, float32.
    """

    name: str
    detect: Callable
    words: Callable
    config: Callable
    parameters: Callable


class Target(NamedTuple):
    """Destination of a tensor: the path of the parameter, the index of the part that it fills,
    and True if the tensor must be transposed.
    """

    path: str
    part: tuple = ()
    transposed: bool = False


def assign(
    tensors: Mapping[str, np.ndarray], targets: Mapping[str, Target] | None, config: dict
) -> dict:
    """The parameters, float32, of `build(config, ...)`; each tensor is used exactly once.

    targets: the target of every tensor that such a model can have; targets of parameters that this
        one lacks are ignored. Names with the same target are tied: the checkpoint has one of them,
        or equal tensors. None: tensors are named by the paths of the parameters.

    Raises:
        InputError: tensors are left over, missing, of another shape or tied and different, all in
            one line.
    """
    shapes = parameter_shapes(build(config, config["data"]["vocabulary_size"]))
    shapes = traverse_util.flatten_dict(shapes, sep="/")
    parameters = {path: np.empty(leaf.shape, np.float32) for path, leaf in shapes.items()}
    if targets is None:
        targets = {path: Target(path) for path in parameters}
    targets = {name: target for name, target in targets.items() if target.path in parameters}
    views = {}  # of the parameters
    for name, target in targets.items():
        view = parameters[target.path][target.part]
        views[name] = view.T if target.transposed else view
    filled, misshapen, unequal = [], [], []
    for name, view in views.items():
        if (tensor := tensors.get(name)) is None:
            continue
        if tensor.shape != view.shape:
            misshapen.append(f"{name} {list(tensor.shape)}, not {list(view.shape)}")
        elif targets[name] not in filled:
            view[...] = tensor
            filled.append(targets[name])
        elif not np.array_equal(view, tensor):
            unequal.append(name)
    left_over = [name for name in tensors if name not in views]
    missing = [name for name in views if name not in tensors and targets[name] not in filled]
    problems = {
        "left over": [f"{name} {list(tensors[name].shape)}" for name in left_over],
        "missing": [f"{name} {list(views[name].shape)}" for name in missing],
        "of another shape": misshapen,
        "tied to another by its options, but different": unequal,
        "without a source": sorted(shapes.keys() - {target.path for target in targets.values()}),
    }
    lists = [
        f"{problem}: {', '.join(names[:4])}" + f" and {len(names) - 4} more" * (len(names) > 4)
        for problem, names in problems.items()
        if names
    ]
    if lists:
        raise InputError(
            f"the arrays do not fit the model of {config['data']['vocabulary_size']:,} words that"
            " the options describe: " + "; ".join(lists)
        )
    return traverse_util.unflatten_dict(parameters, sep="/")


def completed(settings: Mapping[str, object]) -> dict:
    """The config with these settings by dotted key, and the default of every other key.

    The corpus is `text_files` without a path, because a checkpoint does not contain its training
    text.
    """
    return complete({"data.corpus": "text_files"}, settings)


def scalar_options(options: Mapping) -> dict:
    """Options that are numbers, text, or lists of them; any other value, which could contain
    itself, is replaced by the name of its type.
    """
    scalar = str | int | float | None

    def is_plain(value):
        items = value if isinstance(value, list | tuple) else [value]
        return all(isinstance(item, scalar) for item in items)

    return {
        name: value if is_plain(value) else f"<{type(value).__name__}>"
        for name, value in options.items()
    }


def parse_list(value: object) -> tuple:
    """Parses a list in an option, such as "200,500" or "[(1, 64), (2, 128)]"."""
    if isinstance(value, str):
        value = ast.literal_eval(value if value.startswith(("[", "(")) else f"[{value}]")
    return tuple(value)


def unsupported(options: Mapping, names: list[str]) -> InputError:
    """An error that names options with values that no layer here supports."""
    values = ", ".join(f"{name}={reprlib.repr(options.get(name))}" for name in names)
    return InputError(
        f"cannot convert the checkpoint's {values}: no layer of this project computes that"
    )
