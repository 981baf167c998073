"""k-FED: inputs are clustered in one round before training; each sample trains the branch of its center.

Dennis, Li, Smith: *Heterogeneity for the Win: One-Shot Federated Clustering*, ICML 2021. Zhu et al.: *Diurnal or
Nocturnal?*, ICLR 2022, start from it and enhance it to T-shot k-means.

| symbol | meaning |
| --- | --- |
| `k` | number of clusters, here of branches |
| `k'` | number of centers of a client |

1. Each client clusters its inputs into k' centers (Awasthi and Sheffet 2012).
2. M begins as the centers of one client. Until M has k, add the center that is farthest from its nearest one in M.
3. One round of Lloyd's algorithm from M over all centers.

When to use it: modes look different in the raw inputs, clients of all modes are there at once, and each client has few
modes.

Choices:
    - ours: training and prediction after the clustering are those of T-shot k-means, because k-FED is a clustering. A
      sample goes to the nearest center of the server; k-FED sends it with its client's center.
    - paper: k' is at most the square root of k. Here at most k, because two branches are usual.
    - paper: one round, of the clients that the cohort selects. Under a shift these may be of one mode.
    - released code: every client has k' centers, and all count the same; counts only drop empty ones. T-shot takes K
      of each client and weighs them by their samples. It begins with the largest.
    - paper: step 3 is one round. T-shot and the released code go on to the end of Lloyd's algorithm.
    - paper: a client clusters in the space of its k' singular vectors. Released code: k-means++ draws its
      first centers, and means are taken in that space.
    - ours: a center without core samples stays where it was drawn. A core sample is at most a third as far
      from its center as from any other.
    - ours: it is not defined for text.
"""

import numpy as np

from fedtide.algorithms.entry import Entry
from fedtide.clusters.clusterer import Points, distances, draw_seeds, farthest_first, kmeans_from
from fedtide.cohorts import Arrivals, Cohort
from fedtide.core.base import Algorithm
from fedtide.core.errors import refused
from fedtide.core.rng import Rng
from fedtide.fields.types import Count, Fraction, NonNegative
from fedtide.learn import KERAS, LocalTrainer, Server, Task, Weighting
from fedtide.mixtures.branches import BranchDivisor
from fedtide.mixtures.centers import State, cluster_before
from fedtide.models.branched import BranchCount


def kfed(
    task: Task,
    local: LocalTrainer = LocalTrainer(),
    client_centers: Count = 1,
    branches: BranchCount = 2,
    branch_layer: str = "head",
    lam: NonNegative = 0.0,
    eps: Fraction = 0.5,
    normalize_by: BranchDivisor = "participants",
    server: Server = KERAS,
    cohort: Cohort = Arrivals(),
    weighting: Weighting = "samples",
) -> Algorithm[State]:
    """Multi-branch training with branches chosen by the nearest center of one round of federated k-means.

    Args:
        client_centers: k', number of centers of each client.
        branch_layer: the layer to repeat.
        lam: weight of the branches that a sample does not train.
        eps: label smoothing of these branches.

    Raises:
        FedtideError: k' is above K.
    """
    if client_centers > branches:
        raise refused("client_centers", client_centers, f"1 to {branches}, the branches")

    def summarize(x: Points, rng: Rng) -> tuple[Points, np.ndarray]:
        return local_centers(x, client_centers, rng)

    def cluster(x: Points, counts: np.ndarray) -> Points:
        # A first client without rows cannot report; one that lies begins with a single center.
        x, first = x[counts > 0], max(int(np.count_nonzero(counts[:client_centers])), 1)
        return kmeans_from(x, farthest_first(x, branches, *range(first)), iterations=1)[0]

    return cluster_before(
        "k-fed", task, local, rounds=1, branches=branches, branch_layer=branch_layer, lam=lam, eps=eps,
        normalize_by=normalize_by, server=server, cohort=cohort, weighting=weighting, summarize=summarize,
        cluster=cluster,
    )  # fmt: skip


def local_centers(x: Points, k: int, rng: Rng) -> tuple[Points, np.ndarray]:
    """Cluster the rows of a client as Awasthi and Sheffet do; return at most k centers (k, d), and rows of each (k,).

    With fewer than k rows the last centers are empty.
    """
    centers, counts = np.zeros((k, x.shape[1])), np.zeros(k)
    if len(x) <= k:
        centers[: len(x)], counts[: len(x)] = x, 1.0
        return centers, counts
    axes = np.linalg.svd(x, full_matrices=False)[2][:k]
    flat = x @ axes.T
    seeds = draw_seeds(flat, k, rng)
    away = np.sqrt(distances(flat, seeds))
    for r in range(k):
        core = (3 * away[:, [r]] <= np.delete(away, r, axis=1)).all(axis=1)
        if core.any():
            seeds[r] = flat[core].mean(0)
    centers, member = kmeans_from(x, seeds @ axes)
    return centers, np.bincount(member, minlength=k).astype(np.float64)


ENTRY = Entry(
    "k-fed", kfed, "weights and centers down, update and branch up", "branches", helps=("hours",),
    reveals=("centers", "counts"),
)  # fmt: skip
