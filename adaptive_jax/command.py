"""How the scripts start and end: they parse flags, and print one line for an error that a user can fix."""

import errno
import logging as standard_logging
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from absl import app, flags, logging

from adaptive_jax.errors import InputError

DENIED = {errno.EACCES, errno.EPERM}
OCCUPIED = {errno.ENOTDIR, errno.EEXIST}
UNWRITABLE = DENIED | {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}


def define_workdir(what: str) -> None:
    """Defines the required flag --workdir, and the flags by which several hosts find each other."""
    flags.DEFINE_string("workdir", None, what, required=True)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of host 0; not on TPU pods and under SLURM.")
    flags.DEFINE_integer("hosts", None, "Number of hosts, or processes; not on TPU pods and under SLURM.")
    flags.DEFINE_integer("host", None, "Number of this host, from 0; not on TPU pods and under SLURM.")
    on_disk = "must be a directory on a disk that all hosts share"
    flags.register_validator("workdir", lambda path: "://" not in (path or ""), on_disk)


def workdir() -> tuple[Path, tuple]:
    """The values of these flags: the workdir, and the arguments of `hosts.initialize`."""
    given = flags.FLAGS
    return Path(given.workdir), (given.coordinator, given.hosts, given.host)


def run(main: Callable[..., None], positional: Sequence[str] = ()) -> None:
    """Parses the flags, calls `main()` and exits: status 0, 2 after bad input, 130 after an interruption.

    positional: names of required arguments without a flag; `main` gets them in this order.
    """
    # Orbax warns about ordinary events; this project's own warnings stay.
    logging.set_verbosity(logging.ERROR)
    standard_logging.getLogger("adaptive_jax").setLevel(standard_logging.WARNING)
    app.run(lambda argv: _guarded(main, argv[1:]), flags_parser=lambda argv: _parse(argv, positional))


def _parse(argv, positional):
    try:
        rest = flags.FLAGS(argv)
        given, needed = len(rest) - 1, len(positional)
        if given < needed:
            raise InputError(f"{positional[given]} is missing: give {' '.join(positional)}; --help explains them")
        if given > needed:
            raise InputError(f"{rest[needed + 1]!r} is no flag: write --flag=value; --help lists the flags")
        return rest
    except Exception as error:  # a config file is the user's program: it may raise anything
        _fail(_message(error))


def _guarded(main, arguments):
    try:
        main(*arguments)
    except InputError as error:
        _fail(_one_line(error))
    except OSError as error:
        if "earlier failure to load" in str(error):  # ml_collections raises this when the config is first read
            if "Failed loading config file" not in str(error):
                _fail(_message(error))
            last = str(error).strip().splitlines()[-1].strip()
            _fail(f"{last}: give --config=configs/NAME.py or configs/NAME.py:row")
        name, reason = error.filename or "a file", os.strerror(error.errno or 0)
        if error.errno in DENIED and not _readable(name):
            _fail(f"cannot read {name}: {reason}; give yourself permission to read it, or choose another place")
        if error.errno in OCCUPIED:
            _fail(f"cannot use {name}: {reason}; choose another place")
        if error.errno not in UNWRITABLE:
            raise
        _fail(
            f"cannot write {name}: {reason}; what was saved before is intact. "
            "Make room or choose another place, then run the same command to resume"
        )
    except KeyboardInterrupt:
        print("stopped: the same command resumes from the last checkpoint", file=sys.stderr)
        sys.exit(130)


def _readable(name):
    """Whether this user may read a file or list a directory; for a file that does not exist, the directory it would be in."""
    path = Path(os.path.abspath(name))
    while not os.path.lexists(path):
        path = path.parent
    return os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK)


def _message(error):
    """One line; for an error in a config file, with the file and the line number."""
    cause = error
    while cause is not None:
        if (place := _place_in_config(cause)) and not isinstance(cause, InputError):
            what = cause.msg if isinstance(cause, SyntaxError) else _one_line(cause)
            return f"{place}: {type(cause).__name__}: {what}"
        cause = cause.__cause__ or cause.__context__
    return _one_line(error)


def _place_in_config(error):
    """The place in a config file, or in what it calls, that raised an error: "configs/my.py, line 7"; None for other errors."""
    frames = traceback.extract_tb(error.__traceback__)
    loader = [number for number, frame in enumerate(frames) if Path(frame.filename).name == "config_flags.py"]
    places = [(frame.filename, frame.lineno) for frame in frames[loader[-1] :]] if loader else []
    if loader and isinstance(error, SyntaxError):
        places.append((error.filename, error.lineno))
    libraries = "site-packages", "<", sysconfig.get_path("stdlib")
    own = [place for place in places if not any(part in place[0] for part in libraries)]
    return "{}, line {}".format(*own[-1]) if own else None


def _one_line(error):
    while error.args and isinstance(error.args[0], Exception):  # ml_collections wraps the error that has the message
        error = error.args[0]
    # str of a KeyError would quote its message.
    text = error.args[0] if isinstance(error, KeyError) and error.args else str(error)
    if isinstance(error, KeyError) and (key := str(text).strip("'")).isidentifier():  # ml_collections suggests no similar key
        return f"the config has no key {key!r}: see configs/base.py for all keys"
    lines = [line.strip() for line in str(text).splitlines() if line.strip()] or [type(error).__name__]
    # The message of some errors of ml_collections is a traceback, whose last line is the message of the first error.
    return (lines[-1] if "Traceback" in str(text) else " ".join(lines)).removeprefix("adaptive_jax.errors.InputError: ")


def _fail(message) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: threads of a checkpoint that cannot be written would add their tracebacks.
    os._exit(2)
