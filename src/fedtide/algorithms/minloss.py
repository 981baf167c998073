"""Min Loss: every client trains the branch that fits its rows best (IFCA's choice on one shared trunk).

A baseline of Zhu et al.: *Diurnal or Nocturnal?*, ICLR 2022, section 4, after Ghosh et al.: *An Efficient Framework for
Clustered Federated Learning*, NeurIPS 2020.

When to use it: populations take turns, their rhythm is unknown, and labels tell them apart.

Choices:
    The loss that decides is plain cross-entropy of the received network; the first of equals wins. At inference,
    without labels, the surer branch answers (KL of its prediction to uniform), row by row as in the paper, or for all
    rows of a client together. `branch_average = "participants"` divides a branch's update by the rows of all
    participants, as the paper's mean does; "members" by the rows of those who trained it. A branch that nobody trained,
    and that lam = 0 leaves without a gradient, is not stepped, nor do its moments move. With "members" and lam > 0 the
    pull on a branch of those who did not choose it is divided by the members' rows too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.config_types import Count, Fraction, NonNegative
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
    Shard,
    Weights,
    shared_weights,
)
from fedtide.learn.local import LocalTrainer, costing
from fedtide.learn.participation import with_cohort
from fedtide.learn.server import KERAS, Server
from fedtide.learn.task import Task
from fedtide.multi.branches import (
    BranchAverage,
    BranchLoss,
    ChoosePer,
    branch_update,
    by_surer_branch,
    least_loss,
    step_branches,
    with_branches,
)
from fedtide.multi.clusters import begin_apart
from fedtide.parts.weighting import Weighting


@dataclass(frozen=True)
class State:
    """The network and the server optimizer's memo."""

    weights: Weights
    server: Any
    cohort: Any = None


def minloss(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    branches: Count = 2,
    branch_layer: str = "head",
    lam: NonNegative = 0.25,
    eps: Fraction = 0.5,
    branch_average: BranchAverage = "participants",
    choose_per: ChoosePer = "row",
    server: Server = KERAS,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm:
    """Branches chosen by the smallest training loss.

    Args:
        task: model and loss.
        local: local training.
        branches: K.
        branch_layer: the layer that is repeated.
        lam: weight of the branches that a client does not train.
        eps: label smoothing there.
        branch_average: by whose rows a branch's update is divided.
        choose_per: whether each row or each client picks the surer branch at inference.
        server: what the server does with the mean update.
        cohort: who is asked.
        weighting: "samples" weighs a client by its rows, "uniform" all alike.
    """
    begin_apart(task, branches)
    task = with_branches(task, branch_layer, branches)

    def init(fleet: Fleet, rng: Rng) -> State:
        weights = task.init(rng)
        return State(weights, server.init(weights), cohort.init(fleet))

    def train(payload: Weights, memory: Memory, shard: Shard, moment: Moment, rng: Rng) -> Answer | None:
        if not len(shard):
            return None
        k = least_loss(task, payload, shard)
        fitted = local(task, BranchLoss(task.loss, k, lam, eps), payload, shard, moment, rng)
        if not fitted.steps:
            return None
        total = branch_update(fitted, k, branches, shard, weighting)
        return Answer(total, notes=Notes(branch=torch.tensor(k)))

    def round(state: State, fleet: Fleet, rng: Rng) -> tuple[State, Facts]:
        clients = cohort.pick(state.cohort, fleet, rng, partial(shared_weights, state))
        reply = fleet.ask("train", clients, state.weights, reveal=cohort.reveals)
        state = replace(state, cohort=cohort.learn(state.cohort, reply, fleet.moment))
        return step_branches(state, server, mean(reply.total), lam, branch_average)

    works, effort = {"train": train}, costing(local, {"train": 1})  # a look at all branches
    made = Algorithm("min-loss", init, works, round, shared_weights, by_surer_branch(task, choose_per), effort=effort)
    return with_cohort(made, cohort, task, local)
