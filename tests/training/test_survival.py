"""A run that is killed again and again ends as one that was never stopped, bit for bit."""

import random
import shutil
import signal
import time

import pytest

from adaptive_jax.runs.settings import read_config
from adaptive_jax.training.loop import train
from tests.training.test_metrics import metrics
from tests.training.test_runs import assert_close, state_of
from tests.training.test_stopping import saved

KILLS = 2
RUN = {
    "steps": 800,  # more than are made: the last kill comes before update 200
    "log_every": 7,
    "evaluate_every": 20,
    "checkpoint_every": 5,
    "tokens_per_device": 128,
    "output.tail_dropout": 0.2,
    "output.input_dropout": 0.1,
    "body.dropout": 0.2,
    "optimizer.learning_rate": 0.05,
}
RUN |= {"batches.break_mode": "complete", "batches.layout": "packed"}
RUN |= {"body.attention_dropout": 0.1, "body.activation_dropout": 0.1}


@pytest.mark.first
def test_a_run_killed_again_and_again(quick_command, flags, config, tmp_path, own_cache):
    """Killed once at any time and once while updates are made, and the cache is deleted.

    With dropout, accumulation and packed rows; tests/training/test_optim_runs.py kills runs with
    averages and a rate that goes by losses, tests/training/test_resuming.py stops those on streams,
    tests/training/test_any_devices.py moves runs to other numbers of devices.
    """
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    bits = random.Random(0)
    for number in range(KILLS):
        before = max(saved(killed), default=0)

        def until(number=number, before=before):
            deadline = time.monotonic() + 120  # a run that has failed saves no more
            while number and max(saved(killed), default=0) <= before:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            time.sleep(bits.uniform(0, 0.3 if number else 3))

        line = *flags(killed, **RUN), f"--cache_dir={own_cache}"
        done = quick_command("train.py", *line, until=until)
        assert done.returncode == -signal.SIGKILL, done.stderr
        if number == 0:
            shutil.rmtree(own_cache, ignore_errors=True)  # it may not be there yet
    last = 20 * (max(saved(killed)) // 20 + 2)
    for workdir in uninterrupted, killed:
        train(config(**RUN | {"steps": last}), workdir)
    assert metrics(killed, speeds=False) == metrics(uninterrupted, speeds=False)
    states = (state_of(workdir, read_config(workdir)) for workdir in (killed, uninterrupted))
    assert_close(*states, 0)
