"""The directory in which this machine keeps prepared corpora and compiled programs.

It is a place of the machine and no setting of a run: programs are loaded from it and run, so the
config of a run, which anybody may have written, does not name it.
"""

import os
from pathlib import Path

from adaptive_jax.errors import InputError
from adaptive_jax.files import path_of

VARIABLE = "ADAPTIVE_JAX_CACHE"
DEFAULT = "~/.cache/adaptive_jax"
HELP = f"Directory for prepared corpora and compiled programs; default: ${VARIABLE}, or {DEFAULT}."


def directory() -> Path:
    """The directory that the environment variable names, or the default.

    Raises:
        InputError: it is in object storage, or the home of an unknown user.
    """
    return _checked(os.environ.get(VARIABLE) or DEFAULT)


def use(place: str) -> None:
    """Makes `place` the directory of this process and of those that it starts.

    Raises:
        InputError: as `directory`, or it is empty.
    """
    _checked(place)
    os.environ[VARIABLE] = place


def _checked(place):
    if not place or "://" in place:
        raise InputError(f"--cache_dir={place!r} must be a directory on a local disk")
    return path_of(place)
