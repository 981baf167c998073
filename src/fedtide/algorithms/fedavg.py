"""FedAvg and FedSGD: one global model by averaging what clients make of it.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas: *Communication-Efficient Learning of Deep Networks from Decentralized
Data*, AISTATS 2017, Algorithm 1.

| symbol | meaning |
| --- | --- |
| `w` | the global weights |
| `S_t` | the clients asked in round t |
| `n_i` | rows of client i |
| `Delta_i` | client i's weights after local training, minus `w` |

When to use it: always, first. It is the yardstick for everything else, and hard to beat when clients are alike.

Choices:
    The mean is taken over the clients that answered (the paper's `n` over all clients is wrong when only some take
    part), weighted by their rows or, with `weighting = "uniform"`, equally. The server adds the mean update through a
    server optimizer; plain SGD with rate 1 is the paper's FedAvg.

    With `select` a selector picks who is asked, as many as the cohort would ask, among those that are reachable. What
    it has to know of clients is asked once, before round 0, of whoever is reachable then. Oort's utility is of plain
    cross-entropy of a client's rows under the model that it received, whatever loss trains.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch

from fedtide.core.config_types import Spelled
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Moment,
    Shard,
    Weighted,
    Weights,
    Work,
    shared_weights,
)
from fedtide.learn.fair import Fair, fairly
from fedtide.learn.local import LocalTrainer, Term, costing, gradient_step
from fedtide.learn.server import SGD, Server, averaged
from fedtide.learn.task import Task
from fedtide.learn.training import Training
from fedtide.parts.cohort import Arrivals, Cohort, wanted
from fedtide.parts.select import Select, counting, introduced, labeled, utility
from fedtide.parts.weighting import Weighting, client_weight


@dataclass(frozen=True)
class State:
    """The global weights, the server optimizer's memo, and the selector's."""

    weights: Weights
    server: Any
    select: Any = None


def fedavg(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
    select: Annotated[Select | None, Spelled] = None,
) -> Algorithm:
    """Federated averaging.

    Sends the weights down and the update up, as a weighted sum; clients keep nothing.

    Args:
        task: model and loss.
        local: local training.
        server: what the server does with the mean update.
        cohort: who is asked.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
        select: picks who is asked by what is known of clients; of `cohort` only the numbers count then. None means
            whoever the cohort says.
    """
    return averaging("fedavg", task, local, server, cohort, weighting, select=select)


def averaging(
    name: str,
    task: Task,
    local: LocalTrainer,
    server: Server,
    cohort: Cohort,
    weighting: Weighting,
    extra: Term | None = None,
    stragglers: float = 0.0,
    select: Select | None = None,
    fair: Fair | None = None,
) -> Algorithm:
    """FedAvg with a gradient term, or weights by losses: the family of FedProx, the FedOpt methods and q-FedAvg.

    A client is a straggler with probability `stragglers`: it does a random part of its work, which counts in full.
    """
    wants = ("utility",) if select is not None and select.learns else ()

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        memo = None if select is None else introduced(select, fleet, _classes(task, weights, select))
        return State(weights, server.init(weights), memo)

    def train(payload: Weights, memory: None, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        seen = (
            {"utility": utility(task.losses(payload, shard), int(local.distinct(torch.tensor(len(shard)))))}
            if wants
            else {}
        )
        felt = fair.felt(task, payload, shard) if fair is not None else None
        slow = stragglers and rng.at("straggler").numpy().random() < stragglers
        solver = local.shortened(rng.at("work")) if slow else local
        fitted = solver(task, task.loss, payload, shard, moment, rng, extra=extra)
        if not fitted.steps:
            return None  # no rows, or a single one and BatchNorm: "no step" must not pull the mean to zero
        weight = client_weight(shard, weighting)
        update = {"delta": Weighted(fitted.delta, weight)}
        if fair is not None and felt is not None:
            update = fair.sent(fitted, felt, weight)
        return Answer({**update, "loss": Weighted(fitted.loss, len(shard))}, seen)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        if select is None:
            clients = cohort(rng, fleet)
        else:
            clients = select.pick(state.select, rng, fleet, fleet.reachable, wanted(cohort, fleet))
        reply = fleet.ask("train", clients, state.weights, reveal=wants)
        if select is not None and wants and len(reply.clients):
            seen, number = reply.rows["utility"], fleet.moment.round
            state = replace(state, select=select.learn(state.select, reply.clients, seen, reply.seconds, number))
        return averaged(state, server, mean(reply.total if fair is None else fairly(reply.total)))

    # Where nothing but training is asked of clients it is the work that all such methods share.
    alone = not wants and fair is None and not stragglers
    works: dict[str, Work] = {"train": Training(task, local, weighting, extra) if alone else train}
    if select is not None and select.needs:
        works[select.needs] = counting(local.distinct) if select.needs == "count" else labeled
    reveals = (*(works.keys() - {"train"}), *wants)
    looks = len(wants) + (fair is not None)  # losses before training, where those are wanted
    effort = costing(local, {"train": looks, "count": 0, "labels": 0})
    return Algorithm(name, init, works, round, shared_weights, task.predict, reveals=reveals, effort=effort)


def _classes(task: Task, weights: Weights, select: Select) -> dict[str, int] | None:
    """What the question "labels" has to know: how many classes the model has."""
    if select.needs != "labels":
        return None
    if task.example is None:
        raise FedtideError(f"select: '{select.kind}' has to know the classes; give Task(example=...) some row (1, ...)")
    return {"classes": task.logits(weights, task.example).shape[-1]}


def fedsgd(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """FedSGD: one gradient over all rows of each client, one step of size `local.lr` on the server.

    Equals FedAvg with one epoch of one full batch of plain SGD; what travels is the step, minus rate times gradient.

    Args:
        task: model and loss.
        local: of it only the rate and its schedule are used, not its clipping, weight decay or augmentation.
        server: what the server does with the mean step.
        cohort: who is asked.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights))

    def train(payload: Weights, memory: None, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        step = gradient_step(task, local, payload, shard, moment)
        if step is None:
            return None
        delta, loss = step
        return Answer({"delta": Weighted(delta, client_weight(shard, weighting)), "loss": Weighted(loss, len(shard))})

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        reply = fleet.ask("train", cohort(rng, fleet), state.weights)
        return averaged(state, server, mean(reply.total))

    return Algorithm(
        "fedsgd", init, {"train": train}, round, shared_weights, task.predict, effort=lambda question, rows: rows
    )
