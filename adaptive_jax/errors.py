"""The one kind of error that a user can cause, and cure."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input: a setting, a file or a corpus. The message is one line with the value and the cure.

    `train.py` and `evaluate.py` print it without a traceback and exit with status 2.
    """


def check_rates(layer, *fields: str) -> None:
    """Refuses a dropout rate, smoothing share or the like outside [0, 1).

    Raises:
        InputError: names the field and its value.
    """
    for field in fields:
        if not 0 <= getattr(layer, field) < 1:
            raise InputError(f"{field}={getattr(layer, field)} is no rate: give a number from 0 to less than 1")


def check_at_least(least: int, **values: int) -> None:
    """Refuses values below `least`: `check_at_least(1, steps=0)`.

    Raises:
        InputError: names the value.
    """
    for name, value in values.items():
        if value < least:
            raise InputError(f"{name}={value} must be {least} or more")


def check_known(what: str, name: str, known: Iterable[str]) -> None:
    """Refuses a name that is not known: `config.body.layrs is not one of layers, heads. Did you mean "layers"?`.

    Raises:
        InputError: as above; `what` begins the line.
    """
    known = list(known)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        raise InputError(
            f"{what} is not one of {', '.join(known)}" + (f'. Did you mean "{close[0]}"?' if close else "")
        )
