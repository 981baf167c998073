"""A fleet whose clients answer what they are told to: for the server's half of a round."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedtide.core.base import Algorithm, Cost, Moment, Reply, Weights
from fedtide.core.rng import Rng
from fedtide.core.stopwatch import Stopwatch
from fedtide.core.trees import map_leaves
from fedtide.learn.task import Task
from fedtide.mixtures.step_size import Certainty, Overwrite, Update
from fedtide.models.networks import MLP

DIMS, CLASSES, WIDTH = 4, 3, 5


def task() -> Task:
    """Four features, five hidden units, three classes, float64."""
    build = lambda: MLP(hidden=(WIDTH,)).build((DIMS,), CLASSES)  # noqa: E731
    return Task(build, dtype=torch.float64, example=torch.zeros(1, DIMS))


def identity(width: int = 2, classes: int = 2) -> Task:
    """A network whose features are its inputs."""

    class Through(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(width, classes)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x)

    return Task(Through, dtype=torch.float64, example=torch.zeros(1, width))


@dataclass
class Answering:
    """Everyone that is asked answers with the same total and the given rows.

    Args:
        total: sums; without "delta" there is a zero one.
        rows: in clear.
        round: now.
    """

    total: Mapping[str, Any] | None
    rows: Mapping[str, Tensor] = field(default_factory=dict)
    round: int = 0
    asked: list[tuple[str, Any, tuple[str, ...]]] = field(default_factory=list)
    clustering: Stopwatch = field(default_factory=Stopwatch)

    @property
    def moment(self) -> Moment:
        return Moment(self.round, 100, float(self.round))

    def arrivals(self, m: int) -> Tensor:
        return torch.arange(m)

    def ask(self, question, clients, payload, *, reveal=(), **named) -> Reply:
        self.asked.append((question, payload, tuple(reveal)))
        return Reply(self.total, self.rows, clients, torch.zeros(len(clients)), Cost())


def begun(algorithm: Algorithm) -> Any:
    return algorithm.init(Answering(None), Rng(0).at(-1, "server"))


def still(weights: Weights) -> Weights:
    """An update that changes nothing."""
    return map_leaves(torch.zeros_like, weights)


def moving(kind: str, a0: float = 1.0) -> Update:
    """How components move, by its kind."""
    return {"certainty": Certainty(a0=a0), "overwrite": Overwrite()}[kind]
