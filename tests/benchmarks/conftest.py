"""Fixtures of benchmarks: peers follow each other at once, as nobody reads their times."""

import pytest

from benchmarks import timing


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    """Between the turns of peers."""
    monkeypatch.setattr(timing, "REST", 0)
