"""A sketch of what the types must carry, after Fielding: two questions a round, slots, abstention.

It is as short as it can be and is run through every law beside the real one.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm, Answer, Traits, Weighted, Weights, mean
from fedtide.core.trees import per_client
from fedtide.core.weights import sub
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import SGD
from fedtide.learn.task import Task

# -- Fielding: two questions a round, plain Python between them, training by cluster -----------------------------------


@dataclass(frozen=True)
class Clustered:
    weights: tuple[Weights, ...]
    vectors: Tensor = field(metadata=per_client(new=1 / 3))
    cluster: Tensor = field(metadata=per_client(new=0))
    centers: Tensor


def fielding(
    task: Task, local: LocalTrainer = LocalTrainer(), clusters: int = 2, classes: int = 3, cohort: Cohort = Arrivals()
) -> Algorithm:
    def nearest(vectors, centers):
        return torch.cdist(vectors, centers, p=1).argmin(1)

    def reported(fleet, vectors):
        reply = fleet.ask("report", fleet.reachable, {}, reveal=("labels",))
        if reply.total is None:
            return vectors, reply.clients
        vectors = vectors.clone()
        vectors[reply.clients] = reply.rows["labels"]
        return vectors, reply.clients

    def init(fleet, rng):
        weights = task.init(rng)
        uniform = torch.full((len(fleet.clients), classes), 1 / classes)
        vectors, _ = reported(fleet, uniform)
        centers = vectors[:: max(len(vectors) // clusters, 1)][:clusters].clone()
        return Clustered((weights,) * clusters, vectors, nearest(vectors, centers), centers)

    def report(payload, memory, shard, moment, rng):
        if not len(shard):
            return None
        labels = torch.bincount(shard.y, minlength=classes)[:classes] / len(shard)
        if memory is not None and torch.equal(memory["labels"], labels):
            return None  # not drifted: nothing is sent
        return Answer({"reports": Weighted(1.0)}, {"labels": labels}, memory={"labels": labels})

    def train(payload, memory, shard, moment, rng):
        if not len(shard):
            return None
        fitted = local(task, task.loss, payload, shard, moment, rng)
        delta = sub(fitted.weights, payload)
        return Answer({"delta": Weighted(delta, len(shard))}, update=delta)

    def round(state, fleet, rng):
        vectors, drifted = reported(fleet, state.vectors)
        cluster = state.cluster.clone()
        cluster[drifted] = nearest(vectors[drifted], state.centers)
        chosen = cohort.pick(None, fleet, rng, None)
        reply = fleet.ask("train", chosen, list(state.weights), slot=cluster[chosen], slots=clusters)
        totals = reply.total or [None] * clusters
        weights = tuple(
            w if t is None else SGD().step(w, None, mean(t)["delta"])[0]
            for w, t in zip(state.weights, totals, strict=True)
        )
        centers = torch.stack([
            vectors[cluster == k].mean(0) if (cluster == k).any() else state.centers[k] for k in range(clusters)
        ])  # fmt: skip
        return Clustered(weights, vectors, cluster, centers), {"moved": len(drifted)}

    def serve(state, clients):
        known = clients.clamp(max=len(state.cluster) - 1)
        return list(state.weights), torch.where(clients < len(state.cluster), state.cluster[known], 0)

    return Algorithm(
        "fielding",
        init,
        {"report": report, "train": train},
        round,
        serve,
        task.predict,
        traits=Traits(reveals=("labels",)),
    )
