"""Runs one command on several processes ("hosts"), which connect, print, stop and end together.

    train.py on each of 4 machines    -> initialize() connects them; jax.devices() lists the
                                         devices of all four
    hosts.log0("step 1")              -> prints one line, on host 0
    hosts.barrier("workdir")          -> returns when all four hosts have called it
    Ctrl-C or SIGTERM on any of them  -> stop(step) becomes true on all four after the same update
    one of them is killed             -> JAX ends the others, see fail_together

A single process never waits in any of these functions.
"""

import atexit
import contextlib
import importlib.util
import itertools
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from jax.experimental import multihost_utils

from adaptive_jax.config import signals
from adaptive_jax.errors import InputError, explain, one_line
from adaptive_jax.parallel.processors import may_have_accelerators, order_collectives

START_TIMEOUT = 300  # seconds in which all hosts must have started
REMINDER = 30  # seconds between two lines of a host that waits for the others
# Seconds without a heartbeat after which a host counts as lost: on CPUs, and on devices whose hosts
# may be busy for longer
LOST_ON_CPUS, LOST = 15, 30
END_TIMEOUT = 10  # seconds in which all hosts must have ended
LONGEST_WAIT = 7 * 24 * 3600  # seconds for anything else: the longest preparation of a corpus

# The number of processes, as set by mpirun of Open MPI, by MPICH and its descendants, by torchrun
SIZES = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE"
# The variables of SLURM that jax needs
SLURM = "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"


def distributed_arguments(
    coordinator: str | None, hosts: int | None, host: int | None, environment: Mapping[str, str]
) -> dict | None:
    """The arguments of `jax.distributed.initialize` for these flags and this environment; None for
    a single process, which it would refuse.

        flags a:1234, 2, 0                      -> {"coordinator_address": "a:1234",
                                                    "num_processes": 2, "process_id": 0, ...}
        `srun` with several tasks, a TPU VM     -> {}: jax finds the others itself
        the same, one task a node, 8 GPUs each  -> {"local_device_ids": [0, ..., 7]}:
                                                   jax would use GPU 0 only
        the same, --gpus-per-task=1             -> {"local_device_ids": [0]}: the one that the
                                                   task sees; jax would number those of the node
        mpirun                                  -> {"cluster_detection_method": "mpi4py"}
        TPU_WORKER_HOSTNAMES=one-host, a laptop -> None

    Raises:
        InputError: inconsistent flags, or several processes that jax cannot connect.
    """
    if any(flag is not None for flag in (coordinator, hosts, host)):
        return _named(coordinator, hosts, host)
    several = [name for name in SIZES if int(environment.get(name) or 1) > 1]
    # The tasks of the step, not of the job: `python` without srun is a single process in a job of
    # many tasks.
    if SIZES[0] not in several and all(name in environment for name in SLURM):
        if int(environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"])) == 1:
            return None
        one_a_node = re.fullmatch(r"1(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        gpus = int(environment.get("SLURM_GPUS_ON_NODE") or 0)
        visible = environment.get("CUDA_VISIBLE_DEVICES")
        visible = len(visible.split(",")) if visible else gpus
        all_visible = one_a_node or visible < gpus
        return {"local_device_ids": list(range(visible))} if all_visible and visible else {}
    if {*several} & {*SIZES[:2]} and importlib.util.find_spec("mpi4py"):
        return {"cluster_detection_method": "mpi4py"}
    if {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environment.keys():
        several.append("JOB_COMPLETION_INDEX")
    if several:
        raise InputError(
            f"{several[0]}={environment[several[0]]} says that this process is one of several, but"
            " it would run alone: pass --coordinator=HOST:PORT, --hosts=N and --host=I to each, or"
            " for mpirun `pip install mpi4py`"
        )
    return {} if _on_tpus(environment) else None


def _named(coordinator, hosts, host):
    port = re.fullmatch(r".+:(\d+)", coordinator or "")
    named = None not in (hosts, host) and port and 0 < int(port[1]) < 2**16
    if not named or not 0 <= host < hosts:
        raise InputError(
            f"--coordinator={coordinator} --hosts={hosts} --host={host} must be HOST:PORT of host"
            " 0, with a port up to 65,535, the number of hosts, and the number of this one, from 0;"
            " pass all three or none"
        )
    arguments = {"coordinator_address": coordinator, "num_processes": hosts, "process_id": host}
    return arguments | {"cluster_detection_method": "deactivate"} if hosts > 1 else None


def _on_tpus(environment):
    """True if jax should look for other hosts of a TPU; jax sets some of the variables itself."""
    if "tpu" not in environment.get("JAX_PLATFORMS", "tpu") or "TPU_ML_PLATFORM" not in environment:
        return False
    named = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES"))
    if named is not None:
        return "," in named or int(environment.get("MEGASCALE_NUM_SLICES") or 1) > 1
    return "TPU_SKIP_MDS_QUERY" not in environment


def initialize(
    coordinator: str | None = None, hosts: int | None = None, host: int | None = None
) -> None:
    """Connects this process to the other hosts of its run, if any. Call it before anything that
    uses a device.

    Under a launcher jax finds the other hosts; elsewhere the flags name them. See
    `distributed_arguments`.

    Raises:
        InputError: as `distributed_arguments`; or the hosts do not connect within `START_TIMEOUT`
            seconds.
    """
    arguments = distributed_arguments(coordinator, hosts, host, os.environ)
    if arguments is None:
        return
    accelerators = may_have_accelerators()
    if not accelerators:
        order_collectives()
        _silence_native_stdout()
    # In a thread, because jax kills the process with a stack trace after its own timeout. The
    # timeout for the end of a run is short, so that hosts do not wait long for one that is gone.
    joined = ThreadPoolExecutor(1, "meeting").submit(
        jax.distributed.initialize,
        initialization_timeout=2 * START_TIMEOUT,
        shutdown_timeout_seconds=3 * END_TIMEOUT,
        heartbeat_timeout_seconds=LOST if accelerators else LOST_ON_CPUS,
        **arguments,
    )
    place = f"at {coordinator}" if coordinator else "at the place that the launcher names"
    try:
        _wait_for_others(joined, "this host" if host is None else f"host {host} of {hosts}", place)
    except (RuntimeError, ValueError, OSError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"cannot connect to the hosts {place}: {one_line(error)[:300]}") from error
    if not first():
        logging.getLogger("adaptive_jax").setLevel(logging.ERROR)


def _silence_native_stdout():
    """Drops what C++ libraries such as Gloo print to stdout, and keeps what Python prints."""
    sys.stdout.flush()
    sys.stdout = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115 (open until the end)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _wait_for_others(joined: Future, who: str, place: str) -> None:
    """Waits until all hosts are connected, and prints so at once and every `REMINDER` seconds.

    Raises:
        InputError: they are not connected within `START_TIMEOUT` seconds; or as `joined` raises.
    """
    for waited in range(0, START_TIMEOUT, REMINDER):
        still = "still " if waited else ""
        limit = f"{waited} of {START_TIMEOUT} s" if waited else f"up to {START_TIMEOUT} s"
        print(f"{who} {still}waits {place} for the others, {limit}", file=sys.stderr, flush=True)
        with contextlib.suppress(TimeoutError):
            return joined.result(timeout=min(REMINDER, START_TIMEOUT - waited))
    raise InputError(
        f"{who} has not met the others {place} within {START_TIMEOUT} seconds: start all of them,"
        " and check that the address is that of host 0, and that the port is free there and"
        " reachable from here"
    )


def first() -> bool:
    """True on host 0, which writes files and prints."""
    return jax.process_index() == 0


def log0(text: str) -> None:
    """Prints a line on host 0."""
    if first():
        print(text, flush=True)


def barrier(name: str, seconds: float = LONGEST_WAIT) -> None:
    """Waits until every host has called this with the same `name`.

    Raises:
        RuntimeError: a host does not come within `seconds`.
    """
    if jax.distributed.is_initialized():
        # Imported here, because it takes a second that a single process can save.
        from orbax.checkpoint import multihost

        multihost.get_barrier_sync_fn()(key=name, timeout_ms=int(1000 * seconds))


class Stop:
    """Request to stop, see `stopping`. In a run of one process, `requested` is True after a signal;
    with several hosts it stays False, and `stop(step)` answers for all.
    """

    def __init__(self, reached: Callable[[int], bool] | None = None):
        self.requested, self.reached = False, reached

    def __call__(self, step: int) -> bool:
        """True if training stops after this update."""
        return self.requested if self.reached is None else self.reached(step)


@contextlib.contextmanager
def stopping(before_stop: str = "") -> Iterator[Stop]:
    """Stops all hosts after the same update; every host calls `stop(step)` after every update.

    `stop` returns True on all hosts after one of them has received one of `signals.STOPS`, such as
    SIGTERM, which SLURM and clouds send before they take a machine away. A second Ctrl-C ends that
    host at once; other signals may come any number of times.

    before_stop: what a process does before it stops, for the line that it prints. If empty, a
        single process keeps its signal handlers.
    """
    has_peers, calls = jax.distributed.is_initialized(), itertools.count(1)

    def reached(_):
        # Calls are counted, not steps: JAX stops all hosts at a number that follows the last one, 0
        # at first, and the steps of a resumed run begin beyond it.
        return multihost_utils.reached_preemption_sync_point(next(calls))

    stop, signalled = Stop(reached if has_peers else None), False
    # Only the main thread receives signals.
    if not (has_peers or before_stop) or threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def receive(number, _):
        nonlocal signalled
        if signalled:
            if number == signal.SIGINT:
                write_line("stopped at once: the same command resumes from the last checkpoint")
                os._exit(signals.INTERRUPTED)
            return
        signalled = True
        if before_stop:
            write_line(f"stopping: {before_stop}; Ctrl-C again stops at once")
        if has_peers:
            os.kill(os.getpid(), signal.SIGTERM)  # jax catches it and tells the other hosts
        else:
            stop.requested = True

    # With several hosts, jax has a handler for SIGTERM, which one of Python would replace.
    before = signals.handle(receive, without={signal.SIGTERM} if has_peers else ())
    try:
        yield stop
    finally:
        for number, handler in before.items():
            if number == signal.SIGINT or not signalled:
                signal.signal(number, handler)


def write_line(line: str) -> None:
    """Writes a line to stderr from a signal handler."""
    # Not by sys.stderr, whose lock a progress bar may hold. The bar also hides the cursor.
    below = "\x1b[?25h\n" if os.isatty(2) else ""
    os.write(2, f"{below}{line}\n".encode())


@contextlib.contextmanager
def fail_together() -> Iterator[None]:
    """Ends all hosts when one fails. If all fail, host 0 raises its error; the others exit silently
    with its status.

    A host that fails alone raises its error and ends. The others end with an error of JAX or Gloo,
    at the latest when JAX has not heard from it for `LOST` or `LOST_ON_CPUS` seconds.
    """
    try:
        yield
        barrier("the end")
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        status = 2 if isinstance(error, InputError) or explain(error) else 1
        if isinstance(error, KeyboardInterrupt):
            status = getattr(error, "status", signals.INTERRUPTED)
        if _all_hosts_arrive("the end after a failure"):
            # Otherwise the first host to exit would look lost to the others
            jax.distributed.shutdown()
            if not first():
                os._exit(status)
        else:
            if status == 1:
                traceback.print_exception(error)
                os._exit(status)
            # Otherwise jax's exit handler would wait for the missing hosts.
            atexit.register(os._exit, status)
        raise


def _all_hosts_arrive(name):
    try:
        barrier(name, END_TIMEOUT)
    except RuntimeError:
        return False
    return True
