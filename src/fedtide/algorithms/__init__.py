"""The registry: every algorithm with one line that says what it sends, what the server sees and what clients keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from fedtide.algorithms.flexcfl import relabeled as by_group
from fedtide.algorithms.ifca import ifca
from fedtide.algorithms.ifca import relabeled as by_cluster
from fedtide.algorithms.minloss import minloss
from fedtide.algorithms.oracle import oracle
from fedtide.algorithms.pfedem import pfedem
from fedtide.algorithms.pfedem import relabeled as by_component
from fedtide.algorithms.qfedavg import qfedavg
from fedtide.algorithms.scaffold import scaffold
from fedtide.algorithms.scsgd import scsgd
from fedtide.algorithms.tshot import tshot
from fedtide.algorithms.vanilla import vanilla
from fedtide.core.types import Algorithm, State
from fedtide.multi.branches import relabeled

ONE_MODEL = {"equivariance": "one model: there is nothing to relabel"}

SELECTED = "sums only, or what its cohort asks"

BLENDS = {"equivariance": "the blends that its clients keep would have to be relabeled too"}
EXPLORERS = {"equivariance": "which model an explorer draws would have to be relabeled too"}
DRIFTS = {"equivariance": "which starts of k-means are drawn would have to be relabeled too"}
SPLITS = {"equivariance": "it begins with one model, and its splits say which came of which"}
PLACES = {"equivariance": "a new model takes the first of the places that are free, and the first of merged ones stays"}
CLOCK = {"equivariance": "its prior, or its clock, would have to be relabeled too"}


@dataclass(frozen=True)
class Entry:
    """An algorithm as others find it.

    Args:
        make: from a task and ingredients to an Algorithm; its signature is what a configuration may say.
        sends: what goes up and down, in a few words.
        sees: what the server sees of a single client.
        keeps: what stays on a client between rounds.
        relabel: the state with slot k put in the place of slot order[k], for the law of equivariance.
        exempt: laws that cannot hold for it, each with the reason.
    """

    make: Callable[..., Algorithm]
    sends: str
    sees: str = "sums only"
    keeps: str = "nothing"
    relabel: Callable[[State, Sequence[int]], State] | None = None
    exempt: Mapping[str, str] = field(default_factory=dict)


REGISTRY: Mapping[str, Entry] = {
    "fedavg": Entry(
        fedavg,
        "weights down, update up",
        sees=SELECTED,
        exempt=ONE_MODEL,
    ),
    "fedsgd": Entry(fedsgd, "weights down, gradient step up", exempt=ONE_MODEL),
    "fedprox": Entry(fedprox, "weights down, update up", sees=SELECTED, exempt=ONE_MODEL),
    "fedavgm": Entry(fedavgm, "weights down, update up", sees=SELECTED, exempt=ONE_MODEL),
    "fedadagrad": Entry(fedadagrad, "weights down, update up", sees=SELECTED, exempt=ONE_MODEL),
    "fedadam": Entry(fedadam, "weights down, update up", sees=SELECTED, exempt=ONE_MODEL),
    "fedyogi": Entry(fedyogi, "weights down, update up", sees=SELECTED, exempt=ONE_MODEL),
    "q-fedavg": Entry(qfedavg, "weights down, update and one number up", sees=SELECTED, exempt=ONE_MODEL),
    "scaffold": Entry(
        scaffold,
        "weights and control variate down, updates of both up",
        keeps="its control variate, as large as the weights",
        exempt=ONE_MODEL,
    ),
    "fedbuff": Entry(
        fedbuff,
        "weights down, update up; the server steps when K have answered",
        sees="sums for each age of the model that they began from",
        exempt=ONE_MODEL,
    ),
    "vanilla": Entry(vanilla, "weights down, update up", exempt=ONE_MODEL),
    "fedtem": Entry(
        fedtem,
        "weights and mixture down, update up",
        sees="mean posterior, log-odds, feature mean and variance, rows",
        exempt=CLOCK,
    ),
    "fedtkm": Entry(fedtkm, "weights and centers down, update, feature means and counts up", exempt=CLOCK),
    "min-loss": Entry(minloss, "weights down, update and branch up", relabel=relabeled),
    "scsgd": Entry(scsgd, "weights down, update up", exempt=CLOCK),
    "t-shot": Entry(
        tshot,
        "weights and centers down, update and branch up",
        sees="centers of its raw inputs and their counts",
        exempt={"equivariance": "its centers are found by itself, from rows that cannot be relabeled"},
    ),
    "fedem": Entry(fedem, "K models down, the updates of all up", keeps="its blend", exempt=BLENDS),
    "fedgmm": Entry(
        fedgmm,
        "K models and Gaussians down, updates of all up",
        sees="sums; at the start centers of its features too",
        keeps="its blend",
        exempt=BLENDS,
    ),
    "pfedem": Entry(
        pfedem,
        "K models and Gaussians down, updates of some up",
        sees="sums; at the start centers of its features too",
        keeps="nothing, or its shares",
        relabel=by_component,
    ),
    "aem": Entry(
        aem,
        "J models down, the update of one up",
        sees="which model it trained, unless hidden",
        keeps="nothing; what it makes for itself stays with it",
        exempt=EXPLORERS,
    ),
    "cfl": Entry(
        cfl,
        "weights of a cluster down, update up",
        sees="its update and what it counts for",
        exempt=SPLITS,
    ),
    "cfl-released": Entry(
        cfl_released,
        "weights of a cluster down, update up",
        sees="its update and what it counts for",
        exempt={**SPLITS, "cover": "its fault: places within a cluster are taken for clients"},
    ),
    "fielding": Entry(
        fielding,
        "a cluster's model down, its update up",
        sees="its representation, whenever it drifts",
        keeps="what it said last",
        exempt=DRIFTS,
    ),
    "ifca": Entry(
        ifca, "K models down, the update of one up", sees="which model it trained, unless hidden", relabel=by_cluster
    ),
    "flexcfl": Entry(
        flexcfl,
        "weights of a group down, update up",
        sees="its group, the update that it was grouped by, how far its labels moved",
        keeps="its label shares of then",
        relabel=by_group,
    ),
    "auxo": Entry(
        auxo,
        "weights of a cohort down, update up",
        sees="its cohort, and a part of its update",
        exempt=SPLITS,
    ),
    "feddrift": Entry(
        feddrift,
        "its model down, update up; each step all models down, errors up",
        sees="its model, how badly each model does on its rows, how many they are",
        keeps="nothing, or the rows of recent steps",
        exempt=PLACES,
    ),
    "oracle": Entry(
        oracle,
        "weights of its true group down, update up",
        sees="its true group: a bound, as nobody can know it",
        exempt={"equivariance": "its models are those of the true groups"},
    ),
}
