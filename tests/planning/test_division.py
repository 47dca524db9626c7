"""Division of the rows of an update: over any number of devices, of one host or several."""

import functools

import numpy as np
import pytest

from adaptive_jax.data.batches.pipeline import Layout, TrainingBatches
from adaptive_jax.planning.division import divide
from adaptive_jax.planning.plan import (
    describe,
    devices_to_score,
    divide_update,
)
from tests import refuses
from tests.test_configs import CONFIGS
from tests.toys import TEXT, plan_of

DEVICES = 1, 2, 3, 4, 8, 12, 16, 24, 32, 64


def test_every_row_on_every_number_of_devices():
    """42 of 170 rows were refused on 8 devices, 76 on 64: all are planned, and the devices do at
    most a tenth more than their share of the rows wherever rows may be filled up.
    """
    assert len(CONFIGS) >= 170
    for name, config in CONFIGS.items():
        for devices in DEVICES:
            division = divide_update(config, devices)
            held = config["tokens_per_device"] or 4_096
            length = config["batches"]["sequence_length"]
            streams = config["batches"]["layout"] == "streams"
            assert 1 <= division.devices <= devices
            assert division.rows_per_device <= max(1, held // length)
            share = division.microbatches * division.rows_per_device
            empty = share * division.devices - division.rows
            assert empty == 0 or (empty > 0 and not streams and division.devices == devices)
            if not streams:
                ceiling = -(-division.rows // devices)
                assert share <= max(ceiling / 0.9, ceiling + division.microbatches), name


def test_a_plan_with_idle_devices():
    """Five devices of eight share the 20 rows of the AWD-LSTM: memory is counted on five, and one
    line says what all eight need.
    """
    config = CONFIGS["penn_treebank:awd_lstm"]
    plan = plan_of(config, 10_000, 8)
    assert (plan.devices, plan.present, plan.rows_per_device) == (5, 8, 4)
    says = "20 rows an update use 5 of 8 devices; all work with tokens_per_update=1680"
    assert f"devices      {says}" in describe(plan, TEXT).splitlines()
    assert "all work" not in describe(
        plan_of(config | {"tokens_per_update": 1680}, 10_000, 8), TEXT
    )
    even = "even         1, 2, 4, 5, 10 or 20 device(s) share the 20 rows of an update evenly"
    assert describe(plan, TEXT, steps=1).splitlines()[-1] == even
    shared = plan_of(config | {"fsdp": 5}, 10_000, 8)
    assert shared.fsdp == 5 and shared.state_bytes < 0.3 * plan.state_bytes
    with refuses("fsdp=8", "5 of 8", "20 rows", "1 or 5"):
        plan_of(config | {"fsdp": 8}, 10_000, 8)


@pytest.mark.parametrize(
    "rows, devices, hosts, pad, division",
    [
        (20, 8, 1, False, (20, 5, 1, 4)),
        (20, 8, 1, True, (20, 8, 1, 3)),
        (128, 24, 1, False, (128, 16, 1, 8)),
        (128, 24, 1, True, (128, 24, 1, 6)),
        (64, 8, 1, True, (64, 8, 1, 8)),
        (65, 8, 1, False, (65, 5, 13, 1)),  # 13 rows a device: more than it holds, and a prime
        (19, 2, 1, False, (19, 1, 19, 1)),
        (19, 1, 1, True, (19, 1, 3, 7)),
        (100, 3, 1, True, (100, 3, 5, 7)),
        (20, 16, 2, False, (20, 10, 1, 2)),
        (21, 16, 2, True, (21, 16, 1, 2)),
    ],
)
def test_a_division(rows, devices, hosts, pad, division):
    """By hand, for at most 8 rows at a time."""
    assert divide(rows, 8, devices, hosts, pad=pad) == division


def test_hosts_that_do_not_divide_the_rows():
    """Rows that are continued cannot be filled up; the error names what can share them."""
    with refuses("8 hosts", "20 rows", "1, 2, 4 or 5 hosts", "sequence_length"):
        divide(20, 8, 64, 8, pad=False)


def test_devices_that_evaluate():
    """All, whatever shared the rows of training, unless the config's copies need fewer: a model
    that only five devices hold was evaluated whole on each of eight.
    """
    counts = [devices_to_score({"fsdp": n}, 8) for n in (0, 1, 4, 5, 16)]
    assert counts == [8, 8, 8, 5, 8]
    assert devices_to_score({"fsdp": 3}, 16, hosts=2) == 12


@pytest.mark.parametrize(
    "layout, mode", [("packed", "none"), ("packed", "eos"), ("similar", "eos")]
)
def test_rows_that_are_filled_up(layout, mode):
    """5 rows as 2 microbatches of 4 devices on 2 hosts: the rows are those of one device, in their
    order and by their numbers, and the others weigh nothing.
    """
    ids = np.random.default_rng(0).integers(1, 9, 400).astype(np.int32)
    ids[::7] = 0
    make = functools.partial(TrainingBatches, ids, 0, Layout(16, mode, layout), 5)
    one, several = make(), make(2, 4)
    assert several.per_microbatch == 4
    for step in range(9):
        undivided = one.batch(3, step)
        rows = undivided.inputs.shape[1]
        shares = [several.batch(3, step, (host, 2)) for host in (0, 1)]
        assert {share.inputs.shape[:2] for share in shares} == {(2, -(-rows // 8) * 2)}
        for name, array in undivided._asdict().items():
            if array is None:
                continue
            parts = [getattr(share, name) for share in shares]
            joined = np.concatenate(parts, axis=1).reshape(-1, *array.shape[2:])
            np.testing.assert_array_equal(joined[:rows], array[0], err_msg=name)
            assert name != "weights" or not joined[rows:].any()
