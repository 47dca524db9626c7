"""Tests, and the assertion that all of them share."""

import contextlib
import re

import pytest

from adaptive_jax.errors import InputError


@contextlib.contextmanager
def refuses(*names, error=InputError):
    """`with refuses("rows", "window"):` the block raises an InputError whose message is one line
    and names these arguments, keys or values, each as a word of its own, in any order.
    """
    with pytest.raises(error) as raised:
        yield raised
    message = str(raised.value)
    assert "\n" not in message, message
    missing = [n for n in names if not re.search(rf"(?<!\w){re.escape(n)}(?!\w)", message)]
    assert not missing, f"{message!r} does not name {missing}"
