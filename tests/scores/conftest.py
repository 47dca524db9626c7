"""Fixtures of evaluation."""

import shutil

import pytest


@pytest.fixture(scope="session")
def trained_copy(trained, tmp_path_factory):
    """A copy of the trained run: only its `eval` is to be changed."""
    return shutil.copytree(trained, tmp_path_factory.mktemp("evaluated") / "small")
