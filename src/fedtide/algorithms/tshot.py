"""T-shot k-means: inputs are clustered over T rounds before training; each sample trains the branch of its center.

A baseline of Zhu et al.: *Diurnal or Nocturnal?*, ICLR 2022, section 4, after Dennis, Li, Smith: *Heterogeneity for the
Win: One-Shot Federated Clustering* (k-FED), ICML 2021. With default options it is the baseline as the paper describes
it.

When to use it: modes look different in the raw inputs. It uses only the inputs of samples and no labels.

Choices:
    - paper: more rounds, so that both modes are there, are what "enhances" k-FED, which is `k-fed` here.
    - ours: every participant sends K centers of its raw inputs (k-means++, 10 Lloyd iterations) and their counts. The
      server picks K of them by farthest-first traversal, beginning with the largest, and runs a weighted k-means from
      there.
    - paper: the T rounds come before round 0 and do not train. The fact `collected` is their cost in bytes.
    - paper: the other branches are not trained along (lam = 0), because the paper smooths labels only for Min Loss,
      FedTEM and FedTKM.
    - ours: the batch loss is the sum over the samples of both branches, divided by the batch size.
    - ours: it is not defined for text. The server's lr = 0.01 and eps = 1e-4.
"""

from typing import Annotated

import numpy as np

from fedtide.algorithms.entry import Entry
from fedtide.clusters.clusterer import Points, farthest_first, kmeans_from, summary
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, Fraction, NonNegative, OfShift
from fedtide.learn import KERAS, LocalTrainer, Server, Task, Weighting
from fedtide.mixtures.branches import BranchDivisor
from fedtide.mixtures.centers import State, cluster_before
from fedtide.mixtures.priors import need_period
from fedtide.models.branched import BranchCount


def tshot(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    shots: Annotated[Count | None, OfShift("rounds")] = None,
    branches: BranchCount = 2,
    branch_layer: str = "head",
    lam: NonNegative = 0.0,
    eps: Fraction = 0.5,
    normalize_by: BranchDivisor = "participants",
    server: Server = KERAS,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Multi-branch training with branches chosen by the nearest center of the raw inputs.

    Args:
        shots: T, number of collection rounds before training; None is a whole period of the experiment's shift.
        branch_layer: the layer to repeat.
        lam: weight of the branches that a sample does not train.
        eps: label smoothing of these branches.
    """
    rounds = int(need_period(shots, "shots", "a number of rounds"))

    def summarize(x: Points, rng: Rng) -> tuple[Points, np.ndarray]:
        return summary(x, branches, rng)[:2]

    def cluster(x: Points, counts: np.ndarray) -> Points:
        x, counts = x[counts > 0], counts[counts > 0]
        return kmeans_from(x, farthest_first(x, branches, int(counts.argmax())), weights=counts)[0]

    return cluster_before(
        "t-shot", task, local, rounds=rounds, branches=branches, branch_layer=branch_layer, lam=lam, eps=eps,
        normalize_by=normalize_by, server=server, cohort=cohort, weighting=weighting, summarize=summarize,
        cluster=cluster,
    )  # fmt: skip


ENTRY = Entry(
    "t-shot", tshot, "weights and centers down, update and branch up", "branches", helps=("hours",),
    reveals=("centers", "counts"),
)  # fmt: skip
