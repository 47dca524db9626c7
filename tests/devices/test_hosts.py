"""Several hosts: real processes on loopback that train, evaluate, fail and stop together, against one process alone."""

import contextlib
import json
import re
import signal
import socket
import time

import jax
import numpy as np
import pytest

from adaptive_jax.data.vocabulary.subwords import read_vocabulary
from adaptive_jax.devices import hosts, sharding
from adaptive_jax.errors import InputError
from adaptive_jax.evaluation import scoring
from adaptive_jax.model import build
from adaptive_jax.training import loop as training
from adaptive_jax.training import optim
from adaptive_jax.training.state import shape_of_state
from adaptive_jax.workdir import checkpoints

STEPS = {"log_every": 1, "evaluate_every": 7, "checkpoint_every": 7, "body.dropout": 0.1, "input.cutoffs": (60,)}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
TPU = {"TPU_ML_PLATFORM": "JAX"}


@pytest.mark.parametrize("environment, told", [
    ({}, None),
    ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, None),  # python without srun
    (SRUN, {}),
    (SRUN | {"SLURM_NTASKS": "1"}, None),
    (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # a step of one task, in a job of four
    (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_GPUS_ON_NODE": "2"}, {}),
    (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_GPUS_ON_NODE": "3"}, {"local_device_ids": [0, 1, 2]}),
    (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, {}),
    ({"TPU_WORKER_HOSTNAMES": "a,b"}, None),  # no TPU that jax could use
    (TPU, {}),
    (TPU | {"JAX_PLATFORMS": "cpu"}, None),
    (TPU | {"TPU_SKIP_MDS_QUERY": "1"}, None),
    (TPU | {"TPU_WORKER_HOSTNAMES": "a,b"}, {}),
    (TPU | {"TPU_WORKER_HOSTNAMES": "localhost"}, None),
    (TPU | {"TPU_PROCESS_ADDRESSES": "local", "TPU_WORKER_HOSTNAMES": "a,b"}, None),
    (TPU | {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, {}),
])
def test_what_the_environment_says(environment, told):
    """A process of several is known by its environment alone, and one that is alone is told nothing."""
    assert hosts.meeting(None, None, None, environment) == told


def test_what_the_flags_say():
    """They come before the environment, and one host of one is alone."""
    told = hosts.meeting("a:1234", 2, 1, SRUN)
    assert told.pop("cluster_detection_method") == "deactivate"
    assert told == {"coordinator_address": "a:1234", "num_processes": 2, "process_id": 1}
    assert hosts.meeting("a:1234", 1, 0, SRUN) is None


@pytest.mark.parametrize("flags, says", [
    (("a:1", 2, None), ["--host=None", "all three"]),
    ((None, None, 0), ["--coordinator=None", "--host=0", "all three"]),
    (("a", 2, 0), ["--coordinator=a ", "HOST:PORT"]),
    (("a:1", 2, 2), ["--host=2", "0 to 1"]),
    (("a:1", 2, -1), ["--host=-1", "0 to 1"])])
def test_wrong_flags(flags, says):
    """One line with the value and the cure."""
    with pytest.raises(InputError) as error:
        hosts.meeting(*flags, {})
    assert all(part in str(error.value) for part in says), error.value


@pytest.mark.parametrize("host", [0, 1])
def test_a_host_that_nobody_meets(command, host):
    """It says where it looked, for how long, and ends."""
    run = f"hosts.MEETING = 1; hosts.initialize('127.0.0.1:{free_port()}', 2, {host})"
    done = command("-c", f"from adaptive_jax import command, hosts\ndef main():\n {run}\ncommand.run(main)")
    assert done.returncode == 2
    assert re.fullmatch(rf"error: host {host} has not met the others at 127.0.0.1:\d+ within 1 seconds: .+\n", done.stderr)


@pytest.mark.parametrize("script", [["train.py", "--config=configs/quickstart.py"], ["evaluate.py"]])
def test_a_workdir_in_a_bucket(command, script):
    """It would be a directory called gs: on each host's own disk."""
    done = command(*script, "--workdir=gs://bucket/run")
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*--workdir=gs://bucket/run.* must be a directory on a disk.*\n", done.stderr)


def test_a_workdir_of_its_own(config, text, tmp_path, monkeypatch):
    """A host that does not see what the first has written says so."""
    monkeypatch.setattr(hosts, "first", lambda: False)
    monkeypatch.setattr(checkpoints, "SEEN", 0)
    with pytest.raises(InputError, match=r"run is not the same on all hosts: give a --workdir on a disk that they share"):
        training.train(config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def free_port():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        return server.getsockname()[1]


@pytest.fixture
def start_hosts(start):
    """`start_hosts("train.py", *flags, devices=2)`: the script as two processes, killed at the end of the test."""
    started = []

    def start_hosts(*arguments, devices=1):
        address = f"127.0.0.1:{free_port()}"
        pair = [start(*arguments, f"--coordinator={address}", "--hosts=2", f"--host={host}", devices=devices)
                for host in range(2)]
        started.extend(pair)
        return pair

    yield start_hosts
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def on_hosts(start_hosts):
    """`on_hosts("train.py", *flags, devices=2)`: status, stdout and stderr of both hosts, run to their end."""

    def on_hosts(*arguments, **options):
        return [(*process.communicate(timeout=200), process.returncode) for process in start_hosts(*arguments, **options)]

    return on_hosts


def said(out):
    """What the project prints, without the lines of the library that connects CPUs."""
    return "".join(line for line in out.splitlines(keepends=True) if not line.startswith("[Gloo]"))


def metrics(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def parameters(workdir, step):
    """As one process reads them."""
    config, vocabulary = checkpoints.read_config(workdir), read_vocabulary(workdir / "vocabulary.txt")
    optimizer, _ = optim.from_config(config["optimizer"])
    saved = checkpoints.Checkpoints(workdir, read_only=True)
    state = saved.restore(step, shape_of_state(build(config, vocabulary), optimizer, sharding.device_mesh()))
    saved.close()
    assert state.step == step
    return state.params


@pytest.fixture(scope="module")
def alone(config, tmp_path_factory):
    """20 updates by one process."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    training.train(config(**STEPS, steps=20), workdir)
    return workdir


@pytest.mark.slow
def test_two_hosts_are_one(on_hosts, flags, config, alone, tmp_path):
    """Two hosts from a cold cache, then one process, then two hosts of two devices each: the updates of one process alone.

    Dropout is on. What is written and said is so once.
    """
    workdir, own = tmp_path / "run", STEPS | {"data.cache": str(tmp_path / "cache")}
    (out, err, status), (silence, other_err, other_status) = on_hosts("train.py", *flags(workdir, **own, steps=7))
    assert (status, other_status) == (0, 0), (err, other_err)
    assert "step 7/7  validation" in out
    assert not said(silence)
    assert not [path for path in (tmp_path / "cache").rglob(".*") if path.suffix != ".lock"]
    training.train(config(**STEPS, steps=14), workdir)
    (out, err, status), (silence, other_err, other_status) = on_hosts(
        "train.py", *flags(workdir, **own, steps=20), devices=2)
    assert (status, other_status) == (0, 0), (err, other_err)
    assert "= 1 x 8 rows x 4 device(s)" in out
    assert "after 14 of 20 updates" in out
    assert not said(silence)

    one, several = metrics(alone), metrics(workdir)
    assert [(line["step"], sorted(line)) for line in several] == [(line["step"], sorted(line)) for line in one]
    for name in "train/nll", "train/gradient_norm", "validation/nll":
        np.testing.assert_allclose([line[name] for line in several if name in line],
                                   [line[name] for line in one if name in line], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
                 parameters(workdir, 20), parameters(alone, 20))
    assert len(list(workdir.glob("events*"))) == 3


def test_evaluation_by_two_hosts(on_hosts, alone):
    """The result of one process, written and said once, with windows that do not share out evenly."""
    one = scoring.evaluate(alone, split="test", window=7, context=4, checkpoint="latest", data_path=None)
    path = alone / "eval" / "test-7-4-20.json"
    path.unlink()
    (out, err, status), (silence, _, other_status) = on_hosts(
        "evaluate.py", f"--workdir={alone}", "--window=7", "--context=4", "--checkpoint=latest", devices=2)
    assert (status, other_status) == (0, 0), err
    two = json.loads(path.read_text())
    assert two.pop("nll") == pytest.approx(one["nll"], rel=1e-6)
    assert two.pop("perplexity") == pytest.approx(one["perplexity"], rel=1e-5)
    assert two == json.loads(json.dumps({key: value for key, value in one.items() if key in two}))
    assert out.count("test: perplexity") == 1
    assert not said(silence)


def test_an_error_of_all_is_said_once(on_hosts, flags, tmp_path):
    """Both end with status 2, one with a line."""
    (_, err, status), (_, silence, other_status) = on_hosts("train.py", *flags(tmp_path / "run", **{"body.heads": 5}))
    assert (status, other_status) == (2, 2)
    assert re.fullmatch(r"error: .*5 heads.*\n", err)
    assert silence == ""


def begun(start_hosts, flags, workdir):
    """Two hosts in the middle of a long run."""
    steps = {"steps": 100_000, "log_every": 1, "evaluate_every": 1_000_000, "checkpoint_every": 1_000_000,
             "input.cutoffs": (60,)}
    processes = start_hosts("train.py", *flags(workdir, **steps))
    deadline, path = time.monotonic() + 120, workdir / "metrics.jsonl"
    while not (path.exists() and path.stat().st_size) and time.monotonic() < deadline:
        assert not any(process.poll() for process in processes), [process.communicate() for process in processes]
        time.sleep(0.1)
    return processes


def test_hosts_stop_together(start_hosts, flags, tmp_path):
    """Ctrl-C on the second, which jax is told as SIGTERM: both save the same step and end with status 130 and one line."""
    processes = begun(start_hosts, flags, tmp_path / "run")
    processes[1].send_signal(signal.SIGINT)
    (_, err), (_, silence) = (process.communicate(timeout=60) for process in processes)
    assert [process.returncode for process in processes] == [130, 130], err
    assert [line for line in (err + silence).splitlines() if "SIGTERM caught" not in line] == [
        "stopped; the same command goes on from the last checkpoint"]
    last = metrics(tmp_path / "run")[-1]
    assert parameters(tmp_path / "run", last["step"])
    assert "validation/nll" in last


@pytest.mark.parametrize("killed", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_host_that_is_killed(start_hosts, flags, tmp_path, killed):
    """The other one does not wait for ever."""
    processes = begun(start_hosts, flags, tmp_path / "run")
    processes[killed].kill()
    processes[1 - killed].communicate(timeout=100)
    assert processes[1 - killed].returncode not in (0, None)
