"""SCSGD: the time determines which branch is trained (semi-cyclic SGD on a shared trunk).

A baseline of Zhu et al.: *Diurnal or Nocturnal?*, ICLR 2022, section 4, after Eichner, Koren, McMahan, Srebro,
Talwar: *Semi-Cyclic Stochastic Gradient Descent*, ICML 2019. With nothing but its name it plays the baseline as the
paper describes it.

When to use it: populations take turns abruptly, block by block, and the clock is known.

Choices:
    - ours: `prior = "block"` is literal: the first branch in the first half of each period. A smooth shift that
      begins at its day peak has the same mixture in both halves, so both branches would see the same data. The
      default trains the branch with the largest assumed share, as given by FedTEM's prior.
    - paper: the trunk is shared. In the original each block has a whole model of its own, here with `branch_layer =
      "*"`, where only the current model is trained.
    - paper: the other branches are not trained along (lam = 0), because the paper smooths labels only for Min Loss,
      FedTEM and FedTKM.
    - ours: an untrained branch is not stepped, nor do its moments move.
    - paper: at inference the more certain branch predicts.
"""

from __future__ import annotations

import torch

from fedtide.algorithms.entry import Entry
from fedtide.algorithms.fedavg import State
from fedtide.cohorts import Arrivals, Cohort
from fedtide.cohorts.participation import take_part, with_cohort
from fedtide.core.base import (
    Algorithm,
    Answer,
    Facts,
    Fleet,
    Memory,
    Moment,
    Notes,
    Shard,
    Traits,
    Weights,
    mean,
    shared_weights,
)
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.fields.types import Fraction, NonNegative
from fedtide.learn.branched import with_branches
from fedtide.learn.local import LocalTrainer
from fedtide.learn.server import KERAS, Server
from fedtide.learn.steps import Steps, Stepwise, Train
from fedtide.learn.task import Task
from fedtide.learn.weighting import Weighting
from fedtide.mixtures.branches import (
    CERTAIN,
    BranchDivisor,
    BranchLoss,
    ChoosePer,
    branch_update,
    predict_by_certainty,
    step_branches,
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
) -> Algorithm[State]:
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
        raise refused("lam", lam, "0 with branch_layer = '*', whose models share nothing that could move on")
    task = with_branches(task, branch_layer, branches)
    prior.check(branches)

    def branch(moment: Moment) -> int:
        return int(prior.shares(moment, branches).argmax())  # ties: the first, so branch 1 while q(t) >= 1/2

    @Stepwise
    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Steps[Answer | None]:
        k = branch(moment)
        fitted = yield Train(task, local, payload, shard, moment, rng, loss=BranchLoss(task.loss, k, lam, eps))
        if not fitted.steps:
            return None
        total = branch_update(fitted, k, branches, shard, weighting)
        return Answer(total, notes=Notes(branch=torch.tensor(k)), update=total["delta"].value)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights=weights, server=server.init(weights), cohort=cohort.init(fleet))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        state, reply = take_part(cohort, fleet, state, rng, shared_weights, state.weights)
        return step_branches(state, server, mean(reply.total), lam=lam, normalize_by=normalize_by)

    predict, traits = predict_by_certainty(task, choose_per), Traits(models="branches")
    made = Algorithm("scsgd", init, {"train": train}, round, shared_weights, predict, traits=traits)
    return with_cohort(made, cohort, task, local)


ENTRY = Entry("scsgd", scsgd, "weights down, update up", "branches", helps=("hours",), exempt={"numbers": CERTAIN})
