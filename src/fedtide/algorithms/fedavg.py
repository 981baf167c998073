"""FedAvg: one global model by averaging the clients' updates.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: *Communication-Efficient Learning of Deep Networks from Decentralized
Data*, AISTATS 2017, Algorithm 1.

| symbol | meaning |
| --- | --- |
| `w` | the global weights |
| `S_t` | the participants of round t |
| `n_i` | number of samples of client i |
| `Delta_i` | client i's weights after local training, minus `w` |

When to use it: always, first. It is the baseline for everything else, and hard to beat when clients are alike.

Choices:
    The mean is taken over the clients that answered (the paper's `n` over all clients is wrong if only some
    participate), weighted by their samples or, with `weighting = "uniform"`, equally. The server applies the mean
    update through a server optimizer; plain SGD with learning rate 1 is the paper's FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import Algorithm, Facts, Fleet, Weights, shared_weights
from fedtide.learn.local import LocalTrainer
from fedtide.learn.participation import with_cohort
from fedtide.learn.server import SGD, Server, averaged
from fedtide.learn.task import Task
from fedtide.learn.training import Training
from fedtide.parts.weighting import Weighting


@dataclass(frozen=True)
class State:
    """The global weights, and the memos of the server optimizer and of the cohort."""

    weights: Weights
    server: Any
    cohort: Any = None


def fedavg(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Federated averaging.

    Sends the weights down and the update up, as a weighted sum; clients keep nothing.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights), cohort.init(fleet))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(shared_weights, state))  # S_t
        reply = fleet.ask("train", clients, state.weights, reveal=cohort.reveals)  # sum n_i Delta_i
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        return averaged(state, server, mean(reply.total))

    train = Training(task, local, weighting)
    made = Algorithm("fedavg", init, {"train": train}, round, shared_weights, task.predict)
    return with_cohort(made, cohort, task, local)
