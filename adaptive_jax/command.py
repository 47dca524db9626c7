"""How the scripts start and end: flags in, one clear line out when a user can cure what went wrong."""

import errno
import logging as standard_logging
import os
import sys
from collections.abc import Sequence

from absl import app, flags, logging

from adaptive_jax.errors import InputError

UNWRITABLE = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST,
}  # fmt: skip


def run(main, positional: Sequence[str] = ()) -> None:
    """Parses the flags, calls `main()` and exits: 0, 2 after bad input, 130 after an interruption.

    positional: names of arguments that stand without a flag; all are needed, and `main` is given them in this order.
    """
    # Orbax warns of ordinary things; this project's own warnings stay.
    logging.set_verbosity(logging.ERROR)
    standard_logging.getLogger("adaptive_jax").setLevel(standard_logging.WARNING)
    app.run(lambda argv: _guarded(main, argv[1:]), flags_parser=lambda argv: _parse(argv, positional))


def _parse(argv, positional):
    try:
        rest = flags.FLAGS(argv)
        given, needed = len(rest) - 1, len(positional)
        if given < needed:
            raise InputError(f"{positional[given]} is missing: give {' '.join(positional)}; --help says what they are")
        if given > needed:
            raise InputError(f"{rest[needed + 1]!r} is no flag: write --flag=value; --help lists the flags")
        return rest
    # ml_collections raises these for a config that cannot be loaded and for keys that it does not have.
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError) as error:
        _fail(_message(error))


def _guarded(main, arguments):
    try:
        main(*arguments)
    except InputError as error:
        _fail(_message(error))
    except OSError as error:
        if "Failed loading config file" in str(error):  # raised by ml_collections at the first look at the config
            last = str(error).strip().splitlines()[-1].strip()
            _fail(f"{last}: give --config=configs/NAME.py or configs/NAME.py:row")
        if error.errno not in UNWRITABLE:
            raise
        _fail(
            f"cannot write {error.filename or 'a file'}: {os.strerror(error.errno)}; what was saved before is whole. "
            "Make room or choose another place, and run the same command again to go on"
        )
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)


def _message(error):
    while error.args and isinstance(error.args[0], Exception):  # ml_collections wraps the error that has the message
        error = error.args[0]
    # str of a KeyError would quote its message.
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    # Errors inside a config file arrive as a whole traceback; its last line is the message.
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    return (lines[-1] if "Traceback" in text else " ".join(lines)).removeprefix("adaptive_jax.errors.InputError: ")


def _fail(message):
    print(f"error: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of a checkpoint that could not be written would add their tracebacks to the one line.
    os._exit(2)
