"""Min Loss: every client trains the branch that fits its rows best (IFCA's choice on one shared trunk).

A baseline of Zhu et al.: *Diurnal or Nocturnal?*, ICLR 2022, section 4, after Ghosh et al.: *An Efficient Framework for
Clustered Federated Learning*, NeurIPS 2020.

When to use it: populations take turns, their rhythm is unknown, and labels tell them apart.

Choices:
    The loss that decides is plain cross-entropy of the received network; the first of equals wins. At inference,
    without labels, the surer branch answers (KL of its prediction to uniform), row by row as in the paper, or for all
    rows of a client together. `heads = "participants"` divides a branch's update by the rows of all participants, as
    the paper's mean does; "members" by the rows of those who trained it. A branch that nobody trained, and that lam = 0
    leaves without a gradient, is not stepped, nor do its moments move. With "members" and lam > 0 the pull on a branch
    of those who did not choose it is divided by the members' rows too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fedtide.algorithms.fedavg import Weighting, client_weight
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Prediction,
    Shard,
    Weighted,
    Weights,
    shared_weights,
)
from fedtide.core.values import Count, Fraction, NonNegative
from fedtide.learn.branches import BranchLoss, by_certainty, chosen, counted, least_loss, read, step, with_branches
from fedtide.learn.local import LocalSolver
from fedtide.learn.server import KERAS, Server
from fedtide.learn.task import Task
from fedtide.parts.cohort import Arrivals, Cohort

Heads = Literal["participants", "members"]
Sure = Literal["row", "client"]


class Branching(Protocol):
    """A state with a branched network and a server optimiser's memo."""

    @property
    def weights(self) -> Weights:
        """The network."""

    @property
    def server(self) -> Any:
        """The memo."""


@dataclass(frozen=True)
class State:
    """The network and the server optimiser's memo."""

    weights: Weights
    server: Any


def minloss(
    task: Task,
    local: LocalSolver = LocalSolver(),
    branches: Count = 2,
    layer: str = "head",
    lam: NonNegative = 0.25,
    eps: Fraction = 0.5,
    heads: Heads = "participants",
    sure: Sure = "row",
    server: Server = KERAS,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """Branches chosen by the smallest training loss.

    Args:
        task: model and loss.
        local: local training.
        branches: K.
        layer: the layer that is repeated.
        lam: weight of the branches that a client does not train.
        eps: label smoothing there.
        heads: by whose rows a branch's update is divided.
        sure: whether each row or each client picks the surer branch at inference.
        server: what the server does with the mean update.
        cohort: who is asked.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
    """
    task = with_branches(task, layer, branches)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights))

    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        k = least_loss(task, payload, shard)
        fitted = local(task, BranchLoss(task.loss, k, lam, eps), payload, shard, moment, rng)
        if not fitted.steps:
            return None
        return trained(fitted, F.one_hot(torch.tensor(k), branches), client_weight(shard, weighting), len(shard))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        reply = fleet.ask("train", cohort(rng, fleet), state.weights)
        return stepped(state, server, mean(reply.total), lam, heads)

    return Algorithm("min-loss", init, {"train": train}, round, shared_weights, by_surer_branch(task, sure))


def trained(fitted: Any, branch: Tensor, weight: float, rows: int) -> Answer:
    """The answer of a client that has trained the branches marked in `branch` (K,), as shares."""
    return Answer(
        {
            "delta": Weighted(fitted.delta, weight),
            "loss": Weighted(fitted.loss, rows),
            "branches": Weighted(branch.double(), weight),
        },
        notes={"branch": branch.argmax()},
    )


def stepped(
    state: Branching, server: Server, got: dict[str, Any] | None, lam: float, heads: Heads
) -> tuple[State, Facts]:
    """The server's half of a round: a step of the trunk and of the branches that were trained."""
    if got is None or got["delta"] is None:
        return State(state.weights, state.server), {}
    shares = got["branches"]
    active = torch.ones(len(shares), dtype=torch.bool) if lam else shares > 0
    divisor = torch.where(shares > 0, shares, 1.0) if heads == "members" else None
    weights, memo = step(server, state.weights, state.server, got["delta"], active, divisor)
    return State(weights, memo), {"loss": got["loss"], "branches": shares}


def by_surer_branch(task: Task, sure: Sure) -> Any:
    """The `predict` of methods that know nothing of a row but what the branches say."""

    def predict(payload: Weights, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        logits, _ = read(task, payload, x)
        return chosen(logits, by_certainty(logits, owner, sure == "client", counted(task, x)))

    return predict
