"""Min Loss: every client trains the branch with the lowest loss (IFCA's choice with a shared trunk).

A baseline of Zhu et al.: *Diurnal or Nocturnal?*, ICLR 2022, section 4, after Ghosh et al.: *An Efficient Framework
for Clustered Federated Learning*, NeurIPS 2020. With nothing but its name it plays the baseline as the paper
describes it.

When to use it: populations take turns, their rhythm is unknown, and labels tell them apart.

Choices:
    - paper: the choice uses plain cross-entropy of the received network. Ties go to the first branch (ours).
    - paper: at inference, without labels, the more certain branch predicts each sample (KL of its prediction to
      uniform). With `choose_per = "client"` one branch predicts all samples of a client together.
    - paper: `normalize_by = "participants"` divides a branch's update by the samples of all participants; "members" by
      the samples of those that trained it.
    - ours: an untrained branch that has no gradient (lam = 0) is not stepped, nor do its moments move. With "members"
      and lam > 0 gradients on a branch from clients that did not choose it are divided by the members' samples too.

The safe form has an anchor (docs/never-worse.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fedtide.algorithms.entry import Entry, Safe
from fedtide.algorithms.fedavg import State, average_answers
from fedtide.clusters.rounds import refuse_equal_start
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm, Answer, Memory, Moment, Notes, Shard, Traits, Weights, Work
from fedtide.core.rng import Rng
from fedtide.fields.types import Fraction, NonNegative
from fedtide.learn.branched_task import with_branches
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import KERAS, Server
from fedtide.learn.steps import Steps, Stepwise, Train
from fedtide.learn.task import Task
from fedtide.learn.training import Weighting
from fedtide.mixtures.branches import (
    CERTAIN,
    BranchDivisor,
    BranchLoss,
    BranchLosses,
    ChoosePer,
    branch_update,
    predict_by_certainty,
    step_branches,
)
from fedtide.models.branched import BranchCount
from fedtide.transforms import Anchored


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

    def choose(weights: Weights, shard: Shard, moment: Moment) -> Steps[int]:
        losses = yield BranchLosses(task, weights, shard)
        return int(losses.mean(1).argmin())  # ties: the first

    train = train_branch(task, local, branches, partial(BranchLoss, task.loss, lam=lam, eps=eps), choose, weighting)
    predict, traits = predict_by_certainty(task, choose_per), Traits(models="branches")
    step, forward = partial(step_branches, lam=lam, normalize_by=normalize_by), {"train": 1}  # a pass of all branches
    return average_answers("min-loss", train, task, local, server, cohort, step, predict, traits, forward=forward)


def train_branch(
    task: Task,
    local: LocalTrainer,
    branches: int,
    loss: Callable[[int], BranchLoss],
    choose: Callable[[Weights, Shard, Moment], Steps[int]],
    weighting: Weighting,
) -> Work:
    """Build the question "train" of methods whose clients train one branch.

    Args:
        task: a task with branches.
        local: local training.
        branches: number of branches, K.
        loss: the loss of a client, by the number of its branch.
        choose: (weights, samples, moment) -> number of the client's branch, in steps.
        weighting: weight of a client.
    """

    @Stepwise
    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        if not len(shard):
            return None
        k = yield from choose(payload, shard, moment)
        fitted = yield Train(task, local, payload, shard, moment, rng, loss=loss(k))
        if not fitted.steps:
            return None
        total = branch_update(fitted, k, branches, shard, weighting)
        return Answer(total, notes=Notes(branch=torch.tensor(k)), update=total["delta"].value)

    return train


ENTRY = Entry(
    "min-loss", minloss, "weights down, update and branch up", "branches", helps=("hours",),
    exempt={"numbers": CERTAIN}, safe=Safe(transforms=(Anchored(),)),
)  # fmt: skip
