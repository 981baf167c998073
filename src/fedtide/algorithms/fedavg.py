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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, take_part, with_cohort
from fedtide.core.base import Algorithm, Facts, Fleet, Traits, Weights, Work, mean, shared_weights
from fedtide.core.rng import Rng
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD, Server, step_server
from fedtide.learn.task import Task
from fedtide.learn.training import Training, Weighting


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
    # Each client trains w on its samples, and sends n_i Delta_i.
    return average_answers("fedavg", Training(task, local, weighting), task, local, server, cohort)


def step_by_mean(state: State, server: Server, total: Any) -> tuple[State, Facts]:
    """Move w by the mean of Delta_i."""
    return step_server(state, server, mean(total))


def average_answers(
    name: str,
    train: Work,
    task: Task,
    local: LocalTrainer,
    server: Server,
    cohort: Cohort,
    step: Callable[[State, Server, Any], tuple[State, Facts]] = step_by_mean,
    predict: Any = None,
    traits: Traits = Traits(),
    **costs: Any,
) -> Algorithm[State]:
    """Build a method whose server averages the answers of clients.

    Args:
        name: of the method.
        train: the question "train", with the leaves "delta" and "loss".
        task: model and loss.
        local: local training.
        server: server optimizer for the mean.
        cohort: selection of the participants.
        step: (state, server, sums of a round, None without an answer) -> next state and facts.
        predict: of the method; None is that of the task.
        traits: of the method.
        costs: of training, as of `with_cohort`.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights=weights, server=server.init(weights), cohort=cohort.init(fleet))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        # S_t trains w.
        state, reply = take_part(cohort, fleet, state, rng, shared_weights, state.weights)
        return step(state, server, reply.total)

    predict = task.predict if predict is None else predict
    algorithm = Algorithm(name, init, {"train": train}, round, shared_weights, predict, traits=traits)
    return with_cohort(algorithm, cohort, task, local, **costs)


ENTRY = Entry("fedavg", fedavg, "weights down, update up", "global")
