"""Federated learning when the data will not hold still.

What runs things stands here, kinds of everything and what algorithms are made of in namespaces.

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
    from fedtide import (
        algorithms,
        base,
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
        plot,
        priors,
        server,
        shift,
        transforms,
        weights,
    )
    from fedtide.api import (
        check,
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
    from fedtide.core.errors import FedtideError
    from fedtide.data.shift import Shift
    from fedtide.learn.local import LocalTrainer
    from fedtide.learn.task import Task
    from fedtide.runs.simulate import population, simulate

    __version__: str

__all__ = [
    "FedtideError", "LocalTrainer", "Shift", "Task", "algorithms", "base", "check", "cohorts", "config", "data",
    "devices", "features", "inspect", "local", "losses", "mixtures", "models", "personal", "plot", "population",
    "priors", "recommend", "results", "resume", "run", "server", "shift", "show", "simulate", "track", "trained",
    "transforms", "tune", "verify", "weights", "write_report",
]  # fmt: skip


HOMES = {
    "api": "check inspect recommend results resume run show track trained tune verify write_report",
    "core.errors": "FedtideError",
    "data.shift": "Shift",
    "learn.local": "LocalTrainer",
    "learn.task": "Task",
    "runs.simulate": "population simulate",
}
"""Where names of this package are from; all others are its namespaces. They are imported where they are first used, so
that `fedtide --help` and a worker process do not wait for what they do not need."""

ELSEWHERE = {
    "client": "ft.population", "clientapp": "ft.population", "numpyclient": "ft.population", "dataset": "ft.population",
    "strategy": "ft.algorithms", "server": "ft.server", "serverapp": "ft.run", "history": "ft.simulate",
    "report": "ft.write_report", "compare": "ft.run", "runfolder": "ft.results", "load": "ft.trained",
    "predict": "ft.trained", "table": "ft.data.table", "tensorboard": "ft.track",
}  # fmt: skip
"""What is meant by words of other libraries."""


def __getattr__(name: str) -> object:
    found: object
    if name == "__version__":
        found = _version()
    elif name in __all__:
        home = _home(name)
        found = import_module(f"fedtide.{name}") if home is None else getattr(import_module(f"fedtide.{home}"), name)
    else:
        raise AttributeError(f"module 'fedtide' has no attribute '{name}'{_hint(name)}")
    globals()[name] = found
    return found


def _home(name: str) -> str | None:
    """Return the module that a name is from; None for a namespace."""
    return next((home for home, names in HOMES.items() if name in names.split()), None)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("fedtide")
    except PackageNotFoundError:  # a source tree that is not installed
        return "0"


def _hint(name: str) -> str:
    """Return what may be meant by a name that is not here."""
    if name.startswith("_"):
        return ""
    from fedtide.core.errors import bare_word

    found = [f"ft.{known}" for known in __all__]
    if find_spec(f"fedtide.{name}") is None:  # else it may be `from fedtide import name`, which needs no other module
        spaces = [known for known in __all__ if _home(known) is None]
        found += [f"ft.{space}.{known}" for space in spaces for known in dir(import_module(f"fedtide.{space}"))]
    meant = [each for each in found if bare_word(each.rpartition(".")[2]) == bare_word(name)]
    hint = " or ".join(meant) or ELSEWHERE.get(bare_word(name), "")
    return f"; did you mean {hint}?" * bool(hint)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
