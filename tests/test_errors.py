"""Lines for errors of the machine, which Python, JAX, Orbax and gcsfs raise."""

import errno

import pytest

from adaptive_jax.errors import InputError, explain

FULL = 'RESOURCE_EXHAUSTED: Error writing "/run/2/d/a": [OS error 28: No space left on device]'


@pytest.mark.parametrize(
    "error, line",
    [
        (MemoryError(), "out of memory: make tokens_per_device"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes."), "out of memory: "),
        (RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded"), None),
        (ValueError(FULL), "cannot write /run/2/d/a: No space left on device; what was saved"),
        (OSError(errno.ENOSPC, "", "a.npy"), "cannot write a.npy: No space left on device"),
        (OSError(errno.EROFS, ""), "cannot write a file: Read-only file system"),
        (PermissionError(errno.EACCES, "", "/a"), "cannot use /a: Permission denied; choose"),
        (IsADirectoryError(errno.EISDIR, "", "/a"), "cannot use /a: Is a directory"),
        (FileNotFoundError(errno.ENOENT, "", "/a"), None),
        (Exception("Forbidden: https://b/o\nno access"), "a bucket cannot be used (Forbidden: "),
        (ConnectionResetError(errno.ECONNRESET, ""), None),
        (InputError("a line about a word out of memory"), None),
        (KeyError("a"), None),
    ],
    ids=repr,
)
def test_errors_of_the_machine(error, line):
    """Without it a full disk ends in a traceback, or a bug in a line that hides where it is."""
    said = explain(error)
    assert said is None if line is None else said.startswith(line) and "\n" not in said
