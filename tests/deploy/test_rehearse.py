"""Real processes give the results of a simulation, bit for bit, kills or not."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")

from fedtide.site.machine import Log
from fedtide.site.parity import rehearse
from fedtide.site.site import Site
from fedtide.wire import ledger
from helpers.near_sites import site_of

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.xdist_group("deploy")]

METHODS = {
    "fedavg": {},
    "scaffold": {},
    "ifca": {"clusters": 2},
    "fielding": {},
    "fedtem": {"prior": {"kind": "linear", "period": 4}},
    "pfedem": {"features": "network"},
}


NODES = "berlin,lyon:2,oslo:2"


def rehearsed(
    folder: Path, name: str, rounds: int = 3, kills: bool = True, nodes: str = NODES, **changes: Any
) -> tuple[Site, str]:
    """Rehearse a method, which has to give the bits of the simulation; the site of the rehearsal, and the log."""
    method = {"name": name, "algorithm": name, "cohort": 5, "local": {"lr": 0.1, "batch_size": 8}, **METHODS[name]}
    site = site_of(folder, nodes, name, method=[method], **changes)
    log = Log(file=io.StringIO())
    assert rehearse(site, rounds=rounds, kills=kills, log=log) == 0, log.file.getvalue()
    assert "deployed = simulated, bit for bit" in log.file.getvalue()
    assert ("killing the server" in log.file.getvalue()) == kills
    return Site.read(site.root / "rehearsal"), log.file.getvalue()


@pytest.mark.parametrize(
    "name", [name if name == "scaffold" else pytest.param(name, marks=pytest.mark.thorough) for name in METHODS]
)
def test_deployed_is_simulated(tmp_path, name):
    kills = name == "scaffold"
    rehearsed(tmp_path, name, 4 if kills else 2, kills)


@pytest.mark.thorough
@pytest.mark.parametrize("nodes", [NODES, "berlin,lyon,oslo,rome,wien"], ids=["three nodes", "five nodes"])
def test_masked_sums_are_those_of_the_simulation_with_a_node_and_the_server_killed(tmp_path, nodes):
    """Five nodes deal shares before."""
    site, _ = rehearsed(tmp_path, "ifca", nodes=nodes, wire={"secure": True, "fewest": 3, "shares": True})
    record = (site.root / "nodes" / "berlin" / "asked.jsonl").read_text()
    assert '"kind": "unmask"' in record
    assert ('"kind": "deal"' in record) == (nodes != NODES)
    assert '"opened": {"0": [' in record


@pytest.mark.thorough
def test_private_masked_sums_are_those_of_the_simulation_with_a_node_and_the_server_killed(tmp_path):
    privacy = {"epsilon": 8.0, "clip": {"delta": 1.0, "loss": 5.0}, "noise": "banded", "distance": 1, "scores": 500.0}
    site, log = rehearsed(tmp_path, "fedavg", wire={"secure": True, "fewest": 3, "privacy": privacy})
    assert "noise follows from the seed here" in log
    lines = [(line.round, line.question) for line in ledger.read(site.record / ledger.LEDGER)]
    assert lines == [(0, "train"), (1, "train"), (2, "train"), (2, "score test client"), (2, "score val client")]
    last = json.loads((site.record / "rounds.jsonl").read_text().splitlines()[-1])
    assert set(last["scores"]["val"]) == {"accuracy", "noise", "clients"}
    assert not site.private.exists(), "secrets of noise are gone when the run is over"
