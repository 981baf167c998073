"""FedNova (Wang et al. 2020, plain SGD) as a person would write it, right or with one mistake, for the laws to find."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm, Answer, Weighted, Weights, mean, shared_weights
from fedtide.core.trees import map_leaves
from fedtide.core.weights import add, div, mul
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task


@dataclass(frozen=True)
class State:
    """The global weights."""

    weights: Weights


@dataclass
class Melted:
    """A state that can be changed."""

    weights: Weights


def fednova(
    task: Task, local: LocalTrainer = LocalTrainer(), cohort: Cohort = Arrivals(), fault: str = ""
) -> Algorithm[State]:
    """FedNova; `fault` names the mistake, "" none."""
    kept = []

    def init(fleet, rng):
        return (Melted if fault == "melted" else State)(task.init(rng))

    def train(payload, memory, shard, moment, rng):
        if fault == "impure":
            next(iter(payload.params.values())).add_(1e-3)
        fitted = local(task, task.loss, payload, shard, moment, rng)
        if not fitted.steps and fault != "empty":
            return None
        n, tau = len(shard), fitted.steps
        if fault == "empty":
            1 / n
        delta = fitted.delta
        if fault == "noise":
            delta = map_leaves(lambda d: d + torch.from_numpy(np.random.standard_normal(d.shape)).to(d), delta)  # noqa: NPY002
        rows = {"loss": torch.tensor(fitted.loss)} if fault == "reveal" else {}
        loss = Weighted(fitted.loss, n)
        normalized = div(delta, max(tau, 1))
        total = {"delta": Weighted(normalized, n), "tau": Weighted(float(tau), n), "loss": loss}
        return Answer(total, rows, update=normalized if fault == "share" else delta)

    def round(state, fleet, rng):
        clients = cohort.pick(None, fleet, rng, None)
        reply = fleet.ask("train", clients, state.weights, reveal=("loss",) if fault == "reveal" else ())
        if fault == "nobody":
            reply.total["delta"]
        got = mean(reply.total)
        if got is None:
            return state, {}
        if fault == "closure":
            kept.append(1)
            return replace(state, weights=map_leaves(lambda w: w + len(kept) * 1e-3, state.weights)), {}
        return replace(state, weights=add(state.weights, mul(got["delta"], got["tau"]))), {"loss": got["loss"]}

    def predict(payload, memories, x, owner):
        p = task.predict(payload, memories, x, owner)
        return replace(p, told=p.told - p.told.mean(0)) if fault == "mixing" else p

    return Algorithm("fednova", init, {"train": train}, round, shared_weights, predict)
