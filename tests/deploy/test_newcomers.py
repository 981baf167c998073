"""A roster that grows while rounds are played."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("cryptography")

from fedtide.site.parity import replay
from helpers.serving import WAIT, Serving

pytestmark = [pytest.mark.thorough, pytest.mark.deploy, pytest.mark.slow, pytest.mark.xdist_group("deploy")]


def test_a_node_that_is_invited_while_rounds_are_played_takes_part(tmp_path):
    rounds = 10
    method = {"name": "SCAFFOLD", "algorithm": "scaffold", "cohort": "everyone", "local": {"lr": 0.1, "batch_size": 20}}
    serving = Serving(
        tmp_path, "berlin,lyon", "SCAFFOLD", {"deadline": "3m", "fewest": 2, "every": "10s"},
        rounds=rounds, method=[method],
    )  # fmt: skip
    shutil.copy(tmp_path / "pilot.csv", tmp_path / "paris.csv")
    try:
        server = serving.serve()
        server.wait_for("nodes are let in")
        serving.join("berlin")
        serving.join("lyon")
        server.wait_for("round 2 of")
        assert serving.fedtide("invite", str(serving.site.root), "paris").process.wait(WAIT) == 0
        serving.join("paris")
        server.wait_for("paris is connected")
        there = len(serving.asks())
        server.wait_for("report: ")
    finally:
        serving.close()
    words, first = serving.words(2), there + 1
    assert [words[number] for number in range(first, rounds)] == [["answered"]] * (rounds - first)
    assert [line["clients"] for line in serving.asks()] == sorted(line["clients"] for line in serving.asks())
    assert serving.asks()[0]["clients"] == 2
    again = replay(serving.site.run, [tmp_path / f"{name}.csv" for name in ("berlin", "lyon", "paris")])
    assert again.equal
    assert again.differs is None
