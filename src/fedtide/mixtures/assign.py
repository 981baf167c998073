"""Assignment of participants to components, with counts given by the prior.

Zhu, Xu, Chen, Konečný, Hard, Goldstein: *Diurnal or Nocturnal? Federated Learning of Multi-Branch Networks from
Periodically Shifting Distributions*, ICLR 2022, section 3.1: with two components the n_1 likeliest go to the first.
More components are our own extension: the likeliest joint assignment, which for K = 2 is that sort.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F
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


def members_of(member: Tensor, groups: int, preferred: Tensor | None = None) -> Tensor:
    """Return the mask (K, m) of each component's members; only of those that agree, where there are any.

    Args:
        member: (m,) assigned components.
        groups: K.
        preferred: (m,) components that participants prefer themselves; None asks for no agreement.

    >>> members_of(torch.tensor([0, 0, 1]), 2, torch.tensor([0, 1, 0])).tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
    """
    inside = F.one_hot(member, groups).T.double()
    if preferred is None:
        return inside
    agreeing = inside * F.one_hot(preferred, groups).T
    return torch.where(agreeing.any(1, keepdim=True), agreeing, inside)


def assign_by_rank(posterior: Tensor, joint: Tensor, room: Tensor) -> Tensor:
    """Assign to two components: the first `room[0]` by posterior, then mean log-odds, then id go to component 0.

    Arguments and result are those of `assign`.

    >>> saturated = torch.tensor([[1.0, 0.0]]).repeat(3, 1)
    >>> joint = torch.tensor([[0.0, -50.0], [0.0, -70.0], [0.0, -60.0]])
    >>> assign_by_rank(saturated, joint, torch.tensor([1, 2]))
    tensor([1, 0, 1])
    """
    _check(posterior, room)
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
    _check(posterior, room)
    return torch.tensor(best_assignment(_values(posterior, joint), room.tolist()), dtype=torch.int64)


def _check(posterior: Tensor, room: Tensor) -> None:
    if len(room) != posterior.shape[1] or int(room.sum()) != len(posterior) or bool((room < 0).any()):
        raise ValueError(f"room for {room.tolist()}, posteriors of shape {tuple(posterior.shape)}")


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
    values: np.ndarray = likely * 2**below_likely + odds_60 * 2**below_odds + ids
    return values


def _whole(x: Tensor, digits: int) -> np.ndarray:
    """Return `x` in units of 2^-digits as Python integers, which have unlimited digits."""
    return (x * 2.0**digits).round().to(torch.int64).numpy().astype(object)


def best_assignment(values: np.ndarray, room: list[int]) -> list[int]:
    """Return the component of each participant (m,) that maximizes the sum of `values` (m, K) within `room`.

    >>> best_assignment(np.array([[5, 1], [4, 2]], dtype=object), [1, 1])
    [0, 1]
    """
    m, components = len(values), range(len(room))
    place = values.argmax(1) if m else np.zeros(0, dtype=np.int64)
    free = [room[k] - int((place == k).sum()) for k in components]

    def cheapest_move(k: int, to: int) -> tuple[int, int] | None:
        """Return the least loss of moving a participant from k to another component, and who moves; ties: the first."""
        members = np.flatnonzero(place == k)
        if k == to or not len(members):
            return None
        losses = values[members, k] - values[members, to]
        first = int(losses.argmin())
        return losses[first], int(members[first])

    moves = [[cheapest_move(k, to) for to in components] for k in components]
    while min(free) < 0:
        path = _cheapest_path([[move and move[0] for move in row] for row in moves], free)
        for k, to in pairwise(path):
            move = moves[k][to]
            assert move is not None
            place[move[1]] = to
        free[path[0]] += 1
        free[path[-1]] -= 1
        for k in path:
            moves[k] = [cheapest_move(k, to) for to in components]
    return place.tolist()


def _cheapest_path(prices: list[list[int | None]], free: list[int]) -> list[int]:
    """Return the cheapest chain of components, from an overfull one to one with room.

    A move may gain something, but no cycle of moves does: the placement is always optimal for its own counts.

    Args:
        prices: cost of moving one participant from a component (row) to another (column); None if there is none.
        free: remaining room of each component, negative if it is overfull.
    """
    cost: list[int | None] = [0 if n < 0 else None for n in free]
    before: dict[int, int] = {}
    edges = [(k, to, price) for k, row in enumerate(prices) for to, price in enumerate(row) if price is not None]
    changed = True
    while changed:  # Bellman-Ford
        changed = False
        for k, to, price in edges:
            source, target = cost[k], cost[to]
            if source is not None and (target is None or source + price < target):
                cost[to], before[to], changed = source + price, k, True
    path = [min((c, k) for k, c in enumerate(cost) if c is not None and free[k] > 0)[1]]
    while path[-1] in before:
        path.append(before[path[-1]])
    return path[::-1]
