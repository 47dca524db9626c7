"""Checkpoints: which are kept, which items are read, and workdirs of before."""

import json
import math
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from adaptive_jax.config.keys import resolve
from adaptive_jax.errors import InputError
from adaptive_jax.workdir.checkpoints import Checkpoints
from adaptive_jax.workdir.integrity import CHECKSUMS
from adaptive_jax.workdir.settings import read_config, to_json
from configs import quickstart


def test_the_latest_and_the_best_are_kept(tmp_path):
    """With keep=2: the two latest, and the best by validation however old; the same after
    opening the directory again.
    """
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, nll in enumerate([3.0, 1.0, 2.0, 4.0, 5.0], start=1):
        checkpoints.save(step, {"params": {"a": jnp.full(3, step)}, "carry": ()}, nll)
    checkpoints.close()
    again = Checkpoints(tmp_path, keep=2)
    assert {path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir()} == {
        "2",
        "4",
        "5",
    }
    assert (again.latest(), again.best(), again.step("4")) == (5, 2, 4)
    assert again.restore(2, {"params": {"a": jnp.zeros(3, jnp.int32)}})["params"]["a"].tolist() == [
        2,
        2,
        2,
    ]
    again.close()


def test_items_are_read_one_by_one(tmp_path):
    """Parameters are read without knowing of the optimizer; an item without arrays is not saved
    and comes back as it is.
    """
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(
        3, {"params": {"a": jnp.arange(3)}, "optimizer": (jnp.ones(2), ()), "carry": ()}, 1.0
    )
    checkpoints.close()
    reader = Checkpoints(tmp_path, read_only=True)
    assert reader.restore(3, {"params": {"a": jnp.zeros(3, jnp.int32)}})["params"][
        "a"
    ].tolist() == [0, 1, 2]
    both = reader.restore(3, {"optimizer": (jnp.zeros(2), ()), "carry": ()})
    assert both["carry"] == () and both["optimizer"][0].tolist() == [1, 1]
    with pytest.raises(InputError, match="cannot be read"):
        reader.restore(3, {"params": {"b": jnp.zeros(3, jnp.int32)}})
    reader.close()


def test_a_checkpoint_without_a_validation_loss(tmp_path):
    """It is the latest and never the best, does not stay beyond `keep`, and alone is what
    "best" means.
    """
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"params": {"a": jnp.zeros(1)}}, None)
    assert (checkpoints.step("best"), checkpoints.evaluated(1)) == (1, False)
    for step, nll in (2, 5.0), (3, None), (4, 6.0), (5, None):
        checkpoints.save(step, {"params": {"a": jnp.zeros(1)}}, nll)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, read_only=True)
    assert sorted(checkpoints.manager.all_steps()) == [2, 5]
    assert (checkpoints.best(), checkpoints.latest(), checkpoints.step("best")) == (2, 5, 2)
    checkpoints.close()


def test_a_config_is_read_as_it_was_written(tmp_path):
    """JSON has no infinity and no tuples."""
    config = resolve(quickstart.get_config())
    config["divergence"]["loss"] = math.inf
    (tmp_path / "config.json").write_text(to_json(config))
    assert read_config(tmp_path) == config


def test_a_run_of_an_earlier_version_is_told_in_one_line(tmp_path):
    """By its keys: some are missing, others are not known any more. Read with defaults, it would
    be another model than the one that was trained.
    """
    config = resolve(quickstart.get_config())
    del config["body"]["positions"]
    (tmp_path / "config.json").write_text(to_json(config))
    with pytest.raises(
        InputError,
        match=(
            rf"^{tmp_path}/config.json was written by an earlier version of adaptive_jax, or "
            r"changed \(config\.body\.positions .*\): train again, or use that version$"
        ),
    ):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        *(
            {key: ...}
            for key in (
                "body",
                "data",
                "dtype",
                "fsdp",
                "input",
                "output",
                "seed",
                "tokens_per_update",
            )
        ),
        {"batches": {}},
        {"body": 3},
        {"body": {"name": "transformer"}},
        {"output": {"name": "none"}},
        {"steps": "ten"},
        {"data": []},
        {"input": None},
        {"stepz": 3},
    ],
    ids=str,
)
def test_a_config_that_is_not_complete(tmp_path, change):
    """The file and the key are named, whatever is missing or wrong."""
    config = resolve(quickstart.get_config()) | change
    (tmp_path / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not ...})
    )
    with pytest.raises(InputError, match=rf"config\.json .*{next(iter(change))}") as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)


def test_json_is_standard():
    """No infinity and no NaN, however deep."""
    assert to_json({"a": [math.inf, {"b": (np.nan, 1.5)}]}) == '{"a": [null, {"b": [null, 1.5]}]}'


def saved_run(workdir):
    """Two checkpoints of known arrays; the shapes to restore them, and the step of the newest."""
    checkpoints = Checkpoints(workdir, keep=2)
    items = {
        "params": {"a": jnp.arange(3000.0), "b": {"c": jnp.ones(7)}},
        "optimizer": (jnp.arange(5), ()),
    }
    for step in 1, 2:
        checkpoints.save(step, jax.tree.map(lambda a, step=step: a * step, items), 3.0 - step)
    checkpoints.close()
    return items


def damage(path, how):
    """Damages a file in one of several ways."""
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        middle = len(data) // 2
        changed = {
            "empty": b"",
            "half": data[:middle],
            "flip": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
        }
        path.write_bytes(changed[how])


@pytest.mark.parametrize("how", ["half", "flip", "gone"])
def test_every_damaged_file_is_noticed(tmp_path, caplog, how):
    """The damaged checkpoint is told and put aside, and the one before is used with its own
    numbers.
    """
    items = saved_run(tmp_path / "run")
    names = [
        path.relative_to(tmp_path / "run")
        for path in (tmp_path / "run" / "checkpoints" / "2").rglob("*")
        if path.is_file()
    ]
    assert len(names) > 10
    for number, name in enumerate(names):
        if name.name in (CHECKSUMS, "commit_success.txt"):
            continue
        workdir = shutil.copytree(tmp_path / "run", tmp_path / str(number))
        damage(workdir / name, how)
        caplog.clear()
        checkpoints = Checkpoints(workdir, keep=2)
        assert checkpoints.latest() == 1, name
        assert "checkpoint 2 is damaged" in caplog.text and "2.damaged" in caplog.text
        assert (workdir / "checkpoints" / "2.damaged").is_dir()
        restored = checkpoints.restore(1, items)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), restored, items))
        checkpoints.close()


def test_a_damaged_list_of_checksums(tmp_path, caplog):
    """It hides no damage: the files themselves are read. A whole checkpoint stays in use."""
    items = saved_run(tmp_path)
    sums = tmp_path / "checkpoints" / "2" / CHECKSUMS
    sums.write_bytes(sums.read_bytes()[:200])
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() == 2
    checkpoints.close()
    for path in (tmp_path / "checkpoints" / "2" / "params" / "d").iterdir():
        damage(path, "half")
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.latest() == 1 and "checkpoint 2 is damaged" in caplog.text
    assert jax.tree.all(
        jax.tree.map(lambda a, b: (a == b).all(), checkpoints.restore(1, items), items)
    )
    checkpoints.close()


@pytest.mark.parametrize("how", ["empty", "gone"])
def test_damage_where_there_are_no_checksums(tmp_path, caplog, how):
    """Of a checkpoint that a killed process left: noticed, or the numbers are right all the
    same.
    """
    items = saved_run(tmp_path / "run")
    (tmp_path / "run" / "checkpoints" / "2" / CHECKSUMS).unlink()
    noticed = 0
    for number, path in enumerate((tmp_path / "run" / "checkpoints" / "2").rglob("*")):
        if not path.is_file():
            continue
        workdir = shutil.copytree(tmp_path / "run", tmp_path / str(number))
        damage(workdir / path.relative_to(tmp_path / "run"), how)
        checkpoints = Checkpoints(workdir, keep=2)
        step = checkpoints.latest()
        noticed += step == 1
        try:
            restored = checkpoints.restore(step, items)
        except InputError as error:
            assert "the run has steps 1 as well" in str(error)
        else:
            assert jax.tree.all(
                jax.tree.map(lambda a, b, step=step: (a == b * step).all(), restored, items)
            )
        checkpoints.close()
    assert noticed >= 5


def test_no_whole_checkpoint(tmp_path):
    """All are told, none is renamed, and nothing starts anew in silence; a reader names the
    file.
    """
    items = saved_run(tmp_path)
    for step in "12":
        for path in (tmp_path / "checkpoints" / step / "params" / "d").iterdir():
            damage(path, "half")
    for _ in range(2):
        with pytest.raises(
            InputError,
            match=r"no checkpoint in .* can be read \(2: params/d/.* has changed; 1: params/d/",
        ):
            Checkpoints(tmp_path)
    reader = Checkpoints(tmp_path, read_only=True)
    with pytest.raises(
        InputError,
        match=(
            r"checkpoints/2 cannot be read \(params/d/.* has changed\); the run has steps 1 as well"
        ),
    ):
        reader.restore(2, items)
    reader.close()
    shutil.rmtree(tmp_path / "checkpoints" / "1")
    reader = Checkpoints(tmp_path, read_only=True)
    with pytest.raises(InputError, match="there is no other in this run"):
        reader.restore(2, items)
    reader.close()


def test_nothing_older_goes_before_the_newer_is_verified(tmp_path, caplog):
    """A checkpoint that cannot be read back leaves those before it in place; the next one that
    can be lets them go.
    """
    checkpoints = Checkpoints(tmp_path)
    for step in 1, 2, 3:
        checkpoints.save(step, {"params": {"a": jnp.zeros(9)}}, None)
        checkpoints.manager.wait_until_finished()
        assert sorted(checkpoints.manager.all_steps()) == {1: [1], 2: [1, 2], 3: [1, 3]}[step]
        if step == 2:
            damage(tmp_path / "checkpoints" / "2" / "params" / "manifest.ocdbt", "half")
    checkpoints.save(4, {"params": {"a": jnp.zeros(9)}}, None)
    assert "checkpoint 2 is damaged" in caplog.text
    checkpoints.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2.damaged", "4"]


def test_one_checkpoint_every_so_many_hours(tmp_path):
    """Of checkpoints made an hour apart, every 1.5 hours: the first, every second one, and the
    last.
    """
    checkpoints, begin = Checkpoints(tmp_path, 1, 1.5), time.time() - 360_000
    for step in range(1, 7):
        checkpoints.save(step, {"params": {"a": jnp.zeros(9)}}, None)
        checkpoints.verify()
        facts = tmp_path / "checkpoints" / str(step) / "_CHECKPOINT_METADATA"
        facts.write_text(
            json.dumps(
                json.loads(facts.read_text())
                | {"init_timestamp_nsecs": int((begin + 3600 * step) * 1e9)}
            )
        )
    checkpoints.close()
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"1", "3", "5", "6"}


def test_a_loss_that_is_known_later(tmp_path):
    """The checkpoint is then evaluated, and the best one if its loss is lowest; after opening
    the directory again, too.
    """
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, nll in (1, 2.0), (2, None):
        checkpoints.save(step, {"params": {"a": jnp.zeros(9)}}, nll)
    checkpoints.verify()
    assert (checkpoints.best(), checkpoints.evaluated(2)) == (1, False)
    checkpoints.record_loss(2, 1.5)
    checkpoints.close()
    again = Checkpoints(tmp_path, keep=2)
    assert (again.best(), again.evaluated(2), again.latest()) == (2, True, 2)
    again.close()


def test_the_last_checkpoint_is_verified_before_anyone_is_told(tmp_path):
    """`verify` raises where it cannot be read back, and sets it aside."""
    checkpoints = Checkpoints(tmp_path)
    for step in 1, 2:
        checkpoints.save(step, {"params": {"a": jnp.zeros(9)}}, None)
    checkpoints.manager.wait_until_finished()
    damage(tmp_path / "checkpoints" / "2" / "params" / "manifest.ocdbt", "half")
    with pytest.raises(InputError, match="checkpoint 2 cannot be read back: check the disk"):
        checkpoints.verify()
    assert (checkpoints.latest(), checkpoints.verify()) == (1, None)
    checkpoints.close()
