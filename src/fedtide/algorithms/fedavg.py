"""FedAvg: one global model by averaging the clients' updates.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: *Communication-Efficient Learning of Deep Networks from Decentralized
Data*, AISTATS 2017, Algorithm 1. With nothing but its name it plays Algorithm 1 as printed.

| symbol | meaning |
| --- | --- |
| `w` | the global weights |
| `S_t` | the participants of round t |
| `n_i` | number of samples of client i |
| `Delta_i` | client i's weights after local training, minus `w` |

When to use it: always, first. It is the baseline for everything else, and hard to beat when clients are alike.

Choices:
    - ours: the mean is over the clients that answered; the paper's `n` over all clients is wrong if only some take
      part.
    - paper: clients are weighted by their samples; `weighting = "uniform"` weights them equally.
    - paper: `server` steps along the mean update; SGD with rate 1, the default, makes the mean the next model.
    - ours: the shift sends a round's clients (`cohort`); the paper draws them uniformly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort
from fedtide.cohorts.participation import take_part, with_cohort
from fedtide.core.base import Algorithm, Facts, Fleet, Weights, mean, shared_weights
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD, Server, step_server
from fedtide.learn.task import Task
from fedtide.learn.training import Training
from fedtide.learn.weighting import Weighting


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
    # What a client does: it trains w on its samples, and sends n_i Delta_i.
    train = Training(task, local, weighting)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights=weights, server=server.init(weights), cohort=cohort.init(fleet))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        # What the server does: S_t trains w, and w moves by the mean of Delta_i.
        state, reply = take_part(cohort, fleet, state, rng, shared_weights, state.weights)
        return step_server(state, server, mean(reply.total))

    made = Algorithm("fedavg", init, {"train": train}, round, shared_weights, task.predict)
    return with_cohort(made, cohort, task, local)


ENTRY = Entry("fedavg", fedavg, "weights down, update up", "global")
