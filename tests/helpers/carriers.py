"""Carriers on which things go wrong, and fleets over them."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedtide.core import codec
from fedtide.fleets.engines import Host
from fedtide.laws.every import Time
from fedtide.remote.fleet import RemoteFleet
from fedtide.remote.messages import Response
from fedtide.remote.offline import NearCarrier, near_fleet
from fedtide.runs.build import host_of
from helpers.toys import toy

__all__ = ["Lossy", "Lying", "Time", "host", "lossy", "lying", "resealed", "told", "words"]


class Lossy(NearCarrier):
    """Answers get lost, or come in another order and as late as they like, as a seed says."""

    def __init__(self, nodes: Any, seed: int, lost: float = 0.15, held: float = 0.4) -> None:
        super().__init__(nodes)
        self._draw, self._lost, self._hold = random.Random(seed), lost, held
        self._held: list[Response] = []

    def pull(self) -> list[Response]:
        came = []
        for response in super().pull():
            luck = self._draw.random()
            if luck < self._lost:
                came.append(replace(response, header={}, payload=b"", error="the node died"))
            elif luck < self._lost + self._hold:
                self._held.append(response)
            else:
                came.append(response)
        if self._held and self._draw.random() < 0.2:
            came.append(self._held.pop(self._draw.randrange(len(self._held))))
        return came


class Lying(NearCarrier):
    """What nodes say is changed on the way: (question's header, response) -> response."""

    def __init__(self, nodes: Any, change: Callable[[Any, Response], Response]) -> None:
        super().__init__(nodes)
        self._change = change

    def pull(self) -> list[Response]:
        asked = {waiting.question.id: waiting.question.header for waiting in self._questions}
        return [self._change(asked[response.id], response) for response in super().pull()]


def resealed(response: Response, change: Callable[[Any], Any]) -> Response:
    """The response with another tree."""
    return replace(response, payload=codec.to_bytes(change(codec.from_bytes(response.payload))))


def host(name: str, options: dict[str, Any] | None = None, **changes: Any) -> Host:
    """The toy federation of a method, whose clients keep nothing yet."""
    experiment = toy(name, options, **changes)
    return host_of(experiment, experiment.method[0], 0)


def lossy(made: Host, home: Path, seed: int, **options: Any) -> RemoteFleet:
    """A fleet of five nodes on which answers are lost and late."""
    return near_fleet(made, 5, home, lambda nodes: Lossy(nodes, seed), **options)


def told(fleet: RemoteFleet) -> list[dict[str, Any]]:
    """The lines of the record, as they are read back."""
    lines: list[dict[str, Any]] = json.loads(json.dumps(fleet.record_lines()))
    return lines


def words(lines: list[dict[str, Any]]) -> set[str]:
    """All words for what became of clients, without reasons."""
    nodes = [node for line in lines for ask in line["asks"] for node in ask["nodes"].values()]
    return {word.partition(":")[0] for node in nodes for word in node["clients"].values()}


def lying(change: Callable[[Any, Response], Response], node: str = "") -> Callable[[Any], Lying]:
    """Make the carrier on which what one node says is changed, or what all say."""
    return lambda nodes: Lying(nodes, lambda header, r: change(header, r) if r.node == node or not node else r)
