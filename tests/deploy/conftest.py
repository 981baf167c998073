"""How many kills a run with real processes is to bear: `make deployed DEPLOYED="-k kills --kills 50"`."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kills", type=int, default=4, help="processes of a server and its nodes to kill in one run")
    parser.addoption("--kills-seed", type=int, default=0, help="from which it follows what is killed, and when")
