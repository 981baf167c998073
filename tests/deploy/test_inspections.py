"""Inspections and tournaments on real processes whose server is killed between questions have the simulation's bits."""

import io
from typing import Any

import pytest

pytest.importorskip("cryptography")

from fedtide.config import read
from fedtide.inspection.by_sums import STAGES
from fedtide.site.deploying import make_site
from fedtide.site.inspecting import inspected, last_state
from fedtide.site.machine import Log
from fedtide.site.parity import rehearse
from fedtide.site.site import Roster, Site
from helpers.shops import NAMES, shops

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.thorough, pytest.mark.xdist_group("deploy")]


def rehearsed(place: Any, rounds: int, **changes: Any) -> Site:
    """Rehearse a study of the shops, whose server and a node are killed."""
    study = read(shops(place, rounds=rounds, **changes))
    site = make_site(study, None, Roster.of(",".join(NAMES)), place / "site", None, "study.toml")
    log = Log(file=io.StringIO())
    assert rehearse(site, rounds=rounds, log=log) == 0, log.file.getvalue()
    said = log.file.getvalue()
    assert "deployed = simulated, bit for bit" in said
    assert "killing the server" in said
    return Site.read(site.root / "rehearsal")


def test_an_inspection_whose_server_is_killed(tmp_path):
    site = rehearsed(tmp_path, len(STAGES), wire={"secure": True})
    assert "sums of 6 clients" in str(inspected(site.root))


def test_a_tournament_whose_server_is_killed(tmp_path):
    entries = [
        {"name": name, "algorithm": name, "cohort": 4, "local": {"lr": 0.1, "epochs": 1}}
        for name in ("fedavg", "scaffold", "ifca")
    ]
    method = {"name": "tournament", "algorithm": "tournament", "entries": entries}
    data = read(shops(tmp_path)).data.model_dump(mode="json", exclude_none=True) | {"split": {"val": 0.3}}
    site = rehearsed(tmp_path, 4, method=[method], data=data, wire={"secure": True})
    assert len(last_state(site)[1].rungs) == 2
