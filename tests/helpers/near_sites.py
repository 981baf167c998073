"""A site and its nodes, made as `fedtide deploy` and `fedtide join` make them, in this process."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedtide.config import read
from fedtide.core.loop import begin, play
from fedtide.remote.offline import NearCarrier
from fedtide.remote.schedule import Present, RoundClock
from fedtide.runs.build import wire_of
from fedtide.site.private import private_wire
from fedtide.site.seat import RECORD, Seat, algorithm_without_rows, like
from fedtide.site.serve import fleet_of
from fedtide.site.site import Roster, Site, make_site
from fedtide.site.work import Watch, node_of
from fedtide.wire.answer_schema import made_up
from helpers.hospitals import NAMES, hospitals


def site_of(folder: Path, nodes: str = ",".join(NAMES), **changes: Any) -> Site:
    return make_site(read(hospitals(folder, **changes)), "FedAvg", Roster.of(nodes), folder / "site", None, "s")


def nodes_of(folder: Path, site: Site, rules: Callable[[str], str]) -> dict[str, Any]:
    nodes = {}
    for name in NAMES:
        policy = folder / f"{name}.toml"
        policy.write_text(rules(name))
        seat = Seat.read(site.root / "tickets" / f"{name}.ticket", [folder / f"{name}.csv"], policy, folder / name)
        seat.settle()
        told = {"ticket": str(seat.copy), "data": [str(seat.data[0])], "policy": str(policy), "home": str(seat.home)}
        nodes[name] = Watch(node_of(told), datetime.now(UTC), seat.home / RECORD)
    return nodes


def played(site: Site, nodes: dict[str, Any], rounds: int = 2) -> Any:
    algorithm = algorithm_without_rows(site.experiment, site.about.rows)
    rows = made_up(like(site.about.rows, ()), site.about.rows.classes)
    wire = private_wire(site, algorithm, wire_of(site.experiment, site.method, algorithm, 3))
    fleet = fleet_of(site, NearCarrier(nodes), algorithm, Present(0), RoundClock(), rows, wire)
    fleet.patience = 5.0
    start = begin(algorithm, fleet, seed=0, rounds=rounds)
    list(play(algorithm, fleet, start, seed=0, rounds=rounds))
    return fleet


def words(fleet: Any) -> set[str]:
    return {word for ask in fleet.asks for node in ask["nodes"].values() for word in node["clients"].values()}
