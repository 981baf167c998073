"""Nodes in this process: everything passes through bytes, as over a network, and nothing is lost."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtide.core.base import Memory
from fedtide.fleets.host import Host
from fedtide.fleets.vectors import Vectors
from fedtide.remote.carrier import Carrier, Question, Response
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.node import Node
from fedtide.remote.presence import Rehearsed
from fedtide.wire.masks import Masker
from fedtide.wire.schema import Schemas, made_up
from fedtide.wire.steps import Wire


class NearCarrier:
    """A carrier to nodes in this process, which answer when they are asked after, in the order of the questions.

    Args:
        nodes: by name.
    """

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        self.nodes = nodes
        self._questions: deque[tuple[Question, float]] = deque()

    def removed(self) -> frozenset[str]:
        """Return no name."""
        return frozenset()

    def present(self) -> frozenset[str]:
        """Return the names of all nodes."""
        return frozenset(self.nodes)

    def push(self, questions: Sequence[Question]) -> None:
        """Take questions."""
        now = time.monotonic()
        self._questions.extend((question, now) for question in questions)

    def drop(self, questions: Sequence[str]) -> None:
        """Do nothing: nodes answer all that they are asked."""

    def pull(self) -> list[Response]:
        """Let a node answer one question."""
        if not self._questions:
            return []
        question, pushed = self._questions.popleft()
        header, payload = self.nodes[question.node].handle(json.loads(json.dumps(question.header)), question.payload)
        told = json.loads(json.dumps(header))
        return [Response(question.id, question.node, told, payload, time.monotonic() - pushed)]


def near_fleet(
    host: Host,
    nodes: int,
    home: Path,
    carry: Callable[[Mapping[str, Node]], Carrier] = NearCarrier,
    wire: Wire | None = None,
    **options: Any,
) -> RemoteFleet:
    """Build a fleet of nodes in this process, which share the clients of a simulation.

    Args:
        host: the algorithm, and the clients with their rows.
        nodes: how many; the first ones have a client more.
        home: folder of theirs, in which each keeps what its clients keep.
        carry: makes the carrier from the nodes by name.
        wire: as the server knows it; None as clients do.
        options: further arguments of `RemoteFleet`.
    """
    population, algorithm = host.population, host.algorithm
    roster = {f"node-{k}": ids.tolist() for k, ids in enumerate(population.clients.tensor_split(nodes))}
    secure = host.wire is not None and host.wire.secure
    at = {
        name: Node(
            algorithm,
            host.seed,
            population,
            home / name,
            partial_work=host.partial_work,
            wire=host.wire,
            masker=Masker("", name) if secure else None,
            clients=frozenset(roster[name]),
        )
        for name in roster
    }
    schemas = Schemas(algorithm.works, made_up(*population.few()))
    return RemoteFleet(
        carry(at),
        roster,
        **{"who": Rehearsed(population)} | options,
        reveals=algorithm.traits.reveals,
        first=algorithm.traits.first,
        deadline=algorithm.traits.deadline,
        schemas=schemas,
        vectors=None if host.wire is None else Vectors(wire or host.wire, schemas),
    )


def memory_at(fleet: RemoteFleet, client: int) -> Memory:
    """Return what a client of a fleet of nodes in this process keeps now, as the server counts."""
    assert isinstance(fleet.carrier, NearCarrier)
    (name,) = (name for name, clients in fleet.roster.items() if client in clients)
    return fleet.carrier.nodes[name].memory_of(client, fleet.counted(client))
