"""Throw-away sketches of what the types must carry: IFCA with `adapt`, and Fielding.

They are as short as they can be and are run through every law; the real ones come with their papers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.core.sums import mean
from fedtide.core.types import Algorithm, Answer, Prediction, Slotted, Weighted, Weights
from fedtide.core.weights import sub
from fedtide.learn.local import LocalSolver
from fedtide.learn.server import SGD, Server
from fedtide.learn.task import Task, row_losses
from fedtide.parts.cohort import Arrivals, Cohort

# -- IFCA: K models, slotted sums, a choice on own rows before being evaluated ----------------------------------------


@dataclass(frozen=True)
class Models:
    weights: tuple[Weights, ...]
    server: tuple[Any, ...]


def ifca(
    task: Task, local: LocalSolver = LocalSolver(), models: int = 2, server: Server = SGD(), cohort: Cohort = Arrivals()
) -> Algorithm:
    def init(fleet, rng):
        weights = tuple(task.init(rng.at("model", k) if k else rng) for k in range(models))
        return Models(weights, tuple(server.init(w) for w in weights))

    def best(payload, shard):
        logp = [F.log_softmax(task.logits(w, shard.x), -1) for w in payload]
        losses = torch.stack([row_losses(each, shard.y, shard.mask).double().mean() for each in logp])
        return int(losses.nan_to_num(torch.inf).argmin())

    def train(payload, memory, shard, moment, rng):
        if not len(shard):
            return None
        k = best(payload, shard)
        fitted = local(task, task.loss, payload[k], shard, moment, rng)
        delta = sub(fitted.weights, payload[k])
        return Answer(
            {"delta": Slotted({k: Weighted(delta, len(shard))}, models), "loss": Weighted(fitted.loss, len(shard))},
            notes={"choice": torch.tensor(k)},
        )

    def round(state, fleet, rng):
        reply = fleet.ask("train", cohort(rng, fleet), state.weights)
        if reply.total is None:
            return state, {}
        deltas = [None if total is None else mean(total) for total in reply.total["delta"]]
        stepped = [server.step(w, m, d) for w, m, d in zip(state.weights, state.server, deltas, strict=True)]
        return Models(tuple(w for w, _ in stepped), tuple(m for _, m in stepped)), {
            "fed": sum(d is not None for d in deltas)
        }

    def adapt(payload, memory, shard, moment, rng):
        rows = shard.valid if shard.valid is not None and len(shard.valid) else shard
        return Answer({}, memory={"choice": torch.tensor(best(payload, rows) if len(rows) else 0)})

    def predict(payload, memories, x, owner):
        choice = torch.tensor([0 if m is None else int(m["choice"]) for m in memories])[owner]
        logp = torch.stack([F.log_softmax(task.logits(w, x), -1) for w in payload])  # (K, rows, classes)
        return Prediction(logp[choice, torch.arange(len(x))], choice)

    return Algorithm(
        "ifca", init, {"train": train}, round, lambda state, clients: (state.weights, None), predict, adapt
    )


# -- Fielding: two questions a round, plain Python between them, training by cluster -----------------------------------


@dataclass(frozen=True)
class Clustered:
    weights: tuple[Weights, ...]
    vectors: Tensor
    cluster: Tensor
    centres: Tensor


def fielding(
    task: Task, local: LocalSolver = LocalSolver(), clusters: int = 2, classes: int = 3, cohort: Cohort = Arrivals()
) -> Algorithm:
    def nearest(vectors, centres):
        return torch.cdist(vectors, centres, p=1).argmin(1)

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
        centres = vectors[:: max(len(vectors) // clusters, 1)][:clusters].clone()
        return Clustered((weights,) * clusters, vectors, nearest(vectors, centres), centres)

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
        return Answer({"delta": Weighted(sub(fitted.weights, payload), len(shard))})

    def round(state, fleet, rng):
        vectors, drifted = reported(fleet, state.vectors)
        cluster = state.cluster.clone()
        cluster[drifted] = nearest(vectors[drifted], state.centres)
        chosen = cohort(rng, fleet)
        reply = fleet.ask("train", chosen, list(state.weights), slot=cluster[chosen], slots=clusters)
        totals = reply.total or [None] * clusters
        weights = tuple(
            w if t is None else SGD().step(w, None, mean(t)["delta"])[0]
            for w, t in zip(state.weights, totals, strict=True)
        )
        centres = torch.stack([
            vectors[cluster == k].mean(0) if (cluster == k).any() else state.centres[k] for k in range(clusters)
        ])  # fmt: skip
        return Clustered(weights, vectors, cluster, centres), {"moved": len(drifted)}

    def serve(state, clients):
        known = clients.clamp(max=len(state.cluster) - 1)
        return list(state.weights), torch.where(clients < len(state.cluster), state.cluster[known], 0)

    return Algorithm(
        "fielding", init, {"report": report, "train": train}, round, serve, task.predict, reveals=("labels",)
    )
