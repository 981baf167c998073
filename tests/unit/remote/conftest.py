"""One loop for all servers and callers of a process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _one_loop() -> Iterator[None]:
    pytest.importorskip("cryptography")
    pytest.importorskip("grpc")
    from helpers.callers import one_loop

    with one_loop():
        yield
