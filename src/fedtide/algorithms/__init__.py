"""The registry: every algorithm with one line that says what it sends, what the server sees and what clients keep.

>>> import fedtide as ft
>>> task = ft.Task(lambda: ft.models.Linear().build((3,), 2))
>>> ft.algorithms.fedprox(task, mu=0.1).name
'fedprox'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fedtide.algorithms.aem import aem
from fedtide.algorithms.auxo import auxo
from fedtide.algorithms.cfl import cfl
from fedtide.algorithms.cfl_released import cfl_released
from fedtide.algorithms.fedavg import fedavg
from fedtide.algorithms.fedbuff import fedbuff
from fedtide.algorithms.feddrift import feddrift
from fedtide.algorithms.fedem import fedem
from fedtide.algorithms.fedgmm import fedgmm
from fedtide.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from fedtide.algorithms.fedprox import fedprox
from fedtide.algorithms.fedsgd import fedsgd
from fedtide.algorithms.fedtem import fedtem
from fedtide.algorithms.fedtkm import fedtkm
from fedtide.algorithms.fielding import fielding
from fedtide.algorithms.flexcfl import flexcfl
from fedtide.algorithms.ifca import ifca
from fedtide.algorithms.minloss import minloss
from fedtide.algorithms.oracle import oracle
from fedtide.algorithms.pfedem import pfedem
from fedtide.algorithms.qfedavg import qfedavg
from fedtide.algorithms.scaffold import scaffold
from fedtide.algorithms.scsgd import scsgd
from fedtide.algorithms.tshot import tshot
from fedtide.algorithms.vanilla import vanilla
from fedtide.core.types import Algorithm

SELECTED = "sums only, or what its cohort asks"


@dataclass(frozen=True)
class Entry:
    """An algorithm as others find it.

    Args:
        make: from a task and ingredients to an Algorithm; its signature is what a configuration may say.
        sends: what goes up and down, in a few words.
        sees: what the server sees of a single client.
        keeps: what stays on a client between rounds.
        exempt: laws that cannot hold for it, each with the reason.
    """

    make: Callable[..., Algorithm]
    sends: str
    sees: str = "sums only"
    keeps: str = "nothing"
    exempt: Mapping[str, str] = field(default_factory=dict)


REGISTRY: Mapping[str, Entry] = {
    "fedavg": Entry(
        fedavg,
        "weights down, update up",
        sees=SELECTED,
    ),
    "fedsgd": Entry(fedsgd, "weights down, gradient step up"),
    "fedprox": Entry(fedprox, "weights down, update up", sees=SELECTED),
    "fedavgm": Entry(fedavgm, "weights down, update up", sees=SELECTED),
    "fedadagrad": Entry(fedadagrad, "weights down, update up", sees=SELECTED),
    "fedadam": Entry(fedadam, "weights down, update up", sees=SELECTED),
    "fedyogi": Entry(fedyogi, "weights down, update up", sees=SELECTED),
    "q-fedavg": Entry(qfedavg, "weights down, update and one number up", sees=SELECTED),
    "scaffold": Entry(
        scaffold,
        "weights and control variate down, updates of both up",
        keeps="its control variate, as large as the weights",
    ),
    "fedbuff": Entry(
        fedbuff,
        "weights down, update up; the server steps when K have answered",
        sees="sums for each age of the model that they began from",
    ),
    "vanilla": Entry(vanilla, "weights down, update up"),
    "fedtem": Entry(
        fedtem,
        "weights and mixture down, update up",
        sees="mean posterior, log-odds, feature mean and variance, rows",
    ),
    "fedtkm": Entry(fedtkm, "weights and centers down, update, feature means and counts up"),
    "min-loss": Entry(minloss, "weights down, update and branch up"),
    "scsgd": Entry(scsgd, "weights down, update up"),
    "t-shot": Entry(
        tshot,
        "weights and centers down, update and branch up",
        sees="centers of its raw inputs and their counts",
    ),
    "fedem": Entry(fedem, "K models down, the updates of all up", keeps="its blend"),
    "fedgmm": Entry(
        fedgmm,
        "K models and Gaussians down, updates of all up",
        sees="sums; at the start centers of its features too",
        keeps="its blend",
    ),
    "pfedem": Entry(
        pfedem,
        "K models and Gaussians down, updates of some up",
        sees="sums; at the start centers of its features too",
        keeps="nothing, or its shares",
    ),
    "aem": Entry(
        aem,
        "J models down, the update of one up",
        sees="which model it trained, unless hidden",
        keeps="nothing; what it makes for itself stays with it",
    ),
    "cfl": Entry(
        cfl,
        "weights of a cluster down, update up",
        sees="its update and what it counts for",
    ),
    "cfl-released": Entry(
        cfl_released,
        "weights of a cluster down, update up",
        sees="its update and what it counts for",
        exempt={"cover": "its fault: places within a cluster are taken for clients"},
    ),
    "fielding": Entry(
        fielding,
        "a cluster's model down, its update up",
        sees="its representation, whenever it drifts",
        keeps="what it said last",
    ),
    "ifca": Entry(ifca, "K models down, the update of one up", sees="which model it trained, unless hidden"),
    "flexcfl": Entry(
        flexcfl,
        "weights of a group down, update up",
        sees="its group, the update that it was grouped by, how far its labels moved",
        keeps="its label shares of then",
    ),
    "auxo": Entry(
        auxo,
        "weights of a cohort down, update up",
        sees="its cohort, and a part of its update",
    ),
    "feddrift": Entry(
        feddrift,
        "its model down, update up; each step all models down, errors up",
        sees="its model, how badly each model does on its rows, how many they are",
        keeps="nothing, or the rows of recent steps",
    ),
    "oracle": Entry(
        oracle,
        "weights of its true group down, update up",
        sees="its true group: a bound, as nobody can know it",
    ),
}


def __getattr__(name: str) -> Callable[..., Algorithm]:
    """An algorithm by its name in an experiment file, with `_` for `-`: `ft.algorithms.q_fedavg`."""
    if (entry := REGISTRY.get(name.replace("_", "-"))) is None:
        raise AttributeError(f"module 'fedtide.algorithms' has no attribute '{name}'")
    return entry.make


def __dir__() -> list[str]:
    return ["REGISTRY", "Entry", *(name.replace("-", "_") for name in REGISTRY)]
