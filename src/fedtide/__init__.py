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
from fedtide.api import check, resume, run, tune, verify, write_report
from fedtide.core.errors import FedtideError, bare_word
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
    "Algorithm", "Answer", "FedtideError", "Fleet", "LocalTrainer", "Moment", "Prediction", "Reply", "Rng", "Shard",
    "Shift", "Slotted", "Sum", "Task", "Training", "Weighted", "Weights", "algorithms", "check", "cohorts", "config",
    "data", "devices", "features", "local", "losses", "mean", "mixtures", "models", "personal", "population",
    "priors", "resume", "run", "server", "shared_weights", "shift", "simulate", "tune", "verify", "weights",
    "with_cohort", "write_report",
]  # fmt: skip


ELSEWHERE = {
    "client": "ft.population", "clientapp": "ft.population", "numpyclient": "ft.population", "dataset": "ft.population",
    "strategy": "ft.algorithms", "server": "ft.server", "serverapp": "ft.run", "history": "ft.simulate",
    "report": "ft.write_report",
}  # fmt: skip
"""What is meant by words of other libraries."""


def __getattr__(name: str) -> object:
    if name.startswith("_"):
        raise AttributeError(f"module 'fedtide' has no attribute '{name}'")
    spaces = (algorithms, cohorts, data, losses, mixtures, models, personal, priors, server, shift)
    found = [f"ft.{space.__name__.rpartition('.')[2]}.{known}" for space in spaces for known in dir(space)]
    found += [f"ft.{known}" for known in __all__]
    meant = [each for each in found if bare_word(each.rpartition(".")[2]) == bare_word(name)]
    hint = " or ".join(meant) or ELSEWHERE.get(bare_word(name), "")
    raise AttributeError(f"module 'fedtide' has no attribute '{name}'{f'; did you mean {hint}?' * bool(hint)}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
