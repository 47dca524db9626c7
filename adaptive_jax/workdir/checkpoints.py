"""What a run leaves in its workdir to be continued and evaluated: config, vocabulary and Orbax checkpoints."""

import contextlib
import errno
import json
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from adaptive_jax.data.vocabulary.subwords import read_vocabulary
from adaptive_jax.data.vocabulary.words import Vocabulary
from adaptive_jax.devices import hosts, sharding
from adaptive_jax.errors import InputError
from adaptive_jax.files import replacing

# Settings of a run that may change when it is continued: none changes an update.
FREE = {
    "steps",
    "log_every",
    "evaluate_every",
    "checkpoint_every",
    "keep",
    "tokens_per_device",
    "fsdp",
    "body.attention",
    "body.remat",
    "data.path",
    "data.cache",
}

SEEN = 100  # seconds until hosts see what one of them has written: NFS may remember for 60 that a file was not there


def write_json(path: Path, content) -> None:
    """Writes `content` as readable JSON, wholly or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write((json.dumps(content, indent=2) + "\n").encode())


def read_config(workdir: Path) -> dict:
    """The config that a run was started with.

    Raises:
        InputError: there is no run in `workdir`.
    """
    try:
        return {"fsdp": 0} | json.loads((workdir / "config.json").read_text())  # runs of before it could be chosen
    except FileNotFoundError:
        raise InputError(
            f"{workdir} holds no config.json, so no run: give --workdir of a run that train.py made"
        ) from None
    except ValueError as error:
        raise InputError(
            f"{workdir / 'config.json'} cannot be read ({error}): restore it or start in a new workdir"
        ) from None


def check_same_run(workdir: Path, config: dict) -> None:
    """Refuses to continue a run under settings that would make other updates than those it has made.

    Raises:
        InputError: names each setting that differs, with both values.
    """
    if not (workdir / "config.json").exists():
        return
    old, new = flat(read_config(workdir)), flat(json.loads(json.dumps(config)))
    differ = [
        f"{key} was {old.get(key, 'absent')} and is now {new.get(key, 'absent')}"
        for key in sorted({*old, *new} - FREE)
        if old.get(key) != new.get(key)
    ]
    if differ:
        raise InputError(f"{workdir} holds a run of another config: {'; '.join(differ)}. Use another --workdir")


def check_same_vocabulary(workdir: Path, vocabulary: Vocabulary) -> None:
    """Refuses to continue a run on a corpus that has come to give other word ids.

    Raises:
        InputError: with the sizes of both vocabularies.
    """
    path = workdir / "vocabulary.txt"
    if path.exists() and (old := read_vocabulary(path)).digest != vocabulary.digest:
        raise InputError(
            f"{path} has {len(old):,} words and the corpus now gives {len(vocabulary):,}, not the same ones in the same order: "
            "restore the corpus or use another --workdir"
        )


def begin(workdir: Path, config: dict, plan: dict, vocabulary: Vocabulary) -> None:
    """Writes what a run is: one host does, and the others go on once they see it.

    Raises:
        InputError: they do not, as the disk is not shared; they see another config, as their flags differ.
    """
    hosts.wait("before the workdir")  # all have looked for another run there
    if hosts.first():
        workdir.mkdir(parents=True, exist_ok=True)
        vocabulary.write(workdir / "vocabulary.txt")
        write_json(workdir / "plan.json", plan)
        write_json(workdir / "config.json", config)
    hosts.wait("the workdir")
    deadline = time.monotonic() + SEEN
    while not (workdir / "config.json").exists():
        if time.monotonic() > deadline:
            raise InputError(f"{workdir} is not the same on all hosts: give a --workdir on a disk that they share")
        time.sleep(1)
    check_same_run(workdir, config)


def flat(config: dict, prefix: str = "") -> dict:
    """`{"data": {"block": 8}}` as `{"data.block": 8}`."""
    items = {}
    for key, value in config.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return items


@contextlib.contextmanager
def uninterrupted():
    """Puts off Ctrl-C until the end of the block."""
    if threading.current_thread() is not threading.main_thread():  # which is never interrupted
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
    """The checkpoints of a run: the latest `keep`, and the best by validation.

    To read them beside a run that is still training, `read_only` leaves everything in the directory as it is.

    Raises:
        InputError: `read_only` where nothing has been saved.
    """

    def __init__(self, workdir: Path, keep: int = 1, *, read_only: bool = False):
        def loss(metrics):
            return metrics["nll"]

        self.directory = (workdir / "checkpoints").absolute()
        if read_only and not self.directory.is_dir():
            raise InputError(f"{self.directory} does not exist: train.py has saved no checkpoint yet")
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # what cannot be written is told once, by `_writing`
        self.manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                best_fn=loss,
                best_mode="min",
                single_host_load_and_broadcast=True,  # what one host sees, all see
                read_only=read_only,
                create=not read_only,
                cleanup_tmp_directories=not read_only,
                preservation_policy=AnyPreservationPolicy(
                    [LatestN(n=keep), BestN(get_metric_fn=loss, reverse=True, n=1)]
                ),
            ),
        )

    def save(self, step: int, state, nll: float) -> None:
        """Saves in the background the state after `step` updates, with its validation loss in nats per word.

        Raises:
            OSError: this checkpoint, or the one before, does not fit on the disk.
        """
        if step not in self.manager.all_steps():
            with self._writing():
                self.manager.wait_until_finished()
                # Asked beforehand, because a disk that fills in the middle comes with tracebacks from many threads.
                full = shutil.disk_usage(self.directory).free < sum(a.nbytes for a in jax.tree.leaves(state))
                if sharding.over_hosts(full):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))
                self.manager.save(step, args=ocp.args.StandardSave(state), metrics={"nll": nll})

    def latest(self) -> int | None:
        """The last step saved, or None."""
        return _plain(self.manager.latest_step())

    def best(self) -> int | None:
        """The saved step of lowest validation loss, or None."""
        return _plain(self.manager.best_step())

    def step(self, name: str) -> int:
        """The step that "best", "latest" or a number names.

        Raises:
            InputError: there is no such checkpoint.
        """
        step = {"best": self.best, "latest": self.latest}.get(name, lambda: int(name) if name.isdecimal() else name)()
        saved = sorted(self.manager.all_steps())
        if step not in saved:
            raise InputError(
                f"{self.directory} holds no checkpoint {name!r}: "
                + (f"it has steps {', '.join(map(str, saved))}" if saved else "train.py has saved none yet")
            )
        return step

    def restore(self, step: int, like):
        """The state saved at `step`, with the shapes and shardings of `like` (arrays or their descriptions).

        Raises:
            InputError: a checkpoint that is damaged or of another model.
        """
        try:
            return self.manager.restore(step, args=ocp.args.StandardRestore(like))
        except Exception as error:  # Orbax and its storage raise many kinds for one thing: it cannot be read.
            reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
            raise InputError(
                f"checkpoint {self.directory / str(step)} cannot be read ({reason}): "
                "move it away to go on from the one before it"
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
            with uninterrupted():  # Orbax and its threads tell of an interruption in tracebacks
                yield
        except Exception as error:  # a full disk comes through Orbax as many kinds
            if "RESOURCE_EXHAUSTED" in str(error) or os.strerror(errno.ENOSPC) in str(error):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory)) from error
            raise


def _plain(step):
    """Steps that one host has told the others come as numpy's integers, which JSON does not know."""
    return None if step is None else int(step)
