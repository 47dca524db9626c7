"""Reads the parameters of a run or of an exported model, and nothing else of it.

An exported model is a workdir whose parameters are one file instead of checkpoints:

config.json, vocabulary.txt …   as in any workdir
model.safetensors               the parameters by their place in the model, such as
                                "body.blocks.inner.kernel"
model.sha256                    its checksum, as `sha256sum --check` reads it
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import traverse_util

from adaptive_jax.errors import InputError, of_extra
from adaptive_jax.files import changed_file, in_bucket, write_checksums
from adaptive_jax.runs.checkpoints import METADATA, Checkpoints
from adaptive_jax.runs.settings import EXPORTED, is_exported

MOST_HEADER = 100 << 20  # bytes that the names and shapes of a file of safetensors may take


class Parameters(NamedTuple):
    """Result of `read_parameters`.

    step: updates that made the parameters; values: the parameters; identity: see `identity_of`.
    """

    step: int
    values: dict
    identity: bytes


def identity_of(workdir: Path, step: int) -> bytes:
    """The checksums of a checkpoint's files, or of an exported model's, which tell it from another
    training's; none where there are none.
    """
    checkpoint = workdir / "checkpoints" / str(step)
    files = (checkpoint / "checksums.sha256", checkpoint / METADATA, workdir / "model.sha256")
    content = b""
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            content += path.read_bytes()
    return content


def checkpoint_step(workdir: Path, checkpoint: str) -> int:
    """The number of updates of the parameters that `read_parameters` would read. Raises
    InputError where it would find none.
    """
    if is_exported(workdir):
        return _exported_step(workdir, checkpoint)
    with contextlib.closing(Checkpoints(workdir, read_only=True)) as checkpoints:
        return checkpoints.step(checkpoint)


def read_parameters(workdir: Path, checkpoint: str, like: dict) -> Parameters:
    """The parameters, or their averages if the run's optimizer takes them. Their files are compared
    with their checksums.

    A run that still trains may delete the checkpoint meanwhile: then its successor's are read.

    Args:
        checkpoint: "best" by validation, "latest", or a step; of an exported model its only step.
        like: the parameters as shapes with dtypes and shardings.

    Raises:
        InputError: nothing has been saved there, no such checkpoint, a damaged one, or one of
            another model.
    """
    if is_exported(workdir):
        step = _exported_step(workdir, checkpoint)
        return Parameters(step, _read_exported(workdir, like), identity_of(workdir, step))
    with contextlib.closing(Checkpoints(workdir, read_only=True)) as checkpoints:
        while True:
            step = checkpoints.step(checkpoint)
            identity = identity_of(workdir, step)  # first: files may be deleted once they are read
            item = "averages" if checkpoints.holds(step, "averages") else "params"
            try:
                values = checkpoints.restore(step, {item: like})[item]
                return Parameters(step, values, identity)
            except InputError:
                checkpoints.reload()
                if checkpoints.step(checkpoint) == step:
                    raise


def write_tensors(
    path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]
) -> None:
    """Writes arrays by name into a file of safetensors, and its checksum beside it.

    Raises:
        MissingPackage: safetensors is not installed.
    """
    arrays = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with of_extra("export"):
        from safetensors.numpy import save_file
    save_file(arrays, path, dict(metadata))
    os.umask(mask := os.umask(0))
    path.chmod(0o666 & ~mask)  # the package makes files for their owner alone
    write_checksums(path.with_suffix(".sha256"), [path])


def _exported_step(workdir, checkpoint):
    """The number of updates of an exported model, which is one checkpoint."""
    path = workdir / EXPORTED
    try:
        with path.open("rb") as file:
            # Of a damaged file, this length could ask for any amount of memory.
            size = min(int.from_bytes(file.read(8), "little"), MOST_HEADER)
            step = int(json.loads(file.read(size))["__metadata__"]["step"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path) from error
    if checkpoint not in ("best", "latest", str(step)):
        raise InputError(
            f"{workdir} holds no checkpoint {checkpoint!r}: it is a model exported after {step}"
            " updates; leave it out"
        )
    return step


def _read_exported(workdir, like):
    with of_extra("export"):
        import safetensors.numpy as library
    path = workdir / EXPORTED
    if changed_file(path.with_suffix(".sha256")):
        raise _damaged(path)
    arrays = library.load(path.read_bytes()) if in_bucket(path) else library.load_file(path)
    like = traverse_util.flatten_dict(like, sep=".")
    stored = {name: array.shape for name, array in arrays.items()}
    expected = {name: array.shape for name, array in like.items()}
    for name in sorted({*stored, *expected}):
        shape, now = stored.get(name, "missing"), expected.get(name, "missing")
        if shape != now:
            raise InputError(
                f"{path} is of another model than config.json: {name} has shape {shape}, not {now};"
                " export the run again"
            )
    parameters = {name: _on_devices(arrays[name], array) for name, array in like.items()}
    return traverse_util.unflatten_dict(parameters, sep=".")


def _on_devices(array, like):
    """A host's array in the dtype and sharding of `like`."""
    return jax.make_array_from_callback(
        like.shape, like.sharding, lambda index: array[index].astype(like.dtype)
    )


def _damaged(path):
    return InputError(
        f"{path} is damaged: it is not what was written; copy it again, or export the run again"
    )
