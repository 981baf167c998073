"""FedSoft: K models; every client trains one model that is pulled to all of them, by the share of samples each fits.

Ruan, Joe-Wong: *FedSoft: Soft Clustered Federated Learning with Proximal Local Updating*, AAAI 2022, Algorithm 1. With
default options it follows Algorithm 1, except for the choices below.

| symbol | meaning |
| --- | --- |
| `c_s` | the model of cluster s = 1..K, its center |
| `n_k`, `n_ks` | number of client k's samples, and of those on which `c_s` has the least loss of all centers |
| `u_ks` | importance of cluster s for client k, at least sigma |
| `f_k` | the training loss of client k |

    u_ks = max(n_ks / n_k, sigma)                                          estimated every tau rounds
    w_k  = argmin_w f_k(w) + (lam / 2) sum_s u_ks ||w - c_s||^2            by local training
    c_s  = sum_k u_ks n_k w_k / sum_k u_ks n_k

When to use it: each client's samples are a mixture of a few distributions, and a client can train one model only. All
centers are sent to every participant, and a weighted model of the client for each of them comes back in sums.

Choices:
    - ours: local training starts from the mean of the centers by `u_k`. The pulls to all centers are one pull to this
      mean, of strength `lam * sum_s u_ks`. The released code goes on from the client's last model.
    - ours: a client is evaluated by the same mean of the centers. It estimates `u_k` on its validation samples, or on
      training samples if it has none. The paper also evaluates `w_k`. A client without samples takes equal shares.
    - ours: the shift sends a round's clients, and each counts for each center by `u_ks n_k`. The paper draws clients
      for each center with probabilities `u_ks n_k`, and takes their plain mean.
    - ours: a client keeps its importance, so it estimates anew if tau rounds began since. In the paper the server keeps
      the importance of all clients. In a private study `u_k` counts divided by its sum.
    - released code: sigma 1e-4, which there replaces shares of zero alone; tau 2; lam 0.1 as for letters, and 0.01 for
      CIFAR-10. Losses are plain cross-entropy in evaluation mode. Of equal losses the first counts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.entry import Entry
from fedtide.clusters.rounds import (
    NOT_POOLED,
    Served,
    answer_models,
    at_most_registered,
    decision_rows,
    init_models,
    mix_models,
    refuse_equal_start,
    step_models,
)
from fedtide.cohorts import Arrivals, Cohort, play_rounds, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Reply, Shard, Weighted, Weights, mean
from fedtide.core.rng import Rng
from fedtide.core.weights import sub
from fedtide.fields.types import Count, Fraction, ModelCount, NonNegative
from fedtide.learn import SGD, LocalTrainer, Proximal, Server, Steps, Stepwise, Task, Train, Weighting, client_weight
from fedtide.learn.steps import finite_losses, row_losses
from fedtide.personal import by_own_mean


@dataclass(frozen=True)
class State:
    """The centers, and the server optimizer's memo of each."""

    weights: tuple[Weights, ...]
    server: tuple[Any, ...]
    cohort: Any = None


def fedsoft(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    clusters: ModelCount = 2,
    lam: NonNegative = 0.1,
    sigma: Fraction = 1e-4,
    estimate_every: Count = 2,
    server: Server = SGD(),
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Soft clustered federated learning.

    Sends all centers down, and a weighted model for each of them up in sums.

    Args:
        clusters: number of centers, K.
        lam: strength of the pull to the centers.
        sigma: least importance of a center for a client.
        estimate_every: rounds between two estimates of the importance, the paper's tau.
    """
    refuse_equal_start(task, clusters, is_best_chosen=True)

    def init(fleet: Fleet, rng: Rng) -> State:
        centers = init_models(task, rng, clusters)
        return State(centers, tuple(map(server.init, centers)), cohort.init(fleet))

    def importance(centers: Any, shard: Shard) -> Tensor:
        """Return u_k (K,)."""
        losses = finite_losses(row_losses(task, centers, shard)).reshape(clusters, len(shard), -1).mean(2)
        return (torch.bincount(losses.argmin(0), minlength=clusters).double() / len(shard)).clamp(min=sigma)

    @Stepwise
    def train(payload: Served, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        centers, number = payload.models, moment.round // estimate_every
        u = memory["shares"] if memory is not None and memory["number"] == number else importance(centers, shard)
        start, pull = mix_models(centers, u), lam * float(u.sum())
        fitted = yield Train(task, local, start, shard, moment, rng, Proximal(pull) if pull else None)
        if not fitted.steps:
            return None
        after = fitted.weights
        updates = {s: sub(after, c) for s, c in enumerate(centers)}  # w_k - c_s, of weight u_ks n_k
        next_memory, mean_u = {"shares": u, "number": number}, Weighted(u, client_weight(shard, weighting))
        return answer_models(updates, u, fitted.loss, shard, weighting, next_memory, u=mean_u)

    def step(state: State, reply: Reply, moment: Moment, rng: Rng) -> tuple[State, Facts]:
        facts = mean({"loss": reply.total["loss"], "importance": reply.total["u"]})
        return step_models(state, server, reply.total["delta"]), facts

    def adapt(payload: Served, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        rows = decision_rows(shard)
        return Answer({}, memory={"shares": importance(payload.models, rows)}) if len(rows) else None

    round, serve = play_rounds(cohort, step, lambda state: Served(state.weights))
    predict, check = by_own_mean(task, clusters), at_most_registered(clusters)
    algorithm = Algorithm("fedsoft", init, {"train": train}, round, serve, predict, adapt, check=check)
    forward = {"train": clusters / estimate_every, "loss": clusters + 1}
    refuses = {**NOT_POOLED, "at-home": "a client trains a mean of all models, and sends an update of each"}
    traits: Any = {"sends": (Served,), "models": "clusters", "refuses": refuses, "remembers": True}
    return with_cohort(algorithm, cohort, task, local, forward=forward, **traits)


ENTRY = Entry(
    "fedsoft", fedsoft, "K models down, a model for each of them up", "clustered",
    keeps="the share of its samples that each model fits best (K numbers)", helps=("groups", "holdings"),
    exempt={"update": "measured forgetting of a model includes its distance from the mean that the client trains"},
)  # fmt: skip
