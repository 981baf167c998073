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
    server optimiser; plain SGD with rate 1 is the paper's FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import Algorithm, Answer, Facts, Fleet, Moment, Shard, Weighted, Weights, shared_weights
from fedtide.core.weights import sub
from fedtide.learn.local import LocalSolver, Term
from fedtide.learn.server import SGD, Server, averaged
from fedtide.learn.task import Task
from fedtide.parts.cohort import Arrivals, Cohort
from fedtide.parts.weighting import Weighting, client_weight


@dataclass(frozen=True)
class State:
    """The global weights and the server optimiser's memo."""

    weights: Weights
    server: Any


def fedavg(
    task: Task,
    local: LocalSolver = LocalSolver(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """Federated averaging.

    Sends the weights down and the update up, as a weighted sum; clients keep nothing.

    Args:
        task: model and loss.
        local: local training.
        server: what the server does with the mean update.
        cohort: who is asked.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
    """
    return averaging("fedavg", task, local, server, cohort, weighting)


def averaging(
    name: str,
    task: Task,
    local: LocalSolver,
    server: Server,
    cohort: Cohort,
    weighting: Weighting,
    extra: Term | None = None,
    stragglers: float = 0.0,
) -> Algorithm:
    """FedAvg with a gradient term: the family that FedProx and the FedOpt methods belong to.

    A client is a straggler with probability `stragglers`: it does a random part of its work, which counts in full.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights))

    def train(payload: Weights, memory: None, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        slow = stragglers and rng.at("straggler").numpy().random() < stragglers
        solver = local.shortened(rng.at("work")) if slow else local
        fitted = solver(task, task.loss, payload, shard, moment, rng, extra=extra)
        if not fitted.steps:
            return None  # no rows, or a single one and BatchNorm: "no step" must not pull the mean to zero
        weight = client_weight(shard, weighting)
        return Answer({"delta": Weighted(fitted.delta, weight), "loss": Weighted(fitted.loss, len(shard))})

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        reply = fleet.ask("train", cohort(rng, fleet), state.weights)
        return averaged(state, server, mean(reply.total))

    return Algorithm(name, init, {"train": train}, round, serve=shared_weights, predict=task.predict)


def fedsgd(
    task: Task,
    local: LocalSolver = LocalSolver(),
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """FedSGD: one gradient over all rows of each client, one step of size `local.rate` on the server.

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
        scratch = task.scratch
        if len(shard) < (2 if scratch.needs_pairs else 1):
            return None
        module = scratch.load(payload, train=True)
        shared, per_row = task.loss.prepare(shard)
        loss = task.loss.value(module(task.inputs(shard.x)), shard.y, shared, per_row)
        gradient = torch.autograd.grad(loss, scratch.params, allow_unused=True, materialize_grads=True)
        rate = local.rate * local.schedule(moment)
        # The forward pass has moved the running statistics; they are averaged like any buffer.
        delta = Weights(
            {name: g.mul(-rate) for name, g in zip(scratch.names, gradient, strict=True)},
            sub(scratch.weights.buffers, payload.buffers),
        )
        return Answer(
            {"delta": Weighted(delta, client_weight(shard, weighting)), "loss": Weighted(loss.item(), len(shard))}
        )

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        reply = fleet.ask("train", cohort(rng, fleet), state.weights)
        return averaged(state, server, mean(reply.total))

    return Algorithm("fedsgd", init, {"train": train}, round, serve=shared_weights, predict=task.predict)
