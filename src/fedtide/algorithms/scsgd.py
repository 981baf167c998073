"""SCSGD: the time determines which branch is trained (semi-cyclic SGD on a shared trunk).

A baseline of Zhu et al.: *Diurnal or Nocturnal?*, ICLR 2022, section 4, after Eichner, Koren, McMahan, Srebro, Talwar:
*Semi-Cyclic Stochastic Gradient Descent*, ICML 2019. With `prior = "block"` it is the baseline as the paper describes
it.

When to use it: populations take turns abruptly, block by block, and the clock is known.

Choices:
    - ours: `prior = "block"` is literal: the first branch in the first half of each period. A smooth shift that begins
      at its day peak has the same mixture in both halves, so both branches would see the same data. The default trains
      the branch with the largest assumed share, as given by FedTEM's prior.
    - paper: the trunk is shared. With `branch_layer = "*"` each block has a whole model, and only the current model is
      trained: mode "sep" of the original's released code. The original's single chain is `semi-cyclic`.
    - paper: the other branches are not trained along (lam = 0), because the paper smooths labels only for Min Loss,
      FedTEM and FedTKM.
    - ours: an untrained branch is not stepped, nor do its moments move. The server's lr = 0.01 and eps = 1e-4.
    - paper: at inference the more certain branch predicts.
"""

from functools import partial

from fedtide.algorithms.entry import Entry
from fedtide.cohorts import Arrivals, Cohort, OneModel, build_method
from fedtide.core.base import Algorithm, Moment, Shard, Weights
from fedtide.core.errors import refused
from fedtide.fields.types import Fraction, NonNegative
from fedtide.learn import KERAS, LocalTrainer, Server, Steps, Task, Weighting
from fedtide.learn.task import with_branches
from fedtide.mixtures.branches import (
    CERTAIN,
    BranchDivisor,
    ChoosePer,
    predict_by_certainty,
    step_branches,
    train_branch,
)
from fedtide.mixtures.priors import Linear, Rhythm
from fedtide.models.branched import WHOLE, BranchCount


def scsgd(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    prior: Rhythm = Linear(),
    branches: BranchCount = 2,
    branch_layer: str = "head",
    lam: NonNegative = 0.0,
    eps: Fraction = 0.5,
    normalize_by: BranchDivisor = "participants",
    choose_per: ChoosePer = "row",
    server: Server = KERAS,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """Multi-branch training with branches chosen by the clock.

    Args:
        prior: the assumed share of each mode, over time; the likeliest mode's branch is trained; ties: the first.
        branch_layer: the layer to repeat; with "*" each branch is a whole model, and `lam` has to be 0.
        lam: weight of the branches that are not trained.
        eps: label smoothing of these branches.

    Raises:
        FedtideError: whole models and `lam` above 0.
    """
    if branch_layer == WHOLE and lam:
        raise refused("lam", lam, "0 if branch_layer = '*', because whole models share no layer")
    task = with_branches(task, branch_layer, branches)
    prior.check(branches)

    def choose(weights: Weights, shard: Shard, moment: Moment) -> Steps[tuple[Weights, int]]:
        yield from ()  # nothing has to be computed of samples
        return weights, int(prior.shares(moment, branches).argmax())  # ties: the first, so branch 1 while q(t) >= 1/2

    train = train_branch(task, local, branches, lam, eps, choose, weighting)
    step = partial(step_branches, server=server, lam=lam, normalize_by=normalize_by)
    predict = predict_by_certainty(task, choose_per)
    return build_method("scsgd", task, local, server, cohort, train, step, predict=predict, models="branches")


ENTRY = Entry(
    "scsgd", scsgd, "weights down, update up", "branches", helps=("hours",),
    exempt={"numbers": f"it cannot predict numbers, because {CERTAIN}"},
)  # fmt: skip
