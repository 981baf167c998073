"""A disk that is full, at a node and at the server: it is said, nothing is lost, and it goes on when there is room."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedtide.site.parity import replay
from helpers.federation import until
from helpers.serving import WAIT, Serving

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.deploy,
    pytest.mark.slow,
    pytest.mark.xdist_group("deploy"),
    pytest.mark.skipif(os.geteuid() != 0, reason="disks can be mounted by root alone"),
]


@contextmanager
def disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Mount a small disk."""
    folder.mkdir(mode=0o700)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=0700", "none", str(folder)], check=False
    )
    if made.returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room; return the file that takes it."""
    path = folder / "filler"
    with path.open("wb") as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    os.write(file.fileno(), bytes(size))
            except OSError:
                continue
    return path


def test_full_disks(tmp_path):
    rounds = 16
    method = {"name": "SCAFFOLD", "algorithm": "scaffold", "cohort": "everyone", "local": {"lr": 0.1, "batch_size": 20}}
    with disk(tmp_path / "node", 50), disk(tmp_path / "server", 50):
        serving = Serving(
            tmp_path, "berlin,lyon", "SCAFFOLD", {"deadline": "3m", "every": "5s"},
            rounds=rounds, eval_every=rounds, method=[method],
            folders={"site": tmp_path / "server" / "site", "lyon": tmp_path / "node"},
        )  # fmt: skip
        try:
            server = serving.serve()
            server.wait_for("nodes are let in")
            serving.join("berlin")
            serving.join("lyon")
            until(lambda: ["answered"] in serving.words(1).values(), WAIT)

            filler = fill(tmp_path / "node")
            server.wait_for("lyon, client 1, 'train': refused: the node cannot keep its memory; see whether its disk")
            full = len(serving.asks())
            filler.unlink()
            until(lambda: ["answered"] in [serving.words(1)[n] for n in range(full, len(serving.asks()))], WAIT)

            filler = fill(tmp_path / "server")
            assert server.process.wait(WAIT) == 2
            assert "No space left on device" in server.lines[-1]
            assert "make room" in server.lines[-1]
            filler.unlink()
            server = serving.serve()
            server.wait_for("report: ")
        finally:
            serving.close()
        assert len(serving.asks()) == rounds
        again = replay(serving.site.run, [tmp_path / f"{name}.csv" for name in ("berlin", "lyon")])
        assert again.equal
        assert again.differs is None
