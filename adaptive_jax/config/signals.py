"""Signals that ask a command to stop, and the exit statuses after them."""

import signal
from collections.abc import Callable, Collection

# Ctrl-C; schedulers and clouds; a terminal or an ssh session that closes; `--signal` of SLURM
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
INTERRUPTED = 130
SAVED = 75  # stopped after saving, so the same command resumes: EX_TEMPFAIL of sysexits.h


def handle(handler: Callable, without: Collection[int] = ()) -> dict[int, object]:
    """Installs a handler for all `STOPS`, except a SIGHUP that this process was started to ignore,
    as by nohup. Returns the previous handlers.
    """
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        without = {*without, signal.SIGHUP}
    return {number: signal.signal(number, handler) for number in STOPS if number not in without}
