"""The one kind of error that a user causes and can fix."""

import difflib
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
        if not 0 <= getattr(layer, field) < 1:
            raise InputError(f"{field}={getattr(layer, field)} is no rate: give a number from 0 to less than 1")


def check_at_least(least: int, **values: int) -> None:
    """Checks that no value is below `least`: `check_at_least(1, steps=0)` fails.

    Raises:
        InputError: names the value.
    """
    for name, value in values.items():
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
