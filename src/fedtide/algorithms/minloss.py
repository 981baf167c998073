"""Min Loss: every client trains the branch with the lowest loss (IFCA's choice with a shared trunk).

A baseline of Zhu et al.: *Diurnal or Nocturnal?*, ICLR 2022, section 4, after Ghosh et al.: *An Efficient Framework for
Clustered Federated Learning*, NeurIPS 2020. With default options it is the baseline as the paper describes it, but for
values that it does not print.

When to use it: populations take turns, their rhythm is unknown, and labels tell them apart.

Choices:
    - paper: the choice uses plain cross-entropy of the received network. Ties go to the first branch (ours).
    - paper: at inference, without labels, the more certain branch predicts each sample (KL of its prediction to
      uniform). With `choose_per = "client"` one branch predicts all samples of a client together.
    - paper: `normalize_by = "participants"` divides a branch's update by the samples of all participants; "members" by
      the samples of those that trained it.
    - ours: lam = .25, eps = .5, and the server's lr = 0.01 and eps = 1e-4.
    - ours: an untrained branch that has no gradient (lam = 0) is not stepped, nor do its moments move. With "members"
      and lam > 0 gradients on a branch from clients that did not choose it are divided by the members' samples too.

The safe form has an anchor (docs/never-worse.md).
"""

from functools import partial

from fedtide.algorithms.entry import Entry, Safe
from fedtide.clusters.rounds import refuse_equal_start
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Moment, Shard, Weights
from fedtide.fields.types import Fraction, NonNegative
from fedtide.learn import KERAS, LocalTrainer, Server, Steps, Task, Weighting
from fedtide.learn.task import with_branches
from fedtide.mixtures.branches import (
    CERTAIN,
    BranchDivisor,
    BranchLosses,
    ChoosePer,
    predict_by_certainty,
    step_branches,
    train_branch,
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
) -> Algorithm[OneModel]:
    """Multi-branch training with branches chosen by the smallest training loss.

    Args:
        branch_layer: the layer to repeat.
        lam: weight of the branches that a client does not train.
        eps: label smoothing of these branches.
    """
    refuse_equal_start(task, branches, "" if task.begin else ", or `lam`", is_best_chosen=lam == 0)
    task = with_branches(task, branch_layer, branches)

    def choose(weights: Weights, shard: Shard, moment: Moment) -> Steps[tuple[Weights, int]]:
        losses = yield BranchLosses(task, weights, shard)
        return weights, int(losses.mean(1).argmin())  # ties: the first

    train = train_branch(task, local, branches, lam, eps, choose, weighting)
    step = partial(step_branches, server=server, lam=lam, normalize_by=normalize_by)
    predict = predict_by_certainty(task, choose_per)
    forward = {"train": 1}  # a pass of all branches
    return build_method(
        "min-loss", task, local, server, cohort, train, step, predict=predict, forward=forward, models="branches"
    )


ENTRY = Entry(
    "min-loss", minloss, "weights down, update and branch up", "branches", helps=("hours",),
    exempt={"numbers": f"it cannot predict numbers, because {CERTAIN}"}, safe=Safe(transforms=(Anchored(),)),
)  # fmt: skip
