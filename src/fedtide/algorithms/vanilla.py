"""Vanilla: FedAdam on a network with K branches whose logits are averaged, in training and at inference.

The baseline of Zhu et al.: *Diurnal or Nocturnal?*, ICLR 2022, section 4: as many parameters as FedTEM, but no choice
of branch. With one branch it is FedAdam with the Adam of Keras. With default options it is the baseline as the paper
describes it.

When to use it: as the baseline of multi-branch methods.

Choices:
    - released code: the mean is taken over logits, not over probabilities.
    - ours: with `choose_per` the more certain branch answers, as for Min Loss. Figure 4 has a baseline that is worse
      with batches, and does not name it. It may be this one.
    - ours: the server's lr = 0.01 and eps = 1e-4.
"""

from dataclasses import replace

from fedtide.algorithms.entry import Entry
from fedtide.algorithms.fedavg import fedavg
from fedtide.clusters.rounds import refuse_equal_start
from fedtide.cohorts import Arrivals, Cohort, OneModel
from fedtide.core.base import Algorithm
from fedtide.learn import KERAS, LocalTrainer, Server, Task, Weighting
from fedtide.learn.task import with_branches
from fedtide.mixtures.branches import ChoosePer, predict_by_certainty
from fedtide.models.branched import Averaged, BranchCount, branched, without_average


def vanilla(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    branches: BranchCount = 2,
    branch_layer: str = "head",
    choose_per: ChoosePer | None = None,
    server: Server = KERAS,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[OneModel]:
    """Federated averaging of a network with averaged branches.

    Args:
        branch_layer: the layer to repeat.
        choose_per: whether each "row" or each "client" picks the more certain branch at inference; None answers with
            the mean of the branches.
    """
    refuse_equal_start(task, max(branches, 2))
    many = replace(task, build=lambda: Averaged(branched(task.build(), branch_layer, branches)))
    algorithm = fedavg(many, local, server, cohort, weighting)
    algorithm = replace(algorithm, name="vanilla", traits=replace(algorithm.traits, models="branches"))
    if choose_per is None:
        return algorithm
    choose = predict_by_certainty(with_branches(task, branch_layer, branches), choose_per)
    return replace(algorithm, predict=lambda payload, *rows: choose(without_average(payload), *rows))


ENTRY = Entry("vanilla", vanilla, "weights down, update up", "branches", helps=("hours",))
