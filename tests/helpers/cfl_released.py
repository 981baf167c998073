"""CFL as its code was released, in which all splits after the first mistake places within a cluster for clients.

Sattler, Müller, Samek: *Clustered Federated Learning: Model-Agnostic Distributed Multitask Optimization under Privacy
Constraints*, IEEE TNNLS 2020, Algorithms 1 to 3, as published in code. `cfl` is the method; this one explains numbers
that were published with that code and its copies.

Every client trains the model that it has. A cluster is split if its mean update is short and some update is long, into
two by complete linkage on cosines, and the two sets of *places in the cluster* become clusters. A client moves by the
sum of the mean updates of all clusters that it is in. After the first split it may be in two, or in none.

Choices:
    Clients with the same history have the same model, so that there are fewer models than clients. A cluster is split
    only when all of it answered; the code asks all clients in every round. Local training begins with a fresh
    optimizer; the code keeps one, with its momentum, for each client. A client that was never asked takes the model
    that most clients have.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.cfl import bipartition as halves
from fedtide.algorithms.cfl import show_update, weighted_mean
from fedtide.clusters.distance import cosines
from fedtide.clusters.rounds import mean_over_slots, reveal_update
from fedtide.cohorts import Cohort, Everyone
from fedtide.cohorts.participation import ask_to_train, with_cohort
from fedtide.core.base import Algorithm, Facts, Fleet, Payload, Reply, Slot, Traits, Weights, mean
from fedtide.core.rng import Rng
from fedtide.core.weights import add, shaped
from fedtide.fields.types import NonNegative, Whole
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.learn.training import Training


@dataclass(frozen=True)
class State:
    """The models, the model of each client (registered,), and the mask of each cluster's clients (C, registered)."""

    weights: tuple[Weights, ...]
    model: Tensor
    belongs: Tensor
    cohort: Any = None


def cfl_released(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    eps1: NonNegative = 0.4,
    eps2: NonNegative = 1.6,
    split_after: Whole = 20,
    cohort: Cohort = Everyone(),
) -> Algorithm[State]:
    """Return the method; options are those of `cfl`."""

    def init(fleet: Fleet, rng: Rng) -> State:
        clients = len(fleet.clients)
        every = torch.ones(1, clients, dtype=torch.bool)
        return State((task.init(rng),), torch.zeros(clients, dtype=torch.int64), every, cohort.init(fleet))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(serve, state))
        slot = state.model[clients]
        state, reply = ask_to_train(
            cohort, fleet, state, clients, list(state.weights), slot=slot, reveal=("update", "weight")
        )
        if reply.total is None:
            return state, {"clusters": len(state.belongs)}
        belongs = state.belongs
        for c in range(len(belongs)) if fleet.moment.round >= split_after else ():
            belongs = split(belongs, c, reply, eps1, eps2)
        facts: Facts = {
            "loss": mean_over_slots(reply.total, "loss"),
            "clusters": len(belongs),
            "members": belongs[:, reply.clients].sum(1),
            "in_none": int((belongs.sum(0) == 0).sum()),
            "in_several": int((belongs.sum(0) > 1).sum()),
        }
        return step_clusters(regroup(state, belongs), state, reply), facts

    def serve(state: State, clients: Tensor) -> tuple[Payload, Slot]:
        usual = torch.bincount(state.model).argmax()
        known = clients < len(state.model)
        return list(state.weights), torch.where(known, state.model[clients.clamp(max=len(state.model) - 1)], usual)

    train = reveal_update(Training(task, local, "uniform"), show_update, "update")
    traits = Traits(reveals=("update", "weight"), models="clusters")
    made = Algorithm("cfl-released", init, {"train": train}, round, serve, task.predict, traits=traits)
    return with_cohort(made, cohort, task, local)


def split(belongs: Tensor, c: int, reply: Reply, eps1: float, eps2: float) -> Tensor:
    """Split a cluster by the faulty rule if it is stationary while clients disagree; return all clusters."""
    at = belongs[c][reply.clients]
    updates = reply.rows["update"][at]
    if not 2 < len(updates) == int(belongs[c].sum()):
        return belongs
    settled = weighted_mean(updates, reply.rows["weight"][at]).norm()
    unserved = updates.double().norm(dim=1).max()
    if not (settled < eps1 and unserved > eps2):
        return belongs
    second = torch.from_numpy(halves(cosines(updates).numpy(), "complete"))
    # The fault: these are places within the cluster, but are used as ids.
    one, two = (
        torch.zeros_like(belongs[c]).index_fill_(0, side.nonzero().flatten(), True) for side in (~second, second)
    )
    return torch.cat([belongs[:c], one[None], belongs[c + 1 :], two[None]])


def regroup(before: State, belongs: Tensor) -> State:
    """Make one model for every set of clients that had the same model and are in the same clusters."""
    _, model = torch.cat([before.model[None], belongs]).unique(dim=1, return_inverse=True)
    source = [int(before.model[model == k][0]) for k in range(int(model.max()) + 1)]
    return State(tuple(before.weights[k] for k in source), model, belongs, before.cohort)


def step_clusters(made: State, before: State, reply: Reply) -> State:
    """Move each model along the sum of the mean updates of all clusters that its clients are in."""
    weights = []
    for k, model in enumerate(made.weights):
        holder = int((made.model == k).nonzero()[0])
        heard = [members[reply.clients] for members in made.belongs[made.belongs[:, holder]]]
        means = [weighted_mean(reply.rows["update"][at], reply.rows["weight"][at]) for at in heard if at.any()]
        total: Any = reply.total[int(before.model[holder])]
        if total is None or not means:
            weights.append(model)
            continue
        delta = Weights(shaped(torch.stack(means).sum(0), model.params), mean(total)["delta"].buffers)
        weights.append(add(model, delta))
    return replace(made, weights=tuple(weights))
