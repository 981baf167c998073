"""The registry: every algorithm with one line that says what it sends, what the server sees and what clients keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fedtide.algorithms.fedavg import fedavg, fedsgd
from fedtide.algorithms.fedopt import fedadagrad, fedadam, fedavgm, fedyogi
from fedtide.algorithms.fedprox import fedprox
from fedtide.algorithms.qfedavg import qfedavg
from fedtide.core.types import Algorithm, State

ONE_MODEL = {"equivariance": "one model: there is nothing to relabel"}


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
    "fedavg": Entry(fedavg, "weights down, update up", exempt=ONE_MODEL),
    "fedsgd": Entry(fedsgd, "weights down, gradient step up", exempt=ONE_MODEL),
    "fedprox": Entry(fedprox, "weights down, update up", exempt=ONE_MODEL),
    "fedavgm": Entry(fedavgm, "weights down, update up", exempt=ONE_MODEL),
    "fedadagrad": Entry(fedadagrad, "weights down, update up", exempt=ONE_MODEL),
    "fedadam": Entry(fedadam, "weights down, update up", exempt=ONE_MODEL),
    "fedyogi": Entry(fedyogi, "weights down, update up", exempt=ONE_MODEL),
    "q-fedavg": Entry(qfedavg, "weights down, update and one number up", exempt=ONE_MODEL),
}
