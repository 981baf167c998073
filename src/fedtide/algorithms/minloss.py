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
"""

from __future__ import annotations

from functools import partial

import torch

from fedtide.algorithms.fedavg import State, average_updates
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import Fraction, NonNegative
from fedtide.core.rng import Rng
from fedtide.core.types import Algorithm, Answer, Memory, Moment, Notes, Shard, Weights
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import KERAS, Server
from fedtide.learn.task import Task
from fedtide.models.branched import BranchCount
from fedtide.multi.branches import (
    BranchDivisor,
    BranchLoss,
    ChoosePer,
    branch_update,
    least_loss,
    predict_by_certainty,
    step_branches,
    with_branches,
)
from fedtide.multi.clusters import refuse_equal_start
from fedtide.parts.weighting import Weighting


def minloss(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    branches: BranchCount = 2,
    branch_layer: str = "head",
    lam: NonNegative = 0.25,
    eps: Fraction = 0.5,
    normalize_by: BranchDivisor = "participants",
    choose_per: ChoosePer = "row",
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
    task = with_branches(task, branch_layer, branches)

    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        k = least_loss(task, payload, shard)
        fitted = local(task, BranchLoss(task.loss, k, lam, eps), payload, shard, moment, rng)
        if not fitted.steps:
            return None
        total = branch_update(fitted, k, branches, shard, weighting)
        return Answer(total, notes=Notes(branch=torch.tensor(k)), update=total["delta"].value)

    step = partial(step_branches, lam=lam, normalize_by=normalize_by)
    forward = {"train": 1}  # of all branches
    predict = predict_by_certainty(task, choose_per)
    return average_updates("min-loss", task, local, server, cohort, train, step, predict=predict, forward=forward)
