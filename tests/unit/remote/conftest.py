"""One loop for all servers and callers of a process, and a server that has a node."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before the first file of tests loads it


@pytest.fixture(scope="module", autouse=True)
def _one_loop() -> Iterator[None]:
    pytest.importorskip("cryptography")
    pytest.importorskip("grpc")
    from helpers.callers import one_loop

    with one_loop():
        yield


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    from helpers.callers import quiet

    with quiet():
        yield


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server, and the node berlin, which echoes."""
    from helpers.callers import near
    from helpers.federation import Federation

    made = Federation(tmp_path_factory.mktemp("federation"))
    with near(made, "berlin"):
        yield made
    made.close()
