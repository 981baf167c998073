"""A node that is let in and sends what it should not: its answers do not count, and nobody else feels it."""

from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedtide.site.parity import replay
from helpers import lying_worker
from helpers.processes import offspring, used
from helpers.serving import Serving

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.xdist_group("deploy")]

LIAR = 2
GROWN = 100.0
"""Megabytes by which no process of the server grows when it is sent 400 that it does not want."""
SAID = {
    "garbage": "refused: ",
    "nan": "refused: ",
    "shape": "refused: ",
    "weight": "refused: ",
    "version": "refused: it speaks version 5 of the protocol, and the server version 0",
    "lost": "refused: its memory of round 0 is gone from the node; restore its folder",
    "large": "",
}


def test_what_a_lying_node_sends_does_not_count(tmp_path):
    rounds = len(lying_worker.LIES)
    serving = Serving(
        tmp_path,
        "berlin,lyon,oslo",
        "SCAFFOLD",
        {"deadline": "10m", "fewest": 2, "every": "5s"},  # in which a liar comes back
        rounds=rounds,
        eval_every=rounds,
    )
    try:
        server = serving.serve()
        server.wait_for("nodes are let in")
        serving.join("oslo", worker=Path(lying_worker.__file__))
        server.wait_for("oslo is connected")
        for name in ("berlin", "lyon"):
            serving.join(name)
        large = lying_worker.LIES.index("large")
        server.wait_for(f"round {large} of {rounds}")
        own = server.process.pid
        before = {number: used(number, "VmHWM") for number in (own, *offspring(own))}
        server.wait_for(f"round {large + 1} of {rounds}")
        lines = {own: "fedtide serve"} | offspring(own)
        grown = {lines[number]: used(number, "VmHWM") - before[number] for number in before if number in lines}
        server.wait_for("report: ")
    finally:
        serving.close()
    words = serving.words(LIAR)
    for number, lie in enumerate(lying_worker.LIES):
        if number == rounds - 1 and not words[number]:
            continue  # on a busy machine it is still on its way back
        (word,) = words[number]
        if lie == "honest":
            assert word == "answered"
            continue
        assert word.startswith(SAID[lie]), lie
        assert word not in ("answered", "at work"), lie
        assert any(f"oslo, client {LIAR}, 'train': {word}"[:100] in line for line in server.lines), lie
    for client in (0, 1):  # the first round may have begun before one of the two was there
        assert {word for told in serving.words(client).values() for word in told} == {"answered"}
    assert max(grown.values()) < GROWN, grown
    again = replay(serving.site.run, [tmp_path / f"{name}.csv" for name in ("berlin", "lyon", "oslo")])
    assert again.equal
    assert again.differs is None
