"""Oracle: one model for each true group, which no server can know; a bound for comparisons.

The "oracle" of drift experiments (Jothimurugesan et al.: *Federated Learning under Distributed Concept Drift*, AISTATS
2023, section 5; *Fielding: Clustered Federated Learning with Data Drift*): clustering that is always right.

| symbol | meaning |
| --- | --- |
| `g_i(t)` | the true group of client i in round t |
| `w_k` | model of group k |

    new group k    w_k = mean_{i: g_i(t) = k} w_{g_i(t - 1)}    over registered i
    round          FedAvg inside each group

When to use it: to measure the best result that clustering could reach. It runs only in simulations: the groups are
those of the shift, such as the domain or the labels that a client has now.

Choices:
    - ours: a group that appears later, as at a mass event, begins with the plain mean of its registered clients'
      models. If it has no such models, it begins with the first model. Its optimizer is reset.
    - ours: a group keeps its model while it is empty. Held-out clients' groups are known too.
    - ours: knowing the groups costs no bytes or seconds.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.clusters.rounds import build_clustered, mix_models, serve_clusters, train_clusters
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm, Facts, Payload, Simulation, Slot, Weights
from fedtide.core.rng import Rng
from fedtide.learn import SGD, LocalTrainer, Server, Task, Training, Weighting


@dataclass(frozen=True)
class State:
    """The groups' models, the optimizer's memo of each, and the group of every client, held-out ones included."""

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    group: Tensor
    cohort: Any = None


def oracle(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Federated averaging inside each true group: a bound, as the groups cannot be known in practice.

    Sends a group's model down and its update up in sums.
    """

    def init(fleet: Simulation, rng: Rng) -> State:
        start, group = task.init(rng), fleet.true_groups
        models = (start,) * (int(group.max()) + 1)
        memos = tuple(map(server.init, models))
        return State(weights=models, server=memos, group=group, cohort=cohort.init(fleet))

    def round(state: State, fleet: Simulation, rng: Rng) -> tuple[State, Facts]:
        state = regroup(state, fleet.true_groups, server, len(fleet.clients))
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        group = state.group[clients]
        state, _, facts = train_clusters(fleet, state, clients, group, server, cohort)
        return state, {**facts, "models": len(state.weights)}

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        return serve_clusters(state.weights, state.group, clients)

    works, reveals = {"train": Training(task, local, weighting)}, ("true_groups",)
    return build_clustered("oracle", task, local, cohort, init, round, serve, works, reveals=reveals)


def regroup(state: State, group: Tensor, server: Server, registered: int) -> State:
    """Update the group of every client, and make a model for every new group.

    Args:
        state: the state, with K models.
        group: (clients,) the true group of each client, which may be K or more.
        server: makes the memo of a new model.
        registered: number of clients, from the first on, whose models make a new one: the others are unknown before
            evaluation.
    """
    weights, memos, count = [*state.weights], [*state.server], len(state.weights)
    for k in range(count, int(group.max()) + 1):
        share = torch.bincount(state.group[:registered][group[:registered] == k], minlength=count)
        weights.append(mix_models(state.weights, share) if share.sum() else weights[0])
        memos.append(server.init(weights[-1]))
    return replace(state, weights=tuple(weights), server=tuple(memos), group=group)


ENTRY = Entry(
    "oracle", oracle, "weights of its true group down, update up", "clustered", reveals=("true_groups",),
    exempt={"deployed": "only a simulation knows the true groups"},
)  # fmt: skip
