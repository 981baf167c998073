"""FedBuff with real clients: a slow one trains on while rounds go by, and its answer counts when it comes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedtide.site.parity import replay
from helpers import slow_worker
from helpers.serving import Serving

pytestmark = [pytest.mark.thorough, pytest.mark.deploy, pytest.mark.slow, pytest.mark.xdist_group("deploy")]


def test_a_slow_client_is_asked_after_in_later_rounds(tmp_path):
    rounds = 8
    method = {
        "name": "FedBuff",
        "algorithm": "fedbuff",
        "buffer": 2,
        "cohort": 3,
        "local": {"lr": 0.1, "batch_size": 20},
    }
    serving = Serving(
        tmp_path, "berlin,lyon,oslo", "FedBuff", {"deadline": "10m", "fewest": 3},
        rounds=rounds, eval_every=4, method=[method],
    )  # fmt: skip
    try:
        server = serving.serve()
        server.wait_for("nodes are let in")
        for name in ("berlin", "lyon", "oslo"):
            serving.join(name, worker=Path(slow_worker.__file__))
        server.wait_for("report: ")
    finally:
        serving.close()
    words = serving.words(2)
    assert ["at work"] in words.values()
    assert ["answered"] in words.values()
    assert all(len(line["asks"][0]["answered"]) == 2 for line in serving.asks())
    again = replay(serving.site.run, [tmp_path / f"{name}.csv" for name in ("berlin", "lyon", "oslo")])
    assert again.equal
    assert again.differs is None
