"""The ends of a script: interruptions while it works, reads flags or unwinds; warnings; bugs."""

import os
import pty
import re
import signal
import subprocess
import sys

import pytest

WORKS = """
import logging, os, signal, sys, time, warnings
from absl import logging as absl_logging
from adaptive_jax.config import flags as config_flags
from adaptive_jax.config import commands
config_flags.define()
def rest():  # in short sleeps: a signal that comes just before a sleep does not end it
    for _ in range(600):
        time.sleep(0.1)
def works():
    print("ready", flush=True)
    rest()
def unwinds():
    try:
        works()
    finally:
        print("unwinding", flush=True)
        rest()
def says():
    raise KeyboardInterrupt("stopped at update 7")
def waits():
    try:
        works()
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped at update 8") from None
def lacks():
    import no_such_module.part
def exhausts():
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory, 3 bytes")
def warns():
    logging.getLogger("jax._src.xla_bridge").warning("a GPU may be present")
    logging.getLogger("adaptive_jax.anything").warning("%d words\\nare not there", 3)
    logging.getLogger("adaptive_jax.anything").info("an ordinary event")
    absl_logging.warning("a library's event")
    logging.getLogger("orbax").info("a library's event")
    exec(compile("warnings.warn('a library says')", "/x/site-packages/y.py", "exec"))
    warnings.warn("ours says")
def writes():
    print("日本")
def fails():
    {}["a bug"]
def prints():
    print("line", flush=True)
    sys.stdin.read()
    print("line " * 10_000)
commands.run(globals()[sys.argv.pop()], stopped="stopped: here")
"""


def begin(*arguments, **options):
    """The process of a case."""
    return subprocess.Popen(
        [sys.executable, "-c", WORKS, *map(str, arguments)], text=True, **options
    )


@pytest.mark.parametrize(
    "case, number, says",
    [
        ("works", signal.SIGINT, "stopped: here"),
        ("works", signal.SIGTERM, "stopped: here"),
        ("works", signal.SIGUSR1, "stopped: here"),
        ("waits", signal.SIGINT, "stopped at update 8"),
        ("a config file", signal.SIGINT, "stopped: here"),
        ("a config file", signal.SIGTERM, "stopped: here"),
    ],
)
def test_an_interruption_is_one_line(tmp_path, case, number, says):
    """Status 130 and the line of the script or of the exception, also while a config file runs."""
    rests = "for _ in range(600):\n    time.sleep(0.1)\n"  # as in WORKS
    (tmp_path / "slow.py").write_text(f"import time\nprint('ready', flush=True)\n{rests}")
    arguments = [f"--config={tmp_path / 'slow.py'}", "works"] if case == "a config file" else [case]
    with begin(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, f"{says}\n")


def test_a_signal_that_is_ignored_stays_ignored():
    """A SIGHUP under nohup, as when an ssh session closes."""
    line = ["nohup", sys.executable, "-c", WORKS, "works"]
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(line, text=True, stdin=subprocess.DEVNULL, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=1)
        process.send_signal(signal.SIGUSR2)
        assert process.wait(timeout=30) == 130


@pytest.mark.parametrize(
    "numbers",
    [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGINT)],
    ids=["ctrl-c", "sigterm"],
)
def test_a_second_interruption_ends_at_once(numbers):
    """Without a line or a traceback, and with the cursor of the terminal back."""
    main, other = pty.openpty()
    with begin("unwinds", stdout=other, stderr=other) as process:
        printed = b""
        for number, waits_for in zip(numbers, (b"ready", b"unwinding"), strict=True):
            while waits_for not in printed:
                printed += os.read(main, 1000)
            process.send_signal(number)
        assert process.wait(timeout=30) == 130
        printed += os.read(main, 1000)
    os.close(main), os.close(other)
    assert b"Traceback" not in printed and printed.endswith(b"\x1b[?25h")


@pytest.mark.parametrize(
    "case, status, says",
    [
        ("says", 130, r"stopped at update 7\n"),
        ("lacks", 2, r"error: the package no_such_module is missing: pip install no_such.*\n"),
        (
            "exhausts",
            2,
            r"Traceback.*out of memory, 3 bytes\nerror: out of memory: make tokens_per_device .*\n",
        ),
        (
            "warns",
            0,
            r"warning: a GPU may be present\nwarning: 3 words are not there\nwarning: ours says\n",
        ),
        ("fails", 1, r"Traceback.*KeyError: 'a bug'\n"),
    ],
)
def test_warnings_and_tracebacks(case, status, says):
    """The project's warnings in one line each, and of libraries only JAX's of missing devices; a
    bug, and memory that ran out, keep their traceback.
    """
    with begin(case, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        _, err = process.communicate(timeout=30)
    assert process.returncode == status and re.fullmatch(says, err, re.DOTALL), err


def test_output_is_utf_8_in_every_locale():
    """As what commands read: else their own output is refused, or ends in a traceback."""
    ascii_locale = os.environ | {"PYTHONIOENCODING": "ascii"}
    with begin("writes", stdout=subprocess.PIPE, encoding="utf-8", env=ascii_locale) as process:
        assert process.communicate(timeout=30)[0] == "日本\n"


def test_a_reader_that_has_read_enough():
    """As `train.py --explain | head -1`: the command ends without a traceback."""
    with begin(
        "prints", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        process.stdin.close()
        assert (process.stderr.read(), process.wait(timeout=30)) == ("", 141)
