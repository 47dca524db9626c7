"""The benchmark of adoption, without a checkout: what is missing is said in a line."""

import sys

import pytest

from adaptive_jax.errors import InputError
from benchmarks import adoption


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    """Without it a user meets an ImportError deep in nanodo, or a program that compares nothing."""
    for source in (None, str(tmp_path)):
        with pytest.raises(InputError, match=f"must be a checkout of nanodo, got {source}: git"):
            adoption.modules(source)
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / "nanodo"
    package.mkdir()
    for name, text in (("model", ""), ("data", "import no_such_package.python")):
        (package / f"{name}.py").write_text(text)
    with pytest.raises(InputError, match="which is not installed: pip install no_such_package"):
        adoption.modules(str(tmp_path))
    sys.modules.pop("nanodo", None)
