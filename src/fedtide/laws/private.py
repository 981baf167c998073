"""The law of private sums: all released sums have noise, and privacy changes nothing but bounds and noise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedtide.config import Experiment
from fedtide.core.base import Reply
from fedtide.core.errors import FedtideError
from fedtide.core.memory import MemoryStore
from fedtide.core.trees import leaves
from fedtide.data.ragged import Ragged
from fedtide.fleets.local_engine import Host
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.laws.case import Case, NotApplicable, Played, Watched, hold, near, played
from fedtide.runs.build import host_of
from fedtide.runs.privacy import server_wire, sums_of
from fedtide.wire.clip import WHOLE
from fedtide.wire.pipeline import Opening, ServerStep
from fedtide.wire.release import Draw
from fedtide.wire.vector import Form

WIDE, FAINT = 1e3, 1e-3
"""Bounds that cut nothing of a toy, and a noise multiplier at which no slot of it counts as empty."""


def private(case: Case) -> None:
    """A private run is the run without privacy but for bounds and noise, and all released sums have noise."""
    experiment = _private(case)
    plain = case.make(wire={"secure": False, "fewest": 1})
    usual = played(plain, host=_even(case.host(plain)), rounds=3)
    quiet, _ = _released(experiment, 3, lambda stream, number, size: torch.zeros(size, dtype=torch.float64))
    # Sums of a state over rounds may count samples, and here count clients: served payloads do not depend on them.
    ours, theirs = (run.host.algorithm.serve(run.state, run.host.population.clients)[0] for run in (quiet, usual))
    near(ours, theirs, "bounds that cut nothing and noise of zero change what is served", 1e-4, 1e-5)
    _, sums = _released(experiment, 1, lambda stream, number, size: torch.ones(size, dtype=torch.float64))
    for form, total, released in sums:
        before, after = form.tables(total), form.tables(released)
        for name, table in after.items():
            seen = table != 0
            bare = seen & (table == before[name])
            bare[:, -1] &= len(table) > 1  # of a leaf without slots it is the number of clients
            hold(not bool(bare.any()), f"'{name or WHOLE}' is released without noise")


@dataclass(frozen=True)
class _Recorded:
    """The server's step that records its sums, before and after they are released."""

    step: ServerStep
    sums: list[tuple[Form, Tensor, Tensor]]
    safe: ClassVar[None] = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def release(self, total: Tensor, opening: Opening) -> Tensor:
        released = self.step.release(total.clone(), opening)
        self.sums.append((opening.form, total, released.clone()))
        return released


def _private(case: Case) -> Experiment:
    """Return the toy experiment with privacy, and a bound for each value that is summed."""

    def bounded(clip: dict[str, float]) -> Experiment:
        privacy = {"multiplier": FAINT, "distance": 1, "clip": clip}
        return case.make(wire={"secure": False, "fewest": 1, "privacy": privacy})

    try:
        whole = bounded({WHOLE: WIDE})
        forms = sums_of(whole.method[0], case.host(whole))
        names = sorted({leaf.name or WHOLE for form in forms for leaf in form.leaves})
        experiment = bounded(dict.fromkeys(names, WIDE)) if names else None
        case.host(experiment)
    except FedtideError as why:
        raise NotApplicable(str(why)) from None
    if experiment is None:
        raise NotApplicable("it sums nothing")
    return experiment


def _even(host: Host) -> Host:
    """Return a host whose clients hold equally many rows of each part: in private sums each client counts once."""
    population: Any = host.population
    parts = {}
    for name, rows in population.parts.items():
        fewest = int(rows.counts[rows.counts > 0].min()) if rows.total else 0
        parts[name] = Ragged.of([rows[client][:fewest].numpy() for client in range(len(rows))])
    return replace(host, population=replace(population, parts=parts))


def _released(experiment: Experiment, rounds: int, draw: Draw) -> tuple[Played, list[tuple[Form, Tensor, Tensor]]]:
    """Play rounds of a private run with some noise; return it, and each sum with its form, before and after."""
    host = _even(host_of(experiment, experiment.method[0], 0, MemoryStore(None)))
    wire, sums = server_wire(experiment, experiment.method[0], host, draw), list[tuple[Form, Tensor, Tensor]]()
    assert wire.server is not None
    server: Any = _Recorded(wire.server, sums)

    def watch(fleet: SimulatedFleet) -> Watched:
        fleet.vectors = replace(fleet.vectors, wire=replace(wire, server=server))
        return Watched(fleet, look=look)

    asked = 0

    def look(question: str, reply: Reply) -> None:
        nonlocal asked
        hold(len(sums) > asked or not leaves(reply.total), f"the sum of '{question}' is read before it is released")
        asked = len(sums)

    return played(experiment, host=host, fleet=watch, rounds=rounds), sums
