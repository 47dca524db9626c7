"""Checkpoints of a run, by Orbax: items that are saved together and read one by one."""

import contextlib
import errno
import logging
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from adaptive_jax.devices import sharding
from adaptive_jax.errors import InputError

ITEMS = ("params", "optimizer", "carry")
WHOLE = "default"  # the one item of checkpoints made before there were several


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Delays Ctrl-C until the end of the block."""
    if threading.current_thread() is not threading.main_thread():  # which alone receives signals
        yield
        return
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


class Checkpoints:
    """The checkpoints of a run: the latest `keep`, and the one of lowest validation loss.

    Items are those of `ITEMS` that have arrays in them.

    read_only: leaves the directory as it is, to read beside a run that is still training.

    Raises:
        InputError: `read_only` where nothing has been saved.
    """

    def __init__(self, workdir: Path, keep: int = 1, *, read_only: bool = False):
        def loss(metrics):
            return metrics["nll"]

        self.directory = (workdir / "checkpoints").absolute()
        if read_only and not self.directory.is_dir():
            raise InputError(f"{self.directory} does not exist: train.py has saved no checkpoint yet")
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # `_writing` reports once what cannot be written
        best = BestN(get_metric_fn=loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
        self.manager = ocp.CheckpointManager(
            self.directory,
            item_names=ITEMS,  # said here, because Orbax would take a directory of older checkpoints for one of single items
            options=ocp.CheckpointManagerOptions(
                best_fn=loss,
                best_mode="min",
                single_host_load_and_broadcast=True,  # all hosts see what the first one sees
                read_only=read_only,
                create=not read_only,
                cleanup_tmp_directories=not read_only,
                preservation_policy=AnyPreservationPolicy([LatestN(n=keep), best]),
            ),
        )

    def save(self, step: int, items: dict, nll: float | None) -> None:
        """Saves items after `step` updates, in the background.

        nll: the validation loss in nats a word; None if it was not computed, and the checkpoint is never the best one.

        Raises:
            OSError: this checkpoint, or the one before, does not fit on the disk.
        """
        if step in self.manager.all_steps():
            return
        items = {name: item for name, item in items.items() if jax.tree.leaves(item)}
        with self._writing():
            self.manager.wait_until_finished()
            # Checked beforehand, because a disk that fills up during a save causes tracebacks from many threads.
            full = shutil.disk_usage(self.directory).free < sum(a.nbytes for a in jax.tree.leaves(items))
            if sharding.sum_over_hosts(full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))
            saved = {name: ocp.args.StandardSave(item) for name, item in items.items()}
            self.manager.save(step, args=ocp.args.Composite(**saved), metrics=None if nll is None else {"nll": nll})

    def latest(self) -> int | None:
        """The last step saved, or None."""
        return _plain(self.manager.latest_step())

    def best(self) -> int | None:
        """The saved step of lowest validation loss, or None."""
        best = _plain(self.manager.best_step())
        return None if best is None or not self.evaluated(best) else best

    def evaluated(self, step: int) -> bool:
        """Whether the checkpoint has a validation loss."""
        return self.manager.metrics(step) is not None

    def step(self, name: str) -> int:
        """The step that "best", "latest" or a number names; "best" is the latest where none has a validation loss.

        Raises:
            InputError: there is no such checkpoint.
        """
        named = {"best": lambda: self.best() or self.latest(), "latest": self.latest}
        step = named.get(name, lambda: int(name) if name.isdecimal() else name)()
        saved = sorted(self.manager.all_steps())
        if step not in saved:
            raise InputError(
                f"{self.directory} holds no checkpoint {name!r}: "
                + (f"it has steps {', '.join(map(str, saved))}" if saved else "train.py has saved none yet")
            )
        return step

    def restore(self, step: int, like: dict) -> dict:
        """Reads the items that `like` names, saved at `step`, with its shapes and shardings; it holds arrays or their shapes.

        Raises:
            InputError: a damaged checkpoint, or one of another model.
        """
        wanted = {name: item for name, item in like.items() if jax.tree.leaves(item)}
        try:
            if (older := self.directory / str(step) / WHOLE).exists():
                arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
                args = ocp.args.PyTreeRestore(wanted, restore_args=arguments, partial_restore=True)
                return like | ocp.PyTreeCheckpointer().restore(older, args=args)
            args = ocp.args.Composite(**{name: ocp.args.StandardRestore(item) for name, item in wanted.items()})
            return like | dict(self.manager.restore(step, args=args).items())
        except Exception as error:  # Orbax and its storage raise many kinds for one thing: it cannot be read.
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise InputError(
                f"checkpoint {self.directory / str(step)} cannot be read ({reason}): "
                "move it away to use the one before it"
            ) from error

    def close(self) -> None:
        """Waits until everything is on disk.

        Raises:
            OSError: it does not fit.
        """
        with self._writing():
            self.manager.wait_until_finished()
            self.manager.close()

    @contextlib.contextmanager
    def _writing(self):
        try:
            with uninterrupted():  # Orbax and its threads answer an interruption with tracebacks
                yield
        except Exception as error:  # a full disk comes through Orbax as many kinds
            if "RESOURCE_EXHAUSTED" in str(error) or os.strerror(errno.ENOSPC) in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory)) from error
            raise


def _plain(step):
    """An int of Python's: steps that were broadcast come as NumPy's, which JSON does not know."""
    return None if step is None else int(step)
