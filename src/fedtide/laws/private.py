"""The law of private sums: all that is released has noise, and privacy changes nothing but bounds and noise."""

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
from fedtide.laws.case import Case, Compared, NotApplicable, hold, near
from fedtide.laws.toy import Played, played
from fedtide.runs.build import host_of
from fedtide.runs.privacy import server_wire, sums_of
from fedtide.wire.clip import WHOLE
from fedtide.wire.ledger import Ledger
from fedtide.wire.pipeline import Opening, ServerStep
from fedtide.wire.release import Draw
from fedtide.wire.vector import Form

WIDE, FAINT = 1e3, 1e-3
"""Bounds that cut nothing of a toy, and a noise multiplier at which no slot of it counts as empty."""


def private(case: Case) -> None:
    """A private run is the run without privacy, but for bounds and noise, which all that is released has."""
    experiment = _private(case)
    plain = case.make(wire={"secure": False, "fewest": 1})
    usual = played(plain, host=_even(case.host(plain)), rounds=3)
    quiet, _ = _released(experiment, 3, lambda stream, number, size: torch.zeros(size, dtype=torch.float64))
    # What a state adds up over rounds may count samples, and here counts clients: what is served does not depend on it.
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
class _Kept:
    """The server's step, whose sums are kept as they come and as they are released."""

    step: ServerStep
    sums: list[tuple[Form, Tensor, Tensor]]
    safe: ClassVar[None] = None

    @property
    def ledger(self) -> Ledger | None:
        return self.step.ledger

    def add_bounds(self, form: Form, number: int) -> Form:
        return self.step.add_bounds(form, number)

    def release(self, total: Tensor, opening: Opening) -> Tensor:
        released = self.step.release(total.clone(), opening)
        self.sums.append((opening.form, total, released.clone()))
        return released


def _private(case: Case) -> Experiment:
    """Return the toy experiment with privacy, and a bound for each value that is summed."""

    def made(clip: dict[str, float]) -> Experiment:
        privacy = {"multiplier": FAINT, "distance": 1, "clip": clip}
        return case.make(wire={"secure": False, "fewest": 1, "privacy": privacy})

    try:
        tried = made({WHOLE: WIDE})
        forms = sums_of(tried.method[0], case.host(tried))
        names = sorted({leaf.name or WHOLE for form in forms for leaf in form.leaves})
        experiment = made(dict.fromkeys(names, WIDE)) if names else None
        case.host(experiment)
    except FedtideError as why:
        raise NotApplicable(str(why)) from None
    if experiment is None:
        raise NotApplicable("it sums nothing")
    return experiment


def _even(host: Host) -> Host:
    """Return a host whose clients hold equally many rows of each part: where sums are private each counts once."""
    population: Any = host.population
    parts = {}
    for name, held in population.parts.items():
        fewest = int(held.counts[held.counts > 0].min()) if held.total else 0
        parts[name] = Ragged.of([held[client][:fewest].numpy() for client in range(len(held))])
    return replace(host, population=replace(population, parts=parts))


def _released(experiment: Experiment, rounds: int, draw: Draw) -> tuple[Played, list[tuple[Form, Tensor, Tensor]]]:
    """Play rounds of a private run with some noise; return it, and each sum with its form, before and after."""
    host = _even(host_of(experiment, experiment.method[0], 0, MemoryStore(None)))
    wire, sums = server_wire(experiment, experiment.method[0], host, draw), list[tuple[Form, Tensor, Tensor]]()
    assert wire.server is not None
    step = _Kept(wire.server, sums)

    def watched(fleet: SimulatedFleet) -> Compared:
        fleet.vectors = replace(fleet.vectors, wire=replace(wire, server=step))
        return Compared(fleet, look)

    asked = 0

    def look(question: str, reply: Reply) -> None:
        nonlocal asked
        hold(len(sums) > asked or not leaves(reply.total), f"a sum of '{question}' is read that was not released")
        asked = len(sums)

    return played(experiment, host=host, fleet=watched, rounds=rounds), sums
