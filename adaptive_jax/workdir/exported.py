"""Exported models: workdirs whose parameters are one file in the format safetensors instead of
checkpoints.

config.json, vocabulary.txt …   as in any workdir
model.safetensors               the parameters by their place in the model, such as
                                "body.blocks.inner.kernel"
model.sha256                    its checksum, as `sha256sum --check` reads it
"""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np
from flax import traverse_util

from adaptive_jax.errors import InputError
from adaptive_jax.files import changed_file, replacing, write_checksums

FILE = "model.safetensors"


def is_exported(workdir: Path) -> bool:
    """Whether a workdir holds an exported model."""
    return (workdir / FILE).exists()


def write_tensors(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes arrays by name into a file of safetensors, and its checksum beside it.

    Raises:
        InputError: the package safetensors is missing.
    """
    content = _safetensors().save(
        {name: np.asarray(array, order="C") for name, array in arrays.items()}, dict(metadata)
    )
    with replacing(path) as file:
        file.write(content)
    write_checksums(path.with_suffix(".sha256"), [path])


def exported_step(workdir: Path, checkpoint: str = "best") -> int:
    """The number of updates that made the parameters of an exported model.

    checkpoint: "best", "latest" or that number: an exported model is one checkpoint.

    Raises:
        InputError: another number, or a file that cannot be read.
    """
    try:
        with (workdir / FILE).open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        step = int(header["__metadata__"]["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(_unreadable(workdir / FILE)) from error
    if checkpoint not in ("best", "latest", str(step)):
        raise InputError(
            f"{workdir} holds no checkpoint {checkpoint!r}: it is a model exported after {step}"
            " updates; leave it out"
        )
    return step


def read_exported(workdir: Path, like: dict) -> dict:
    """The parameters of an exported model, with the shapes, dtypes and shardings of `like`, a tree
    of shapes.

    Raises:
        InputError: a file that cannot be read or has changed, parameters of another model, or
            safetensors is missing.
    """
    path, library = workdir / FILE, _safetensors()
    if changed_file(path.with_suffix(".sha256")):
        raise InputError(_unreadable(path))
    try:
        arrays = library.load(path.read_bytes())
    except Exception as error:  # the library raises many kinds
        raise InputError(_unreadable(path)) from error
    wanted = traverse_util.flatten_dict(like, sep=".")
    for name in sorted({*arrays, *wanted}):
        there, here = (
            f"of shape {each[name].shape}" if name in each else "missing"
            for each in (arrays, wanted)
        )
        if there != here:
            raise InputError(
                f"{path} is of another model than config.json: {name} is {there}, not {here};"
                " export the run again"
            )

    def put(array, like):
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda index: array[index].astype(like.dtype)
        )

    return traverse_util.unflatten_dict(
        {name: put(arrays[name], each) for name, each in wanted.items()}, sep="."
    )


def _unreadable(path):
    return f"{path} is damaged: it is not what was written; copy it again, or export the run again"


def _safetensors():
    try:
        import safetensors.numpy
    except ImportError:
        raise InputError(
            f"{FILE} needs a package that is not installed: pip install safetensors"
        ) from None
    return safetensors.numpy
