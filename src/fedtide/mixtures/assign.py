"""Assignment of participants to components, with counts given by the prior.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, section 3.1: with two components the n_1 likeliest go to the first.
More components are our own extension: the likeliest joint assignment, which for K = 2 is that sort.
"""

import math
from itertools import pairwise, permutations

import numpy as np
import torch
from torch import Tensor

LEAST_POSTERIOR = 1e-12


def capacities(shares: Tensor, m: int) -> Tensor:
    """Round the shares of components to whole numbers of `m` participants.

    Two components: n_1 = floor(q_1 m + 1/2), as in the paper. More: the largest remainders are rounded up. Differences
    by rounding errors count as ties, and ties go to the lower component.

    Args:
        shares: (K,) on the simplex.
        m: participants.

    Returns:
        (K,) int64, which sums to m.

    >>> capacities(torch.tensor([0.25, 0.75]), 10), capacities(torch.tensor([0.5, 0.3, 0.2]), 4)
    (tensor([3, 7]), tensor([2, 1, 1]))
    """
    wanted = shares.double() / shares.double().sum() * m
    if len(shares) == 2:
        first = math.floor(float(wanted[0]) + 0.5 + 1e-9)
        return torch.tensor([first, m - first])
    counts = wanted.floor()
    remainders = (wanted - counts).round(decimals=9)
    largest = remainders.argsort(descending=True, stable=True)[: m - int(counts.sum())]
    counts[largest] += 1
    return counts.to(torch.int64)


def assign(posterior: Tensor, joint: Tensor, room: Tensor) -> Tensor:
    """Assign a component to each participant within capacities `room`: by rank for K = 2, else by cost.

    Args:
        posterior: (m, K) mean posteriors, participants in the order of their ids.
        joint: (m, K) mean log-joints, finite; they break ties where posteriors have saturated.
        room: (K,) int64 capacities that sum to m; see `capacities`.

    Returns:
        (m,) int64, component numbers from 0.

    >>> posterior = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2]])
    >>> assign(posterior, posterior.log(), torch.tensor([1, 2]))
    tensor([0, 1, 1])
    """
    return (assign_by_rank if posterior.shape[1] == 2 else assign_by_cost)(posterior, joint, room)


def assign_by_rank(posterior: Tensor, joint: Tensor, room: Tensor) -> Tensor:
    """Assign to two components: the first `room[0]` by posterior, then mean log-odds, then id go to component 0.

    Arguments and result are those of `assign`.

    >>> saturated = torch.tensor([[1.0, 0.0]]).repeat(3, 1)
    >>> joint = torch.tensor([[0.0, -50.0], [0.0, -70.0], [0.0, -60.0]])
    >>> assign_by_rank(saturated, joint, torch.tensor([1, 2]))
    tensor([1, 0, 1])
    """
    odds = joint[:, 0].double() - joint[:, 1].double()
    by_odds = odds.argsort(descending=True, stable=True)
    order = by_odds[posterior[by_odds, 0].argsort(descending=True, stable=True)]
    place = torch.ones(len(posterior), dtype=torch.int64)
    place[order[: int(room[0])]] = 0
    return place


def assign_by_cost(posterior: Tensor, joint: Tensor, room: Tensor) -> Tensor:
    """Assign to any number of components: the exact maximum of sum_i log max(posterior_i, 1e-12) within `room`.

    Ties are broken by the sum of log-joints, then by sum_i i*k(i): lower ids go to lower components. Method: successive
    shortest paths. All participants start in their preferred component; then one at a time leaves an overfull
    component along the cheapest chain of moves. (SciPy's solvers compute in floats, where sums decide ties by
    rounding.)

    Arguments and result are those of `assign`.

    >>> posterior = torch.tensor([[0.8, 0.1, 0.1], [0.7, 0.2, 0.1], [0.6, 0.1, 0.3]])
    >>> assign_by_cost(posterior, posterior.log(), torch.tensor([1, 1, 1]))
    tensor([0, 1, 2])
    """
    return torch.tensor(best_assignment(_values(posterior, joint), room.tolist()), dtype=torch.int64)


def _values(posterior: Tensor, joint: Tensor) -> np.ndarray:
    """Return the value of each participant in each component (m, K): three keys packed into one exact integer.

    Sums of floats depend on their order, so ties would be decided by rounding errors; sums of integers do not.
    """
    m, groups = posterior.shape
    # 2^-56 is below the gaps between posteriors near 1; only differences between components matter in the second key.
    likely = _whole(posterior.double().clamp_min(LEAST_POSTERIOR).log(), 56)
    odds = joint.double() - joint[:, :1].double()
    largest = float(odds.abs().max()) if m else 0.0
    odds_60 = _whole(odds, min(60 - math.frexp(largest)[1], 1000))
    ids = (np.arange(m)[:, None] * np.arange(groups)).astype(object)
    # Each key is shifted by more digits than a sum of the lower keys has.
    below_odds = (2 * m * m * groups).bit_length()
    below_likely = below_odds + 61 + (2 * m).bit_length()
    return likely * 2**below_likely + odds_60 * 2**below_odds + ids


def _whole(x: Tensor, digits: int) -> np.ndarray:
    """Return `x` in units of 2^-digits as Python integers, which have unlimited digits."""
    return (x * 2.0**digits).round().to(torch.int64).numpy().astype(object)


def best_assignment(values: np.ndarray, room: list[int]) -> list[int]:
    """Return the component of each participant (m,) that maximizes the sum of `values` (m, K) within `room`.

    >>> best_assignment(np.array([[5, 1], [4, 2]], dtype=object), [1, 1])
    [0, 1]
    """
    place = values.argmax(1) if len(values) else np.zeros(0, dtype=np.int64)
    free = [size - int((place == k).sum()) for k, size in enumerate(room)]
    while min(free) < 0:
        moves = _cheapest_moves(values, place)
        path = _cheapest_path({edge: loss for edge, (loss, _) in moves.items()}, free)
        for edge in pairwise(path):
            place[moves[edge][1]] = edge[1]
        free[path[0]] += 1
        free[path[-1]] -= 1
    return place.tolist()


def _cheapest_moves(values: np.ndarray, place: np.ndarray) -> dict[tuple[int, int], tuple[int, int]]:
    """Return the least loss of moving a participant from one component to another, and who moves; ties: the first."""
    moves = {}
    for k, to in permutations(range(values.shape[1]), 2):
        members = np.flatnonzero(place == k)
        if len(members):
            losses = values[members, k] - values[members, to]
            moves[k, to] = losses.min(), int(members[losses.argmin()])
    return moves


def _cheapest_path(losses: dict[tuple[int, int], int], free: list[int]) -> list[int]:
    """Return the cheapest chain of components, from an overfull one to one with room.

    A move may gain something, but no cycle of moves does: the placement is always optimal for its own counts.

    Args:
        losses: loss of moving one participant from a component to another, for possible moves.
        free: remaining room of each component, negative if it is overfull.
    """
    cost = {k: 0 for k, room in enumerate(free) if room < 0}
    before: dict[int, int] = {}
    changed = True
    while changed:  # Bellman-Ford
        changed = False
        for (k, to), loss in losses.items():
            if k in cost and (to not in cost or cost[k] + loss < cost[to]):
                cost[to], before[to], changed = cost[k] + loss, k, True
    path = [min((c, k) for k, c in cost.items() if free[k] > 0)[1]]
    while path[-1] in before:
        path.append(before[path[-1]])
    return path[::-1]
