"""The one kind of error that a user can cause, and cure."""


class InputError(ValueError):
    """Bad input: a setting, a file or a corpus. The message is one line with the value and the cure.

    `train.py` and `evaluate.py` print it without a traceback and exit with status 2.
    """
