"""A deployment played again in simulation from its record, where the rows of its clients are at hand.

The same clients take part and the same answers count, so the weights after each round are those of the deployment, bit
for bit, on a processor of the same kind with the same versions.

Of a private run nobody knows the noise. Its sums are taken as they were released, so no rows are needed: that the
weights come out shows that they are made of releases alone, which the budget covers. Where rows are at hand, what a sum
has beside its clients' answers is looked at, too: it has to be as large as the ledger's noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from fedtide.core import checkpoint
from fedtide.core.atomic import sha256
from fedtide.core.base import PARTS, Shard
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.record import ASKS, read_rounds
from fedtide.data.population import Population
from fedtide.data.ragged import Ragged
from fedtide.data.rows import Rows
from fedtide.data.transforms import Prepare
from fedtide.evaluate.judge import Judge, views
from fedtide.fleets.local_engine import Host
from fedtide.remote.offline import replayed
from fedtide.runs import folder
from fedtide.runs.build import host_of, metrics_of, wire_of
from fedtide.runs.folder import Planned
from fedtide.runs.runner import Run
from fedtide.runs.verify import verify
from fedtide.site.private import recorded_sums
from fedtide.site.rows import FileRows
from fedtide.site.seat import algorithm_without_rows, blank
from fedtide.site.site import Site
from fedtide.site.tickets import RowsAbout
from fedtide.wire.answer_schema import made_up
from fedtide.wire.release import Noise


@dataclass(frozen=True)
class Replayed:
    """What came of playing a deployment again.

    Args:
        rounds: how many were played.
        equal: whether the server's state after the last is the same to the last bit.
        differs: the first round whose record says something else; None where none does.
        folder: the run folder of the simulation.
        noise: of a private run whose rows are at hand, what each release had beside its clients' answers.
    """

    rounds: int
    equal: bool
    differs: int | None
    folder: Path
    noise: tuple[Noise, ...] = ()


def replay(root: Path, data: Sequence[Path] = (), out: Path | None = None) -> Replayed:
    """Play the run of a site again in simulation.

    Args:
        root: its run folder, `run` in the folder of the site.
        data: a file of rows for each client, in the order of their ids; none takes the study's own rows, as a
            rehearsal does, and of a private run none.
        out: the run folder to make; None is `replay` beside the run folder.

    Raises:
        FedtideError: it is no run of real clients, has no checkpoint yet, or the rows are not those of its clients.
    """
    if not root.is_dir():
        raise FedtideError(f"{root}: no such folder")
    for verdict in verify(root):
        if verdict.wrong is not None:
            raise FedtideError(verdict.wrong)
    settings = folder.load(root)
    run = folder.plan(settings, root)[0]
    lines = read_rounds(run.folder, ASKS)
    if not lines:
        raise FedtideError(f"{root}: its clients were simulated (no {ASKS}); allowed: the run folder of a site")
    played = _saved(run)
    place = out or root.parent / "replay"
    again = replace(run, folder=place / run.folder.relative_to(root))
    store = MemoryStore(again.folder / "memory")
    private = settings.wire is not None and settings.wire.privacy is not None
    if data or private:
        host = _host(run, Site.read(root.parent), data, store)
    else:
        host = host_of(run.experiment, run.method, run.seed, store)
    recorded = recorded_sums(Site.read(root.parent), host.algorithm, host.wire) if private else None
    wire = host.wire if recorded is None or host.wire is None else replace(host.wire, steps=[recorded])
    if place.exists():
        raise FedtideError(f"{place}: already exists, and is left as it is; allowed: --out with a new folder")
    folder.create(settings, place)
    fleet = replayed(host, lines, run.experiment.fleet.threads, wire)
    judged = views(host.population) if data or not private else []
    judge = Judge(host.algorithm, fleet, judged, run.method.decide_per, metrics_of(run.experiment))
    simulation = Run(again.experiment, again.method, again.seed, again.folder)
    done = count(1)
    for _ in simulation.play(stop=lambda: next(done) >= played, judge_of=lambda _: judge):
        pass
    noise = tuple(recorded.found) if recorded is not None and data else ()
    equal, differs = _state(run, played) == _state(again, played), _differs(run, again, played)
    return Replayed(played, equal, differs, place, noise)


def _host(run: Planned, site: Site, data: Sequence[Path], store: MemoryStore) -> Host:
    """Return the host of clients whose rows are in files; without any they have rows that are made up."""
    experiment, clients = run.experiment, range(site.roster.clients)
    split, transforms = experiment.data.split, experiment.data.transforms
    algorithm = algorithm_without_rows(experiment, site.about.rows)
    if data:
        people = population_of_files(FileRows.read(data, clients, site.about.rows, split, transforms))
    else:
        people = population_made_up(site.about.rows, len(clients), transforms)
    wire = wire_of(experiment, run.method, algorithm, len(clients))
    return Host(algorithm, people, run.seed, store, experiment.timing.partial_work, wire)


def population_made_up(about: RowsAbout, clients: int, transforms: tuple[Prepare, ...]) -> Population:
    """Return clients that all have the same rows, which nobody holds."""
    like = blank(about)
    made = made_up(Shard(like.x, like.y, torch.zeros(1, dtype=torch.int64)), about.classes)
    lists = {part: Ragged.of([list(range(len(made.y)))] * clients) for part in PARTS}
    rows = replace(like, x=made.x, y=made.y)
    return Population(rows, lists, torch.zeros(clients, dtype=torch.int64), ("all",), clients, transforms=transforms)


def population_of_files(held: FileRows) -> Population:
    """Return the clients of nodes as a population: the same rows in the same order."""
    rows, first = list[Rows](), 0
    parts: dict[str, list[list[int]]] = {part: [] for part in PARTS}
    for client in sorted(held.held):
        own = held.held[client]
        order = own.ids.argsort(stable=True)
        place = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))
        for part in PARTS:
            parts[part].append((place[own.parts[part]] + first).tolist())
        rows.append(own.rows.pick(order))
        first += len(order)
    joined = _joined(rows)
    lists = {part: Ragged.of(each) for part, each in parts.items()}
    group = torch.zeros(len(rows), dtype=torch.int64)
    return Population(joined, lists, group, ("all",), len(rows), transforms=held.transforms)


def _joined(rows: Sequence[Rows]) -> Rows:
    """Return the rows of several clients one after the other."""
    timed = all(each.time is not None for each in rows)
    columns: dict[str, Any] = {"x": torch.cat([each.x for each in rows]), "y": torch.cat([each.y for each in rows])}
    if timed:
        columns["time"] = torch.cat([each.time for each in rows if each.time is not None])
    return replace(rows[0], **{"time": None, "held_out": None} | columns)


def _saved(run: Planned) -> int:
    """Return the number of rounds whose end is saved."""
    found = sorted(path.name for path in (run.folder / "checkpoints").glob("[0-9]*") if path.is_dir())
    if not found:
        raise FedtideError(f"{run.folder}: no round is saved yet; allowed: a run with a checkpoint")
    return int(found[-1])


def _state(run: Planned, number: int) -> str:
    return sha256(run.folder / "checkpoints" / f"{number:08d}" / checkpoint.FILES[0])


def _differs(deployed: Planned, simulated: Planned, played: int) -> int | None:
    """Return the first round of which the records say something else, in what both of them say."""
    pairs = zip(read_rounds(deployed.folder)[:played], read_rounds(simulated.folder), strict=False)
    for one, other in pairs:
        if any(one[key] != other[key] for key in ("answered", "trained", "facts") if key in one and key in other):
            return int(one["round"])
    return None
