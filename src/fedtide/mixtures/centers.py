"""Branches by the nearest center of raw inputs, which clients cluster before training: T-shot k-means and k-FED."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtide.clusters.clusterer import Points
from fedtide.cohorts import Cohort, collect_before, play_rounds, with_cohort
from fedtide.core.base import Algorithm, Answer, Facts, Fleet, Moment, Reply, Shard, Weighted, Weights
from fedtide.core.errors import FedtideError
from fedtide.core.rng import Rng
from fedtide.learn import LocalTrainer, Server, Steps, Task, Weighting
from fedtide.learn.device import to_cpu
from fedtide.learn.task import with_branches
from fedtide.mixtures.branches import BranchDivisor, predict_by_branch, step_branches, train_branch


@dataclass(frozen=True)
class Sent:
    """Payload of clients: the network, and the center of each branch."""

    weights: Weights
    centers: Tensor | None


@dataclass(frozen=True)
class State:
    """The network, the optimizer's memo, the collection, and the centers (K, inputs) once there are any.

    found: centers of the participants so far (n, inputs); counts: samples of each (n,); collected: bytes.
    """

    weights: Weights
    server: Any
    found: Tensor
    counts: Tensor
    centers: Tensor | None
    collected: int
    cohort: Any = None


def cluster_before(
    name: str,
    task: Task,
    local: LocalTrainer,
    *,
    rounds: int,
    branches: int,
    branch_layer: str,
    lam: float,
    eps: float,
    normalize_by: BranchDivisor,
    server: Server,
    cohort: Cohort,
    weighting: Weighting,
    summarize: Callable[[Points, Rng], tuple[Points, np.ndarray]],
    cluster: Callable[[Points, np.ndarray], Points],
) -> Algorithm[State]:
    """Build multi-branch training with branches by the nearest center, from centers that clients send before it.

    Args:
        name: of the method.
        rounds: number of collection rounds.
        summarize: raw inputs of a client (rows, inputs), key -> its centers (n, inputs), and rows of each (n,).
        cluster: centers of all clients (n, inputs), and rows of each (n,), 0 for an empty one -> K centers; at least K
            are not empty.
    """
    if task.example is not None and not task.example.is_floating_point():
        raise FedtideError(f"{name}: found rows of tokens; it clusters raw inputs and is not defined for text")
    task = with_branches(task, branch_layer, branches)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights, none = task.init(rng), torch.empty(0)
        return State(weights, server.init(weights), none, none, centers=None, collected=0, cohort=cohort.init(fleet))

    def collect(payload: Any, memory: Any, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        centers, counts = summarize(to_cpu(shard.x).flatten(1).double().numpy(), rng.at("seeds"))
        rows = {"centers": torch.from_numpy(centers).float(), "counts": torch.from_numpy(counts)}
        return Answer({"rows": Weighted(float(len(shard)))}, rows)

    def gather(state: State, reply: Reply, moment: Moment, rng: Rng) -> State:
        centers, counts = state.found, state.counts
        if reply.total is not None:
            centers = torch.cat([centers, reply.rows["centers"].flatten(0, 1)])
            counts = torch.cat([counts, reply.rows["counts"].flatten()])
        collected = state.collected + reply.cost.up + reply.cost.down
        if moment.round < -1:
            return replace(state, found=centers, counts=counts, collected=collected)
        none = torch.empty(0)
        centers = cluster_reports(cluster, centers, counts, branches)
        return replace(state, found=none, counts=none, centers=centers, collected=collected)

    def choose(payload: Sent, shard: Shard, moment: Moment) -> Steps[tuple[Weights, Tensor]]:
        yield from ()  # nothing has to be computed of other clients
        return payload.weights, nearest(payload, shard.x)

    def step(state: State, reply: Reply, moment: Moment, rng: Rng) -> tuple[State, Facts]:
        state, facts = step_branches(state, reply, server=server, lam=lam, normalize_by=normalize_by)
        return state, {**facts, "collected": state.collected}

    train = train_branch(task, local, branches, lam, eps, choose, weighting)
    round, serve = play_rounds(cohort, step, lambda state: Sent(state.weights, state.centers))
    predict = predict_by_branch(task, lambda payload, logits, z, x, owner: nearest(payload, x))
    algorithm = Algorithm(name, init, {"train": train}, round, serve, predict)
    algorithm = with_cohort(algorithm, cohort, task, local, forward={"collect": 0}, sends=(Sent,), models="branches")
    return collect_before(algorithm, cohort, collect, rounds, ("centers", "counts"), gather)


def nearest(payload: Sent, x: Tensor) -> Tensor:
    """Return the branch (rows,) of the center that is nearest to each row; ties, and without centers: the first."""
    assert payload.centers is not None
    if not payload.centers.shape[1]:
        return torch.zeros(len(x), dtype=torch.int64)
    return torch.cdist(to_cpu(x).flatten(1).double(), payload.centers.double()).argmin(1)


def cluster_reports(
    cluster: Callable[[Points, np.ndarray], Points], reports: Tensor, counts: Tensor, branches: int
) -> Tensor:
    """Cluster the reported centers; with fewer than K of them the rest are too far away to be nearest.

    Without any report centers have no inputs (K, 0).
    """
    every, n = reports.double().numpy(), counts.double().clamp(min=0).numpy()
    x = every[n > 0]
    if not len(x):
        return torch.empty(branches, 0)
    if len(x) < branches:
        return torch.from_numpy(np.concatenate([x, np.full((branches - len(x), x.shape[1]), 1e6)])).float()
    return torch.from_numpy(cluster(every, n)).float()
