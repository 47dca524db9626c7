"""The benchmark of adoption, without a checkout: what is missing is said in a line."""

import sys

import pytest

from benchmarks import adoption
from tests import refuses


@pytest.mark.parametrize("trainer", adoption.TRAINERS)
def test_missing_checkout_or_package_is_named(trainer, tmp_path, monkeypatch):
    """Without it a user meets an ImportError deep in the trainer, or a program that compares
    nothing.
    """
    for source in (None, str(tmp_path)):
        with refuses(trainer, str(source), "git"):
            adoption.trainer_module(trainer, source)
    monkeypatch.setattr(sys, "path", [*sys.path])
    package = tmp_path / adoption.TRAINERS[trainer][1] / trainer
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import no_such_package.python")
    with refuses("installed", "pip install") as error:
        adoption.trainer_module(trainer, str(tmp_path))
    # levanter's own arrays are a package
    assert str(error.value).endswith(("no_such_package", "haliax"))
    sys.modules.pop(trainer, None)
