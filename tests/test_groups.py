"""Groups of tests are played by one process each, because they share what is dear to make."""

import pytest


def test_groups_reach_the_processes(request):
    """Where pytest and pytest-xdist do not go together each test is dealt singly, and nothing says so."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("there is one process")
    assert request.node.nodeid.endswith("@test_groups")
