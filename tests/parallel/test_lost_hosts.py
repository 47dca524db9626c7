"""Hosts that are lost, wait, share no disk or get a signal: two processes of four devices, and what
each of them says.
"""

import json
import re
import signal

import pytest

from adaptive_jax.parallel import hosts
from tests import refuses
from tests.conftest import until
from tests.parallel.test_hosts import reached
from tests.training.test_stopping import STOPPING, saved

LONG = {"steps": 100_000, "log_every": 1, "evaluate_every": 0, "checkpoint_every": 3}
WAITS = "host {host} of 2 waits at 127.0.0.1:\\d+ for the others, up to 300 s\n"
SECONDS = 200  # on a busy machine; 12 on a quiet one


def said(process, host):
    """The lines that a host wrote to stderr after it said that it waits for the other, but for one
    about the corpus, which the other may be preparing.
    """
    err = process.communicate(timeout=SECONDS)[1]
    waits = re.match(WAITS.format(host=host), err)
    assert waits, err
    return re.sub("warning: another process is making .*\n", "", err[waits.end() :])


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """That of the run of these tests."""
    return tmp_path_factory.mktemp("lost") / "run"


@pytest.mark.first
def test_a_signal_stops_all_hosts(start_hosts, flags, workdir):
    """SIGUSR1 on both, as SLURM sends it, then SIGHUP and SIGTERM on one: both save the same update
    and end with status 75.
    """
    processes = start_hosts("train.py", *flags(workdir, **LONG), devices=4)
    until(reached(workdir, 4), *processes)
    processes[0].send_signal(signal.SIGUSR1)
    for number in signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM:
        processes[1].send_signal(number)
    errors = [said(process, host) for host, process in enumerate(processes)]
    step = max(saved(workdir))
    stopped = f"stopped after update {step:,} of 100,000, which is saved: the same command resumes"
    assert errors == [f"{STOPPING}{stopped}\n", STOPPING]
    assert [process.returncode for process in processes] == [75, 75] and step >= 4
    out = processes[0].communicate()[0]
    assert "= 1 x 4 rows x 8 device(s)" in out and "Gloo" not in out


@pytest.mark.first
@pytest.mark.parametrize("host", [1, 0])
def test_a_host_that_is_killed(start_hosts, flags, workdir, host):
    """The other one ends with an error instead of waiting for ever; the same command resumes the
    run, as the second of these tests does.
    """
    # Beyond what an earlier run wrote, whose last updates had no checkpoint
    metrics = workdir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    last = max((json.loads(line)["step"] for line in lines), default=0)
    processes = start_hosts("train.py", *flags(workdir, **LONG), devices=4)
    until(reached(workdir, last + 2), *processes)
    processes[host].send_signal(signal.SIGKILL)
    err = said(processes[1 - host], 1 - host)
    assert processes[1 - host].returncode != 0 and err


@pytest.mark.first
def test_a_workdir_that_is_not_shared(start_hosts, flags, tmp_path):
    """Both end at once, and one says why."""
    processes = start_hosts("train.py", *flags(f"{tmp_path}/run{{host}}", **LONG), devices=4)
    errors = [said(process, host) for host, process in enumerate(processes)]
    cure = "use a --workdir on a disk that they share, or gs://BUCKET/NAME"
    assert errors == [f"error: {tmp_path}/run0 is not the same on all hosts: {cure}\n", ""]
    assert [process.returncode for process in processes] == [2, 2]
    assert not [path for path in tmp_path.glob("run?/*") if "vocabulary" in path.name]


def test_a_host_that_waits_says_so(monkeypatch, capsys):
    """At once and at every reminder."""
    monkeypatch.setattr(hosts, "START_TIMEOUT", 3)
    monkeypatch.setattr(hosts, "REMINDER", 1)

    class Never:
        def result(self, timeout):
            raise TimeoutError

    with refuses("host 0 of 2", "a:1"):
        hosts._wait_for_others(Never(), "host 0 of 2", "at a:1")
    assert capsys.readouterr().err.splitlines() == [
        "host 0 of 2 waits at a:1 for the others, up to 3 s",
        "host 0 of 2 still waits at a:1 for the others, 1 of 3 s",
        "host 0 of 2 still waits at a:1 for the others, 2 of 3 s",
    ]
