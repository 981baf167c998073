"""Federated learning when the data will not hold still.

Functions that run things are here. Kinds of everything, and the parts of algorithms, are in namespaces.

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

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedtide import algorithms, cohorts, config, data, learn, mixtures, models, personal, transforms
    from fedtide.api import (
        check,
        forget,
        inspect,
        recommend,
        results,
        resume,
        run,
        show,
        track,
        trained,
        tune,
        verify,
        write_report,
    )
    from fedtide.core import base, weights
    from fedtide.core.errors import FedtideError
    from fedtide.data import shift
    from fedtide.data.shift import Shift
    from fedtide.fleets import devices
    from fedtide.learn import LocalTrainer, Task, features, losses, schedules, server
    from fedtide.mixtures import priors
    from fedtide.report import plot
    from fedtide.runs.simulate import population, simulate

    __version__: str

SPACES = {
    "algorithms": "algorithms", "base": "core.base", "cohorts": "cohorts", "config": "config", "data": "data",
    "devices": "fleets.devices", "features": "learn.features", "learn": "learn", "losses": "learn.losses",
    "mixtures": "mixtures", "models": "models", "personal": "personal", "plot": "report.plot",
    "priors": "mixtures.priors", "schedules": "learn.schedules", "server": "learn.server", "shift": "data.shift",
    "transforms": "transforms", "weights": "core.weights",
}  # fmt: skip
"""Namespaces, and the module that each one is."""

NAMES = {
    "api": "check forget inspect recommend results resume run show track trained tune verify write_report",
    "core.errors": "FedtideError",
    "data.shift": "Shift",
    "learn": "LocalTrainer Task",
    "runs.simulate": "population simulate",
}
"""Names, and where they are from. All are imported when they are first used, because `fedtide --help` and a worker
process do not wait for what they do not need."""

HOMES = {name: home for home, names in NAMES.items() for name in names.split()}

__all__ = [
    "FedtideError", "LocalTrainer", "Shift", "Task", "algorithms", "base", "check", "cohorts", "config", "data",
    "devices", "features", "forget", "inspect", "learn", "losses", "mixtures", "models", "personal", "plot",
    "population", "priors", "recommend", "results", "resume", "run", "schedules", "server", "shift", "show",
    "simulate", "track", "trained", "transforms", "tune", "verify", "weights", "write_report",
]  # fmt: skip

ELSEWHERE = {
    "client": "ft.population", "clientapp": "ft.population", "numpyclient": "ft.population", "dataset": "ft.population",
    "strategy": "ft.algorithms", "server": "ft.server", "serverapp": "ft.run", "history": "ft.simulate",
    "report": "ft.write_report", "compare": "ft.run", "runfolder": "ft.results", "load": "ft.trained",
    "predict": "ft.trained", "table": "ft.data.table", "tensorboard": "ft.track",
}  # fmt: skip
"""Our names for words of other libraries."""


def __getattr__(name: str) -> object:
    value: object
    if name == "__version__":
        from fedtide._version import installed

        value = installed()
    elif name in SPACES:
        value = import_module(f"fedtide.{SPACES[name]}")
    elif name in HOMES:
        value = getattr(import_module(f"fedtide.{HOMES[name]}"), name)
    else:
        raise AttributeError(f"module 'fedtide' has no attribute '{name}'{_hint(name)}")
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    """Return a hint about a name that is not here."""
    if name.startswith("_"):
        return ""
    from fedtide.core.errors import bare_word

    names = [f"ft.{public}" for public in __all__]
    if find_spec(f"fedtide.{name}") is None:  # else it may be `from fedtide import name`, which needs no other module
        spaces = {space: import_module(f"fedtide.{path}") for space, path in SPACES.items()}
        names += [f"ft.{space}.{public}" for space, module in spaces.items() for public in dir(module)]
    meant = [full for full in names if bare_word(full.rpartition(".")[2]) == bare_word(name)]
    hint = " or ".join(meant) or ELSEWHERE.get(bare_word(name), "")
    return f"; did you mean {hint}?" * bool(hint)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
