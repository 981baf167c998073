"""Triggers of a re-clustering, after drift.

Li, Avdiukhin, Shahout, Ivkin, Braverman, Yu: *Fielding: Clustered Federated Learning with Data Drift*, 2024
(arXiv 2411.01580), Algorithm 2, and appendix F for triggers other than theta/3. Ours: theta is 0 if only one cluster is
left. The details of learned thresholds are ours, and the lower bound c of an adaptive threshold (as printed it becomes
negative).

A trigger is a frozen dataclass. `start()` returns its first memo. `fires(memo, event)` tells whether an event
re-clusters. `after(memo, fired)` returns the memo after an event, and `record(memo, accuracy)` the memo after a
validation accuracy. An event is a round in which at least one client reported. A memo is a tree of numbers, so that it
can be saved.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import Field
from torch import Tensor

from fedtide.clusters.distance import Distance, heterogeneity, is_wider, lengths
from fedtide.core.base import Holdings
from fedtide.core.errors import refused
from fedtide.fields.types import Count, NonNegative, OpenFraction, Positive, ingredient

THIRD = 1 / 3
TRIED = (0.0, 1 / 6, 1 / 3, 1 / 2, 2 / 3)
"""Thresholds of figure 14, in units of theta."""


def theta(centers: Tensor, filled: Tensor, kind: Distance) -> float:
    """Return the mean length of the way between the centers of clusters with members; 0 for a single one.

    Args:
        centers: (K, d).
        filled: (K,) bool, mask of clusters with members.

    >>> centers = torch.tensor([[0.0], [2.0]])
    >>> theta(centers, torch.tensor([True, True]), "l1"), theta(centers, torch.tensor([True, False]), "l1")
    (2.0, 0.0)
    """
    members = centers[filled]
    if len(members) < 2:
        return 0.0
    first, second = torch.triu_indices(len(members), len(members), 1)
    return float(lengths(members[first], members[second], kind).mean(dtype=torch.float64))


@dataclass(frozen=True)
class Event:
    """A round in which clients drifted, after their moves.

    before, after: (K, d) the centers before, and the means of the current members; filled: (K,) bool, mask of clusters
    with members; kind: the distance; spreads: returns how far clients are from the others of their cluster, now and if
    all were clustered anew; wider: tells whether two members of one cluster are more than a given distance apart, None
    if the server sees no pair of clients.
    """

    before: Tensor
    after: Tensor
    filled: Tensor
    kind: Distance
    spreads: Callable[[], tuple[float, float]]
    wider: Callable[[float], bool] | None = None


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
    def fires(self, memo: Any, event: Event) -> bool:
        """Tell whether this event re-clusters."""

    def after(self, memo: Any, fired: bool) -> Any:
        """Return the memo after an event."""
        return memo

    def record(self, memo: Any, accuracy: float) -> Any:
        """Return the memo after a validation accuracy."""
        return memo


def trigger_on(event: Event, trigger: Trigger, memo: Any, k_max: int) -> tuple[bool, Any, dict[str, float]]:
    """Return the decision on an event, the next memo, and the facts "theta" and "way" (the largest movement)."""
    fired = k_max > 1 and trigger.fires(memo, event)
    far = float(lengths(event.before, event.after, event.kind)[event.filled].max())
    facts = {"theta": theta(event.after, event.filled, event.kind), "way": far}
    return fired, trigger.after(memo, fired), facts


def has_val(trigger: Trigger) -> Callable[[Holdings], None]:
    """Build the `check` of methods with a trigger: one that uses validation accuracies needs validation samples."""

    def check(holdings: Holdings) -> None:
        if trigger.uses_accuracy and not holdings.has_val:
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

    def fires(self, memo: None, event: Event) -> bool:
        """Tell whether a center moved as far as the threshold."""
        return _far(event, self.tau)


@ingredient
class Gain(Trigger):
    """Re-cluster if that makes clusters tighter by `least` or more; our own.

    At every event the server clusters the last reports anew, and compares the mean distance of clients from the other
    members of their clusters. Clusters stay if the new ones are no better, so it is quiet without groups.

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

    def fires(self, memo: None, event: Event) -> bool:
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
    >>> memo = trigger.start()
    >>> for fired in (True, True, False):
    ...     memo = trigger.after(memo, fired)
    ...     print(memo.delta)
    0.1
    0.2
    0.1
    """

    c: Positive = 0.1
    kind: Literal["adaptive"] = "adaptive"

    def start(self) -> Width:
        """Return the first threshold."""
        return Width(self.c)

    def fires(self, memo: Width, event: Event) -> bool:
        """Tell whether a cluster is wider than the threshold."""
        assert event.wider is not None
        return event.wider(memo.delta)

    def after(self, memo: Width, fired: bool) -> Width:
        """Return the next threshold."""
        return Width(2 * memo.delta if fired and memo.fired else max(self.c, memo.delta - self.c), fired)


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
    >>> memo = trigger.start()
    >>> for accuracy in (0.6, 0.8, 0.7):
    ...     print(trigger.threshold(memo))
    ...     memo = trigger.record(trigger.after(memo, False), accuracy)
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
                f"found explore {self.explore} and {len(self.tried)} thresholds; allowed: an event or more for each"
            )
        if self.every is not None and self.every <= self.explore:
            raise ValueError(
                f"found every {self.every} and explore {self.explore}; allowed: every of more than explore, because "
                "trials would restart before any threshold is used"
            )

    def start(self) -> Scores:
        """Return the memo without events or scores."""
        return Scores(0, (0.0,) * len(self.tried), (0,) * len(self.tried))

    def threshold(self, memo: Scores) -> float:
        """Return the threshold of the next event, in units of theta."""
        use = self._next(memo)
        return THIRD if use is None else self.tried[use]

    def fires(self, memo: Scores, event: Event) -> bool:
        """Tell whether a center moved as far as the threshold of this event."""
        return _far(event, self.threshold(memo))

    def after(self, memo: Scores, fired: bool) -> Scores:
        """Record the threshold used; reset scores when the trials restart."""
        if self._turn(memo) == 0:
            return replace(self.start(), events=memo.events + 1, used=self._next(memo))
        use = self._next(memo)
        best = use if self._turn(memo) >= self.explore else None
        return replace(memo, events=memo.events + 1, used=use, best=best)

    def record(self, memo: Scores, accuracy: float) -> Scores:
        """Add an accuracy to the score of the current threshold."""
        if memo.used is None or memo.best is not None or not math.isfinite(accuracy):
            return memo
        total, count = list(memo.total), list(memo.count)
        total[memo.used] += accuracy
        count[memo.used] += 1
        return replace(memo, total=tuple(total), count=tuple(count))

    def _turn(self, memo: Scores) -> int:
        """Return the number of events since the trials began."""
        return memo.events % self.every if self.every else memo.events

    def _next(self, memo: Scores) -> int | None:
        """Return the index of the next threshold; None if there are no scores."""
        turn = self._turn(memo)
        if turn < self.explore:
            return turn % len(self.tried)
        if memo.best is not None:
            return memo.best
        means = [total / count if count else -math.inf for total, count in zip(memo.total, memo.count, strict=True)]
        return means.index(max(means)) if any(memo.count) else None


def _far(event: Event, tau: float) -> bool:
    """Tell whether some center of a cluster with members moved by tau theta or more; never for infinity."""
    moved = float(lengths(event.before, event.after, event.kind)[event.filled].max())
    return tau == 0 or moved >= tau * theta(event.after, event.filled, event.kind)
