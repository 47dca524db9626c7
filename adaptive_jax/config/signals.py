"""Signals that ask a command to stop, and the exit status of a training that they ended."""

import signal
from collections.abc import Callable, Collection

# Ctrl-C; schedulers and clouds; a terminal or an ssh session that closes; `--signal` of SLURM
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
INTERRUPTED = 130
SAVED = 75  # stopped, and the same command resumes: a temporary failure in sysexits.h


def handle(handler: Callable, without: Collection[int] = ()) -> dict[int, object]:
    """Installs a handler for all `STOPS` but those that this process was started to ignore, as
    nohup does SIGHUP. Returns the handlers before.
    """
    return {
        number: signal.signal(number, handler)
        for number in STOPS
        if number not in without and signal.getsignal(number) is not signal.SIG_IGN
    }
