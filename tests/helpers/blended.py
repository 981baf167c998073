"""Studies of clients that hold a blend of domains, and a toy of a method that splits their rows.

An algorithm of the user's own, named `helpers.blended:splitting` in a configuration.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtide.algorithms.fedavg import fedavg
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm, Answer, Notes, Prediction, Weighted, Weights, mean
from fedtide.learn.local import LocalTrainer
from fedtide.learn.task import Task
from fedtide.mixtures.feature_gaussians import posteriors
from helpers.studies import A

BLEND: dict[str, Any] = {
    "rounds": 12,
    "eval_every": 1,
    "data": {
        "source": {"kind": "gaussians", "samples": 160, "dims": 4, "classes": 3, "domains": 2, "offset": 4.0},
        "partition": {"kind": "iid", "clients": 6},
        "groups": {"by": "none"},
        "split": {"test": 0.25},
        "held_out_clients": {"clients": 1},
    },
    "shift": {"who": "always", "what": {"kind": "domain-mixture", "cycles": 3, "samples": 20, "curve": "cosine"}},
}
"""Top-level tables of such a study."""

SPLITTING = {**A, "name": "splitting", "algorithm": "helpers.blended:splitting"}
FLAT = {**SPLITTING, "name": "flat", "flat": True}


@dataclass(frozen=True)
class State:
    """One network, and K Gaussians over the inputs: mu (K, d), pi (K,)."""

    weights: Weights
    mu: Tensor
    pi: Tensor


def splitting(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    cohort: Cohort = Arrivals(),
    components: int = 2,
    flat: bool = False,
    short: bool = False,
) -> Algorithm:
    """FedAvg that tells which Gaussian each row is from; `flat` puts all into the first, `short` forgets a row."""
    made = fedavg(task, local, cohort=cohort)

    def init(fleet, rng) -> State:
        weights = made.init(fleet, rng).weights
        dims = next(iter(weights.params.values())).shape[1]
        mu = torch.from_numpy(rng.at("mu").numpy().normal(0.0, 4.0, (components, dims)))
        return State(weights, mu, torch.full((components,), 1 / components, dtype=torch.float64))

    def gamma(payload: State, x: Tensor) -> tuple[Tensor, Tensor]:
        found, joint = posteriors(x, payload.mu, torch.full_like(payload.mu, 3.0), payload.pi)
        if flat:
            found = torch.zeros_like(found).index_fill_(1, torch.tensor([0]), 1.0)
        return found, joint

    def train(payload: State, memory, shard, moment, rng) -> Answer | None:
        answer = made.works["train"](payload.weights, memory, shard, moment, rng)
        if answer is None:
            return None
        found, joint = gamma(payload, shard.x)
        entropy = -(found * found.clamp(min=1e-12).log()).sum(1).mean()
        total = {
            **answer.total,
            "mu": Weighted(found.T @ shard.x.double()),
            "mass": Weighted(found.sum(0)),
            "rows": Weighted(float(len(shard))),
            "entropy": Weighted(entropy, len(shard)),
            "log_likelihood": Weighted(joint.logsumexp(1).mean(), len(shard)),
        }
        return Answer(total, notes=Notes(component=found.argmax(1)[short:]))

    def round(state: State, fleet, rng):
        reply = fleet.ask("train", cohort.pick(None, fleet, rng, None), state)
        if reply.total is None:
            return state, {}
        got, mass = mean(reply.total), reply.total["mass"].value
        weights = Weights({name: value + got["delta"].params[name] for name, value in state.weights.params.items()})
        pi = mass / mass.sum()
        step = pi[:, None] * (mass > 0)[:, None]
        moved = state.mu + step * (reply.total["mu"].value / mass.clamp(min=1e-9)[:, None] - state.mu)
        facts = {"loss": got["loss"], "pi": pi, "entropy": got["entropy"], "log_likelihood": got["log_likelihood"]}
        return State(weights, moved, pi.clamp(0.05, 0.95)), facts

    def predict(payload: State, memories, x: Tensor, owner: Tensor) -> Prediction:
        prediction = made.predict(payload.weights, memories, x, owner)
        found, joint = gamma(payload, x)
        others = {"global": prediction.told.argmax(1), "class 0": torch.zeros(len(x), dtype=torch.int64)}
        return Prediction(prediction.told, found.argmax(1), found, others, joint.logsumexp(1))

    return Algorithm("splitting", init, {"train": train}, round, lambda state, clients: (state, None), predict)
