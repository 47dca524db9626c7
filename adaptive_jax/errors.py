"""Errors that users cause and can fix, and one-line messages for errors of the machine."""

import contextlib
import difflib
import errno
import numbers
import os
import re
from collections.abc import Iterable, Iterator


class InputError(ValueError):
    """Bad input: a setting, a file or a corpus. The message is one line with the value and the
    cure.

    The scripts print it without a traceback and exit with status 2.
    """


class MissingPackage(InputError, ModuleNotFoundError):
    """A package of an extra is not installed."""


NEEDS = {
    "layers": "layers and optimizers need",
    "train": "training and trained models need",
    "gcs": "workdirs on gs:// need",
    "figures": "figures need",
    "export": "exported models need",
    "tokenizer": "runs with data.tokenizer need",
}


FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
UNUSABLE = {errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST, errno.EISDIR}
UNUSABLE |= {errno.ENAMETOOLONG, errno.ELOOP}
STORES = {"gcsfs", "fsspec", "aiohttp", "google"}  # packages that raise errors about a bucket


@contextlib.contextmanager
def of_extra(extra: str) -> Iterator[None]:
    """Surrounds imports of packages that the losses do not need.

    extra: the extra of pyproject.toml that installs them, a key of `NEEDS`.

    Raises:
        MissingPackage: a package is not installed; the message says how to install it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f"{NEEDS[extra]} {error.name}: pip install 'adaptive_jax[{extra}]'"
        ) from None


def is_within(value: object, interval: str) -> bool:
    """True for a number in an interval such as "[0, 1)"; False for arrays and booleans."""
    low, high = map(float, interval[1:-1].split(","))
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    ends = (value == low and interval[0] == "[") or (value == high and interval[-1] == "]")
    return low < value < high or ends


def check_within(interval: str, **values: float) -> None:
    """Checks that numbers are in an interval: `check_within("[0, inf)", ar=-1)` fails.

    Raises:
        InputError: `ar must be in [0, inf), got -1`.
    """
    for name, value in values.items():
        if not is_within(value, interval):
            raise InputError(f"{name} must be in {interval}, got {value!r}")


def check_rates(layer: object, *fields: str) -> None:
    """Checks that these fields of a layer, such as its dropout rates, are in [0, 1).

    Raises:
        InputError: as `check_within`.
    """
    check_within("[0, 1)", **{field: getattr(layer, field) for field in fields})


def check_at_least(least: int, **values: int) -> None:
    """Checks that values are whole numbers of at least `least`: `check_at_least(1, steps=0)` fails.

    Raises:
        InputError: as `check_within`.
    """
    for name, value in values.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise InputError(f"{name} must be a whole number, got {value!r}")
        if value < least:
            raise InputError(f"{name} must be in [{least}, inf), got {value!r}")


def check_known(what: str, name: str, choices: Iterable[str]) -> None:
    """Checks that `name` is one of `choices`, and suggests the closest one if it is not.

    Raises:
        InputError: `config.body.layrs is not one of layers, heads. Did you mean "layers"?`, where
            `what` starts the line.
    """
    choices = list(choices)
    if name in choices:
        return
    close = next(iter(difflib.get_close_matches(str(name), choices, n=1)), None)
    raise InputError(
        f"{what} is not one of {', '.join(choice or repr(choice) for choice in choices)}"
        + (f'. Did you mean "{close}"?' if close else "")
    )


def explain(error: BaseException) -> str | None:
    """A one-line message, with a cure, for running out of memory, a full disk or missing
    permissions, as Python, JAX, Orbax or gcsfs report them; None for any other error.
    """
    if is_out_of_memory(error):
        return (
            "out of memory: make tokens_per_device or the model smaller, or set body.remat=all for"
            " a transformer; to score text, lower --window or --rows"
        )
    # gcsfs reports missing permissions as an OSError without an errno.
    of_gcsfs = str(error).startswith("Forbidden: ") or "gs://" in str(error)
    if of_gcsfs or type(error).__module__.partition(".")[0] in STORES:
        return (
            f"a bucket cannot be used ({one_line(error)[:200]}): check its name, your credentials"
            " and the network, then run the same command; what was saved before is intact"
        )
    # Orbax gives no errno for a full disk, and names the file in quotes.
    number = errno.ENOSPC if _says_full(error) else getattr(error, "errno", None)
    quoted = re.search('"(/.*?)"', str(error))
    name = getattr(error, "filename", None) or (quoted[1] if quoted else "a file")
    if number in FULL:
        return (
            f"cannot write {name}: {os.strerror(number)}; what was saved before is intact. Make"
            " room or choose another place, then run the same command to resume"
        )
    if number in UNUSABLE:
        reason = os.strerror(number)
        return f"cannot use {name}: {reason}; choose another place, or change its permissions"
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """True if a device or the machine ran out of memory; False for a GPU's shared memory."""
    if isinstance(error, MemoryError | InputError):
        return isinstance(error, MemoryError)
    text = str(error).lower()
    exhausted = "resource_exhausted" in text or "out of memory" in text
    return exhausted and "shared memory" not in text and not _says_full(error)


def _says_full(error):
    return os.strerror(errno.ENOSPC) in str(error)


def one_line(error: BaseException) -> str:
    """An error's message in one line; the name of its type if it has none."""
    # str() of a KeyError would quote its message.
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    return " ".join(text.split()) or type(error).__name__
