"""The parameters of a run or of an exported model, for those that read nothing else of it."""

import contextlib
from pathlib import Path

from adaptive_jax.errors import InputError
from adaptive_jax.workdir.checkpoints import Checkpoints
from adaptive_jax.workdir.exported import exported_step, is_exported, read_exported


def checkpoint_step(workdir: Path, checkpoint: str) -> int:
    """The number of updates of the parameters that `read_parameters` would read. Raises
    InputError where it would find none.
    """
    if is_exported(workdir):
        return exported_step(workdir, checkpoint)
    with contextlib.closing(Checkpoints(workdir, read_only=True)) as checkpoints:
        return checkpoints.step(checkpoint)


def read_parameters(workdir: Path, checkpoint: str, like: dict) -> tuple[int, dict]:
    """The number of updates that made the parameters, and the parameters, or their averages if the
    run's optimizer takes them.

    A run that still trains may delete the checkpoint meanwhile: then its successor's are read.

    Args:
        checkpoint: "best" by validation, "latest", or a step.
        like: the parameters as shapes with shardings.

    Raises:
        InputError: nothing has been saved there, no such checkpoint, or one that cannot be read.
    """
    if is_exported(workdir):
        return exported_step(workdir, checkpoint), read_exported(workdir, like)
    with contextlib.closing(Checkpoints(workdir, read_only=True)) as checkpoints:
        while True:
            step = checkpoints.step(checkpoint)
            item = "averages" if checkpoints.holds(step, "averages") else "params"
            try:
                return step, checkpoints.restore(step, {item: like})[item]
            except InputError:
                checkpoints.reload()
                if checkpoints.step(checkpoint) == step:
                    raise
