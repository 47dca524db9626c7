"""Notes which tests of the reference numbers have run."""

import pytest

from tests.reference import sets


@pytest.fixture(autouse=True)
def noted(request):
    sets.RAN.add(request.node.nodeid)
