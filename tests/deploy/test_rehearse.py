"""What real processes give is what a simulation gives, bit for bit, kills or not."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("cryptography")

from fedtide.config import read
from fedtide.site import parity
from fedtide.site.deploying import make_site
from fedtide.site.machine import Log
from fedtide.site.parity import Kill, rehearse
from fedtide.site.site import Roster, Site
from fedtide.wire import ledger
from helpers.hospitals import hospitals

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.xdist_group("deploy")]

LOCAL = {"lr": 0.1, "batch_size": 8}
METHODS = {
    "fedavg": {},
    "scaffold": {},
    "ifca": {"clusters": 2},
    "fielding": {},
    "fedtem": {"prior": {"kind": "linear", "period": 4}},
    "pfedem": {"features": "network"},
}


@pytest.mark.parametrize(
    "name", [name if name == "scaffold" else pytest.param(name, marks=pytest.mark.thorough) for name in METHODS]
)
def test_deployed_is_simulated(tmp_path, name):
    method = {"name": name, "algorithm": name, "cohort": 4, "local": LOCAL, **METHODS[name]}
    experiment = read(hospitals(tmp_path, method=[method]))
    site = make_site(experiment, name, Roster.of("berlin,lyon:2,oslo:2"), tmp_path / "site", None, "study.toml")
    said = io.StringIO()
    kills = name == "scaffold"
    assert rehearse(site, rounds=4 if kills else 2, kills=kills, log=Log(file=said)) == 0, said.getvalue()
    assert "deployed = simulated, bit for bit" in said.getvalue()
    assert ("killing the server" in said.getvalue()) == kills


@pytest.mark.thorough
def test_masked_sums_are_those_of_the_simulation_with_a_node_and_the_server_killed(tmp_path):
    method = {"name": "ifca", "algorithm": "ifca", "cohort": 5, "local": LOCAL, "clusters": 2}
    experiment = read(hospitals(tmp_path, method=[method], wire={"secure": True, "fewest": 3}))
    site = make_site(experiment, "ifca", Roster.of("berlin,lyon:2,oslo:2"), tmp_path / "site", None, "study.toml")
    said = io.StringIO()
    assert rehearse(site, rounds=3, log=Log(file=said)) == 0, said.getvalue()
    assert "deployed = simulated, bit for bit" in said.getvalue()
    told = (site.root / "rehearsal" / "nodes" / "berlin" / "asked.jsonl").read_text()
    assert '"kind": "unmask"' in told
    assert '"opened": {"0": [' in told


@pytest.mark.thorough
def test_private_masked_sums_are_those_of_the_simulation_with_a_node_and_the_server_killed(tmp_path):
    method = {"name": "FedAvg", "algorithm": "fedavg", "cohort": 5, "local": LOCAL}
    privacy = {"epsilon": 8.0, "clip": {"delta": 1.0, "loss": 5.0}, "noise": "banded", "distance": 1}
    experiment = read(hospitals(tmp_path, method=[method], wire={"secure": True, "fewest": 3, "privacy": privacy}))
    site = make_site(experiment, "FedAvg", Roster.of("berlin,lyon:2,oslo:2"), tmp_path / "site", None, "study.toml")
    said = io.StringIO()
    assert rehearse(site, rounds=3, log=Log(file=said)) == 0, said.getvalue()
    assert "noise follows from the seed here" in said.getvalue()
    assert "deployed = simulated, bit for bit" in said.getvalue()
    there = Site.read(site.root / "rehearsal")
    assert [line.round for line in ledger.read(there.record / ledger.LEDGER)] == [0, 1, 2]
    assert not there.private.exists(), "what noise needed is gone when the run is over"


@pytest.mark.thorough
def test_a_server_that_is_killed_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(parity, "_plan_kills", lambda site: [Kill(1, "")])
    site = make_site(
        read(hospitals(tmp_path)), "SCAFFOLD", Roster.of("berlin,lyon:4"), tmp_path / "site", None, "s.toml"
    )
    said = io.StringIO()
    assert rehearse(site, rounds=2, log=Log(file=said)) == 0, said.getvalue()
    assert "killing the server in round 2" in said.getvalue()
