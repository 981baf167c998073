"""Rounds of which a server before this one has released sums: they are played again with what was released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtide.core.memory import Version
from fedtide.fleets.ask import Ask
from fedtide.fleets.totals import ALL
from fedtide.remote.asks import ANSWERED
from fedtide.remote.node_answers import Received
from fedtide.remote.schedule import Attendance
from fedtide.wire.ledger import Line
from fedtide.wire.pipeline import Wire


@dataclass(frozen=True)
class ReleasedRounds:
    """The releases of a server until a checkpoint counts on them.

    Args:
        wire: as the server knows it; without noise nothing is kept.
    """

    wire: Wire

    def lines(self, number: int, ask: int | None = None) -> list[Line]:
        """Return the releases of a round, or of one of its questions, before this server was started."""
        ledger = self.wire.ledger
        return [] if ledger is None or self.wire.safe is None else ledger.of(number, ask)

    def attendance(self, number: int) -> tuple[Tensor, Tensor] | None:
        """Settle the rounds before one, and return who was present and willing in it; None if nothing is released."""
        ledger, safe = self.wire.ledger, self.wire.safe
        if ledger is None or safe is None:
            return None
        safe.settle(number, ledger.lines)
        lines = self.lines(number)
        notes = safe.noted((number, lines[0].ask)) if lines else None
        if notes is None:
            return None
        present, willing = (torch.tensor(notes[name], dtype=torch.int64) for name in ("present", "willing"))
        return present, willing

    def note(
        self, version: Version, attendance: Attendance, counted: set[int], answers: Mapping[int, Received]
    ) -> None:
        """Keep what must be known of a question beside its sums, if the server is killed before its checkpoint."""
        if self.wire.safe is not None:
            clients = sorted(counted)
            notes = {
                "present": attendance.present.tolist(),
                "willing": attendance.willing.tolist(),
                "kept": [client for client in clients if answers[client].keeps],
                "seconds": {str(client): answers[client].seconds for client in clients},
            }
            self.wire.safe.note(version, notes)

    def read(self, ask: Ask, lines: Sequence[Line]) -> tuple[dict[int, Tensor], dict[int, Received]]:
        """Return the sums of a question that are not gone, by slot or 0, and the answers of the clients in them."""
        safe = self.wire.safe
        assert safe is not None
        notes = safe.noted(ask.version) or {"seconds": {}, "kept": []}
        seconds = {int(client): seconds for client, seconds in notes["seconds"].items()}
        possible = set(ask.clients.tolist()) & seconds.keys()
        sums, clients = dict[int, Tensor](), list[int]()
        for line in lines:
            fits = line.question == ask.question and set(line.clients) <= possible
            if fits and (total := safe.read_sum(line)) is not None:
                sums[line.slot or ALL] = total
                clients += line.clients
        answers = {
            client: Received(ANSWERED, None, client in notes["kept"], ask, seconds[client])
            for client in sorted(clients)
        }
        return sums, answers

    def offer(self, number: int, clients: frozenset[int]) -> None:
        """Count a round of clients that are asked to open a sum, as their nodes do before they show anything."""
        ledger, safe = self.wire.ledger, self.wire.safe
        if ledger is not None and ledger.offer(number, clients) and safe is not None:
            safe.offer(number, sorted(clients))
