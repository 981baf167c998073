"""A private study with real processes, whose server is killed after it has released sums."""

from __future__ import annotations

from itertools import pairwise

import pytest

pytest.importorskip("cryptography")

from fedtide.site.parity import replay
from fedtide.wire.ledger import LEDGER, read
from helpers.federation import until
from helpers.hospitals import NAMES
from helpers.serving import WAIT, Serving

pytestmark = [pytest.mark.thorough, pytest.mark.deploy, pytest.mark.slow, pytest.mark.xdist_group("deploy")]

PRIVACY = {
    "epsilon": 8.0,
    "clip": {"delta": 1.0, "loss": 5.0},
    "adapt": {"delta": {"quantile": 0.5}},
    "noise": "banded",
    "distance": 1,
}


def test_each_round_is_released_once_whenever_the_server_dies(tmp_path):
    wire = {"secure": True, "fewest": 3, "privacy": PRIVACY}
    serving = Serving(tmp_path, ",".join(NAMES), "FedAvg", {"deadline": "10m", "fewest": 3}, wire=wire)
    ledger = serving.site.record / LEDGER
    try:
        server = serving.serve()
        server.wait_for("nodes are let in")
        for name in NAMES:
            serving.join(name)
        for number in (1, 3):
            until(lambda number=number: len(read(ledger)) >= number, WAIT)
            server.process.kill()
            server.process.wait()
            server = serving.serve()
            server.wait_for("nodes are let in")
        server.wait_for("report:")
        assert server.process.wait(WAIT) == 0
    finally:
        serving.close()
    lines = read(ledger)
    assert [line.place for line in lines] == [(number, 0, None) for number in range(4)]
    assert all(line.clients == (0, 1, 2) for line in lines)
    assert lines[-1].epsilon == pytest.approx(8.0)
    for client, name in enumerate(NAMES):
        own = read(tmp_path / f"{name}-folder" / "privacy" / f"{client}.jsonl")
        assert [(line.round, line.epsilon) for line in own] == [(line.round, line.epsilon) for line in lines]
    # Noise decides whether a bound rises or falls, so that it may come back to one before the last.
    assert all(one.bounds["delta"] != next_.bounds["delta"] for one, next_ in pairwise(lines))
    assert not serving.site.private.exists()
    assert replay(serving.site.run, out=tmp_path / "replay").equal
    files = [tmp_path / f"{name}.csv" for name in NAMES]
    found = replay(serving.site.run, files, tmp_path / "with-rows")
    assert found.equal
    assert len(found.noise) == 4
    assert all(each.likely for each in found.noise)
    assert "Privacy budget" in (serving.site.run / "report.html").read_text(encoding="utf-8")
