"""Six shops with files of rows, sites of theirs, and nodes in this process that play the studies of these sites."""

import csv
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedtide.config import read
from fedtide.evaluate.judge import Judge
from fedtide.inspection.by_sums import STAGES
from fedtide.inspection.table import Table
from fedtide.runs import folder
from fedtide.runs.runner import Run
from fedtide.site.deploying import make_site
from fedtide.site.seat import Seat, node_of
from fedtide.site.site import Roster, Site
from fedtide.site.tickets import Ticket
from helpers.near_sites import fleet_at, host_at
from helpers.planted import planted

CLIENTS = 6
NAMES = [f"shop-{number}" for number in range(CLIENTS)]


def write_rows(path: Path, table: Table, rows: np.ndarray) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        lines = csv.writer(file)
        lines.writerow(["when", "a", "b", "c", "d", "label", "shop"])
        for row in np.flatnonzero(rows):
            when = datetime(2026, 3, 2) + timedelta(seconds=round(float(table.time[row])))
            values = [round(float(value), 4) for value in table.features[row]]
            lines.writerow([when.isoformat(), *values, table.label[row], table.client[row]])


def shops(place: Path, world: str = "meaning", **changes: Any) -> Path:
    """Write a study that asks the questions, its pilot rows, and a file of rows for each shop; return the study."""
    table = planted(world, 0)
    owner = np.array([int(name.split()[1]) for name in table.client])
    write_rows(place / "pilot.csv", table, owner < CLIENTS)
    for number, name in enumerate(NAMES):
        write_rows(place / f"{name}.csv", table, owner == number)
    source = {"kind": "csv", "path": str(place / "pilot.csv"), "label": "label", "client": "shop", "time": "when"}
    study: dict[str, Any] = {
        "rounds": len(STAGES), "eval_every": len(STAGES), "data": {"source": source, "split": {"test": 0.0}},
        "model": {"kind": "linear"}, "method": [{"name": "questions", "algorithm": "inspection"}],
    }  # fmt: skip
    (place / "study.toml").write_text(tomli_w.dumps(study | changes), encoding="utf-8")
    return place / "study.toml"


def made(study: Path, root: Path, method: str | None = None) -> Site:
    """The site of a study for the six shops."""
    site = make_site(read(study), method, Roster.of(",".join(NAMES)), root, None, "study.toml")
    folder.create(site.experiment, site.run)
    return site


def play(site: Site, rounds: int, names: Sequence[str] = NAMES) -> None:
    """Play until so many rounds are over, with nodes in this process that begin anew."""
    place, nodes = site.root.parent, {}
    for name in names:
        home = place / f"{site.root.name}-{name}"
        seat = Seat.read(Ticket.read(site.root / "tickets" / f"{name}.ticket"), [place / f"{name}.csv"], home=home)
        seat.settle()
        nodes[name] = node_of(seat.settings)
    host = host_at(site)
    fleet = fleet_at(site, nodes, host)
    run, over = Run(site.experiment, site.method, site.seed, site.record), [0]
    for step in run.play(
        lambda: over[-1] >= rounds, lambda _: Judge(host.algorithm, fleet, (), site.method.decide_per)
    ):
        over.append(step.round)
