"""Federated learning when the data will not hold still.

What runs things and what an algorithm is made of stands here; the rest is in namespaces.

>>> import torch
>>> import fedtide as ft
>>> x, y = torch.randn(400, 20), torch.arange(400) % 4
>>> people = ft.population(x, y, ft.data.Dirichlet(clients=20, alpha=0.3))
>>> task = ft.Task(lambda: torch.nn.Linear(20, 4))
>>> algorithm = ft.algorithms.fedavg(task, ft.LocalTrainer(lr=0.1), cohort=ft.cohorts.Arrivals(5))
>>> result = ft.simulate(algorithm, people, rounds=8)
>>> len(result.accuracy)
1
"""

from importlib.metadata import PackageNotFoundError, version

from fedtide import (
    algorithms,
    cohorts,
    config,
    data,
    devices,
    features,
    local,
    losses,
    mixtures,
    models,
    personal,
    priors,
    server,
    shift,
    weights,
)
from fedtide.api import run, tune
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import (
    Algorithm,
    Answer,
    Fleet,
    Moment,
    Prediction,
    Reply,
    Shard,
    Slotted,
    Sum,
    Weighted,
    Weights,
    shared_weights,
)
from fedtide.data.shift import Shift
from fedtide.learn.local import LocalTrainer
from fedtide.learn.participation import with_cohort
from fedtide.learn.task import Task
from fedtide.learn.training import Training
from fedtide.runs.simulate import population, simulate

try:
    __version__ = version("fedtide")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0"

__all__ = [
    "Algorithm", "Answer", "FedtideError", "Fleet", "LocalTrainer", "Moment", "Prediction", "Reply",
    "Rng", "Shard", "Shift", "Slotted", "Sum", "Task", "Training", "Weighted", "Weights", "algorithms", "cohorts",
    "config", "data", "devices", "features", "local", "losses", "mean", "mixtures", "models", "personal", "population",
    "priors", "run", "server", "shared_weights", "shift", "simulate", "tune", "weights", "with_cohort",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
