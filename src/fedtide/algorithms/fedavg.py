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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import Algorithm, Facts, Fleet, Weights, Work, shared_weights
from fedtide.learn.local import LocalTrainer
from fedtide.learn.participation import take_part, with_cohort
from fedtide.learn.server import SGD, Server, step_server
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

    return average_updates("fedavg", task, local, server, cohort, Training(task, local, weighting))


def average_updates(
    name: str,
    task: Task,
    local: LocalTrainer,
    server: Server,
    cohort: Cohort,
    train: Work,
    step: Callable[[State, Server, Any], tuple[State, Facts]] = step_server,
    totals: Callable[[Any], Any] = lambda total: total,
    predict: Any = None,
    **cost: Any,
) -> Algorithm[State]:
    """Build FedAvg, or an algorithm with one network that differs in what follows.

    Args:
        name: for the record.
        task: model and loss.
        local: local training.
        server: server optimizer.
        cohort: selection of participants.
        train: work of a participant.
        step: (state, server optimizer, means or None) -> the next state and facts.
        totals: transforms the sums, or None, before their mean is taken.
        predict: prediction of the network; None for one without branches.
        cost: `forward` or `trained` of `with_cohort`.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights), cohort.init(fleet))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        # S_t trains; the reply has sum n_i Delta_i.
        state, reply = take_part(cohort, fleet, state, rng, shared_weights, state.weights)
        return step(state, server, mean(totals(reply.total)))

    made = Algorithm(name, init, {"train": train}, round, shared_weights, predict or task.predict)
    return with_cohort(made, cohort, task, local, **cost)
