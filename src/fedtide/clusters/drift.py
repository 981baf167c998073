"""Server-side reaction to reported drift: moves between clusters, triggers of re-clustering, and model transfer.

Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu: *Fielding: Clustered Federated Learning with Data Drift*, 2024
(arXiv 2411.01580), Algorithm 2, and appendix F for triggers other than theta/3. Our own choices: theta is 0 if only one
cluster is left (there are no distances between centers), the details of learned thresholds, and the lower bound c of an
adaptive threshold (as printed it becomes negative).

A trigger is a frozen dataclass. `start()` returns its first memo; `fires(kept, event)` tells whether an event
re-clusters; `after(kept, fired)` returns the memo after an event; `record(kept, accuracy)` returns the memo after a
validation accuracy. An event is a round in which at least one client reported. A memo is a tree of numbers, so that it
can be saved.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from fedtide.clusters.distance import (
    CELLS,
    Center,
    Distance,
    Joint,
    between,
    lengths,
    means,
    renormalize,
    sum_distances,
    unit,
)
from fedtide.core.base import Holdings
from fedtide.core.errors import refused
from fedtide.fields.types import Count, NonNegative, OpenFraction, Positive, ingredient

THIRD = 1 / 3
TRIED = (0.0, 1 / 6, 1 / 3, 1 / 2, 2 / 3)
"""Thresholds of figure 14, in units of theta."""


class MovingCenters:
    """Clusters whose members move one by one; the centers that a move concerns are recomputed at once.

    The cost of a move grows with the number of clusters, not of clients, but for medians. An empty cluster keeps its
    center and is nobody's nearest.

    Args:
        x: (rows, d) the last report of every client.
        label: (rows,) int64, the cluster of each client, -1 for none.
        centers: (K, d), centers before.
        kind: the distance.
        center: mean or median.

    >>> x, label = torch.tensor([[0.0], [4.0], [2.0], [9.0]]), torch.tensor([0, 0, 1, 1])
    >>> clusters = MovingCenters(x, label, torch.tensor([[2.0], [7.0]]), "l1")
    >>> clusters.nearest(2)
    0
    >>> clusters.move(2, 0)
    >>> clusters.label.tolist(), clusters.centers.flatten().tolist()
    ([0, 0, 0, 1], [2.0, 9.0])
    """

    def __init__(self, x: Tensor, label: Tensor, centers: Tensor, kind: Distance, center: Center = "mean") -> None:
        self.x, self.label, self.centers, self.kind, self.center = x, label.clone(), centers.clone(), kind, center
        self.rows = (unit(x) if kind == "cosine" else x).double()
        known = label >= 0
        self.sums = torch.zeros(centers.shape, dtype=torch.float64).index_add_(0, label[known], self.rows[known])
        self.counts = torch.bincount(label[known], minlength=len(centers))
        self.stale = set(range(len(centers)))  # reports are new, and the centers are those of the reports before

    def nearest(self, i: int) -> int:
        """Return the cluster with members whose center is nearest to client i; ties go to the first."""
        filled = self.counts.nonzero()[:, 0]
        return int(filled[between(self.x[i : i + 1], self.centers[filled], self.kind).argmin()])

    def move(self, i: int, new: int) -> None:
        """Move client i, and recompute the centers of the clusters that it left and joined, if those changed."""
        old = int(self.label[i])
        if new != old:
            self.label[i] = new
            for k, change in ((old, -1), (new, 1)) if old >= 0 else ((new, 1),):
                self.sums[k].add_(self.rows[i], alpha=change)
                self.counts[k] += change
                self.stale.add(k)
        for k in {old, new} & self.stale:
            self._recompute(k)
            self.stale.remove(k)

    def _recompute(self, k: int) -> None:
        if self.center == "median":
            member, kept = self.label == k, self.centers[k : k + 1]
            first = torch.zeros(int(member.sum()), dtype=torch.int64)
            self.centers[k] = means(self.x[member], first, 1, kept, self.kind, "median")[0]
        elif self.counts[k]:
            mean = (self.sums[k] / self.counts[k])[None]
            self.centers[k] = renormalize(mean, self.kind, "mean", self.centers[k : k + 1])[0]


def theta(centers: Tensor, filled: Tensor, kind: Distance) -> float:
    """Return the mean length of the way between the centers of clusters with members; 0 for a single one.

    Args:
        centers: (K, d).
        filled: (K,) bool, mask of clusters with members.
        kind: the distance.

    >>> centers = torch.tensor([[0.0], [2.0]])
    >>> theta(centers, torch.tensor([True, True]), "l1"), theta(centers, torch.tensor([True, False]), "l1")
    (2.0, 0.0)
    """
    some = centers[filled]
    if len(some) < 2:
        return 0.0
    first, second = torch.triu_indices(len(some), len(some), 1)
    return float(lengths(some, first, some, second, kind).mean(dtype=torch.float64))


def center_moves(before: Tensor, after: Tensor, kind: Distance) -> Tensor:
    """Return the length of the way that each center moved (K,).

    >>> center_moves(torch.tensor([[0.5, 0.5]]), torch.tensor([[1.0, 0.0]]), "l1")
    tensor([1.])
    """
    here = torch.arange(len(before))
    return lengths(before, here, after, here, kind)


def mixing_matrix(old_label: Tensor, new_label: Tensor, old_k: int, new_k: int) -> Tensor:
    """Return the mixing matrix A (new, old) float64 with rows that sum to one; new models are A times old models.

    A[k, l] is the share of the new cluster's members who were in the old one, so a new model is the mean of its
    members' old models. An empty new cluster takes the mean over all clients.

    >>> mixing_matrix(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 1]), 2, 2).round(decimals=2).tolist()
    [[0.67, 0.33], [0.0, 1.0]]
    """
    counts = torch.bincount(new_label * old_k + old_label, minlength=new_k * old_k).reshape(new_k, old_k).double()
    counts[counts.sum(1) == 0] = counts.sum(0)
    return counts / counts.sum(1, keepdim=True)


def distances_within(x: Tensor, label: Tensor, kind: Distance) -> Tensor:
    """Return the mean distance of each row from the other members of its cluster (rows,) float64; 0 if it is alone.

    For L1, sums over pairs come from sorted columns in O(n log n) each; for other distances from all pairs.

    >>> distances_within(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1]), "l1").tolist()
    [1.0, 1.0, 0.0]
    """
    out = torch.zeros(len(x), dtype=torch.float64)
    for cluster in label.unique().tolist():
        member = (label == cluster).nonzero()[:, 0]
        if kind == "l1":
            total = _summed_l1(x[member].double())
        else:
            total = sum_distances(x[member], torch.ones(len(member), 1, dtype=x.dtype), kind)[:, 0]
        out[member] = total / max(len(member) - 1, 1)
    return out


def _summed_l1(x: Tensor) -> Tensor:
    """Return the sum of L1 distances of each row from all rows (rows,)."""
    value, order = x.sort(0)
    count, before = len(x), value.cumsum(0) - value  # the sum of all smaller values
    rank = torch.arange(count, dtype=x.dtype)[:, None]
    # In sorted order: r values are smaller, n - r - 1 are larger.
    total = value * rank - before + (value.sum(0) - before - value) - value * (count - rank - 1)
    return torch.zeros_like(x).scatter_(0, order, total).sum(1)


def heterogeneity(x: Tensor, label: Tensor, kind: Distance) -> float:
    """Return the mean over clients (not clusters) of the distance to the rest of the cluster; 0 without rows.

    >>> round(heterogeneity(torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1]), "l1"), 4)
    0.6667
    """
    return float(distances_within(x, label, kind).mean()) if len(x) else 0.0


def is_wider(x: Tensor, label: Tensor, delta: float, kind: Distance = "l1") -> bool:
    """Tell whether two rows of one cluster are more than `delta` apart.

    Distances to a cluster's first member mostly decide: one larger than `delta` means yes; and with the triangle
    inequality no two rows are more than twice the largest apart.

    >>> x, label = torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([0, 0, 1])
    >>> is_wider(x, label, 0.9), is_wider(x, label, 1.0)
    (True, False)
    """
    within = []
    for cluster in label.unique().tolist():
        member = x[label == cluster]
        far = float(between(member, member[:1], kind).max())
        if len(member) > 1 and far > delta:
            return True
        if len(member) > 2 and (2 * far > delta or isinstance(kind, Joint) or kind in ("sq-l2", "cosine")):
            within.append(member)
    for member in within:
        step = max(CELLS // len(member), 1)
        for begin in range(0, len(member), step):
            far_apart = between(member[begin : begin + step], member[begin:], kind)
            far_apart.fill_diagonal_(0)
            if bool((far_apart > delta).any()):
                return True
    return False


# -- triggers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Event:
    """A round in which clients drifted, after their moves.

    before, after: (K, d) the centers before, and the means of the current members; filled: (K,) bool, mask of clusters
    with members; kind: the distance; spreads: returns how far clients are from the others of their cluster, now and if
    all were clustered anew; wider: tells whether two members of one cluster are more than a given distance apart.
    """

    before: Tensor
    after: Tensor
    filled: Tensor
    kind: Distance
    spreads: Callable[[], tuple[float, float]]
    wider: Callable[[float], bool]


def event_of(
    before: Tensor, after: Tensor, filled: Tensor, x: Tensor, label: Tensor, kind: Distance, anew: Callable[[], Tensor]
) -> Event:
    """Return the event of a server that has the last report of every client.

    Args:
        before: (K, d) the centers before.
        after: (K, d) the means of the current members.
        filled: (K,) bool, mask of clusters with members.
        x: (rows, d) the reports.
        label: (rows,) int64.
        kind: the distance.
        anew: returns the labels (rows,) of a clustering of all clients.
    """

    def spreads() -> tuple[float, float]:
        return heterogeneity(x, label, kind), heterogeneity(x, anew(), kind)

    return Event(before, after, filled, kind, spreads, lambda delta: is_wider(x, label, delta, kind))


class Trigger(Protocol):
    """The condition of a global re-clustering; by default without a memo, and without use of accuracies."""

    kind: str
    """Name of the kind in a configuration."""
    uses_accuracy: ClassVar[bool] = False
    """Tell whether the trigger uses validation accuracies."""
    splits_one: ClassVar[bool] = True
    """Tell whether any event re-clusters where there is one cluster only."""

    def start(self) -> Any:
        """Return the memo before the first event."""
        return None

    @abstractmethod
    def fires(self, kept: Any, event: Event) -> bool:
        """Tell whether this event re-clusters."""

    def after(self, kept: Any, fired: bool) -> Any:
        """Return the memo after an event."""
        return kept

    def record(self, kept: Any, accuracy: float) -> Any:
        """Return the memo after a validation accuracy."""
        return kept


def has_val(trigger: Trigger) -> Callable[[Holdings], None]:
    """Build the `check` of methods with a trigger: one that uses validation accuracies needs validation samples."""

    def check(held: Holdings) -> None:
        if trigger.uses_accuracy and not held.has_val:
            allowed = "data.split.val above 0, as it scores thresholds on validation rows; or 'fraction', 'adaptive'"
            raise refused("trigger", trigger.kind, allowed)

    return check


@ingredient
class FixedFraction(Trigger):
    """Re-cluster if some center moved by `tau` theta or more (Algorithm 2).

    Args:
        tau: threshold in units of theta, the mean distance between centers; 0 re-clusters at every event, infinity at
            none.

    >>> x = torch.tensor([[0.0], [6.0]])
    >>> label = torch.tensor([0, 1])
    >>> event = event_of(x, x + torch.tensor([[2.0], [0.0]]), label >= 0, x, label, "l1", lambda: label)
    >>> FixedFraction().fires(None, event), FixedFraction(tau=2 / 3).fires(None, event)
    (True, False)
    """

    tau: Annotated[float, Field(strict=True, ge=0)] = THIRD
    kind: Literal["fraction"] = "fraction"

    def fires(self, kept: None, event: Event) -> bool:
        """Tell whether a center moved as far as the threshold."""
        return _far(event, self.tau)


@ingredient
class Gain(Trigger):
    """Re-cluster if that makes clusters tighter by `least` or more; our own.

    At every event the server clusters the last reports anew, and compares the mean distance of clients from the other
    members of their clusters; the ratio of two such means has no unit. As clients are where they were if the new
    clusters are no better, it is quiet where there are no groups.

    Args:
        least: smallest part by which that mean distance has to fall.

    >>> x, label = torch.tensor([[0.0], [1.0], [5.0], [6.0]]), torch.tensor([0, 0, 0, 1])
    >>> event = event_of(x[:2], x[:2], torch.ones(2).bool(), x, label, "l1", lambda: torch.tensor([0, 0, 1, 1]))
    >>> Gain().fires(None, event), Gain(least=0.8).fires(None, event)
    (True, False)
    """

    least: OpenFraction = 0.1
    kind: Literal["gain"] = "gain"
    splits_one: ClassVar[bool] = False

    def fires(self, kept: None, event: Event) -> bool:
        """Tell whether new clusters are so much tighter."""
        now, anew = event.spreads()
        return anew < (1 - self.least) * now


@dataclass(frozen=True)
class Width:
    """Memo of `Adaptive`. delta: the threshold; fired: whether the last event re-clustered."""

    delta: float
    fired: bool = False


@ingredient
class Adaptive(Trigger):
    """Re-cluster if two members of one cluster are more than Delta apart (Algorithm 4; appendix F.2, there by L1).

    Delta is doubled after two consecutive events that re-clustered; after any other event it is lowered by c, but not
    below c.

    Args:
        c: initial threshold and decrement, in the unit of the representation's distance: of embeddings and gradients
            that is a square.

    >>> trigger = Adaptive()
    >>> kept = trigger.start()
    >>> for fired in (True, True, False):
    ...     kept = trigger.after(kept, fired)
    ...     print(kept.delta)
    0.1
    0.2
    0.1
    """

    c: Positive = 0.1
    kind: Literal["adaptive"] = "adaptive"

    def start(self) -> Width:
        """Return the first threshold."""
        return Width(self.c)

    def fires(self, kept: Width, event: Event) -> bool:
        """Tell whether a cluster is wider than the threshold."""
        return event.wider(kept.delta)

    def after(self, kept: Width, fired: bool) -> Width:
        """Return the next threshold."""
        return Width(2 * kept.delta if fired and kept.fired else max(self.c, kept.delta - self.c), fired)


@dataclass(frozen=True)
class Scores:
    """Memo of `Learned`.

    events: number of events; total, count: sum and number of the accuracies noted under each threshold since trying
    began; used: index of the threshold of the last event, None before the first; best: that of the best threshold, None
    if unknown.
    """

    events: int
    total: tuple[float, ...]
    count: tuple[int, ...]
    used: int | None = None
    best: int | None = None


@ingredient
class Learned(Trigger):
    """Trigger like "fraction", with the threshold that gave the best validation accuracy (appendix F.1).

    For `explore` events the thresholds take turns. The score of a threshold is the mean accuracy noted between an event
    that used it and the next event. The best is kept; ties: the first; without scores the threshold is a third. With
    `every`, the trials restart that many events after they began. As in the paper scores are plain accuracies: while
    these climb, a threshold that is tried late scores more. "gain" needs no trials.

    Args:
        explore: r0, number of events for trying thresholds.
        every: r1, number of events after which the trials restart, more than `explore`; None means never.
        tried: the thresholds, in units of theta.

    >>> trigger = Learned(explore=2, tried=(0.0, 0.5))
    >>> kept = trigger.start()
    >>> for accuracy in (0.6, 0.8, 0.7):
    ...     print(trigger.threshold(kept))
    ...     kept = trigger.record(trigger.after(kept, False), accuracy)
    0.0
    0.5
    0.5
    """

    explore: Count = 10
    every: Count | None = None
    tried: Annotated[tuple[NonNegative, ...], Field(min_length=1)] = TRIED
    kind: Literal["learned"] = "learned"
    uses_accuracy: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.explore < len(self.tried):
            raise ValueError(
                f"found explore {self.explore} and {len(self.tried)} thresholds; allowed: an event or more for each, "
                "as those whose turn does not come could not be the best"
            )
        if self.every is not None and self.every <= self.explore:
            raise ValueError(
                f"found every {self.every} and explore {self.explore}; allowed: every of more than explore, as trying "
                "would begin again before any threshold is kept"
            )

    def start(self) -> Scores:
        """Return the memo without events or scores."""
        return Scores(0, (0.0,) * len(self.tried), (0,) * len(self.tried))

    def threshold(self, kept: Scores) -> float:
        """Return the threshold of the next event, in units of theta."""
        use = self._next(kept)
        return THIRD if use is None else self.tried[use]

    def fires(self, kept: Scores, event: Event) -> bool:
        """Tell whether a center moved as far as the threshold of this event."""
        return _far(event, self.threshold(kept))

    def after(self, kept: Scores, fired: bool) -> Scores:
        """Record the threshold used; reset scores when the trials restart."""
        if self._turn(kept) == 0:
            return replace(self.start(), events=kept.events + 1, used=self._next(kept))
        use = self._next(kept)
        best = use if self._turn(kept) >= self.explore else None
        return replace(kept, events=kept.events + 1, used=use, best=best)

    def record(self, kept: Scores, accuracy: float) -> Scores:
        """Add an accuracy to the score of the current threshold."""
        if kept.used is None or kept.best is not None or not math.isfinite(accuracy):
            return kept
        total, count = list(kept.total), list(kept.count)
        total[kept.used] += accuracy
        count[kept.used] += 1
        return replace(kept, total=tuple(total), count=tuple(count))

    def _turn(self, kept: Scores) -> int:
        """Return the number of events since the trials began."""
        return kept.events % self.every if self.every else kept.events

    def _next(self, kept: Scores) -> int | None:
        """Return the index of the next threshold; None if there are no scores."""
        turn = self._turn(kept)
        if turn < self.explore:
            return turn % len(self.tried)
        if kept.best is not None:
            return kept.best
        means = [total / count if count else -math.inf for total, count in zip(kept.total, kept.count, strict=True)]
        return means.index(max(means)) if any(kept.count) else None


def _far(event: Event, tau: float) -> bool:
    """Tell whether some center of a cluster with members moved by tau theta or more; never for infinity."""
    moved = float(center_moves(event.before, event.after, event.kind)[event.filled].max())
    return tau == 0 or moved >= tau * theta(event.after, event.filled, event.kind)
