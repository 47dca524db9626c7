"""Tensors of other code become parameters of this project, each exactly once.

A weight of torch is `[outputs, inputs]`; a kernel here is `[inputs, outputs]`.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from flax import traverse_util

from adaptive_jax.errors import InputError
from adaptive_jax.model.language_model import build, parameter_shapes


class Place(NamedTuple):
    """Where a tensor goes: the path of the parameter, the part of it, and whether the tensor
    must be transposed.
    """

    path: str
    part: tuple = ()
    transposed: bool = False


def fill(tensors: Mapping[str, np.ndarray], places: Mapping[str, Place], config: dict) -> dict:
    """The parameters, float32, of `build(config, ...)`.

    places: of every tensor that such a model may have; those of parameters that this one lacks are
        ignored.

    Raises:
        InputError: tensors are left over, missing or of another shape, all in one line.
    """
    shapes = _shapes(config)
    places = {name: place for name, place in places.items() if place.path in shapes}
    _check_all_used(tensors, places, shapes)
    parameters = {path: np.empty(shape, np.float32) for path, shape in shapes.items()}
    for name, (path, part, transposed) in places.items():
        parameters[path][part] = tensors[name].T if transposed else tensors[name]
    return traverse_util.unflatten_dict(parameters, sep="/")


def fitting(parameters: dict, config: dict) -> dict:
    """These parameters as float32, if they are all of `build(config, ...)`.

    Raises:
        InputError: they are not, or have other shapes; with those that differ, in one line.
    """
    given, shapes = traverse_util.flatten_dict(parameters, sep="/"), _shapes(config)
    if wrong := [
        f"{path} {list(getattr(given.get(path), 'shape', ()))}, not {list(shapes.get(path, ()))}"
        for path in sorted({*given, *shapes})
        if path not in given or path not in shapes or given[path].shape != shapes[path]
    ]:
        raise InputError(
            f"the checkpoint's tensors do not fit together: {_listed(wrong)}; give another"
            " checkpoint"
        )
    return traverse_util.unflatten_dict(
        {path: array.astype(np.float32) for path, array in given.items()}, sep="/"
    )


def _shapes(config):
    """The shape of every parameter by path."""
    shapes = parameter_shapes(build(config, config["data"]["vocabulary_size"]))
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(shapes, sep="/").items()}


def _listed(names, most=4):
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _check_all_used(tensors, places, shapes):
    """Raises InputError unless the tensors fill all parameters, and each is used."""
    parts = {
        name: np.broadcast_to(np.float32(0), shapes[place.path])[place.part]
        for name, place in places.items()
    }
    expected = {
        name: list(part.T.shape if places[name].transposed else part.shape)
        for name, part in parts.items()
    }
    given = {name: list(tensor.shape) for name, tensor in tensors.items()}
    filled = dict.fromkeys(shapes, 0)
    for name, place in places.items():
        filled[place.path] += parts[name].size
    wrong = {
        "left over in the checkpoint": [
            f"{name} {shape}" for name, shape in given.items() if name not in expected
        ],
        "missing in it": [
            f"{name} {shape}" for name, shape in expected.items() if name not in given
        ],
        "of another shape": [
            f"{name} {given[name]}, not {shape}"
            for name, shape in expected.items()
            if given.get(name, shape) != shape
        ],
        "without a source": [
            f"{path} {list(shape)}"
            for path, shape in shapes.items()
            if filled[path] != math.prod(shape)
        ],
    }
    if any(wrong.values()):
        raise InputError(
            "the checkpoint's tensors do not fit the model that its options describe: "
            + "; ".join(f"{problem}: {_listed(names)}" for problem, names in wrong.items() if names)
        )
