"""Runs on numbers of devices that do not divide the rows: the updates are those of one device."""

import functools
import json

import jax
import numpy as np
import pytest

from adaptive_jax.training.loop import train
from tests.training.conftest import RUNS
from tests.training.test_metrics import metrics
from tests.training.test_runs import state_of

ROWS = {
    # 20 rows: 8 devices share 24, four of them empty; of 6 devices five work
    "packed": (
        RUNS["transformer"]
        | {"tokens_per_update": 320, "batches.break_mode": "complete", "batches.layout": "packed"}
    ),
    # 14 rows: of 8 devices seven work, of 6 two
    "streams": RUNS["streams"] | {"tokens_per_update": 840},
}
SAYS = {
    "packed": [
        "320 tokens = 1 x 3 rows x 8 device(s), 4 of them empty",
        "20 rows an update use 5 of 6 devices; all work with tokens_per_update=288",
    ],
    "streams": [
        "14 rows an update use 7 of 8 devices; all work with tokens_per_update=960",
        "14 rows an update use 2 of 6 devices; all work with tokens_per_update=720",
    ],
}

TRAIN = """
import json, pathlib, sys
import jax
from adaptive_jax.training.loop import train
from tests.shared_programs import sharing
config, workdir, present = json.loads(sys.argv[1]), pathlib.Path(sys.argv[2]), jax.devices
def run(name, count, steps):
    jax.devices, jax.device_count = lambda: present()[:count], lambda: count
    try:
        train(config | {"steps": steps}, workdir / name)
    finally:
        jax.devices, jax.device_count = present, lambda: len(present())
with sharing():
    run("moved", 8, 2), run("moved", 6, 4), run("eight", 8, 4), run("six", 6, 4)
"""


@pytest.fixture(scope="module")
def on_devices(run_config, eight, tmp_path_factory):
    """`on_devices("packed")`: the config of a run; its directory, where `one`, `eight` and `six`
    are runs on so many devices and `moved` went from 8 to 6 to 1; what the runs printed.
    """

    @functools.cache
    def on_devices(name):
        workdir = tmp_path_factory.mktemp("devices")
        run = "transformer" if name == "packed" else name
        config = run_config(run, **ROWS[name], checkpoint_every=2, evaluate_every=2)
        out = eight(TRAIN, json.dumps(config), workdir)
        for changed in "one", "moved":
            train(config | {"steps": 6}, workdir / changed)
        return config, workdir, out

    return on_devices


def losses(workdir):
    """Losses and norms of gradients that a run logged, by step and name."""
    names = "train/nll", "train/gradient_norm", "validation/nll"
    return {
        (line["step"], name): line[name]
        for line in metrics(workdir)
        for name in names
        if name in line
    }


@pytest.mark.parametrize("name", ROWS)
def test_every_number_of_devices_makes_the_same_updates(name, on_devices):
    """On 8 and 6 devices, and moved from 8 to 6 to 1: losses, of the validation split as well,
    parameters, the optimizer's state and carries; and a line says what is used.
    """
    config, workdir, printed = on_devices(name)
    assert all(says in printed for says in SAYS[name]), printed
    one = losses(workdir / "one")
    for run, steps in ("eight", 4), ("six", 4), ("moved", 6):
        logged = losses(workdir / run)
        assert len(logged) == 2.5 * steps  # two of each update, one of every second
        assert logged == pytest.approx({key: one[key] for key in logged}, rel=2e-6)
        ours, theirs = (state_of(workdir / which, config, steps) for which in (run, "one"))
        assert (jax.tree.leaves(theirs.carry) != []) == (name == "streams")
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=5e-6), ours, theirs)
