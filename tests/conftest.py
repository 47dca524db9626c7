"""Fixtures of the end-to-end tests: a small corpus, a small config of it, a trained run, and the
two scripts as commands.
"""

import contextlib
import gc
import importlib
import io
import json
import lzma
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from absl import flags as absl_flags

from adaptive_jax.__main__ import COMMANDS
from adaptive_jax.config import cache, commands
from adaptive_jax.config.keys import complete, resolve
from adaptive_jax.training.loop import train
from configs import quickstart
from tests import programs, shared_programs
from tests.programs import HASTE

# fixtures
compiled, eight, traced_once = programs.compiled, programs.eight, shared_programs.traced_once

# The same examples in every run, and no limit of time: a machine may be busy.
hypothesis.settings.register_profile("repeated", deadline=None, derandomize=True)
hypothesis.settings.load_profile("repeated")

# Collecting garbage after every 700 new objects takes a tenth of the time of tracing.
gc.set_threshold(100_000, 50, 50)

ROOT = Path(__file__).parents[1]
TOPICS, WORDS = 12, 10


def pytest_collection_modifyitems(items):
    """Files with a test marked `first` begin first, so that no worker waits at the end."""
    first = {item.path for item in items if item.get_closest_marker("first")}
    items.sort(key=lambda item: item.path not in first)


def pytest_make_parametrize_id(config, val, argname):
    """Bytes have no part in a test's name: those of a packed file hold the second at which they
    were packed, and two workers that collect at different seconds must find the same names.
    """
    return argname if isinstance(val, bytes) else None


@pytest.fixture(scope="session", autouse=True)
def cache_of_all(tmp_path_factory):
    """The cache of every test that has no `own_cache`: none reads or fills that of the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(cache.VARIABLE, str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    """The cache of one test, `tmp_path / "cache"`; commands that `quick_command` forks get it as
    `--cache_dir`.
    """
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A directory of text whose lines keep to one of 12 topics, every second word being "the":
    memory helps here.

    The vocabulary is 122 words: 10 of each topic, "the" and <eos>.
    """
    directory = tmp_path_factory.mktemp("text")
    bits = np.random.Generator(np.random.Philox(1))
    share = 1 / np.arange(1, WORDS + 1)
    for name, lines in ("train", 360), ("valid", 24), ("test", 25):
        topics = np.resize(np.arange(TOPICS), lines)
        bits.shuffle(topics)
        words = np.concatenate(
            [
                np.resize(np.arange(WORDS), (1, 8)),
                bits.choice(WORDS, (lines - 1, 8), p=share / share.sum()),
            ]
        )
        every = (
            [f"t{t}w{w}" for t in range(TOPICS) for w in range(WORDS)] if name == "train" else []
        )
        text = [" ".join(every)] + [
            " ".join(f"the t{t}w{w}" for w in row) for t, row in zip(topics, words, strict=True)
        ]
        (directory / f"{name}.txt").write_text("\n".join(text) + "\n")
    return directory


@pytest.fixture(scope="session")
def settings(text):
    """`settings(steps=3, **{"body.layers": 2})`: all that the small run sets otherwise than
    configs/quickstart.py.
    """

    def settings(**changes):
        return {
            "steps": 240,
            "tokens_per_update": 512,
            "tokens_per_device": 512,
            "log_every": 7,
            "evaluate_every": 40,
            "checkpoint_every": 80,
            "keep": 2,
            "data.corpus": "text_files",
            "data.path": str(text),
            "data.threshold": 1,
            "data.tokeniser": "none",
            "data.lower": False,
            "data.vocabulary_size": 122,
            "batches.sequence_length": 16,
            "input.cutoffs": (20, 60),
            "body.layers": 1,
            "body.features": 32,
            "body.heads": 2,
            "body.feed_forward": 64,
            "body.dropout": 0.0,
            "optimizer.learning_rate": 0.3,
            "optimizer.momentum": 0.9,
            "optimizer.clip_norm": 1.0,
            "schedule.warmup_steps": 1,
            "schedule.cycle_steps": 239,
        } | changes

    return settings


@pytest.fixture(scope="session")
def config(settings):
    """`config(steps=3, **{"body.layers": 2})`: the config of the small run with these changes,
    as `train` takes it.
    """

    def config(**changes):
        config = quickstart.get_config()
        config.update_from_flattened_dict(settings(**changes))
        return resolve(config)

    return config


@pytest.fixture(scope="session")
def with_layers(settings):
    """`with_layers({"body.name": "lstm", ...})`: the config of the small run with other classes;
    of a group whose class is named, nothing else of the small run is kept.
    """

    def with_layers(changes):
        other = {key.split(".")[0] for key in changes if key.endswith(".name")}
        kept = {k: v for k, v in settings().items() if k.split(".")[0] not in other}
        return complete(kept | changes)

    return with_layers


@pytest.fixture(scope="session")
def trained(config, tmp_path_factory):
    """The workdir of the small run, trained to the end: to be read, not changed."""
    workdir = tmp_path_factory.mktemp("run") / "small"
    train(config(), workdir)
    return workdir


@pytest.fixture(scope="session")
def flags(settings):
    """The command line of the small run: `train.py *flags(workdir, steps=3)`."""

    def flags(workdir, row="", **changes):
        assign = [f"--config.{key}={value}" for key, value in settings(**changes).items()]
        return [f"--config=configs/quickstart.py{row}", f"--workdir={workdir}", *assign]

    return flags


@pytest.fixture(scope="session")
def free_port():
    """`free_port()`: a port on loopback that nobody uses."""

    def free_port():
        with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
            return server.getsockname()[1]

    return free_port


@pytest.fixture(scope="session")
def server():
    """A process that has imported what the scripts import, and that `quick_command` forks; see
    tests/forks.py.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    with subprocess.Popen(
        [sys.executable, "tests/forks.py"],
        cwd=ROOT,
        env=environment,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        yield process
        process.stdin.close()


@pytest.fixture(scope="session")
def forked(server, tmp_path_factory):
    """`forked("train.py", *flags, devices=8, apart=True)`: asks `server` for a fork; the directory
    of its files. See tests/forks.py.
    """

    def forked(*arguments, devices=1, cwd=ROOT, env=None, given="", apart=False):
        directory = tmp_path_factory.mktemp("quick")
        (directory / "in").write_text(given)
        flags = f"--xla_force_host_platform_device_count={devices} {HASTE}"
        job = {
            "argv": list(map(str, arguments)),
            "cwd": str(cwd),
            "env": {"XLA_FLAGS": flags} | (env or {}),
            "directory": str(directory),
            "apart": apart,
        }
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        return directory

    return forked


def printed(directory):
    """The output of a fork to stdout and to stderr."""
    return tuple((directory / name).read_text(errors="replace") for name in ("out", "err"))


@pytest.fixture(scope="session")
def quick_command(forked, server):
    """`quick_command("train.py", *flags, devices=8)`, or "-m", "adaptive_jax", "score": exit
    status, stdout and stderr of the script run to its end, without the seconds of imports.

    A fork of `server`. cwd: where it runs. env: variables besides those of the server. given: its
    stdin. until: called while it runs; when it returns, the script is killed.
    """

    def quick_command(*arguments, until=None, **how):
        directory = forked(*arguments, **how)
        if until:
            while not (directory / "out").exists():  # the server may still import
                time.sleep(0.005)
            until()
            (directory / "kill").touch()
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(arguments, status, *printed(directory))

    return quick_command


def until(condition, *processes):
    """Waits until a condition holds, while processes run, for 200 seconds at most."""
    deadline = time.monotonic() + 200
    while True:
        ended = [process for process in processes if process.poll() is not None]
        if condition():
            return
        assert not ended and time.monotonic() < deadline, [each.communicate() for each in ended]
        time.sleep(0.005)


class Fork:
    """A script that runs in a fork, with what tests use of `subprocess.Popen`."""

    def __init__(self, directory):
        self.directory, self.returncode = directory, None

    def poll(self):
        """Its exit status; None while it runs."""
        if self.returncode is None and (self.directory / "status").exists():
            self.returncode = int((self.directory / "status").read_text())
        return self.returncode

    @property
    def pid(self):
        """The number of its process."""
        return int((self.directory / "pid").read_text())

    def communicate(self, timeout=300):
        """The output of the process, once it has ended."""
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.directory, timeout)
            time.sleep(0.01)
        return printed(self.directory)

    def send_signal(self, number):
        """Sends it a signal."""
        os.kill(self.pid, number)

    def kill(self):
        """Kills it, if it runs."""
        (self.directory / "kill").touch()


@pytest.fixture(scope="session")
def start(forked, server):
    """`start("train.py", *flags, devices=8)`: the script, which runs on while the test does."""

    def start(*arguments, **how):
        fork = Fork(forked(*arguments, apart=True, **how))
        assert server.stdout.readline()  # nothing: it has begun
        while not (fork.directory / "pid").exists():
            time.sleep(0.001)
        return fork

    return start


@pytest.fixture
def start_hosts(start, free_port):
    """`start_hosts("train.py", *flags, devices=2)`: the script as two processes, killed at the
    end of the test; each has its number for {host} in the arguments.
    """
    started = []

    def begin(*arguments, **how):
        started.append(start(*arguments, **how))
        return started[-1]

    def start_hosts(*arguments, devices=1):
        address = f"--coordinator=127.0.0.1:{free_port()}"
        return [
            begin(
                *(str(each).replace("{host}", str(host)) for each in arguments),
                *(address, "--hosts=2", f"--host={host}"),
                devices=devices,
            )
            for host in range(2)
        ]

    yield start_hosts
    for process in started:
        process.kill()
        process.communicate()


class _BadInput(BaseException):
    """Raised in place of ending this process; its message is the line without `error: `."""


@contextlib.contextmanager
def _own_flags():
    """Removes the flags of commands, and puts them back; absl's own flags stay."""
    flags = vars(absl_flags.FLAGS)
    before = dict(flags)
    of_modules = absl_flags.FLAGS.flags_by_module_dict().items()
    of_absl = [flag for module, found in of_modules if module.startswith("absl") for flag in found]
    flags.clear()
    absl_flags.FLAGS.__init__()
    for flag in of_absl:
        absl_flags.FLAGS[flag.name] = flag
    try:
        yield
    finally:
        flags.clear()
        flags.update(before)


@pytest.fixture
def in_process(monkeypatch):
    """`in_process("train.py", *flags)`, or "-m", "adaptive_jax", "score": as `quick_command`, but
    in this process, where JAX has started. Warnings are not in its stderr.
    """

    def in_process(script, *arguments, given=""):
        argv = [script, *map(str, arguments)]
        name = script.removesuffix(".py")
        if script == "-m":
            name, argv = argv[2], argv[2:]
        if name == "train":
            argv.insert(1, "--notune_cpu")  # on a CPU it would start anew
        out, err, status = io.StringIO(), io.StringIO(), 0

        def run():
            command = importlib.import_module(f"adaptive_jax.{COMMANDS[name][0]}")
            getattr(command, "define_flags", lambda: None)()
            command.main(*commands._parse(argv, getattr(command, "POSITIONAL", ()))[1:])

        def fail(message):
            raise _BadInput(message)

        with (
            _own_flags(),
            tempfile.TemporaryFile("w+") as stdin,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            monkeypatch.context() as patch,
        ):
            patch.setattr(commands, "fail", fail)
            patch.setattr(sys, "argv", argv)
            patch.setenv(cache.VARIABLE, os.environ[cache.VARIABLE])  # --cache_dir sets it
            stdin.write(given)
            stdin.seek(0)
            patch.setattr(sys, "stdin", stdin)
            try:
                commands._guarded(run, "stopped")
            except _BadInput as bad:
                status = 2
                print(f"error: {bad}", file=err)
            except SystemExit as end:
                status = end.code or 0
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    return in_process


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 100 kB, which one checkpoint or shard overfills; only root can have one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", disk]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture(scope="session")
def real_wordnet(tmp_path_factory):
    """A directory with the files of WordNet 3.0, unpacked."""
    packed = ROOT.parent / "shared" / "data" / "wordnet-3.0"
    if not packed.exists():
        pytest.skip("needs ../shared")
    directory = tmp_path_factory.mktemp("wordnet")
    for file in packed.iterdir():
        content = file.read_bytes()
        if file.suffix == ".xz":
            content = lzma.decompress(content)
        (directory / file.name.removesuffix(".xz")).write_bytes(content)
    return directory
