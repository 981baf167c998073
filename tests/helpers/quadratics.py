"""Two clients with a quadratic each, so that every step can be done with pencil and paper.

The model is one number w (a linear layer without bias on x = 1), the loss of a row (w - y)^2 / 2, its gradient w - y.
Client 0 holds one row with y = 0, client 1 three rows with y = 4. The model starts at w = 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedtide.core.base import Algorithm, Moment, Weights
from fedtide.core.memory import MemoryStore
from fedtide.core.rng import Rng
from fedtide.data.population import Population
from fedtide.fleets.engines import Host, LocalEngine
from fedtide.fleets.simulated import SimulatedFleet
from fedtide.learn.task import Task
from helpers.stages import holding


@dataclass(frozen=True)
class Half:
    """(w x - y)^2 / 2."""

    def prepare(self, shard):
        return None, ()

    def value(self, outputs, y, shared, columns):
        return 0.5 * (outputs[:, 0] - y).square().mean()


TASK = Task(lambda: nn.Linear(1, 1, bias=False), Half(), torch.float64)


def population(targets: list[list[int]] | None = None) -> Population:
    targets = targets or [[0], [4, 4, 4]]
    classes = max(t for own in targets for t in own) + 1
    return holding(
        [(torch.ones(len(own), 1, dtype=torch.float64), torch.tensor(own, dtype=torch.int64)) for own in targets],
        classes=classes,
    )


def at(w: float) -> Weights:
    return Weights({"weight": torch.tensor([[w]], dtype=torch.float64)})


def fleet_of(
    algorithm: Algorithm, targets: list[list[int]] | None = None, who: Population | None = None
) -> SimulatedFleet:
    who, memory = who or population(targets), MemoryStore(None)
    return SimulatedFleet(who, LocalEngine(Host(algorithm, who, 0, memory)))


def played(
    algorithm: Algorithm, fleet: SimulatedFleet, state: Any, rounds: int, seed: int = 0
) -> Iterator[tuple[Any, Any]]:
    """The state and the facts after each round."""
    for number in range(rounds):
        fleet.begin(Moment(number, rounds, 0.0))
        state, facts = algorithm.round(state, fleet, Rng(seed).at(number, "server"))
        yield state, facts


def after(
    algorithm: Algorithm,
    state: Any,
    rounds: int = 1,
    targets: list[list[int]] | None = None,
    who: Population | None = None,
) -> Any:
    *_, (state, _) = played(algorithm, fleet_of(algorithm, targets, who), state, rounds)
    return state


def value(state: Any) -> float:
    return float(state.weights.params["weight"])


def models(state: Any) -> list[float]:
    """The number of each of several models."""
    return [float(weights.params["weight"]) for weights in state.weights]
