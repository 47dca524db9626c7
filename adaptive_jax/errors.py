"""The one kind of error that a user causes and can fix."""

import difflib
import numbers
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input: a setting, a file or a corpus. The message is one line with the value and the cure.

    The scripts print it without a traceback and exit with status 2.
    """


def check_rates(layer: object, *fields: str) -> None:
    """Checks that these fields of a layer, its dropout rates or shares, are in [0, 1).

    Raises:
        InputError: names the field and its value.
    """
    for field in fields:
        value = getattr(layer, field)
        if not isinstance(value, numbers.Real) or not 0 <= value < 1:
            raise InputError(f"{field}={value!r} is no rate: give a number from 0 to less than 1")


def check_at_least(least: int, **values: int) -> None:
    """Checks that values are whole numbers and none is below `least`: `check_at_least(1, steps=0)` fails.

    Raises:
        InputError: names the value.
    """
    for name, value in values.items():
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise InputError(f"{name}={value!r} is no whole number: give {least} or more")
        if value < least:
            raise InputError(f"{name}={value} must be {least} or more")


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Checks that `name` is known, and suggests the closest known name if it is not.

    Raises:
        InputError: `config.body.layrs is not one of layers, heads. Did you mean "layers"?`, where `what` starts the line.
    """
    known = list(known)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        raise InputError(f"{what} is not one of {', '.join(known)}" + (f'. Did you mean "{close[0]}"?' if close else ""))
