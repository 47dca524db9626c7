"""Checkpoints of a run, by Orbax: items that are saved together and read one by one.

A checkpoint is verified once it is on disk: read back, and given a list of checksums. Until then
none before it is deleted.
"""

import contextlib
import datetime
import errno
import itertools
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    BestN,
    LatestN,
    PreservationContext,
)

from adaptive_jax.errors import InputError
from adaptive_jax.files import absolute, in_store, replacing
from adaptive_jax.parallel import hosts, sharding
from adaptive_jax.workdir import integrity
from adaptive_jax.workdir.integrity import ITEMS
from adaptive_jax.workdir.orbax_stores import teach_orbax

logger = logging.getLogger(__name__)


class _Saved(NamedTuple):
    """A checkpoint as Orbax's policies want to know it."""

    step: int
    metrics: dict | None
    time: datetime.datetime


class Checkpoints:
    """The checkpoints of a run: the latest `keep`, and the one of lowest validation loss.

    Items are those of `ITEMS` that have arrays in them. Opening a run to continue it renames
    damaged checkpoints that are newer than the last whole one to STEP.damaged, with a warning.

    read_only: leaves the directory as it is, to read beside a run that is still training.

    Raises:
        InputError: `read_only` where nothing has been saved; or every checkpoint is damaged: they
            stay as they are.
    """

    def __init__(
        self,
        workdir: Path,
        keep: int = 1,
        *,
        read_only: bool = False,
    ):
        self.directory = absolute(workdir / "checkpoints")
        if in_store(self.directory):
            teach_orbax()
        if read_only and not self.directory.is_dir():
            raise InputError(
                f"{self.directory} does not exist: train.py has saved no checkpoint yet"
            )
        # `_writing` reports once what cannot be written.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        self.unverified = None  # the step saved last
        best = BestN(get_metric_fn=_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        self.policy = AnyPreservationPolicy([LatestN(n=keep), best])
        if not read_only:
            self._set_damaged_aside()
        options = ocp.CheckpointManagerOptions(
            best_fn=_loss,
            best_mode="min",
            single_host_load_and_broadcast=True,  # all hosts see what the first one sees
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            preservation_policy=LatestN(),  # all: `_verify` deletes
            temporary_path_class=(
                ocp.path.atomicity.CommitFileTemporaryPath if in_store(self.directory) else None
            ),
        )
        # Item names are said here, because Orbax would take a directory of older checkpoints for
        # one of single items
        try:
            self.manager = ocp.CheckpointManager(self.directory, item_names=ITEMS, options=options)
        except ValueError as error:  # it reads the validation losses
            raise InputError(
                f"{self.directory} cannot be read ({error}): train.py sets damaged ones aside"
            ) from error

    def save(self, step: int, items: dict, nll: float | None, hours: float = 0.0) -> None:
        """Saves items after `step` updates, in the background.

        nll: the validation loss in nats a word; None if it was not computed, and the checkpoint is
            never the best one.
        hours: that the run has trained.

        Raises:
            OSError: this checkpoint, or the one before, does not fit on the disk.
        """
        if step in self.manager.all_steps():
            return
        items = {name: item for name, item in items.items() if jax.tree.leaves(item)}
        with self._writing():
            self._verify()
            # Checked beforehand, because a disk that fills up during a save causes tracebacks from
            # many threads.
            full = not in_store(self.directory) and shutil.disk_usage(self.directory).free < sum(
                a.nbytes for a in jax.tree.leaves(items)
            )
            if sharding.sum_over_hosts(full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))
            saved = {name: ocp.args.StandardSave(item) for name, item in items.items()}
            metrics = None if nll is None else {"nll": nll}
            self.manager.save(
                step,
                args=ocp.args.Composite(**saved),
                metrics=metrics,
                custom_metadata={"hours": hours},
            )
            self.unverified = step

    def latest(self) -> int | None:
        """The last step saved, or None."""
        return _plain(self.manager.latest_step())

    def best(self) -> int | None:
        """The saved step of lowest validation loss, or None."""
        best = _plain(self.manager.best_step())
        return None if best is None or not self.evaluated(best) else best

    def reload(self) -> None:
        """Looks again at what another process has saved and deleted."""
        self.manager.reload()

    def evaluated(self, step: int) -> bool:
        """Whether the checkpoint has a validation loss."""
        return self.manager.metrics(step) is not None

    def holds(self, step: int, item: str) -> bool:
        """Whether the checkpoint has an item of `ITEMS`."""
        return (self.directory / str(step) / item).is_dir()

    def hours(self, step: int) -> float:
        """Hours that the run had trained when it was saved; 0 for checkpoints that do not say."""
        try:
            return float(
                json.loads((self.directory / str(step) / "_CHECKPOINT_METADATA").read_text())[
                    "custom_metadata"
                ]["hours"]
            )
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0

    def recorded_loss(self, step: int) -> float | None:
        """The loss that `record_loss` gave a checkpoint, whose state does not know of it; None
        if there is none.
        """
        metrics = self.manager.metrics(step) or {}
        return metrics["nll"] if metrics.get("recorded") else None

    def step(self, name: str) -> int:
        """The step that "best", "latest" or a number names; "best" is the latest where none has a
        validation loss.

        Raises:
            InputError: there is no such checkpoint.
        """
        named = {"best": lambda: self.best() or self.latest(), "latest": self.latest}
        step = named.get(name, lambda: int(name) if name.isdecimal() else name)()
        saved = sorted(self.manager.all_steps())
        if step not in saved:
            raise InputError(
                f"{self.directory} holds no checkpoint {name!r}: "
                + (
                    f"it has steps {', '.join(map(str, saved))}"
                    if saved
                    else "train.py has saved none yet"
                )
            )
        return step

    def restore(self, step: int, like: dict) -> dict:
        """Reads the items that `like` names, saved at `step`, with its shapes and shardings; it
        holds arrays or their shapes.

        Raises:
            InputError: a damaged checkpoint, or one of another model.
        """
        wanted = {name: item for name, item in like.items() if jax.tree.leaves(item)}
        try:
            args = ocp.args.Composite(
                **{name: ocp.args.StandardRestore(item) for name, item in wanted.items()}
            )
            return like | dict(self.manager.restore(step, args=args).items())
        except (
            Exception
        ) as error:  # Orbax and its storage raise many kinds for one thing: it cannot be read.
            if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
                raise
            orbax = str(error).strip().splitlines() or [type(error).__name__]
            reason = (
                integrity.problem(self.directory / str(step), tuple(wanted))
                or _mismatch(orbax[0])
                or orbax[0][:200]
            )
            others = [other for other in sorted(self.manager.all_steps()) if other != step]
            cure = (
                f"the run has steps {', '.join(map(str, others))} as well"
                if others
                else "there is no other in this run"
            )
            raise InputError(
                f"checkpoint {self.directory / str(step)} cannot be read ({reason}); {cure}"
            ) from error

    def close(self) -> None:
        """Waits until everything is on disk.

        Raises:
            OSError: it does not fit.
        """
        with self._writing():
            self._verify()
            self.manager.close()

    def verify(self) -> None:
        """Waits until the last checkpoint is on disk, reads it back, and deletes those that need
        not be kept.

        Raises:
            InputError: it cannot be read back, and has been set aside.
            OSError: it does not fit on the disk.
        """
        with self._writing():
            step = self.unverified
            if not self._verify():
                raise InputError(
                    f"checkpoint {step} cannot be read back: check the disk of {self.directory};"
                    " the same command goes on from the checkpoint before, if there is one"
                )

    def record_loss(self, step: int, nll: float) -> None:
        """Gives a checkpoint that was saved without a validation loss its loss, in nats a word."""
        directory = self.directory / str(step)
        if hosts.first():
            with replacing(directory / "metrics" / "metrics") as file:
                file.write(json.dumps({"nll": nll, "recorded": True}).encode())
            integrity.seal(directory)
        hosts.barrier(f"the loss of {step}")
        self.manager.reload()

    def _verify(self):
        """As `verify`; returns whether the checkpoint can be read."""
        self.manager.wait_until_finished()
        if self.unverified is None:
            return True
        step, self.unverified = self.unverified, None
        directory, why = self.directory / str(step), None
        if hosts.first():
            if (why := integrity.unreadable(directory)) is None:
                integrity.seal(directory)
            else:
                self._set_aside(step, why)
        if sharding.sum_over_hosts(why is not None):
            self.manager.reload()
            return False
        saved = [self._saved(step) for step in sorted(self.manager.all_steps())]
        keep = self.policy.should_preserve(saved, context=PreservationContext())
        for checkpoint, stays in zip(saved, keep, strict=True):
            # The first host decides: disks may show others other times.
            if sharding.sum_over_hosts(hosts.first() and not stays):
                self.manager.delete(checkpoint.step)
        return True

    def _saved(self, step):
        directory = self.directory / str(step)
        try:  # not the times of files, which copying changes
            seconds = (
                json.loads((directory / "_CHECKPOINT_METADATA").read_text())["init_timestamp_nsecs"]
                / 1e9
            )
        except (OSError, ValueError, KeyError, TypeError):
            seconds = directory.stat().st_mtime
        return _Saved(
            step, self.manager.metrics(step), datetime.datetime.fromtimestamp(seconds, datetime.UTC)
        )

    def _set_damaged_aside(self):
        found, damaged = [], {}
        if hosts.first():
            found = integrity.steps_in(self.directory)
            problems = ((step, integrity.problem(self.directory / str(step))) for step in found)
            damaged = dict(itertools.takewhile(lambda each: each[1], problems))
        if sharding.sum_over_hosts(bool(damaged) and len(damaged) == len(found)):
            raise InputError(
                f"no checkpoint in {self.directory} can be read"
                f" ({'; '.join(f'{step}: {why}' for step, why in damaged.items())}): restore one"
                " from a copy, or train anew in another --workdir"
            )
        for step, why in damaged.items():
            self._set_aside(step, why)
        hosts.barrier("damaged checkpoints")

    def _set_aside(self, step, why):
        aside = integrity.set_aside(self.directory / str(step))
        logger.warning(
            "checkpoint %d is damaged (%s): it is now %s, and an older one is used",
            step,
            why,
            aside,
        )

    @contextlib.contextmanager
    def _writing(self):
        try:
            yield
        except Exception as error:  # a full disk comes through Orbax as many kinds
            if "RESOURCE_EXHAUSTED" in str(error) or os.strerror(errno.ENOSPC) in str(error):
                raise OSError(
                    errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory)
                ) from error
            raise


def _plain(step):
    """An int of Python's: steps that were broadcast come as NumPy's, which JSON does not know."""
    return None if step is None else int(step)


def _mismatch(error):
    """Orbax's line about an array that has another shape than the model's, in plain words; None
    for any other line.
    """
    found = re.search(r"Requested shape: (\(.*?\)) .* stored shape: (\(.*?\))", error)
    return (
        found
        and f"it has an array of shape {found[2]} where config.json describes one of {found[1]}"
    )


def _loss(metrics):
    return metrics["nll"]
