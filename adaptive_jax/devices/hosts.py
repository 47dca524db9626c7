"""Several processes that run one command together, here called hosts: how they meet, which one speaks, and how they end.

    train.py on each of 4 machines       -> initialize() connects them, jax.devices() are those of all four
    hosts.say("step 1")                  -> one line, from the first host
    hosts.wait("workdir")                -> goes on once all four have come here
    Ctrl-C or SIGTERM on any of them     -> stop(step) is true on all four after the same update

A process that is alone goes through all of this without waiting for anything.
"""

import atexit
import contextlib
import logging
import os
import re
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
from jax.experimental import multihost_utils

from adaptive_jax.errors import InputError

MEETING = 300  # seconds that hosts may start apart
ENDING = 10  # seconds that they may end apart
WAITING = 7 * 24 * 3600  # seconds for anything else: the longest preparation of a corpus

SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")  # all that jax reads


def meeting(coordinator: str | None, hosts: int | None, host: int | None, environment: Mapping[str, str]) -> dict | None:
    """What `jax.distributed.initialize` is to be told by a process with these flags and environment; None if it is alone.

        flags a:1234, 2, 0                      -> {"coordinator_address": "a:1234", "num_processes": 2, "process_id": 0, ...}
        of `srun` with several tasks            -> {}, which jax fills in by itself
        the same, one task a node, 8 GPUs each  -> {"local_device_ids": [0, ..., 7]}, where jax would take GPU 0 alone
        on a TPU VM                             -> {}
        TPU_WORKER_HOSTNAMES=one-host, a laptop -> None

    Raises:
        InputError: some of the flags without the others, no HOST:PORT, or a host that is not one of 0 to hosts − 1.
    """
    given = [flag is not None for flag in (coordinator, hosts, host)]
    if any(given):
        shown = f"--coordinator={coordinator} --hosts={hosts} --host={host}"
        if not all(given):
            raise InputError(f"{shown}: give --coordinator=HOST:PORT, --hosts=N and --host=I, all three or none")
        if not re.fullmatch(r".+:\d+", coordinator):
            raise InputError(f"--coordinator={coordinator} has no port: give HOST:PORT, of host 0, the same on every host")
        if not 0 <= host < hosts:
            raise InputError(f"--host={host} is none of {hosts}: number hosts from 0 to {hosts - 1}, each its own")
        named = {"coordinator_address": coordinator, "num_processes": hosts, "process_id": host}
        return named | {"cluster_detection_method": "deactivate"} if hosts > 1 else None
    # A step's own number of tasks: `python` without srun is one process, however many tasks the job has.
    if all(name in environment for name in SLURM):
        if int(environment.get("SLURM_STEP_NUM_TASKS", environment["SLURM_NTASKS"])) == 1:
            return None
        alone_on_node = re.fullmatch(r"1(\(x\d+\))?", environment.get("SLURM_STEP_TASKS_PER_NODE", ""))
        gpus = int(environment.get("SLURM_GPUS_ON_NODE", 0))
        return {"local_device_ids": list(range(gpus))} if alone_on_node and gpus else {}
    return {} if _on_tpus(environment) else None


def _on_tpus(environment):
    """Whether to ask jax for the other hosts of a TPU; jax has set some of this itself when it was imported."""
    if "tpu" not in environment.get("JAX_PLATFORMS", "tpu") or "TPU_ML_PLATFORM" not in environment:
        return False
    named = environment.get("TPU_PROCESS_ADDRESSES", environment.get("TPU_WORKER_HOSTNAMES"))
    if named is not None:
        return "," in named or int(environment.get("MEGASCALE_NUM_SLICES") or 1) > 1
    return "TPU_SKIP_MDS_QUERY" not in environment


def initialize(coordinator: str | None = None, hosts: int | None = None, host: int | None = None) -> None:
    """Connects this process to the others of its run, if there are any; before anything else that uses a device.

    On TPU pods and under SLURM jax knows the others; elsewhere flags say who they are. See `meeting`.

    Raises:
        InputError: see `meeting`; and the others are not met within `MEETING` seconds.
    """
    arguments = meeting(coordinator, hosts, host, os.environ)
    if arguments is None:
        return
    # In a thread, as jax ends the whole process with a stack trace when its own time is over. At the end of a run nobody
    # waits long for a host that does not come.
    joined = ThreadPoolExecutor(1, "meeting").submit(
        jax.distributed.initialize, initialization_timeout=2 * MEETING, shutdown_timeout_seconds=3 * ENDING, **arguments
    )
    where = f"at {coordinator}" if coordinator else "that SLURM or the TPU tells jax of"
    try:
        joined.result(timeout=MEETING)
    except TimeoutError:
        this = "this host" if host is None else f"host {host}"
        raise InputError(
            f"{this} has not met the others {where} within {MEETING} seconds: start all of them, and check"
            " that the address is host 0's, that its port is free there and can be reached from here"
        ) from None
    except (RuntimeError, ValueError, OSError) as error:
        raise InputError(f"cannot meet the hosts {where}: {' '.join(str(error).split())[:300]}") from error
    if not first():
        logging.getLogger("adaptive_jax").setLevel(logging.ERROR)


def first() -> bool:
    """Whether this is the host that writes and speaks."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints a line, once for all hosts."""
    if first():
        print(text, flush=True)


def wait(name: str, seconds: float = WAITING) -> None:
    """Waits until all hosts are at the place called `name`, which each comes by once.

    Raises:
        RuntimeError: they do not come within `seconds`.
    """
    if jax.distributed.is_initialized():
        from orbax.checkpoint import multihost  # only now: a second that no single process should spend

        multihost.get_barrier_sync_fn()(key=name, timeout_ms=int(1000 * seconds))


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[int], bool]]:
    """Has hosts stop together: `stop(step)`, asked by every host after every step, becomes true on all after the same one.

    One of them was sent SIGTERM, as SLURM and clouds do before they take a machine away, or met Ctrl-C. A second Ctrl-C
    ends that host at once. A process that is alone is interrupted as ever, and `stop` is never true.
    """
    if not jax.distributed.is_initialized():
        yield lambda step: False
        return

    def interrupted(*_):
        signal.signal(signal.SIGINT, before)
        os.kill(os.getpid(), signal.SIGTERM)  # which jax tells the other hosts

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield multihost_utils.reached_preemption_sync_point
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Has hosts end together. What all of them fail of, the first one raises, and the others end with its status in silence.

    A host that fails alone raises what it met and ends. The others then meet a broken connection, or, within some
    100 seconds, jax misses the one that is gone: it ends them all, with status 134 and a line about "another task".
    """
    try:
        yield
        wait("the end")
    except BaseException as error:
        if not jax.distributed.is_initialized():
            raise
        status = 2 if isinstance(error, InputError | OSError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        if _all_come_to("the end after a failure"):
            jax.distributed.shutdown()  # else the first to end would look to the others like one that broke off
            if not first():
                os._exit(status)
        else:
            if status == 1:
                traceback.print_exception(error)
                os._exit(status)
            atexit.register(os._exit, status)  # at exit jax would wait for hosts that do not come
        raise


def _all_come_to(name):
    try:
        wait(name, ENDING)
    except RuntimeError:
        return False
    return True
