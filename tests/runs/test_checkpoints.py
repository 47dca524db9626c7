"""Checkpoints: which are kept, which items are read, and that no damaged one is used."""

import contextlib
import functools
import json
import math
import os
import random
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from adaptive_jax.config.keys import resolve
from adaptive_jax.errors import InputError
from adaptive_jax.interop.export import export
from adaptive_jax.runs import checkpoints as module
from adaptive_jax.runs.checkpoints import CHECKSUMS, Checkpoints, steps_in
from adaptive_jax.runs.parameters import read_parameters
from adaptive_jax.runs.settings import read_config, to_json
from adaptive_jax.scores.evaluate import Request, evaluate
from adaptive_jax.text.load import load
from adaptive_jax.training.finetuning import finetuned
from configs import quickstart
from tests import refuses


def test_a_folder_of_other_digits_is_no_checkpoint(tmp_path):
    """It was a traceback of whatever opened the run."""
    for name in "3", "٣", "x3", "12":
        (tmp_path / name).mkdir()
    assert module.steps_in(tmp_path) == [12, 3]


def test_the_latest_and_the_best_are_kept(tmp_path):
    """With keep=2: the two latest, and the best by validation however old; the same after
    opening the directory again.
    """
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, nll in enumerate([3.0, 1.0, 2.0, 4.0, 5.0], start=1):
        checkpoints.save(step, {"params": {"a": jnp.full(3, step)}, "carry": ()}, nll)
    checkpoints.close()
    again = Checkpoints(tmp_path, keep=2)
    assert steps_in(tmp_path / "checkpoints") == [5, 4, 2]
    assert (again.latest(), again.best(), again.step("4")) == (5, 2, 4)
    assert again.restore(2, {"params": {"a": jnp.zeros(3, jnp.int32)}})["params"]["a"].tolist() == [
        2,
        2,
        2,
    ]
    again.close()


def test_saving_never_asks_whether_to_stop(tmp_path, monkeypatch):
    """JAX stops all hosts at a number that follows the last one asked for. Orbax asked for the
    number of the update, `hosts.stopping` for its count of calls: a run that was resumed on
    several hosts never reached the number, and went on after Ctrl-C.
    """
    numbers = []
    monkeypatch.setattr(
        multihost_utils, "reached_preemption_sync_point", lambda step: bool(numbers.append(step))
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(7, {"params": {"a": jnp.zeros(3)}}, 1.0)
    checkpoints.close()
    assert (numbers, steps_in(tmp_path / "checkpoints")) == ([], [7])


def test_hours_that_cannot_be_read(tmp_path):
    """They count from 0."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(3, {"params": {"a": jnp.arange(3)}}, 1.0, hours=2.5)
    checkpoints.close()
    for content, hours in ("", 2.5), ("{not", 0.0):
        if content:
            (tmp_path / "checkpoints" / "3" / "_CHECKPOINT_METADATA").write_text(content)
        reader = Checkpoints(tmp_path, read_only=True)
        assert reader.hours(3) == hours
        reader.close()


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
    with refuses("checkpoints/3"):
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


def test_a_run_of_an_earlier_version_is_told_in_one_line(tmp_path):
    """By its keys: some are missing, others are not known any more. Read with defaults, it would
    be another model than the one that was trained.
    """
    config = resolve(quickstart.get_config())
    del config["body"]["positions"]
    (tmp_path / "config.json").write_text(to_json(config))
    with refuses(f"{tmp_path}/config.json", "earlier version", "config.body.positions"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        *({key: ...} for key in ("body", "dtype", "seed", "tokens_per_update")),
        {"batches": {}},
        {"body": {"name": "transformer"}},
        {"output": {"name": "none"}},
        {"steps": "ten"},
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
    with refuses("config.json", *change):
        read_config(tmp_path)


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


def test_a_checkpoint_that_a_training_deletes_while_a_reader_opens(tmp_path, monkeypatch):
    """Whenever that is: Orbax lists checkpoints and then looks at each, and a reader ended in the
    traceback of the second look.
    """
    saved_run(tmp_path / "run")
    looks = deletions = 0

    def deleting(path, *arguments, stat=os.stat, **options):
        nonlocal looks, deletions
        if str(path) == str(deleted):
            looks += 1
            if looks == last and deleted.exists():
                monkeypatch.setattr(os, "stat", stat)
                shutil.rmtree(deleted)
                deletions += 1
        return stat(path, *arguments, **options)

    for last in range(1, 100):
        workdir = shutil.copytree(tmp_path / "run", tmp_path / str(last))
        deleted, looks, before = workdir / "checkpoints" / "1", 0, deletions
        monkeypatch.setattr(os, "stat", deleting)
        with contextlib.closing(Checkpoints(workdir, read_only=True)) as reader:
            monkeypatch.undo()
            assert reader.latest() == 2
        if deletions == before:
            break
    assert deletions > 1


def damage(path, how):
    """Damages a file in one of several ways."""
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        middle = len(data) // 2
        changed = {
            "half": data[:middle],
            "flip": data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :],
        }
        path.write_bytes(changed[how])


def copies_with_damage(run, tmp_path, how):
    """Copies of a run, each with another damaged file below the items of its newest checkpoint."""
    newest = run / "checkpoints" / "2"
    names = [path.relative_to(run) for path in newest.glob("*/**/*") if path.is_file()]
    for number, name in enumerate([*names, newest.relative_to(run) / CHECKSUMS]):
        workdir = shutil.copytree(run, tmp_path / str(number))
        damage(workdir / name, how)
        yield name, workdir
    assert len(names) > 10


@pytest.mark.parametrize("how", ["flip", "gone"])
def test_every_damaged_file_is_noticed(tmp_path, caplog, how):
    """A reader is refused; training warns, leaves the checkpoint as it is and uses the one before
    with its own numbers.
    """
    items = saved_run(tmp_path / "run")
    for name, workdir in copies_with_damage(tmp_path / "run", tmp_path, how):
        if "params" in name.parts:  # what evaluation reads
            with (
                refuses("checkpoints/2", "steps 1"),
                contextlib.closing(Checkpoints(workdir, read_only=True)) as reader,
            ):
                reader.restore(2, {"params": items["params"]})
        caplog.clear()
        checkpoints = Checkpoints(workdir, keep=2)
        assert checkpoints.latest() == 1, name
        assert caplog.text.count("checkpoints/2 is damaged") == 1, name
        assert steps_in(workdir / "checkpoints") == [2, 1]
        restored = checkpoints.restore(1, items)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), restored, items))
        checkpoints.close()


def test_a_run_with_a_damaged_checkpoint_goes_on(tmp_path, caplog):
    """Checkpoints before and at the damaged step are saved, though `keep` is 1, and the damaged one
    is then replaced: Orbax would drop what is older than the latest.
    """
    checkpoints = Checkpoints(tmp_path)
    for step, nll in (10, 2.0), (20, None):
        checkpoints.save(step, {"params": {"a": jnp.full(9, step)}}, nll)
    checkpoints.close()
    for path in (tmp_path / "checkpoints" / "20" / "params" / "d").iterdir():
        damage(path, "flip")
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() == 10
    for step, steps in (15, [20, 15, 10]), (20, [20, 10]):
        checkpoints.save(step, {"params": {"a": jnp.full(9, step)}}, None)
        checkpoints.wait()
        assert (checkpoints.latest(), steps_in(tmp_path / "checkpoints")) == (step, steps)
    checkpoints.close()
    caplog.clear()
    again = Checkpoints(tmp_path)
    assert (again.latest(), caplog.text) == (20, "")
    again.close()


def test_a_deletion_that_was_cut_off(tmp_path, caplog):
    """The rest is removed where a newer checkpoint is intact; alone it might be all that is
    left of a run.
    """
    saved_run(tmp_path)
    (tmp_path / "checkpoints" / "1" / CHECKSUMS).unlink()
    Checkpoints(tmp_path, keep=2).close()
    assert (steps_in(tmp_path / "checkpoints"), caplog.text) == ([2], "")
    (tmp_path / "checkpoints" / "2" / CHECKSUMS).unlink()
    with refuses("2", "checksums.sha256"):
        Checkpoints(tmp_path, keep=2)
    assert steps_in(tmp_path / "checkpoints") == [2]


def test_nobody_uses_a_damaged_checkpoint(trained, tmp_path):
    """Evaluation, scoring and generation, exports, and a run that starts from it name the
    file; the bit is in the numbers of a table, which would be read without an error.
    """
    workdir = shutil.copytree(trained, tmp_path / "run")
    for path in workdir.glob("checkpoints/*/params/**/d/*"):
        damage(path, "flip")
    origin = {"init_from": str(workdir), "init_checkpoint": "best"}
    for use in (
        lambda: evaluate(workdir, Request()),
        lambda: load(workdir),
        lambda: export(workdir, tmp_path / "exported"),
        lambda: finetuned(origin, None, None, None, None, None),
    ):
        with refuses("params", "has changed"):
            use()
    assert not (tmp_path / "exported").exists()


def test_a_flipped_bit_anywhere(tmp_path):
    """Of any file of any checkpoint that "best" chooses among: refused, or nothing that is read
    changes. A loss with another digit would choose another checkpoint in silence.
    """
    items = saved_run(tmp_path / "run")
    read = functools.partial(read_parameters, tmp_path / "run", "best", items["params"])
    expected, bits = read()[:2], random.Random(0)

    def read_with(path, at, bit, refused):
        content = path.read_bytes()
        path.write_bytes(content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :])
        with refused:
            items_read = read()[:2]
            assert jax.tree.all(jax.tree.map(np.array_equal, items_read, expected)), path
        path.write_bytes(content)

    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    for path in bits.choices(files, k=12):
        at, bit = bits.randrange(path.stat().st_size), 1 << bits.randrange(8)
        read_with(path, at, bit, contextlib.suppress(InputError))
    for step, digit, bit in ("1", b"2", 2), ("2", b"1", 4):  # the best was 1.0, and is 0.0 and 2.0
        loss = tmp_path / "run" / "checkpoints" / step / "metrics" / "metrics"
        at = loss.read_bytes().index(digit)
        read_with(loss, at, bit, refuses(f"checkpoints/{step}", "metrics"))


def test_a_loss_that_cannot_be_read(tmp_path, caplog):
    """Readers name the folder, and training goes on without it."""
    saved_run(tmp_path)
    damage(tmp_path / "checkpoints" / "1" / "metrics" / "metrics", "half")
    with refuses("metrics/metrics", "delete"):
        Checkpoints(tmp_path, read_only=True)
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert (checkpoints.latest(), checkpoints.best()) == (2, 2)
    checkpoints.close()
    assert "checkpoints/1 is damaged (metrics/metrics is missing or has changed)" in caplog.text


def test_a_state_of_an_earlier_version(tmp_path):
    """Arrays under other names, such as those of an optimizer that now has layers one by one."""
    saved_run(tmp_path)
    checkpoints = Checkpoints(tmp_path, keep=2)
    with refuses("arrays", "config.json"):
        checkpoints.restore(2, {"params": {"b": [jnp.zeros(9)]}})
    checkpoints.close()


def test_a_list_of_checksums_that_lacks_a_file(tmp_path):
    """It hides no damage."""
    saved_run(tmp_path)
    sums = tmp_path / "checkpoints" / "2" / CHECKSUMS
    sums.write_text("".join(sums.read_text().splitlines(keepends=True)[:-1]))
    with refuses("no checksum"):
        read_parameters(tmp_path, "2", saved_run(tmp_path / "other")["params"])


def test_no_whole_checkpoint(tmp_path):
    """The error names all checkpoints, none is removed, and nothing starts anew in silence; a
    reader names the file.
    """
    items = saved_run(tmp_path)
    for step in "12":
        for path in (tmp_path / "checkpoints" / step / "params" / "d").iterdir():
            damage(path, "half")
    for _ in range(2):
        with refuses("no checkpoint", "2", "1", "has changed"):
            Checkpoints(tmp_path)
    reader = Checkpoints(tmp_path, read_only=True)
    with refuses("checkpoints/2", "has changed", "steps 1"):
        reader.restore(2, items)
    reader.close()
    shutil.rmtree(tmp_path / "checkpoints" / "1")
    reader = Checkpoints(tmp_path, read_only=True)
    with refuses("checkpoints/2", "no other"):
        reader.restore(2, items)
    reader.close()


def test_a_loss_that_is_known_later(tmp_path):
    """The checkpoint is then evaluated, and the best one if its loss is lowest; after opening
    the directory again, too.
    """
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, nll in (1, 2.0), (2, None):
        checkpoints.save(step, {"params": {"a": jnp.zeros(9)}}, nll)
    checkpoints.wait()
    assert (checkpoints.best(), checkpoints.evaluated(2)) == (1, False)
    metrics = tmp_path / "checkpoints" / "2" / "metrics"
    metrics.mkdir(exist_ok=True)
    (metrics / ".metrics.1").write_text('{"nl')  # of a kill while the loss was recorded
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert (checkpoints.best(), checkpoints.latest(), checkpoints.evaluated(2)) == (1, 2, False)
    with pytest.MonkeyPatch.context() as patch:  # a kill before the list of checksums has the loss
        patch.setattr(module, "add_checksum", killed)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.record_loss(2, 1.75)
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert (checkpoints.latest(), checkpoints.recorded_loss(2)) == (2, 1.75)
    checkpoints.record_loss(2, 1.5)
    checkpoints.close()
    again = Checkpoints(tmp_path, keep=2)
    assert (again.best(), again.evaluated(2), again.latest()) == (2, True, 2)
    again.close()
    damage(metrics / "metrics", "flip")
    reader = Checkpoints(tmp_path, read_only=True)
    with refuses("checkpoints/2", "metrics/metrics"):
        reader.step("best")
    reader.close()


def killed(*_):
    raise KeyboardInterrupt
