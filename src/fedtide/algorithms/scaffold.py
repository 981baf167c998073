"""SCAFFOLD: FedAvg whose clients correct every local step by what they know of their own drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: *SCAFFOLD: Stochastic Controlled Averaging for Federated Learning*,
ICML 2020, Algorithm 1.

| symbol | meaning |
| --- | --- |
| `w` | the global weights (the paper's x) |
| `c` | the server's control variate: where all clients together would go |
| `c_i` | client i's control variate, kept on the client: where it would go alone |
| `y` | client i's weights during local training |
| `tau`, `eta` | local steps that were done, and their size |

    y    <- y - eta * (g_i(y) - c_i + c)                          tau times
    c_i+ <- option I:  the gradient of client i's loss at w, over all its rows
            option II: c_i - c + (w - y) / (tau * eta)
    w    <- w + eta_g * mean over the cohort of (y - w)
    c    <- c + (1/N) * sum over the cohort of (c_i+ - c_i)       N: all clients

When to use it: clients differ, do many local steps, and come back often. A client that takes part for the first time
has no variate of its own and is only pulled along `c`; where most are met once or never, it is FedAvg with a stale
direction. It sends twice as much as FedAvg both ways, and wants a smaller local rate.

Choices:
    Everything starts from zero variates, so the first round is FedAvg's with equal weights. (Widely used code starts
    them from a random network, which pushes every newcomer in a random direction.) Only trainable parameters have
    variates; running statistics are averaged like an update. Option II is the default, as in the paper's experiments.
    The mean of updates is uniform, as in the paper; `weighting = "samples"` weighs updates by rows, as in NIID-Bench,
    and never the variates. `eta_g` is the rate of `server`. Option II reads a client's mean gradient from how far it
    went, which is true of plain SGD alone: momentum, Adam and clipping are refused. Weight decay belongs to the
    gradient, in both options. Option I takes one more pass, in training mode and on the rows as they are, without
    augmentation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import Algorithm, Answer, Facts, Fleet, Memory, Moment, Shard, Weighted, Weights, shared_weights
from fedtide.core.weights import add, sub
from fedtide.learn.local import LocalTrainer, costing
from fedtide.learn.participation import with_cohort
from fedtide.learn.server import SGD, Server
from fedtide.learn.task import Task
from fedtide.learn.terms import Correction
from fedtide.parts.weighting import Weighting, client_weight

Variate = dict[str, Tensor]


@dataclass(frozen=True)
class State:
    """The global weights, the server optimizer's memo, and the server's control variate `c`."""

    weights: Weights
    server: Any
    control: Variate
    cohort: Any = None


def scaffold(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    variant: Literal["I", "II"] = "II",
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "uniform",
) -> Algorithm:
    """FedAvg with control variates, so that clients that differ do not drift apart.

    Args:
        task: model and loss.
        local: local training, by plain SGD.
        variant: how a client renews its variate: "I" by the gradient at the weights that it received, which is one more
            pass over its rows; "II" from the steps that it did.
        server: what the server does with the mean update; its rate is the paper's `eta_g`.
        cohort: who is asked.
        weighting: "uniform" counts all updates alike, "samples" weighs them by rows; variates are never weighted.

    Raises:
        FedtideError: local training is not by plain SGD.
    """
    _check(local)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights), _zeros(weights.params), cohort.init(fleet))

    def train(payload: Any, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        weights, c = payload["weights"], payload["control"]
        own = _zeros(c) if memory is None else memory["control"]
        correction = Correction([c[name] - own[name] for name in task.scratch.names])
        fitted = local(task, task.loss, weights, shard, moment, rng, extra=correction)
        if not fitted.steps:
            return None
        delta = fitted.delta
        if variant == "I":
            new, _ = task.gradient(weights, shard)
            if local.weight_decay:
                new = {name: g + local.weight_decay * weights.params[name] for name, g in new.items()}
        else:
            new = {name: own[name] - c[name] - delta.params[name] / fitted.stepped for name in c}
        total = {
            "delta": Weighted(delta, client_weight(shard, weighting)),
            "control": Weighted(sub(new, own)),
            "loss": Weighted(fitted.loss, len(shard)),
        }
        return Answer(total, memory={"control": new})

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(shared_weights, state))
        reply = fleet.ask("train", clients, {"weights": state.weights, "control": state.control}, reveal=cohort.reveals)
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        if reply.total is None:
            return state, {}
        got = mean(reply.total)
        weights, memo = server.step(state.weights, state.server, got["delta"])
        # The sum over the cohort by the number of all clients: not the mean over the cohort.
        moved = {name: total / len(fleet.clients) for name, total in reply.total["control"].value.items()}
        return State(weights, memo, add(state.control, moved), state.cohort), {"loss": got["loss"]}

    effort = costing(local, {"train": 3 if variant == "I" else 0})  # a pass forward and back is as much as three looks
    works = {"train": train}
    made = Algorithm("scaffold", init, works, round, shared_weights, task.predict, keeps=1, effort=effort)
    return with_cohort(made, cohort, task, local)


def _check(local: LocalTrainer) -> None:
    """Refuse what control variates are not made for."""
    why = "as control variates are made for plain SGD"
    if local.optimizer != "sgd":
        raise FedtideError(f"local.optimizer: found '{local.optimizer}', allowed: 'sgd', {why}")
    if local.momentum:
        raise FedtideError(f"local.momentum: found {local.momentum}, allowed: 0, {why}")
    if local.max_grad_norm is not None:
        raise FedtideError(f"local.max_grad_norm: found {local.max_grad_norm}, allowed: none, {why}")


def _zeros(like: Variate) -> Variate:
    return {name: torch.zeros_like(value) for name, value in like.items()}
