"""Several hosts: real processes on loopback that train, evaluate, fail and stop together,
against one process alone.
"""

import importlib.util
import json
import os
import re
import signal
import subprocess
import textwrap
from pathlib import Path

import numpy as np
import pytest

from adaptive_jax.parallel import hosts, sharding
from adaptive_jax.runs.checkpoints import Checkpoints
from adaptive_jax.runs.run import Run
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.training.loop import train
from tests import refuses
from tests.conftest import until
from tests.training.test_metrics import metrics

ROOT = Path(__file__).parents[2]
STEPS = {"log_every": 1, "evaluate_every": 3, "checkpoint_every": 3, "keep": 2}
STEPS |= {"body.dropout": 0.1, "input.cutoffs": (60,)}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "4"}
SRUN |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
ONE_A_NODE = SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}
TPU = {"TPU_ML_PLATFORM": "JAX"}
MPI = {"OMPI_COMM_WORLD_SIZE": "4"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    "environment, arguments",
    [
        ({}, None),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # python without srun
        (SRUN, {}),
        (SRUN | {"SLURM_NTASKS": "1"}, None),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # a step of one task, in a job of four
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_GPUS_ON_NODE": "2"}, {}),
        (ONE_A_NODE | {"SLURM_GPUS_ON_NODE": "3"}, {"local_device_ids": [0, 1, 2]}),
        (ONE_A_NODE, {}),
        # A task that sees some of the node's GPUs has them all; jax took number SLURM_LOCALID
        (
            SRUN | {"CUDA_VISIBLE_DEVICES": "3", "SLURM_GPUS_ON_NODE": "4"},
            {"local_device_ids": [0]},
        ),
        (SRUN | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "2"}, {}),
        (
            ONE_A_NODE | {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_ON_NODE": "8"},
            {"local_device_ids": [0, 1]},
        ),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, None),  # no TPU that jax could use
        (TPU, {}),
        (TPU | {"JAX_PLATFORMS": "cpu"}, None),
        (TPU | {"TPU_SKIP_MDS_QUERY": "1"}, None),
        (TPU | {"TPU_WORKER_HOSTNAMES": "a,b"}, {}),
        (TPU | {"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        (TPU | {"TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_HOSTNAMES": "a,b"}, None),
        (TPU | {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, {}),
        (SRUN | MPI, {"cluster_detection_method": "mpi4py"}),  # mpirun within a job of SLURM
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": ""}, None),  # as templates of containers leave it; was a traceback
        ({"PMI_SIZE": "4"}, {"cluster_detection_method": "mpi4py"}),
        (POD, None),
    ],
)
def test_arguments_from_the_environment(environment, arguments, monkeypatch):
    """A process of several is known by its environment alone, and one that is alone is told
    nothing.
    """
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "installed")
    assert hosts.distributed_arguments(None, None, None, environment) == arguments


@pytest.mark.parametrize(
    "environment, names",
    [
        (MPI, "mpirun mpi4py --coordinator"),
        ({"PMI_SIZE": "4"}, "mpi4py"),
        (POD | {"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX=0 --coordinator"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 --coordinator"),
    ],
)
def test_processes_that_cannot_be_joined(environment, names, monkeypatch):
    """An error, not as many runs of one process each."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with refuses(*names.split()):
        hosts.distributed_arguments(None, None, None, environment)


def test_arguments_from_flags():
    """They come before the environment, and one host of one is alone."""
    arguments = hosts.distributed_arguments("a:1234", 2, 1, SRUN)
    assert arguments.pop("cluster_detection_method") == "deactivate"
    assert arguments == {"coordinator_address": "a:1234", "num_processes": 2, "process_id": 1}
    assert hosts.distributed_arguments("a:1234", 1, 0, SRUN) is None


def test_flags_and_texts_that_differ_between_hosts(config, tmp_path, monkeypatch):
    """If hosts differ in --hours they deadlock; if one has a stale copy of the text, words get
    different ids.
    """
    for value, other, says in (
        ('"hours": 0.0', '"hours": 5.0', "hours=0.0 5.0"),
        ('"devices": ', '"devices": 1', "devices"),
        ('"vocabulary": "', '"vocabulary": "9', "vocabulary"),
        ('"train text": "', '"train text": "9', "train text"),
    ):

        def texts(text, change=(value, other)):
            assert change[0] in text
            return [text, text.replace(*change)]

        monkeypatch.setattr(sharding, "texts_of_hosts", texts)
        with refuses(*says.split(), "must be the same on all hosts"):
            train(config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()  # the cured command may begin there


def test_hosts_may_hold_copies_of_a_text_in_different_places(config, tmp_path, monkeypatch):
    """With paths compared, a cluster whose machines mount a disk elsewhere could not train."""

    class Compared(Exception):
        """Ends the run there."""

    def texts_of_hosts(text):
        raise Compared(text)

    monkeypatch.setattr(sharding, "texts_of_hosts", texts_of_hosts)
    with pytest.raises(Compared) as compared:
        train(config(steps=1), tmp_path / "run")
    assert "seed" in str(compared.value) and "data.path" not in str(compared.value)


@pytest.mark.parametrize(
    "status, state, requeued",
    [
        (75, "RUNNING", True),
        (75, "COMPLETING", False),
        (0, "RUNNING", False),
        (2, "RUNNING", False),
    ],
)
def test_the_script_for_slurm(tmp_path, status, state, requeued):
    """It goes on after a time limit, and not after scancel, an error or the end of training."""
    text = (ROOT / "docs" / "hosts.md").read_text()
    [script] = re.findall(r"\n\n((?:    .*\n|\n)+)", text[: text.index("**mpirun**")])[-1:]
    (tmp_path / "script").write_text(textwrap.dedent(script))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    programs = {"srun": f"exit {status}", "squeue": f"echo {state}", "scontrol": "echo $*"}
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", "script"], cwd=tmp_path, env=os.environ | path, capture_output=True, text=True
    )
    assert done.stdout == ("requeue 7\n" if requeued else "")
    assert done.returncode == status and not done.stderr


def test_hosts_that_nobody_meets(quick_command, free_port):
    """Each of two that wait at different places says where, for how long, and ends."""
    program = """
from adaptive_jax.config import commands
def main(coordinator, host):
    from adaptive_jax.parallel import hosts
    hosts.START_TIMEOUT = 1
    hosts.initialize(coordinator, 2, int(host))
commands.run(main, ["COORDINATOR", "HOST"])
"""
    for host in 0, 1:
        done = quick_command("-c", program, f"127.0.0.1:{free_port()}", host)
        assert done.returncode == 2
        assert f"error: host {host} of 2 has not met the others at 127.0.0.1:" in done.stderr
        assert "within 1 seconds: start all" in done.stderr


def ended(processes):
    """The output of both hosts and their exit statuses: `(out, err), (out, err), [status,
    status]`.
    """
    return *(process.communicate(timeout=200) for process in processes), [
        process.returncode for process in processes
    ]


def silent(text):
    """True if a host printed nothing of this project. Its output holds lines of Gloo, which two
    threads may mix up.
    """
    return not re.search("step |rows  |error: |perplexity|continuing|stopped: |Traceback", text)


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """9 updates by one process."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    train(config(**STEPS, steps=9), workdir)
    return workdir


def reached(workdir, step):
    """A condition that holds once hosts have written the metrics of `step`."""
    path = workdir / "metrics.jsonl"
    return lambda: path.exists() and f'"step": {step},' in path.read_text()


ON_HOSTS = """
from adaptive_jax.config import commands
from adaptive_jax.config import flags as config_flags
from adaptive_jax.training import command
command.define_flags()
def main():
    import errno
    from adaptive_jax.parallel import hosts
    from adaptive_jax.scores.evaluate import Request, evaluate
    from adaptive_jax.training import loop, writers
    workdir = commands.workdir()
    hosts.initialize(*config_flags.options(commands.Hosts))
    config = config_flags.config()[0]
    with hosts.fail_together():
        %s
commands.run(main)
"""
TRAIN_AND_FAIL = """
        loop.train(config, workdir)
        evaluate(workdir.with_name("none"), Request())
"""
EVALUATE_AND_TRAIN = """
        evaluate(workdir, Request(window=7, context=4, checkpoint="latest"))
        evaluate(workdir, Request(checkpoint="latest", method="cache"))
        sgd = {"rule": "sgd"}
        evaluate(workdir, Request(window=8, checkpoint="latest", method="dynamic", options=sgd))
        loop.train(config, workdir)
"""
FAIL_ALONE = """
        hosts.END_TIMEOUT = 3
        write = writers.JsonLines.write
        def full(self, step, metrics):
            if step == 6:
                raise OSError(errno.ENOSPC, "", "metrics.jsonl")
            write(self, step, metrics)
        if hosts.first():
            writers.JsonLines.write = full
        loop.train(config, workdir)
"""


@pytest.mark.first
def test_two_hosts_are_one(start_hosts, flags, config, alone, tmp_path):
    """Two hosts from a cold cache, one process, then two hosts of two devices each that evaluate,
    train and are stopped.

    They make the updates of one process alone, with dropout, and its scores, in windows that do not
    share out evenly, with a cache and with dynamic evaluation; four devices share the parameters
    and compute each its own words.
    All is written and said once, an error of both hosts too, which ends both. Ctrl-C on the second
    host stops both after the same step, which is
    saved before anything is scored.
    """
    workdir, cache = tmp_path / "run", tmp_path / "cache"
    (out, err), (silence, other_err), statuses = ended(
        start_hosts(
            "-c",
            ON_HOSTS % TRAIN_AND_FAIL,
            *flags(workdir, **STEPS, steps=3),
            f"--cache_dir={cache}",
        )
    )
    assert statuses == [2, 2], err + other_err
    assert re.search(r"error: .*none holds no run", err) and err.count("error: ") == 1
    assert "step 3/3  validation" in out and silent(silence + other_err)
    assert not [path for path in cache.rglob(".*") if path.suffix != ".lock"]
    train(config(**STEPS, steps=6), workdir)
    one = evaluate(workdir, Request(window=7, context=4, checkpoint="latest"))
    cached = evaluate(workdir, Request(checkpoint="latest", method="cache"))
    learned = evaluate(
        workdir, Request(window=8, checkpoint="latest", method="dynamic", options={"rule": "sgd"})
    )
    path = workdir / "eval" / "test-7-4-6.json"
    for each in (workdir / "eval").iterdir():
        each.unlink()

    processes = start_hosts(
        "-c",
        ON_HOSTS % EVALUATE_AND_TRAIN,
        *flags(workdir, **STEPS, steps=100_000, fsdp=4, shard_words=True),
        f"--cache_dir={cache}",
        devices=2,
    )
    until(reached(workdir, 10), *processes)
    processes[1].send_signal(signal.SIGINT)  # which jax is told of as SIGTERM
    (out, err), (silence, other_err), statuses = ended(processes)
    assert statuses == [75, 75], err + other_err
    assert (
        len(re.findall("stopped after update [0-9]+ of 100,000, which is saved", err)) == 1
        and "Traceback" not in err
    )
    assert silent(silence + other_err)
    assert "= 1 x 8 rows x 4 device(s)" in out and "after 6 of 100,000 updates" in out
    assert out.count("test: perplexity") == 3
    for method, expected in ("cache", cached), ("dynamic", learned):
        [found] = (workdir / "eval").glob(f"*-{method}-*.json")
        assert json.loads(found.read_text())["nll"] == pytest.approx(expected["nll"], rel=1e-6)
    two = json.loads(path.read_text())
    assert two.pop("checksum")  # of its losses; the file alone has it
    assert two.pop("nll") == pytest.approx(one["nll"], rel=1e-6)
    assert two.pop("perplexity") == pytest.approx(one["perplexity"], rel=1e-5)
    rounded = {"seconds", "date", "bins", "bits_per_character", "bits_per_byte"}
    assert two.keys() | {"nll", "perplexity"} == one.keys()
    assert all(
        two[key] == value
        for key, value in json.loads(json.dumps(one)).items()
        if key in two.keys() - rounded
    )
    assert len(list(workdir.glob("events*"))) == 3

    single, several = metrics(alone, speeds=False), metrics(workdir, speeds=False)
    last = several[-1]
    assert "train/nll" in last and last["step"] >= 10
    checkpoints = Checkpoints(workdir, read_only=True)
    assert checkpoints.latest() == last["step"] and not checkpoints.evaluated(last["step"])
    checkpoints.close()
    assert Run.open(workdir, "latest").step == last["step"]
    several = [line for line in several if line["step"] < 10]
    assert [(line["step"], sorted(line)) for line in several] == [
        (line["step"], sorted(line)) for line in single
    ]
    for name in "train/nll", "train/gradient_norm", "validation/nll":
        found, wanted = (
            [line[name] for line in lines if name in line] for lines in (several, single)
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.first
def test_a_host_that_fails_alone(start_hosts, flags, tmp_path):
    """After a checkpoint: it says why and ends, and the other one does not wait for ever."""
    (_, err), _, statuses = ended(
        start_hosts("-c", ON_HOSTS % FAIL_ALONE, *flags(tmp_path / "run", **STEPS, steps=100_000))
    )
    assert statuses[0] == 2 and statuses[1] not in (0, None)
    assert "error: cannot write metrics.jsonl: No space left on device" in err
    assert "Traceback" not in err
    assert (tmp_path / "run" / "checkpoints" / "3").is_dir()
