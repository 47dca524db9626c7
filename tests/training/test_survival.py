"""A run that is killed again and again ends as one that was never stopped, bit for bit."""

import random
import shutil
import signal
import time

import pytest

from adaptive_jax.runs.settings import read_config
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
def test_a_run_killed_again_and_again(quick_command, flags, tmp_path, own_cache):
    """Killed once at any time and once while updates are made, and the cache is deleted; continued
    on four devices, losses are within 1e-5.

    With dropout, accumulation and packed rows; tests/training/test_optim_runs.py kills runs with
    averages and a rate that goes by losses, tests/training/test_resuming.py stops those on streams.
    """
    whole, killed, moved = (tmp_path / name for name in ("whole", "killed", "moved"))
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
    step = max(saved(killed))
    shutil.copytree(killed, moved)
    # Rounding errors grow from update to update, so only the next ones are compared.
    next_ones = step + 20
    last = 20 * (step // 20 + 2)
    for workdir, devices, steps in (whole, 1, last), (killed, 1, last), (moved, 4, next_ones):
        done = quick_command("train.py", *flags(workdir, **RUN | {"steps": steps}), devices=devices)
        assert done.returncode == 0, done.stderr

    assert metrics(killed, speeds=False) == metrics(whole, speeds=False)
    assert_close(*(state_of(workdir, read_config(workdir)) for workdir in (killed, whole)), 0)
    ours, theirs = (
        {
            (line["step"], key): value
            for line in metrics(workdir)
            for key, value in line.items()
            if key.endswith("/nll")
        }
        for workdir in (moved, whole)
    )
    continued = [key for key in ours.keys() & theirs.keys() if key[0] > step]
    assert len(continued) >= 3
    assert max(abs(ours[key] - theirs[key]) for key in continued) < 1e-5
