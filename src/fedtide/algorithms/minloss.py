"""Min Loss: every client trains the branch with the lowest loss (IFCA's choice with a shared trunk).

A baseline of Zhu et al.: *Diurnal or Nocturnal?*, ICLR 2022, section 4, after Ghosh et al.: *An Efficient Framework for
Clustered Federated Learning*, NeurIPS 2020.

When to use it: populations take turns, their rhythm is unknown, and labels tell them apart.

Choices:
    The choice uses plain cross-entropy of the received network; ties go to the first branch. At inference, without
    labels, the more certain branch predicts (KL of its prediction to uniform), per sample as in the paper, or for all
    samples of a client together. `normalize_by = "participants"` divides a branch's update by the samples of all
    participants, as the paper's mean does; "members" by the samples of those that trained it. An untrained branch that
    has no gradient (lam = 0) is not stepped, nor do its moments move. With "members" and lam > 0 the gradients on a
    branch from clients that did not choose it are divided by the members' samples too.
    The `anchor` is ours, and `anchor = false` the paper: see FedTEM. In ten small settings over five seeds the paper's
    form lost up to 3.3 points to the best single model and gained up to 4.5, anchored it lost 0.2 at most and gained up
    to 3.3 (recipe never-worse).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import Fraction, NonNegative
from fedtide.core.rng import Rng
from fedtide.core.sums import mean
from fedtide.core.types import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Notes,
    Payload,
    Prediction,
    Shard,
    Weights,
    to_everyone,
)
from fedtide.learn.local import LocalTrainer
from fedtide.learn.participation import take_part, with_cohort
from fedtide.learn.server import KERAS, Server
from fedtide.learn.steps import Steps, Stepwise, Train
from fedtide.learn.task import Task
from fedtide.models.branched import BranchCount
from fedtide.multi.anchor import Anchor, Anchored, Anchoring
from fedtide.multi.branches import (
    BranchDivisor,
    BranchLoss,
    BranchLosses,
    ChoosePer,
    branch_update,
    predict_by_certainty,
    step_branches,
    with_branches,
)
from fedtide.multi.clusters import refuse_equal_start
from fedtide.parts.weighting import Weighting


@dataclass(frozen=True)
class State:
    """The network, the optimizer's memo, the model of all samples, if any, and the memo of the cohort."""

    weights: Weights
    server: Any
    anchor: Anchor | None = None
    cohort: Any = None


def minloss(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    branches: BranchCount = 2,
    branch_layer: str = "head",
    lam: NonNegative = 0.25,
    eps: Fraction = 0.5,
    normalize_by: BranchDivisor = "participants",
    choose_per: ChoosePer = "row",
    anchor: Anchored = True,
    server: Server = KERAS,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Multi-branch training with branches chosen by the smallest training loss.

    Args:
        branch_layer: the layer to repeat.
        lam: weight of the branches that a client does not train.
        eps: label smoothing of these branches.
    """
    refuse_equal_start(task, branches)
    beside = Anchoring(anchor, task, local, server, weighting)
    task = with_branches(task, branch_layer, branches)
    certain = predict_by_certainty(task, choose_per)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights), beside.start(rng), cohort.init(fleet))

    def broadcast(state: State) -> Payload:
        return {"weights": state.weights, **beside.sent(state)}

    @Stepwise
    def train(payload: Payload, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        weights = payload["weights"]
        parts = yield from beside.train(by_branch, payload, None, shard, moment, rng)
        k = int((yield BranchLosses(task, weights, shard)).mean(1).argmin())  # ties: the first
        fitted = yield Train(task, local, weights, shard, moment, rng, loss=BranchLoss(task.loss, k, lam, eps))
        if not fitted.steps:
            return None
        total = branch_update(fitted, k, branches, shard, weighting) | parts
        return Answer(total, notes=Notes(branch=torch.tensor(k)), update=total["delta"].value)

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        state, reply = take_part(cohort, fleet, state, rng, serve, broadcast(state))
        if reply.total is None:
            return state, {}
        state, facts = step_branches(state, server, mean(reply.total), lam, normalize_by)
        state, weighed = beside.step(state, reply.total)
        return state, {**facts, **weighed}

    def by_branch(payload: Payload, memories: Any, x: Tensor, owner: Tensor) -> Prediction:
        found: Prediction = certain(payload["weights"], memories, x, owner)
        return found

    serve = to_everyone(broadcast)
    made = beside.added_to(Algorithm("min-loss", init, {"train": train}, round, serve, by_branch))
    # One pass of all branches.
    return with_cohort(made, cohort, task, local, forward={"train": 1}, trained=beside.trained())
