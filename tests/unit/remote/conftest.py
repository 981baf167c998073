"""One loop for all servers and callers of a process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # before the first file of tests loads it


@pytest.fixture(scope="module", autouse=True)
def _one_loop() -> Iterator[None]:
    pytest.importorskip("cryptography")
    pytest.importorskip("grpc")
    from helpers.callers import one_loop

    with one_loop():
        yield
