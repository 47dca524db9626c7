"""Start and end of commands: parses flags, and prints errors that a user can fix in one line."""

import importlib
import itertools
import logging as standard_logging
import os
import signal
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from adaptive_jax.config import cache, keys, signals
from adaptive_jax.config import flags as config_flags
from adaptive_jax.errors import InputError, explain, is_out_of_memory, of_extra, one_line
from adaptive_jax.files import path_of

with of_extra("train"):
    from absl import app, flags, logging

SHOW_CURSOR = b"\x1b[?25h"  # progress bars hide it


class Allow(NamedTuple):
    """Flag of commands that open runs.

    Attributes:
        allow: Modules of other packages whose classes the config of a run may name, such as
            my_package.layers: they are imported, so their code runs.
    """

    allow: tuple[str, ...] = ()


class Workdir(NamedTuple):
    """Flag of commands of one run.

    Attributes:
        workdir: Directory of the run: config, vocabulary, metrics, checkpoints.
    """

    workdir: str = ""


class Hosts(NamedTuple):
    """Flags by which the hosts of a run find each other; not needed on TPU pods and under SLURM or
    mpirun.

    Attributes:
        coordinator: HOST:PORT of host 0; TPU pods, SLURM and, with mpi4py, mpirun need none of
            --coordinator, --hosts and --host.
        hosts: Number of hosts, or processes.
        host: Number of this host, from 0.
    """

    coordinator: str | None = None
    hosts: int | None = None
    host: int | None = None


def workdir() -> Path:
    """The value of --workdir.

    Raises:
        InputError: no workdir, or one that is no path.
    """
    if not flags.FLAGS.workdir:
        raise InputError("--workdir is missing: pass --workdir=DIRECTORY")
    return path_of(flags.FLAGS.workdir)


def run_module(name: str) -> None:
    """Runs the `main` of a command's module by `run`, with the module's `POSITIONAL` and `STOPPED`.

    The module defines its flags when it is imported, or in its `define_flags`.
    """
    command = importlib.import_module(name)
    getattr(command, "define_flags", lambda: None)()
    sys.modules["__main__"].__doc__ = command.__doc__  # what --help shows
    for flag in flags.FLAGS.get_key_flags_for_module(command):
        flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    run(command.main, getattr(command, "POSITIONAL", ()), getattr(command, "STOPPED", "stopped"))


def run(
    main: Callable[..., None], positional: Sequence[str] = (), stopped: str = "stopped"
) -> None:
    """Parses the flags, calls `main()` and exits: status 0, 2 after bad input, 130 after a signal
    of `signals.STOPS`, or the `status` of the KeyboardInterrupt.

    positional: names of the arguments without a flag, in the order in which `main` takes them. A
        last one that ends in "..." stands for one or more arguments, in "...]" for any number.
    stopped: the line after an interruption, unless the KeyboardInterrupt has a message.
    """
    for name, errors in ("stdout", "strict"), ("stderr", "backslashreplace"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115 (None if it is closed)
        if hasattr(stream, "reconfigure"):  # UTF-8 in every locale, as commands read it
            stream.reconfigure(encoding="utf-8", errors=errors)
        setattr(sys, name, stream)
    _handle_signals()
    _silence_libraries()
    sys.unraisablehook = _show_unraisable

    def guarded(argv):
        _guarded(lambda: main(*argv[1:]), stopped)
        _ignore_signals()

    app.run(guarded, flags_parser=lambda argv: _guarded(lambda: _parse(argv, positional), stopped))


class _Warnings(standard_logging.Handler):
    """Prints `warning: …`, one line each."""

    def emit(self, record):
        _print_warning(record.levelname.lower(), record.getMessage())


def _silence_libraries():
    """Silences logs and warnings of libraries, except JAX's about devices that it cannot use;
    prints this project's warnings as `warning: …`, one line each.
    """
    # Orbax warns about ordinary events, and logs errors that it also raises.
    logging.set_verbosity(logging.FATAL)
    standard_logging.getLogger("asyncio").setLevel(standard_logging.CRITICAL)
    for name in "adaptive_jax", "jax._src.xla_bridge":
        shown = standard_logging.getLogger(name)
        shown.setLevel(standard_logging.WARNING)
        shown.handlers, shown.propagate = [_Warnings()], False
    if not sys.warnoptions:
        warnings.showwarning = _show_own_warnings


def _show_unraisable(unraisable):
    # The threads of a checkpoint that cannot be read complain about a closed event loop.
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def _show_own_warnings(message, category, filename, lineno, file=None, line=None):
    if "site-packages" not in filename and sysconfig.get_path("stdlib") not in filename:
        _print_warning("warning", message)


def _print_warning(level, message):
    print(f"{level}: {' '.join(str(message).split())}", file=sys.stderr, flush=True)


def _handle_signals():
    """Makes the first stop signal raise KeyboardInterrupt; see `_ignore_signals` for the next."""

    def interrupted(*_):
        _ignore_signals()
        raise KeyboardInterrupt

    signals.handle(interrupted)


def _ignore_signals():
    """Makes Ctrl-C end the process at once, and ignores other stop signals, which libraries that
    are shutting down would answer with tracebacks.
    """
    signals.handle(lambda number, _: number == signal.SIGINT and _exit_at_once())


def _exit_at_once():
    for terminal in filter(os.isatty, (1, 2)):
        os.write(terminal, SHOW_CURSOR)
    os._exit(signals.INTERRUPTED)


def _parse(argv, positional):
    flags.DEFINE_string("cache_dir", None, cache.HELP)
    flags.FLAGS.register_key_flag_for_module(argv[0], flags.FLAGS["cache_dir"])
    if {"-h", "-help", "--help"} & set(itertools.takewhile(lambda flag: flag != "--", argv[1:])):
        app.usage(shorthelp=True, writeto_stdout=True, exitcode=0)  # absl's --help exits with 1
    try:
        argv = flags.FLAGS.read_flags_from_files(argv, force_gnu=False)
        rest = config_flags.parse(argv) if "config" in flags.FLAGS else flags.FLAGS(argv)
    except (flags.Error, ValueError) as error:  # a ValueError for --noNAME with a value
        if isinstance(error, InputError):
            raise
        fail(one_line(error))
    keys.allow(flags.FLAGS.allow if "allow" in flags.FLAGS else ())
    if flags.FLAGS.cache_dir is not None:
        cache.use(flags.FLAGS.cache_dir)
    last = "".join(positional[-1:])
    count, required = len(rest) - 1, len(positional) - last.endswith("...]")
    if count < required:
        raise InputError(
            f"{positional[count].rstrip('.')} is missing: use {' '.join(positional)}; --help"
            " explains them"
        )
    if count > required and not last.endswith(("...", "...]")):
        raise InputError(
            f"{rest[required + 1]!r} is not a flag: write --flag=value; --help lists the flags"
        )
    return rest


def _guarded(call, stopped):
    """Calls a function; on bad input, an error that `explain` describes, or an interruption, ends
    the process with one line.
    """
    try:
        result = call()
        sys.stdout.flush()
        return result
    except InputError as error:
        fail(one_line(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "adaptive_jax"):
            raise
        fail(f"the package {package} is missing: pip install {package}, or 'adaptive_jax[train]'")
    except BrokenPipeError:
        os._exit(141)  # as other programs do when their reader, such as `head`, ends
    except Exception as error:
        if str(error).startswith("Unable to initialize backend"):
            fail(
                f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')} has no devices here: unset"
                " it, or install JAX for them"
            )
        if not (line := explain(error)):
            raise
        if is_out_of_memory(error):
            traceback.print_exception(error)  # says where, and how many bytes
        fail(line)
    except KeyboardInterrupt as interruption:
        print(str(interruption) or stopped, file=sys.stderr)
        sys.exit(getattr(interruption, "status", signals.INTERRUPTED))


def fail(message: object) -> NoReturn:
    """Prints an error in one line and ends the process with status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit, after which threads that cannot write a checkpoint would print tracebacks.
    os._exit(2)
