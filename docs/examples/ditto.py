"""Ditto: a model on each client, pulled towards the global one.

Li, Hu, Beirami, Smith: *Ditto: Fair and Robust Federated Learning Through Personalization*, ICML
2021, Algorithm 1.

| symbol | meaning |
| --- | --- |
| `w` | the global weights, those of FedAvg |
| `v_k` | the weights that client k keeps |
| `lam` | strength of the pull |

    v_k <- v_k - lr * (grad F_k(v_k) + lam * (v_k - w))

When to use it: clients differ, come back often, and have too few rows for a model of their own.

Choices:
    - ours: the personal model starts as the global one and takes as many steps as the global one
      does, in an order of its own.
    - ours: a client that was never asked is served by the global model.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import fedtide as ft
from fedtide.cohorts import with_cohort
from fedtide.core.base import Algorithm, Answer, Fleet, Moment, Shard, Traits, Weighted, Weights, mean, shared_weights
from fedtide.core.rng import Rng


@dataclass(frozen=True)
class State:
    """The global weights, and the cohort's memo."""

    weights: Weights
    cohort: Any


def ditto(
    task: ft.Task,
    local: ft.LocalTrainer = ft.LocalTrainer(),
    lam: float = 0.1,
    cohort: ft.cohorts.Cohort = ft.cohorts.Arrivals(),
) -> Algorithm[State]:
    """FedAvg, and a model of each client's own beside it.

    Args:
        task: model and loss.
        local: local training, of both models.
        lam: strength of the pull towards the global model.
        cohort: who is asked.
    """

    def init(fleet: Fleet, rng: Rng) -> State:
        return State(task.init(rng), cohort.init(fleet))

    def train(w: Weights, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        fitted = local(task, task.loss, w, shard, moment, rng)
        if not fitted.steps:
            return None
        # Copies: the task has one module, which the personal model is about to use.
        delta, loss = ft.weights.sub(fitted.weights, w), fitted.loss
        anchor = [w.params[name] for name in task.scratch.names]

        def pull(now: list[torch.Tensor], start: list[torch.Tensor]) -> list[torch.Tensor]:
            return [lam * (v - a) for v, a in zip(now, anchor, strict=True)]

        v = w if memory is None else memory["own"]
        personal = local(task, task.loss, v, shard, moment, rng.at("own"), term=pull)
        copy = ft.weights.map_leaves(torch.clone, personal.weights)
        total = {"delta": Weighted(delta, len(shard)), "loss": Weighted(loss, len(shard))}
        return Answer(total, memory={"own": copy}, update=delta)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, dict[str, Any]]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(shared_weights, state))
        reply = fleet.ask("train", clients, state.weights, reveal=cohort.reveals)
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        if reply.total is None:
            return state, {}
        got = mean(reply.total)
        return replace(state, weights=ft.weights.add(state.weights, got["delta"])), {"loss": got["loss"]}

    predict = ft.personal.by_own_weights(task)
    result = Algorithm("ditto", init, {"train": train}, round, shared_weights, predict, traits=Traits(keeps=1))
    return with_cohort(result, cohort, task, local)
