"""Checkpoints of a run, by Orbax: items that are saved together and read one by one.

Each checkpoint lists the checksums of its files before it counts as saved, and files are compared
with the list before their arrays are used, on a disk and in a bucket.
"""

import asyncio
import contextlib
import functools
import json
import logging
import operator
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import jax
import orbax.checkpoint as ocp
from absl import logging as absl_logging
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from adaptive_jax.errors import InputError, is_out_of_memory, one_line
from adaptive_jax.files import (
    absolute,
    add_checksum,
    changed_file,
    files_below,
    in_bucket,
    names_in,
    naming,
    write_bytes,
    write_checksums,
)
from adaptive_jax.parallel import hosts, sharding

logger = logging.getLogger(__name__)
T = TypeVar("T")

ITEMS = ("params", "averages", "optimizer", "carry", "tables")
CHECKSUMS, LOSS = "checksums.sha256", "metrics/metrics"
METADATA, COMMITTED = "_CHECKPOINT_METADATA", "commit_success.txt"  # of Orbax
WAIT = "wait for the first, which a lower checkpoint_every brings earlier"
DELETIONS = 9  # that a training may make while its checkpoints are listed


def steps_in(directory: Path) -> list[int]:
    """The steps of the checkpoints in a directory, intact or not, the latest first."""
    names = (name for name in names_in(directory) if name.isascii() and name.isdecimal())
    return sorted(map(int, names), reverse=True)


def recorded(directory: Path, key: str) -> object:
    """A value that `Checkpoints.save` recorded of a checkpoint; None where it does not say, or is
    damaged.
    """
    try:
        return json.loads((directory / METADATA).read_text())["custom_metadata"][key]
    except (OSError, ValueError, TypeError, KeyError):
        return None


class _WithChecksums:
    """A directory that Orbax is about to finish; that of a step gets checksums of its items.

    damaged: names of steps hidden from Orbax, so that it neither counts nor deletes them.
    """

    damaged: Collection[str] = ()

    @classmethod
    async def validate_final(cls, final_path):
        if final_path.name in cls.damaged:
            raise ocp.path.atomicity.ValidationError(f"{final_path} is damaged")
        await super().validate_final(final_path)

    async def finalize(self):
        directory = self.get()
        if self.get_final().name.isdecimal():  # not of an item in it
            files = [path for path in files_below(directory) if path.parent != directory]
            await asyncio.to_thread(write_checksums, directory / CHECKSUMS, files)
        await super().finalize()


class _OnDisk(_WithChecksums, ocp.path.atomicity.AtomicRenameTemporaryPath):
    """Renamed once it holds everything."""


class _InBucket(_WithChecksums, ocp.path.atomicity.CommitFileTemporaryPath):
    """Marked by an object once it holds everything."""


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Silences Orbax, which warns about ordinary events, in programs that import this package."""
    verbosity = absl_logging.get_verbosity()
    absl_logging.set_verbosity(absl_logging.ERROR)
    try:
        yield
    finally:
        absl_logging.set_verbosity(verbosity)


class _Manager(ocp.CheckpointManager):
    """Never asks JAX whether to stop: JAX stops hosts at a number after the last one asked for,
    which Orbax gives in updates and `hosts.stopping` in calls, so a resumed run would not stop.
    """

    def reached_preemption(self, step):
        return False


def _beside_training(read: Callable[[], T]) -> T:
    """Reads again if a training deletes a checkpoint between Orbax's list and its look at it."""
    for _ in range(DELETIONS):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return read()
    return read()


class Checkpoints:
    """The checkpoints of a run: the latest `keep`, and the one of lowest validation loss.

    Items are those of `ITEMS` that have arrays in them. A resumed run warns of damaged checkpoints
    that are newer than the last intact one, and of older ones whose loss is damaged; it leaves them
    where they are and ignores them.

    read_only: leaves the directory as it is, to read beside a run that is still training.

    Raises:
        InputError: `read_only` where nothing has been saved; or every checkpoint is damaged: they
            stay as they are.
    """

    def __init__(self, workdir: Path, keep: int = 1, *, read_only: bool = False):
        self.directory = absolute(workdir / "checkpoints")
        # is_dir returns False where a bucket refuses access
        if read_only and not self.directory.exists():
            raise InputError(
                f"{self.directory} does not exist; train.py has saved no checkpoint yet: {WAIT}"
            )
        self._intact = None  # the step whose files were compared when the run was opened
        self._damaged = {}  # why, by the name of a step
        if not read_only:
            # `save` raises what cannot be written
            logging.getLogger("asyncio").setLevel(logging.CRITICAL)
            self._find_damaged()
        loss = operator.itemgetter("nll")
        best = BestN(get_metric_fn=loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        temporary = _InBucket if in_bucket(self.directory) else _OnDisk
        options = ocp.CheckpointManagerOptions(
            best_fn=loss,
            best_mode="min",
            single_host_load_and_broadcast=True,  # all hosts see what the first one sees
            read_only=read_only,
            create=not read_only,
            cleanup_tmp_directories=not read_only,
            preservation_policy=AnyPreservationPolicy([LatestN(n=keep), best]),
            temporary_path_class=type("Temporary", (temporary,), {"damaged": self._damaged}),
        )
        # Without item names, Orbax takes a directory without metrics for one of a single item.
        manager = functools.partial(_Manager, self.directory, item_names=ITEMS, options=options)
        try:
            self.manager = _beside_training(manager)
        except ValueError as error:  # it reads the validation losses
            raise InputError(
                f"{self.directory} cannot be read ({error}): delete the folder of the step whose"
                f" {LOSS} is no JSON"
            ) from error

    def save(self, step: int, items: dict, nll: float | None, **metadata: object) -> None:
        """Saves items after `step` updates, in the background.

        nll: the validation loss in nats a word; None if it was not computed, and the checkpoint is
            never the best one.
        metadata: what `recorded` returns: the hours that the run has trained, and its id.

        Raises:
            Exception: of Orbax, if this checkpoint, or the one before, does not fit on the disk.
        """
        items = {name: item for name, item in items.items() if jax.tree.leaves(item)}
        with naming(self.directory):
            self.manager.wait_until_finished()
            if self._damaged.pop(str(step), None):
                _remove(self.directory / str(step))
            saved = {name: ocp.args.StandardSave(item) for name, item in items.items()}
            self.manager.save(
                step,
                args=ocp.args.Composite(**saved),
                metrics=None if nll is None else {"nll": nll},
                custom_metadata=metadata,
            )

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk. Raises as `save`."""
        with naming(self.directory):
            self.manager.wait_until_finished()

    def close(self) -> None:
        """Waits as `wait` does, and ends Orbax's threads. Raises as `save`."""
        with naming(self.directory):
            self.manager.close()

    def latest(self) -> int | None:
        """The last step saved, or None."""
        step = self.manager.latest_step()
        return None if step is None else int(step)  # one that was broadcast is NumPy's

    def best(self) -> int | None:
        """The saved step of lowest validation loss, or None."""
        step = self.manager.best_step()
        return None if step is None or self.manager.metrics(step) is None else int(step)

    def reload(self) -> None:
        """Looks again at what another process has saved and deleted."""
        _beside_training(self.manager.reload)

    def evaluated(self, step: int) -> bool:
        """True if the checkpoint has a validation loss."""
        return self.manager.metrics(step) is not None

    def holds(self, step: int, item: str) -> bool:
        """True if the checkpoint has an item of `ITEMS`."""
        return (self.directory / str(step) / item).is_dir()

    def hours(self, step: int) -> float:
        """Hours that the run had trained when the checkpoint was saved; 0 if it does not say."""
        return float(recorded(self.directory / str(step), "hours") or 0.0)

    def recorded_loss(self, step: int) -> float | None:
        """The loss that `record_loss` gave a checkpoint, whose optimizer state does not include it;
        None if there is none.
        """
        metrics = self.manager.metrics(step) or {}
        return metrics["nll"] if metrics.get("recorded") else None

    def record_loss(self, step: int, nll: float) -> None:
        """Gives a checkpoint that was saved without a validation loss its loss, in nats a word."""
        # A checkpoint without a loss has no checksum of this file: a kill between the two leaves it
        # intact.
        if hosts.first():
            directory = self.directory / str(step)
            write_bytes(directory / LOSS, json.dumps({"nll": nll, "recorded": True}).encode())
            add_checksum(directory / CHECKSUMS, directory / LOSS)
        hosts.barrier(f"the loss of {step}")
        self.manager.reload()

    def step(self, name: str) -> int:
        """The step that "best", "latest" or a number names; "best" is the latest where none has a
        validation loss.

        Raises:
            InputError: there is no such checkpoint, or a damaged file of losses may hide the best.
        """
        self.manager.wait_until_finished()
        saved = sorted(self.manager.all_steps())
        for other in saved if name == "best" else ():
            directory = self.directory / str(other)
            changed = changed_file(directory / CHECKSUMS, [LOSS])
            # A file that is missing is one that training deletes meanwhile.
            if changed == LOSS and (directory / LOSS).exists():
                raise self._unreadable(other, f"{LOSS} has changed")
        step = int(name) if name.isdecimal() else None
        if name in ("best", "latest"):
            step = (name == "best" and self.best()) or self.latest()
        if step not in saved:
            steps = f"it has steps {', '.join(map(str, saved))}; or use best or latest"
            raise InputError(
                f"{self.directory} holds no checkpoint {name!r}: "
                + (steps if saved else f"train.py has saved none yet: {WAIT}")
            )
        return step

    def restore(self, step: int, like: dict) -> dict:
        """Reads the items that `like` names, saved at `step`, with its shapes and shardings, after
        their files were compared with their checksums. All hosts call it together.

        like: arrays or their shapes.

        Raises:
            InputError: a damaged checkpoint, or one of another model.
        """
        items = {name: item for name, item in like.items() if jax.tree.leaves(item)}
        directory, why = self.directory / str(step), None
        self.manager.wait_until_finished()
        if hosts.first() and step != self._intact:
            try:
                why = _problem(directory, tuple(items))
            except OSError as error:  # of this host alone
                why = one_line(error)
        if sharding.sum_over_hosts(why is not None):
            raise self._unreadable(step, why or "see the first host")
        try:
            args = {name: ocp.args.StandardRestore(item) for name, item in items.items()}
            restored = self.manager.restore(step, args=ocp.args.Composite(**args))
        except Exception as error:  # Orbax and its storage raise many kinds
            if is_out_of_memory(error):
                raise
            line = next(iter(str(error).strip().splitlines()), type(error).__name__)
            fault = f"its arrays are not those of config.json: {line[:200]}"
            raise self._unreadable(step, fault) from error
        return like | dict(restored.items())

    def _find_damaged(self):
        """Finds, on the first host, the newest intact step and damaged ones, which stay where they
        are. Removes what deletions that were cut off left of older ones.
        """
        for step in steps_in(self.directory) if hosts.first() else ():
            directory = self.directory / str(step)
            if in_bucket(directory) and not (directory / COMMITTED).exists():
                continue  # never finished: Orbax removes it
            if self._intact and not (directory / CHECKSUMS).exists():
                _remove(directory)
            # Orbax reads the losses of all, to find the best.
            elif why := _problem(directory, () if self._intact else ITEMS):
                self._damaged[str(step)] = why
            else:
                self._intact = self._intact or step
        if sharding.sum_over_hosts(bool(self._damaged) and self._intact is None):
            raise InputError(
                f"no checkpoint in {self.directory} can be read"
                f" ({'; '.join(f'{step}: {why}' for step, why in self._damaged.items())}): restore"
                " one from a copy, or train anew in another --workdir"
            )
        for step, why in self._damaged.items():
            text = "checkpoint %s is damaged (%s): the run goes on without it"
            logger.warning(text, self.directory / step, why)

    def _unreadable(self, step, why):
        other_steps = [other for other in sorted(self.manager.all_steps()) if other != step]
        steps = f"the run has steps {', '.join(map(str, other_steps))} as well"
        cure = steps if other_steps else "there is no other in this run"
        return InputError(f"checkpoint {self.directory / str(step)} cannot be read ({why}); {cure}")


def _remove(directory: Path) -> None:
    """Removes a checkpoint."""
    directory.rmtree() if in_bucket(directory) else shutil.rmtree(directory)


def _problem(directory: Path, items: Sequence[str]) -> str | None:
    """Fault in the loss, or in the files of these items, of a checkpoint, or None."""
    sums = directory / CHECKSUMS
    if not sums.exists():
        return f"{CHECKSUMS} is missing"
    if changed := changed_file(sums, [f"{item}/" for item in (*items, "metrics")]):
        return f"{changed} is missing or has changed"
    listed = {line.partition("  ")[2] for line in sums.read_text().splitlines()}
    files = (path for item in items for path in files_below(directory / item))
    unlisted = {path.relative_to(directory).as_posix() for path in files} - listed
    return f"{min(unlisted)} has no checksum" if unlisted else None
