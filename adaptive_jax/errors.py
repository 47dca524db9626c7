"""The one kind of error that a user can cause, and cure."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input: a setting, a file or a corpus. The message is one line with the value and the cure.

    `train.py` and `evaluate.py` print it without a traceback and exit with status 2.
    """


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
