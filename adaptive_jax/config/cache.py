"""The directory of this machine for prepared corpora and compiled programs.

It is not part of a config: programs are loaded from it and run, and anybody may have written the
config of a run.
"""

import os
from pathlib import Path

from adaptive_jax.files import local_directory

VARIABLE = "ADAPTIVE_JAX_CACHE"
DEFAULT = "~/.cache/adaptive_jax"
HELP = f"Directory for prepared corpora and compiled programs; default: ${VARIABLE}, or {DEFAULT}."


def directory() -> Path:
    """The directory that the environment variable names, or the default.

    Raises:
        InputError: it is in object storage, or the home of an unknown user.
    """
    return local_directory(os.environ.get(VARIABLE) or DEFAULT, "--cache_dir")


def use(place: str) -> None:
    """Makes `place` the directory of this process and of those that it starts.

    Raises:
        InputError: as `directory`, or it is empty.
    """
    local_directory(place, "--cache_dir")
    os.environ[VARIABLE] = place
