"""A site and its nodes, made as `fedtide deploy` and `fedtide join` make them, in this process."""

import itertools
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedtide.config import read
from fedtide.core.loop import begin, play
from fedtide.core.memory import MemoryStore
from fedtide.evaluate.judge import Judge, views
from fedtide.fleets.engines import Host
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.offline import NearCarrier
from fedtide.remote.schedule import Present, RoundClock
from fedtide.runs import folder as run_folder
from fedtide.runs.build import metrics_of
from fedtide.runs.runner import Run
from fedtide.site.accounts import private_wire
from fedtide.site.client_rows import host_without_rows
from fedtide.site.deploying import make_site
from fedtide.site.seat import RECORD, Seat, WatchedNode, node_of
from fedtide.site.serve import fleet_of
from fedtide.site.site import Roster, Site
from fedtide.site.tickets import Ticket
from helpers.hospitals import NAMES, hospitals


def site_of(
    folder: Path, nodes: str = ",".join(NAMES), played: str = "FedAvg", address: str | None = None, **changes: Any
) -> Site:
    study = read(hospitals(folder, **changes))
    return make_site(study, played, Roster.of(nodes), folder / "site", address, "study.toml")


def nodes_of(
    folder: Path, site: Site, rules: Callable[[str], str], live: Mapping[str, Path] | None = None
) -> dict[str, Any]:
    nodes = {}
    for name in NAMES:
        policy = folder / f"{name}.toml"
        policy.write_text(rules(name))
        ticket, watch = Ticket.read(site.root / "tickets" / f"{name}.ticket"), [live[name]] if live else []
        seat = Seat.read(ticket, [folder / f"{name}.csv"], policy, folder / name, watch=watch)
        seat.settle()
        nodes[name] = WatchedNode(node_of(seat.settings), datetime.now(UTC), seat.home / RECORD)
    return nodes


def host_at(site: Site) -> Host:
    return host_without_rows(site.experiment, site.about.rows, site.roster.clients, MemoryStore(None))


def fleet_at(site: Site, nodes: dict[str, Any], host: Host) -> RemoteFleet:
    fleet = fleet_of(
        site, NearCarrier(nodes), host, Present(0), RoundClock(), private_wire(site, host), lambda present: False
    )
    fleet.patience = 5.0
    return fleet


def serve_near(site: Site, nodes: dict[str, Any], rounds: int = 4, *, judged: bool = False) -> None:
    """Play rounds as a server does, on a clock whose rounds all take equally long."""
    site = Site.read(site.root)
    if not site.run.exists():
        run_folder.create(site.experiment, site.run)
    host = host_at(site)
    fleet = fleet_at(site, {node.name: nodes[node.name] for node in site.roster.node if not node.left}, host)
    judged_on, metrics = views(host.population) if judged else [], metrics_of(site.experiment)
    judge = Judge(host.algorithm, fleet, judged_on, site.method.decide_per, metrics)
    experiment = site.experiment.model_copy(update={"checkpoint_every": 1})
    played = Run(experiment, site.method, site.seed, site.record).play(judge_of=lambda _: judge, until=rounds)
    assert [progress.round for progress in played][-1] == rounds


def played(site: Site, nodes: dict[str, Any], rounds: int = 2) -> Any:
    """The first rounds of a site's study, in this process."""
    host, whole = host_at(site), max(site.experiment.rounds, rounds)
    fleet = fleet_at(site, nodes, host)
    start = begin(host.algorithm, fleet, seed=0, rounds=whole)
    list(itertools.islice(play(host.algorithm, fleet, start, seed=0, rounds=whole), rounds))
    return fleet


def words(fleet: Any) -> set[str]:
    return {word for ask in fleet.record.asks for node in ask["nodes"].values() for word in node["clients"].values()}
